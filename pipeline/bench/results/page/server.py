"""What the server's metrics and its GPUs say of each load point, with units.

Only figures of the load point itself are shown: the counters of a metrics page count since the server's start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trtpipe.pipeline.bench.results.page.load_points import LoadPoint, named
from trtpipe.pipeline.bench.results.page.tables import HEAD
from trtpipe.pipeline.pages import plots
from trtpipe.pipeline.pages.parts import Cell, Row, Table, number
from trtpipe.pipeline.pages.plots import Figure

_GIB = 1 / 2**30
# Columns by key: heading with its unit, and the factor from the report's unit.
_MODELS = {
    "succeeded_per_s": ("requests/s", 1.0), "failed_per_s": ("failed/s", 1.0), "queue_ms": ("in queue ms", 1.0),
    "first_response_ms": ("first response ms", 1.0), "compute_ms": ("compute ms", 1.0),
    "request_ms": ("whole request ms", 1.0),
}  # fmt: skip
_ENGINES = {
    "input_tokens_per_s": ("prompt tokens/s", 1.0), "output_tokens_per_s": ("output tokens/s", 1.0),
    "steps_per_s": ("steps/s", 1.0), "in_flight_max": ("limit of requests in flight", 1.0),
    "kv_max": ("KV blocks", 1.0), "kv_tokens_per_block": ("tokens of a block", 1.0),
    "kv_reuse_share": ("prompt found in cache %", 100.0),
}  # fmt: skip
_GPUS = {
    "utilization_percent": ("busy %", 1.0), "memory_peak_bytes": ("peak memory GiB", _GIB), "power_w": ("power W", 1.0),
    "sm_clock_mhz": ("SM clock MHz", 1.0), "energy_j": ("energy J", 1.0),
}  # fmt: skip
# Time series likewise: title of the panel, and factor.
_SERIES = {
    "in_flight": ("Requests in flight", 1.0), "waiting": ("Requests waiting", 1.0),
    "tokens_per_s": ("Output tokens/s, counted when a request ends", 1.0),
    "kv_fraction": ("KV cache in use, %", 100.0), "gpu_utilization": ("GPUs busy, %, sum", 100.0),
    "gpu_memory_bytes": ("GPU memory, GiB", _GIB), "gpu_power_w": ("GPU power, W", 1.0),
    "utilization": ("GPU busy, %", 1.0), "memory": ("GPU memory, GiB", _GIB), "power": ("GPU power, W", 1.0),
    "sm_clock": ("SM clock, MHz", 1.0),
}  # fmt: skip


def tables(points: list[LoadPoint]) -> list[Table]:
    """Triton's models, the engines, the GPUs, and tokens and energy; those of which anything is known."""
    models, engines, gpus, totals = list[Row](), list[Row](), list[Row](), list[Row]()
    for point in points:
        server, name = point["server"] or {}, named(point)
        nvml = server.get("nvml") or {}
        models += [_row(name, str(one.get("model")), one, _MODELS) for one in server.get("models") or []]
        engines += [_row(name, str(one.get("model")), one, _ENGINES) for one in server.get("engines") or []]
        gpus += [
            _row(name, f"{number_} {one.get('name')}", one, _GPUS) for number_, one in (nvml.get("gpus") or {}).items()
        ]
        counted = server.get("output_tokens") or {}
        energy = nvml.get("energy_j_per_token") or server.get("energy_j_per_token")
        if counted or energy:
            agree = {True: "yes", False: "no", None: "unknown"}[counted.get("agree")]
            figures = [number(counted.get("server")), number(counted.get("client")), agree, number(energy)]
            totals.append(Row(name=name, cells=[Cell(text=text) for text in figures]))
    total = ["tokens by the server", "by the client", "they agree", "J/token"]
    return [
        table
        for rows, columns in (
            (models, ["model", *(heading for heading, _ in _MODELS.values())]),
            (engines, ["engine", *(heading for heading, _ in _ENGINES.values())]),
            (gpus, ["GPU", *(heading for heading, _ in _GPUS.values())]),
            (totals, total),
        )
        if (table := _known(rows, columns)) is not None
    ]


def _row(name: str, what: str, values: Mapping[str, Any], columns: Mapping[str, tuple[str, float]]) -> Row:
    cells = [Cell(text=number(_scaled(values.get(key), factor))) for key, (_, factor) in columns.items()]
    return Row(name=name, cells=[Cell(text=what), *cells])


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _known(rows: list[Row], columns: list[str]) -> Table | None:
    """The table without columns of which nothing is known."""
    unknown = Cell(text=number(None))
    kept = [at for at in range(len(columns)) if any(row.cells[at] != unknown for row in rows)]
    if not kept:
        return None
    told = [Row(name=row.name, cells=[row.cells[at] for at in kept]) for row in rows]
    return Table(head=HEAD, columns=[columns[at] for at in kept], rows=told)


def timelines(points: list[LoadPoint]) -> Iterator[Figure]:
    for point in points:
        for seconds, series in _series(point["server"] or {}):
            panels: dict[tuple[str, float], list[plots.Line]] = {}
            for key, values in series.items():
                gpu = re.fullmatch(r"gpu (\d+) (\w+)", key)
                panel = _SERIES.get(gpu[2] if gpu else key, (key, 1.0))
                lines = panels.setdefault(panel, [])
                lines.append(
                    plots.Line(
                        name=f"GPU {gpu[1]}" if gpu else panel[0], style=len(lines) % plots.STYLES,
                        values=[_scaled(value, panel[1]) for value in values],
                    )
                )  # fmt: skip
            made = [plots.Panel(label=label, lines=lines) for (label, _), lines in panels.items()]
            yield plots.timeline(named(point), seconds, made)


def _series(value: dict[str, Any]) -> Iterator[tuple[list[float], dict[str, list[float | None]]]]:
    """All series in the value: lists as long as the `t_s` beside them."""
    seconds = value.get("t_s")
    if isinstance(seconds, list) and _is_series(seconds):
        lines = {
            key: one
            for key, one in value.items()
            if key != "t_s" and _is_series(one) and len(one) == len(seconds) and any(x is not None for x in one)
        }
        if lines:
            yield seconds, lines
    for inner in value.values():
        if isinstance(inner, dict):
            yield from _series(inner)


def _is_series(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) > 0 and all(isinstance(one, (int, float, type(None))) for one in value)
    )
