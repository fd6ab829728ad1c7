"""Measured runs, from a table, and what the planner predicts of each."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.configs import facts
from trtpipe.engines.base import Mapping
from trtpipe.engines.errors import InputDataError, suggestion
from trtpipe.engines.json_input import open_regular
from trtpipe.pipeline.bench.load.seeds import generator
from trtpipe.pipeline.planner.demand import SEED, closed_loop
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.memory import Limits
from trtpipe.pipeline.planner.precision import planned_precision
from trtpipe.pipeline.planner.predict import Option, Prediction, quantization
from trtpipe.pipeline.planner.scheduler import Asked, Places, simulate
from trtpipe.pipeline.planner.sizes import LEAST, sizes

# Quantities of a run: column of the table -> name in a report.
QUANTITIES = {"output_tokens_per_s": "tokens/s", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}
# How the clients of a closed loop are.
CLIENTS = ("spread", "in_step")
# Requests of a run whose table does not say how many.
AT_A_RATE = 500
TOKENS_PER_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One measured run. Times are means, in ms.

    moe_ep          groups of GPUs that divide the experts
    length_spread   standard deviation of the prompts' lengths, and of the answers', over their mean: about 1 in records
                    of chats. 0 where all are equal
    requests_per_s  rate of a Poisson process, or
    concurrency     clients that each send the next request when one is answered, or neither: all requests at once
    clients         how those are: `spread` over a request's time, as `trtpipe bench` spreads them, or `in_step`, as
                    load generators leave them that start all at once and ask for equal lengths
    requests        number of requests, which a table gives where all were sent at once; with `concurrency`, no more
                    than it: one batch
    max_batch_size, max_num_tokens, kv_fraction  what the engine was served with; where left out, what `plan` takes
    """

    gpu: str
    model: str
    input_tokens: int
    output_tokens: int
    tp: int = 1
    moe_ep: int = 1
    dtype: str = "auto"
    kv_cache: str | None = None
    runtime: str = "tensorrt_llm"
    release: str | None = None
    length_spread: float = 0.0
    requests_per_s: float | None = None
    concurrency: int | None = None
    clients: str = "spread"
    requests: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    kv_fraction: float = 0.9
    output_tokens_per_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def group(self) -> str:
        """Runs that share what an error may come from: figures are held out by it, never one by one."""
        return f"{self.gpu} {self.model} tp{self.tp}" + (f" ep{self.moe_ep}" if self.moe_ep > 1 else "")


