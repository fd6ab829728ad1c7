"""NVIDIA's published figures of the engine path (tests/data/published), our own of vLLM (docs/measurements/h200.json),
and what the planner says of the same runs."""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.support.paths import DATA, ROOT
from trtpipe.configs.facts import find_gpu, find_shape
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.pipeline.planner.cost import Step, StepCost
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.memory import Limits, memory
from trtpipe.pipeline.planner.scheduler import Asked, Places, simulate

FOLDER = DATA / "published"
MEASURED = ROOT / "docs" / "measurements" / "h200.json"
FP8 = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)
# Requests of each run by prompt and answer, from the same document.
REQUESTS = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (2048, 128): 3000, (2048, 2048): 1500,
    (5000, 500): 1500, (1000, 1000): 3000, (500, 2000): 3000, (20000, 2000): 1000,
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A published figure. `held_out` ones are not fitted to."""

    release: str
    model: str
    tp: int
    input: int
    output: int
    gpu: str
    quantization: Quantization
    tokens_per_s: float
    held_out: bool = False


@dataclass(frozen=True)
class Serving:
    """A published run at a rate; requests_per_s None is as fast as possible."""

    model: str
    tp: int
    input: int
    output: int
    gpu: str
    requests_per_s: float | None
    ttft_ms: float
    itl_ms: float
    tokens_per_s: float


def throughput() -> list[Point]:
    """Every other row is held out, so that each card, model, size and length is on both sides."""
    with (FOLDER / "throughput.csv").open(newline="") as file:
        return [
            Point(
                row["release"], row["model"], int(row["tp"]), int(row["input_tokens"]), int(row["output_tokens"]),
                row["gpu"], FP8 if row["quantization"] == "fp8" else UNQUANTIZED, float(row["output_tokens_per_s"]),
                held_out=number % 2 == 1,
            )
            for number, row in enumerate(csv.DictReader(file))
        ]  # fmt: skip


def serving() -> list[Serving]:
    with (FOLDER / "serving.csv").open(newline="") as file:
        return [
            Serving(
                row["model"], int(row["tp"]), int(row["input_tokens"]), int(row["output_tokens"]), row["gpu"],
                float(row["requests_per_s"]) if row["requests_per_s"] else None, float(row["mean_ttft_ms"]),
                float(row["mean_itl_ms"]), float(row["output_tokens_per_s"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


gpu_of = functools.lru_cache(maxsize=None)(find_gpu)


@functools.cache
def shape(name: str) -> ModelConfig:
    if name == "llama3.1-405b":
        return replace(
            find_shape("llama3.1-70b")[1], hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
            num_attention_heads=128,
        )  # fmt: skip
    return find_shape(name)[1]


def bench_limits(point: Point) -> Limits:
    """What `trtllm-bench build` chooses for a data set (bench/build/tuning.py), and the document's KV fraction."""
    model, item = shape(point.model), 2 if point.quantization == UNQUANTIZED else 1
    total = gpu_of(point.gpu).memory_bytes
    assert total is not None
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_size
    layer = model.hidden_size * (heads + model.num_attention_heads * model.head_size + 3 * model.intermediate_size)
    parameters = model.num_hidden_layers * layer + 2 * model.vocab_size * model.hidden_size
    free = total * point.tp - parameters * item
    token = 2 * model.num_hidden_layers * max(point.tp, model.num_key_value_heads) * model.head_size * item
    batch = min(0.95 * free / (token * (point.input + point.output)), 4096)
    tokens = min(batch * (1 + point.input / point.output), 32768)
    return Limits(
        max_batch_size=_up(batch, [(256, 32), (1024, 128), (math.inf, 256)], 64),
        max_num_tokens=_up(tokens, [(4096, 256), (8192, 512), (math.inf, 1024)], 2048),
        tokens_per_block=64,
        kv_cache_free_gpu_mem_fraction=0.95,
    )


def _up(value: float, grains: list[tuple[float, int]], least: int) -> int:
    grain = next(grain for limit, grain in grains if value < limit)
    return max(least, grain * math.ceil(value / grain))


@dataclass(frozen=True)
class Run:
    """The steps of a run at an infinite rate: they do not depend on how long each takes."""

    repeat: Any
    step: Step
    tokens: int

    def tokens_per_s(self, cost: StepCost) -> float:
        return self.tokens / float((self.repeat * cost.seconds(self.step)).sum())


@functools.cache
def run(point: Point, activations: float, runtime_gib: float) -> Run | None:
    """None where the planner says that it does not fit."""
    from trtpipe.pipeline.planner.efficiency import load_efficiency

    how = replace(load_efficiency(), activations=activations, runtime_gib=runtime_gib)
    limits = bench_limits(point)
    found = memory(
        shape(point.model), DataType.BFLOAT16, Mapping(tp_size=point.tp), point.quantization, gpu_of(point.gpu),
        limits, how,
    )  # fmt: skip
    places = Places(
        batch=limits.max_batch_size, tokens=limits.max_num_tokens, kv_blocks=found.kv_blocks, tokens_per_block=64
    )
    asked = Asked(0.0, point.input, point.output)
    if places.blocks(asked) > places.kv_blocks:
        return None
    count = REQUESTS[point.input, point.output]
    rows: list[tuple[float, ...]] = []

    def note(repeat: int, step: Step) -> None:
        rows.append((repeat, step.context, step.decoding, step.cached, step.work, step.logits))

    simulate([asked] * count, places, lambda step: 0.0, watch=note)
    columns = np.array(rows).T
    return Run(columns[0], Step(**dict(zip(FIELDS, columns[1:], strict=True))), count * point.output)


