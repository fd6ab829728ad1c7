"""Throughput of one batch with 0, 1, 8 and 32 LoRA adapters on the reference runtime, measured in turns in one run.

On a CPU the times are those of the processor, with one thread: other programs do not count.

`python -m tests.benchmarks.lora --model FOLDER` with a Hugging Face folder; the rows are those of docs/lora.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.adapters import write_adapter
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.hf.adapter import lay_out, read_adapter
from trtpipe.engines.reference.runtime import Runtime

BATCH, PROMPT = 32, 32
COUNTS = (0, 1, 8, 32)


def engine(model: Path, work: Path, dtype: DataType) -> tuple[Path, list[int]]:
    """The engine folder, and the numbers of 32 adapters of rank 8 in work/lora."""
    out, folder = work / "engine", work / "lora"
    out.mkdir()
    folder.mkdir()
    convert(model, out, dtype=dtype, mapping=Mapping())
    limits = {
        "max_batch_size": BATCH, "max_input_len": 512, "max_seq_len": 1024, "max_num_tokens": 1024, "max_beam_width": 1,
        "plugin_config": {"tokens_per_block": 32},
    }  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    whole = {"version": "benchmark", "pretrained_config": config, "build_config": limits}
    (out / "config.json").write_text(json.dumps(whole))
    numbers = []
    for index in range(max(COUNTS)):
        adapter = write_adapter(work / f"adapter{index}", model, rank=8, seed=index, size=0.05)
        numbers.append(int(lay_out(read_adapter(adapter), f"a{index}", folder).name))
    return out, numbers


def run(runtime: Runtime, adapters: list[int], new: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds until every prompt is computed, and output tokens a second after that."""
    for index in range(BATCH):
        adapter = adapters[index % len(adapters)] if adapters else 0
        prompt = tuple(100 + (index * 7 + place) % 1000 for place in range(PROMPT))
        runtime.submit(Request(id=index, prompt=prompt, max_tokens=new, adapter=adapter))
    begin = clock()
    seen: set[int] = set()
    while len(seen) < BATCH:
        seen |= {output.id for output in runtime.step()}
    prompts = clock()
    tokens = 0
    while runtime.has_work:
        tokens += sum(len(output.tokens) for output in runtime.step())
    return prompts - begin, tokens / (clock() - prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", type=DataType, default=DataType.FLOAT32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as work:
        folder, numbers = engine(args.model, Path(work), args.dtype)
        runtime = Runtime(
            folder, device=args.device, adapters=Path(work) / "lora", enable_kv_cache_reuse=False,
            enable_chunked_context=True,
        )  # fmt: skip
        found: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
        for count in COUNTS:  # loads the adapters
            run(runtime, numbers[:count], 2, clock)
        for _ in range(args.rounds):
            for count in COUNTS:
                found[count].append(run(runtime, numbers[:count], args.tokens, clock))
        print("| adapters | prompts, s | output tokens/s | of none |\n|---|---|---|---|")
        none = statistics.median(rate for _, rate in found[0])
        for count, rows in found.items():
            prompts, rate = (statistics.median(column) for column in zip(*rows, strict=True))
            print(f"| {count} | {prompts:.2f} | {rate:.1f} | {rate / none:.0%} |")


if __name__ == "__main__":
    main()