def read(file: Path) -> list[MeasuredRun]:
    """Figures of a CSV file with the columns above, of which the first four are needed, and one that says when requests
    were sent. Raises InputDataError."""
    fields = {field.name: field for field in dataclasses.fields(MeasuredRun)}
    try:
        with io.TextIOWrapper(open_regular(file), encoding="utf-8-sig", newline="") as stream:
            table = csv.DictReader(stream)
            columns = table.fieldnames or []
            rows = list(table)
    except (OSError, ValueError, csv.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputDataError(
            f"{file} cannot be read as a CSV table", why=why, remedy="give a CSV file of measured runs"
        ) from None
    for column in columns:
        if column not in fields:
            raise InputDataError(f"{file}: the column '{column}' is not known", remedy=suggestion(column, list(fields)))
    for name in ("gpu", "model", "input_tokens", "output_tokens"):
        if name not in columns:
            raise InputDataError(
                f"{file} has no column {name}", remedy="give gpu, model, input_tokens and output_tokens"
            )
    if not set(columns) & QUANTITIES.keys():
        raise InputDataError(f"{file} has no measured quantity", remedy=f"give one of {', '.join(QUANTITIES)}")
    return [_figure(row, f"{file}, line {line}", fields) for line, row in enumerate(rows, 2)]


def _figure(row: dict[str, Any], where: str, fields: dict[str, Any]) -> MeasuredRun:
    given: dict[str, Any] = {}
    for name, text in row.items():
        if name is None or text is None:
            raise InputDataError(f"{where} has not as many cells as the head", remedy="give each column a cell")
        if not text.strip():
            continue
        kind = float if "float" in str(fields[name].type) else int if "int" in str(fields[name].type) else str
        try:
            given[name] = kind(text.strip())
        except ValueError:
            raise InputDataError(f"{where}: {name} is '{text[:60]}'", remedy="give a number") from None
        if name == "length_spread" and given[name] == 0:
            continue
        if kind is not str and not 0 < given[name] < 1e12:
            raise InputDataError(f"{where}: {name} is {given[name]:g}", remedy="give a positive number")
    missing = [name for name in ("gpu", "model", "input_tokens", "output_tokens") if name not in given]
    if missing:
        raise InputDataError(f"{where} has no {missing[0]}", remedy="fill the cell")
    if not given.keys() & {"concurrency", "requests_per_s", "requests"}:
        raise InputDataError(
            f"{where} does not say when requests were sent",
            remedy="give concurrency or requests_per_s, or requests where all were sent at once",
        )
    if given.get("clients", "spread") not in CLIENTS:
        raise InputDataError(f"{where}: clients is '{given['clients'][:60]}'", remedy=f"give {' or '.join(CLIENTS)}")
    return MeasuredRun(**given)


@dataclass(frozen=True)
class PredictedRun:
    """Prediction of a run; None where a quantity does not exist, such as the TPOT of one token."""

    output_tokens_per_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None


def predict_run(figure: MeasuredRun, efficiency: Efficiency) -> PredictedRun:
    """Simulate the run. Raises UsageError for one that cannot be planned."""
    how = efficiency.of(figure.runtime, figure.release)
    base = option(figure)
    made = dataclasses.replace(base, cost=base.cost.under(how))
    found = _simulated(figure, made)
    return PredictedRun(
        found.tokens_per_s, float(found.ttft.mean()), float(found.tpot.mean()) if len(found.tpot) else None
    )  # fmt: skip


@functools.cache
def option(figure: MeasuredRun) -> Option:
    """What the run was measured on. Raises UsageError."""
    return _option(
        figure.gpu, figure.model, Mapping(tp_size=figure.tp, moe_ep_size=figure.moe_ep), figure.dtype, figure.kv_cache,
        figure.runtime, figure.input_tokens, figure.output_tokens, figure.max_batch_size, figure.max_num_tokens,
        figure.kv_fraction,
    )  # fmt: skip


@functools.cache
def _option(
    gpu: str, model: str, mapping: Mapping, dtype: str, kv_cache: str | None, runtime: str, prompt: int, answer: int,
    batch: int | None, tokens: int | None, fraction: float,
) -> Option:  # fmt: skip
    how, card, (name, shape) = _shipped(), _gpu(gpu), _shape(model)
    stored = _model(model, source=None, revision=None).stored
    precision = planned_precision(name, shape, stored, card, runtime, dtype, kv_cache)
    lengths = Lengths(mean_input=prompt, mean_output=answer, longest_input=prompt, longest=prompt + answer)
    if batch is not None:
        limits = Limits(
            max_batch_size=batch, max_num_tokens=max(tokens or 8192, batch), tokens_per_block=TOKENS_PER_BLOCK,
            kv_cache_free_gpu_mem_fraction=fraction,
        )  # fmt: skip
    else:
        limits = sizes(
            shape, precision.dtype, mapping, quantization(precision), card, lengths, how.of(runtime),
            least=dataclasses.replace(LEAST, kv_cache_free_gpu_mem_fraction=fraction),
        )  # fmt: skip
        if tokens is not None:
            limits = dataclasses.replace(limits, max_num_tokens=max(tokens, limits.max_batch_size))
    made = Option.make(shape, card, precision, mapping, lengths, how.of(runtime), limits)
    made.require_fit(prompt + answer)
    return made


_gpu = functools.lru_cache(maxsize=None)(facts.find_gpu)
_shape = functools.lru_cache(maxsize=None)(facts.find_shape)
_model = functools.lru_cache(maxsize=None)(facts.find_model)


@functools.cache
def _shipped() -> Efficiency:
    """Memory's coefficients: the same for every run of a table."""
    return load_efficiency()


def _simulated(figure: MeasuredRun, made: Option) -> Prediction:
    front = made.cost.efficiency.front_s
    if figure.concurrency is not None and (figure.requests or figure.concurrency + 1) > figure.concurrency:
        clients, in_step = figure.concurrency, figure.clients == "in_step"
        first, follow = closed_loop(_asked(figure, max(40, 4 * clients)), clients, front, in_step=in_step)
        timeline = simulate(first, made.places, made.seconds, follow=follow)
        return Prediction.of(timeline, None, front, clients, in_step=in_step)
    asked = _asked(figure, figure.requests or AT_A_RATE)
    if figure.requests_per_s is not None:
        gaps = generator((SEED, 4)).exponential(1 / figure.requests_per_s, len(asked))
        asked = [one._replace(arrival=at) for one, at in zip(asked, np.cumsum(gaps).tolist(), strict=True)]
    return Prediction.whole(simulate(asked, made.places, made.seconds), front)


def _asked(figure: MeasuredRun, count: int) -> list[Asked]:
    """Requests of the run, all at 0 s. Lengths that are not equal are drawn from a gamma distribution and scaled to the
    mean that was measured; one whose spread is 1 is exponential."""
    if not figure.length_spread:
        return [Asked(0.0, figure.input_tokens, figure.output_tokens)] * count
    rng, shape = generator((SEED, 5)), figure.length_spread**-2

    def drawn(mean: int) -> list[int]:
        lengths = rng.gamma(shape, 1 / shape, count)
        return [max(1, round(one)) for one in (lengths / lengths.mean() * mean).tolist()]

    prompts, answers = drawn(figure.input_tokens), drawn(figure.output_tokens)
    return [Asked(0.0, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def at_once(figure: MeasuredRun) -> tuple[Any, tuple[Any, ...], int] | None:
    """Of a run whose requests are all sent at once: how often each step repeats, the steps, and the tokens.

    They do not depend on how long a step takes, so a fit simulates them once. None where the run is another.
    """
    if figure.requests_per_s is not None or figure.requests is None or figure.output_tokens_per_s is None:
        return None
    lengths = (figure.input_tokens, figure.output_tokens, figure.length_spread, figure.requests)
    return _steps(option(figure).places, *lengths)


@functools.cache
def _steps(
    places: Places, prompt: int, answer: int, spread: float, count: int
) -> tuple[Any, tuple[Any, ...], int]:  # fmt: skip
    run = MeasuredRun(gpu="", model="", input_tokens=prompt, output_tokens=answer, length_spread=spread)
    asked = _asked(run, count)
    ran = simulate(asked, places, lambda step: 0.0).ran
    columns = np.array([(repeat, *step) for repeat, _, step in ran]).T
    return columns[0], tuple(columns[1:]), sum(one.output for one in asked)


@dataclass(frozen=True)
class Errors:
    """Errors of some figures in one quantity: predicted / measured - 1."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean absolute error."""
        return float(np.mean(np.abs(self.values)))

    @property
    def bias(self) -> float:
        return float(np.mean(self.values))


def errors(predicted: Sequence[tuple[MeasuredRun, PredictedRun]], quantity: str) -> Errors:
    """Of the figures that have this quantity."""
    return Errors(
        tuple(
            value / true - 1
            for figure, one in predicted
            if (true := getattr(figure, quantity)) is not None and (value := getattr(one, quantity)) is not None
        )
    )