FIELDS = ("context", "decoding", "cached", "work", "logits")


@functools.cache
def _cost(point: Point) -> StepCost:
    from trtpipe.pipeline.planner.efficiency import load_efficiency

    return StepCost.of(
        shape(point.model), DataType.BFLOAT16, Mapping(tp_size=point.tp), point.quantization, gpu_of(point.gpu),
        load_efficiency(),
    )  # fmt: skip


def cost(point: Point, how: Efficiency) -> StepCost:
    """With these efficiencies; shapes are counted once."""
    base, gpu = _cost(point), gpu_of(point.gpu)
    assert gpu.sm is not None
    kind = "bf16" if point.quantization == UNQUANTIZED else "fp8"
    from trtpipe.pipeline.planner.cost import link_bandwidth

    return replace(
        base, efficiency=how, share=how.product(gpu.sm, kind), share16=how.product(gpu.sm, "fp16"),
        link=link_bandwidth(gpu, point.tp, how), latency=how.allreduce_s,
    )  # fmt: skip


def predicted(point: Point, how: Efficiency) -> float | None:
    made = run(point, how.activations, how.runtime_gib)
    return None if made is None else made.tokens_per_s(cost(point, how))


def errors(how: Efficiency, points: list[Point]) -> Iterator[tuple[Point, float | None]]:
    """(predicted - published) / published of each."""
    for point in points:
        value = predicted(point, how)
        yield point, None if value is None else value / point.tokens_per_s - 1


def served(point: Serving, how: Efficiency) -> tuple[float, float, float]:
    """(mean TTFT in ms, mean ITL in ms, tokens/s) of the planner for a published run at a rate.

    trtllm-build's default sizes, Poisson arrivals as the document's client makes them, 500 requests.
    """
    model, gpu, mapping = shape(point.model), gpu_of(point.gpu), Mapping(tp_size=point.tp)
    limits = Limits(max_batch_size=2048, max_num_tokens=8192, tokens_per_block=64)
    found = memory(model, DataType.BFLOAT16, mapping, UNQUANTIZED, gpu, limits, how)
    places = Places(batch=2048, tokens=8192, kv_blocks=found.kv_blocks, tokens_per_block=64)
    step = StepCost.of(model, DataType.BFLOAT16, mapping, UNQUANTIZED, gpu, how)
    gaps = np.random.default_rng(0).exponential(1 / point.requests_per_s if point.requests_per_s else 0.0, 500)
    made = simulate([Asked(at, point.input, point.output) for at in np.cumsum(gaps)], places, step.seconds)
    first, end = np.array(made.first, dtype=float), np.array(made.end, dtype=float)
    arrival = np.array([asked.arrival for asked in made.asked])
    ttft = (first - arrival).mean() + how.front_s
    itl = ((end - first) / (point.output - 1)).mean()
    return ttft * 1e3, itl * 1e3, 500 * point.output / (end.max() - arrival.min())


@dataclass(frozen=True)
class Together:
    """So many clients at once, each asking again when it is answered."""

    quantization: Quantization
    concurrency: int
    tokens_per_s: float


def vllm() -> list[Together]:
    """Our own runs of vLLM, all places together: what `make gpu-e2e` measured. Only those of 16 bits are fitted to."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["engine"]["result"]
    precisions = {"bf16": UNQUANTIZED, "fp8": Quantization(quant_algo=QuantAlgo.FP8)}
    return [
        Together(quantization, int(concurrency), speed["waves"])
        for name, quantization in precisions.items()
        for concurrency, speed in measured[name]["in_process"].items()
    ]


def together(point: Together, how: Efficiency) -> float:
    """Tokens/s that the planner says of such a run: Llama 3 8B on an H200, 128 tokens in and out."""
    model, gpu, mapping = shape("llama3-8b"), gpu_of("h200"), Mapping()
    limits = Limits(max_batch_size=512, max_num_tokens=8192)
    found = memory(model, DataType.BFLOAT16, mapping, point.quantization, gpu, limits, how)
    places = Places(batch=512, tokens=8192, kv_blocks=found.kv_blocks)
    step = StepCost.of(model, DataType.BFLOAT16, mapping, point.quantization, gpu, how)
    count = 4 * point.concurrency
    rest = iter(range(count - point.concurrency))
    made = simulate(
        [Asked(0.0, 128, 128)] * point.concurrency, places, step.seconds,
        follow=lambda index, now: Asked(now, 128, 128) if next(rest, None) is not None else None,
    )  # fmt: skip
    return count * 128 / max(end for end in made.end if end is not None)
