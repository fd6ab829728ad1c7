"""Published figures of TensorRT-LLM (tests/data/published), our own of vLLM (docs/measurements), and what the planner
says of the latter."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass

from tests.support.paths import DATA, ROOT
from trtpipe.configs import facts
from trtpipe.engines.precision import resolve_precision
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency
from trtpipe.pipeline.planner.measured_runs import MeasuredRun, read
from trtpipe.pipeline.planner.memory import Limits
from trtpipe.pipeline.planner.predict import Option, Prediction

PUBLISHED = DATA / "published" / "figures.csv"
MEASURED = ROOT / "docs" / "measurements"


def figures() -> list[MeasuredRun]:
    return read(PUBLISHED)


@dataclass(frozen=True)
class Waves:
    """Clients that start together and each ask again when answered, four times; `ttft_ms` is a median."""

    gpu: str
    dtype: str
    concurrency: int
    tokens_per_s: float
    ttft_ms: float | None


def vllm() -> list[Waves]:
    """Our own runs of vLLM, as `make gpu-e2e` measured them. Only those of 16 bits on the H200 are fitted to."""
    return [
        Waves(gpu, dtype, int(concurrency), speed["waves"], speed.get("ttft_p50_ms"))
        for gpu in ("h200", "h100")
        for measured in (json.loads((MEASURED / f"{gpu}.json").read_text(encoding="utf-8"))["engine"]["result"],)
        for dtype in ("bf16", "fp8")
        for concurrency, speed in measured[dtype]["in_process"].items()
    ]


def waves(point: Waves, how: Efficiency) -> Prediction:
    """What the planner says of such a run: Llama 3 8B, 128 tokens in and out."""
    base = _option(point.gpu, point.dtype)
    return dataclasses.replace(base, cost=base.cost.under(how)).waves(_demand(), point.concurrency)


@functools.cache
def _demand() -> Demand:
    return Demand(Work(input_tokens=128, output_tokens=128))


@functools.cache
def _option(gpu: str, dtype: str) -> Option:
    card, shape = facts.find_gpu(gpu), facts.find_shape("llama3-8b")[1]
    precision = resolve_precision(dtype, card, facts.load_quant_recipes(), runtime="vllm")
    limits = Limits(max_batch_size=512, max_num_tokens=8192)
    return Option.make(shape, card, precision, 1, _demand().lengths(), load_efficiency().of("vllm"), limits)
