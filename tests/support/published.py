"""Published figures of TensorRT-LLM (tests/data/published), our own of vLLM (docs/measurements), and what the planner
says of the latter."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.paths import DATA, ROOT
from trtpipe.configs import facts
from trtpipe.engines.base import Mapping
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
    """Clients that start together and each ask again when answered, four times; `ttft_ms` is a median. `said` is what
    the planner predicted before the run: tokens/s, and a TTFT in ms."""

    gpu: str
    dtype: str
    concurrency: int
    tokens_per_s: float
    ttft_ms: float | None
    model: str = "llama3-8b"
    tp: int = 1
    moe_ep: int = 1
    said: tuple[float, float] | None = None

    @property
    def engine(self) -> str:
        return f"{self.model} {self.dtype}, tp {self.tp}" + (f", ep {self.moe_ep}" if self.moe_ep > 1 else "")


def vllm() -> list[Waves]:
    """Our own runs of vLLM, as `make gpu-e2e` measured them. Only those of 16 bits on the H200 are fitted to."""
    return [
        Waves(gpu, dtype, int(concurrency), speed["waves"], speed.get("ttft_p50_ms"))
        for gpu in ("h200", "h100")
        for measured in (json.loads((MEASURED / f"{gpu}.json").read_text(encoding="utf-8"))["engine"]["result"],)
        for dtype in ("bf16", "fp8")
        for concurrency, speed in measured[dtype]["in_process"].items()
    ]


def predicted_before() -> list[Waves]:
    """Our own runs of vLLM of which the planner said something before they were measured."""
    return [
        Waves(
            "h100", dtype, int(clients), speed["waves"], speed.get("ttft_p50_ms"), model, tp, moe_ep,
            (one["predicted"][clients]["tokens_per_s"], one["predicted"][clients]["ttft_p50_ms"]),
        )
        for file in ("h100", "h100-x4")
        for section, of in json.loads((MEASURED / f"{file}.json").read_text(encoding="utf-8")).items()
        for (model, dtype, tp, moe_ep), one in _engines(section, of["result"], 4 if file == "h100-x4" else 1)
        for clients, speed in one["in_process"].items()
        if clients in one["predicted"]
    ]  # fmt: skip


def _engines(section: str, tree: Any, gpus: int) -> Iterator[tuple[tuple[str, str, int, int], dict[str, Any]]]:
    """((model, dtype, tp, ep), what is kept of it) of each engine with predictions and measurements: "vLLM fp8, tp 4,
    ep 4" of a model in a section of many GPUs, "fp8" of Llama 3 8B's shapes in one of a single GPU."""
    if not isinstance(tree, dict):
        return
    if section == "large_served" and gpus > 1:
        tree = {"llama3-70b": {f"vLLM fp8, tp {gpus}": tree}}
    for name, one in tree.items():
        if isinstance(one, dict) and {"predicted", "in_process"} <= one.keys():
            yield ("llama3-8b", name, 1, 1), one
        for engine, of in (one if isinstance(one, dict) else {}).items():
            found = re.fullmatch(r"vLLM (\S+), tp (\d)(?:, ep (\d))?", engine)
            if found and {"predicted", "in_process"} <= of.keys():
                yield (name, found[1], int(found[2]), int(found[3] or 1)), of


def waves(point: Waves, how: Efficiency) -> Prediction:
    """Prediction of the planner for a run with 128 tokens in and out."""
    base = _option(point.gpu, point.dtype, point.model, Mapping(tp_size=point.tp, moe_ep_size=point.moe_ep))
    return dataclasses.replace(base, cost=base.cost.under(how)).waves(_demand(), point.concurrency)


@functools.cache
def _demand() -> Demand:
    return Demand(Work(input_tokens=128, output_tokens=128))


@functools.cache
def _option(gpu: str, dtype: str, model: str, mapping: Mapping) -> Option:
    card, shape = facts.find_gpu(gpu), facts.find_shape(model)[1]
    precision = resolve_precision(dtype, card, facts.load_quant_recipes(), runtime="vllm")
    limits = Limits(max_batch_size=512, max_num_tokens=8192)
    return Option.make(shape, card, precision, mapping, _demand().lengths(), load_efficiency().of("vllm"), limits)
