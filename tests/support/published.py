"""Published figures of TensorRT-LLM (tests/data/published), our own of vLLM (docs/measurements/h200.json), and what the
planner says of the latter."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from tests.support.paths import DATA, ROOT
from trtpipe.configs.facts import find_gpu, find_shape
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.quantization import UNQUANTIZED, QuantAlgo, Quantization
from trtpipe.pipeline.planner.cost import StepCost
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.figures import Figure, read
from trtpipe.pipeline.planner.memory import Limits, memory
from trtpipe.pipeline.planner.scheduler import Asked, Places, simulate

PUBLISHED = DATA / "published" / "figures.csv"
MEASURED = ROOT / "docs" / "measurements" / "h200.json"


_shape = functools.lru_cache(maxsize=None)(find_shape)
_gpu = functools.lru_cache(maxsize=None)(find_gpu)


def figures() -> list[Figure]:
    return read(PUBLISHED)


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
    model, gpu, mapping = _shape("llama3-8b")[1], _gpu("h200"), Mapping()
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
