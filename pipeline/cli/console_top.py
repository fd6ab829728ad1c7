"""Output of `trtpipe top`: a table that refreshes in a terminal, plain lines or JSON lines everywhere else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.cli.console import console, json_line, result_json, size
from trtpipe.pipeline.cli.console_text import one_line
from trtpipe.pipeline.serving.top import Snapshot, metrics_url, watch

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from trtpipe.pipeline.net.triton_metrics import EngineFigures, Figures, GpuFigures

SHORTEST_INTERVAL_S = 0.1
BAR_WIDTH = 30
# Above the first, new requests are about to wait for blocks; above the second, they wait.
KV_TIGHT, KV_FULL = 0.8, 0.95


def run(url: str, name: str, *, interval: float, once: bool, as_json: bool) -> None:
    """Show a server until Ctrl-C, or once: after one interval, because rates need two scrapes.

    Raises UsageError for an impossible URL or interval, HostError when there are no metrics to begin with.
    """
    if not math.isfinite(interval) or interval < SHORTEST_INTERVAL_S:
        raise UsageError(f"an interval of {interval:g} s is not possible", remedy=f"{SHORTEST_INTERVAL_S} is the least")
    snapshots = watch(metrics_url(url), name, interval=interval)
    try:
        first = _require(next(snapshots))
        if once:
            show_once(_require(next(snapshots)), as_json=as_json)
        else:
            show(itertools.chain([first], snapshots), as_json=as_json)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how the user leaves
    finally:
        snapshots.close()


def show(snapshots: Iterable[Snapshot], *, as_json: bool) -> None:
    """Show snapshots until the iterator ends or the user leaves."""
    where = console()
    if as_json:
        for snapshot in snapshots:
            json_line(snapshot.to_json())
    elif where.is_terminal:
        from rich.live import Live

        with Live(console=where, auto_refresh=False) as live:
            for snapshot in snapshots:
                live.update(render(snapshot), refresh=True)
    else:
        for snapshot in snapshots:
            for line in lines(snapshot):
                print(line, flush=True)


def show_once(snapshot: Snapshot, *, as_json: bool) -> None:
    where = console()
    if as_json:
        result_json(snapshot.to_json())
    elif where.is_terminal:
        where.print(render(snapshot))
    else:
        print("\n".join(lines(snapshot)))


def _require(snapshot: Snapshot) -> Snapshot:
    if not snapshot.up:
        raise HostError(
            f"no Triton metrics at {snapshot.url}",
            why=snapshot.why,
            remedy="start a server with `trtpipe serve`, or give the URL of one's metrics port (8002 by default)",
        )
    return snapshot


def render(snapshot: Snapshot) -> RenderableType:
    """The whole screen: a header, Triton's models, and the state of each engine and GPU."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(snapshot)]
    if snapshot.figures is None:
        parts.append(Text(f"no answer: {snapshot.why}", style="red"))
        return Group(*parts)
    parts += ["", _models(snapshot.figures)]
    for engine in snapshot.figures.engines:
        parts += ["", _engine(engine)]
    if snapshot.figures.gpus:
        parts += ["", _gpus(snapshot.figures.gpus)]
    return Group(*parts)


def lines(snapshot: Snapshot) -> list[str]:
    """Lines for a log: one for each model and each engine, which starts with the time."""
    return [one_line(line) for line in _lines(snapshot)]


def _lines(snapshot: Snapshot) -> list[str]:
    stamp = f"{snapshot.time} {snapshot.server}"
    if snapshot.figures is None:
        return [f"{stamp} down: {snapshot.why}"]
    out = [f"{stamp} {name} counts from 0 again" for name in snapshot.figures.restarted]
    for model in snapshot.figures.models:
        out.append(
            f"{stamp} {model.model} requests/s {_number(model.succeeded_per_s, 2)} failed/s "
            f"{_number(model.failed_per_s, 2)} request {_number(model.request_ms)} ms queue {_number(model.queue_ms)} "
            f"ms compute {_number(model.compute_ms)} ms first {_number(model.first_response_ms)} ms pending "
            f"{_number(model.pending, 0)}"
        )
    for engine in snapshot.figures.engines:
        out.append(
            f"{stamp} {engine.model} tokens/s in {_number(engine.input_tokens_per_s)} out "
            f"{_number(engine.output_tokens_per_s)} being made {_number(engine.making_tokens_per_s)} "
            f"in flight {_of(engine.in_flight, engine.in_flight_max)} scheduled "
            f"{_number(engine.scheduled, 0)} waiting {_number(engine.waiting, 0)} KV blocks "
            f"{_of(engine.kv_used, engine.kv_max)} ({_percent(engine.kv_fraction)}) reused/s "
            f"{_number(engine.kv_reused_per_s)}{_speculation(engine)}"
        )
    return out


