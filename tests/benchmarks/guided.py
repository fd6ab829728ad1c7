"""Cost of guided decoding in the reference runtime: a batch of constrained requests against as many free ones.

    python -m tests.benchmarks.guided MODEL [--batch 32] [--tokens 64] [--rounds 5]

MODEL is a Hugging Face folder, such as that of SmolLM2. Both batches run in the same process, in turn; the grammars are
compiled before. The free requests draw as many tokens as the constrained ones do. On a CPU the model is in float32, on
one core, and the times are those of the processor: other programs do not count.
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

from tests.support.long_list import SCHEMA
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.reference.runtime import Runtime
from trtpipe.engines.sampling import Guide, SamplingParams
from trtpipe.pipeline.gateway.schemas import checked
from trtpipe.triton_repo.shared_text import tokenizer_info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        runtime = engine(args.model, Path(folder), args.batch, args.device)
        guide = Guide("json_schema", checked(SCHEMA, "schema"))
        seconds(runtime, guide, args.batch, 4, clock)
        seconds(runtime, None, args.batch, 4, clock)
        print("| round | free, output tokens/s | guided | share of the speed without guides |\n|---|---|---|---|")
        shares = []
        for number in range(1, args.rounds + 1):
            free, guided = (
                args.batch * args.tokens / seconds(runtime, one, args.batch, args.tokens, clock)
                for one in (None, guide)
            )
            shares.append(guided / free)
            print(f"| {number} | {free:.1f} | {guided:.1f} | {shares[-1]:.0%} |", flush=True)
        runtime.close()
    print(f"| median | | | {statistics.median(shares):.0%} |")


def engine(model: Path, out: Path, batch: int, device: str) -> Runtime:
    convert(model, out, dtype=DataType.FLOAT32 if device == "cpu" else DataType.BFLOAT16, mapping=Mapping())
    (out / "info.json").write_text(tokenizer_info(model))
    limits = {"max_batch_size": batch, "max_input_len": 64, "max_seq_len": 512, "max_num_tokens": 2048}
    config = {
        "pretrained_config": json.loads((out / "config.json").read_text()),
        "build_config": {**limits, "max_beam_width": 1, "plugin_config": {"tokens_per_block": 32}},
    }
    (out / "config.json").write_text(json.dumps(config))
    return Runtime(out, device=device, guided_decoding={"tokenizer_info": str(out / "info.json")})


def seconds(runtime: Runtime, guide: Guide | None, batch: int, tokens: int, clock: Callable[[], float]) -> float:
    """Seconds of a batch from its first token to its last."""
    for number in range(batch):
        sampling = SamplingParams(seed=number, top_p=1.0, temperature=0.8)
        runtime.submit(Request(id=number, prompt=(1, 504, 3575), max_tokens=tokens, guide=guide, sampling=sampling))
    begun, made = 0.0, 0
    while runtime.has_work:
        outputs = runtime.step()
        if outputs and not begun:
            begun = clock()
        made += sum(len(output.tokens) for output in outputs)
    assert made == batch * tokens, f"{made} tokens, not {batch * tokens}"
    return clock() - begun


if __name__ == "__main__":
    main()