def _speculation(engine: EngineFigures) -> str:
    if engine.tokens_per_step is None:
        return ""
    return f" tokens/step {_number(engine.tokens_per_step, 2)} drafts accepted {_percent(engine.draft_acceptance)}"


def _head(snapshot: Snapshot) -> Table:
    from rich.table import Table
    from rich.text import Text

    seconds = None if snapshot.figures is None else snapshot.figures.seconds
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    over = "" if seconds is None else f"over {seconds:.1f} s  "
    grid.add_row(Text(f"{snapshot.server}  {snapshot.url}", style="bold"), Text(f"{over}{_clock(snapshot)}"))
    if snapshot.figures is not None and snapshot.figures.restarted:
        names = ", ".join(snapshot.figures.restarted)
        grid.add_row(Text(f"started again: {names}", style="yellow"), Text())
    return grid


def _clock(snapshot: Snapshot) -> str:
    return snapshot.time.partition("T")[2].partition("+")[0] + " UTC"


def _models(figures: Figures) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    # Only this column may shrink: it is long names that do not fit into 80 columns.
    table.add_column("model", overflow="ellipsis", min_width=8)
    for column in ("req/s", "fail/s", "total ms", "queue ms", "infer ms", "first ms", "pending"):
        table.add_column(column, justify="right", no_wrap=True)
    for model in figures.models:
        table.add_row(
            model.model,
            _number(model.succeeded_per_s, 2),
            Text(_number(model.failed_per_s, 2), style="red" if model.failed_per_s else ""),
            _number(model.request_ms),
            _number(model.queue_ms),
            _number(model.compute_ms),
            _number(model.first_response_ms),
            _number(model.pending, 0),
        )
    return table


def _engine(engine: EngineFigures) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    waiting = Text(f"waiting {_number(engine.waiting, 0)}", style="yellow" if engine.waiting else "")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(engine.model, style="bold"))
    grid.add_row(
        "tokens/s", f"in {_number(engine.input_tokens_per_s)}   out {_number(engine.output_tokens_per_s)}   "
        f"being made {_number(engine.making_tokens_per_s)}   steps/s {_number(engine.steps_per_s)}",
    )  # fmt: skip
    grid.add_row(
        "requests",
        Text(f"in flight {_of(engine.in_flight, engine.in_flight_max)}   scheduled {_number(engine.scheduled, 0)}   ")
        + waiting
        + Text(f"   paused {_number(engine.paused, 0)}"),
    )
    if engine.kv_fraction is not None:
        full = engine.kv_fraction
        style = "red" if full > KV_FULL else "yellow" if full > KV_TIGHT else "green"
        bar = Table.grid(padding=(0, 2))
        progress = ProgressBar(1.0, min(1.0, full), width=BAR_WIDTH, complete_style=style, finished_style=style)
        bar.add_row(progress, Text(_percent(full), style=style))
        grid.add_row("KV cache", bar)
    grid.add_row("", f"{_of(engine.kv_used, engine.kv_max)} blocks used, {_number(engine.kv_free, 0)} free")
    if engine.tokens_per_step is not None:
        grid.add_row(
            "speculation",
            f"{_number(engine.tokens_per_step, 2)} tokens a step, {_percent(engine.draft_acceptance)} of the drafts "
            "accepted",
        )
    share = "" if engine.kv_reuse_share is None else f", {_percent(engine.kv_reuse_share)} of the prompts"
    grid.add_row("reuse", f"{_number(engine.kv_reused_per_s)} blocks/s{share}")
    return grid


def _gpus(gpus: Iterable[GpuFigures]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GPU", overflow="ellipsis")
    for column in ("busy", "memory", "power"):
        table.add_column(column, justify="right", no_wrap=True)
    for gpu in gpus:
        memory = None if gpu.memory_used_bytes is None else size(gpu.memory_used_bytes)
        of = "" if gpu.memory_total_bytes is None else f" of {size(gpu.memory_total_bytes)}"
        power = f"{_of(gpu.power_w, gpu.power_limit_w)} W"
        table.add_row(gpu.uuid, _percent(gpu.utilization), f"{memory or '-'}{of}", power)
    return table


def _number(value: float | None, digits: int = 1) -> str:
    """A dash for None; large numbers lose decimals so that columns keep their width."""
    if value is None:
        return "-"
    return f"{value:.{digits if value < 10_000 else 0}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _of(value: float | None, most: float | None) -> str:
    return _number(value, 0) if most is None else f"{_number(value, 0)} of {_number(most, 0)}"
