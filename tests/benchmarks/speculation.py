"""Speed of one request with draft tokens against none, in the reference runtime, on texts that repeat or do not.

    python -m tests.benchmarks.speculation MODEL [--tokens 48] [--drafts 4]

MODEL is the Hugging Face folder of a model that chats, such as that of SmolLM2, computed in float32 on one core. It is
its own draft model too, so that each of its drafts is accepted: what drafts cost at most, and gain at most, in steps.
Times are processor time from the first token to the last. The rows are those of docs/measurements/features.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.reference.runtime import Runtime
from trtpipe.engines.speculation import DRAFT, DRAFT_MODEL, NGRAM

CODE = """def total(items):
    result = 0
    for item in items:
        if item.price > 0:
            result = result + item.price * item.count
    return result
"""
ARTICLE = (
    "The harbour of Lindau was closed on Monday because a storm had torn three boats from their moorings. "
    "The harbour master said that nobody was hurt, and that the boats were found near Bregenz the next morning."
)
TEXTS = {
    "code to be written again": f"Write this function again with `result` replaced by `total_price`.\n\n{CODE}",
    "article to be quoted": f"Copy the most important sentence of this text word by word.\n\n{ARTICLE}",
    "a question": "Why is the sky blue?",
}
LIMITS = {
    "max_batch_size": 1, "max_input_len": 512, "max_seq_len": 1024, "max_num_tokens": 512, "max_beam_width": 1,
    "plugin_config": {"tokens_per_block": 32},
}  # fmt: skip


def engines(model: Path, work: Path, drafts: int) -> dict[str, Path]:
    """An engine folder for each way to make draft tokens, of the same weights."""
    plain = work / "none"
    plain.mkdir()
    convert(model, plain, dtype=DataType.FLOAT32, mapping=Mapping())
    config = json.loads((plain / "config.json").read_text())
    out = {}
    for mode in ("none", NGRAM, DRAFT_MODEL):
        out[mode] = work / mode
        out[mode].mkdir(exist_ok=True)
        for path in plain.glob("*.safetensors"):
            if mode != "none":
                (out[mode] / path.name).symlink_to(path)
        build = {"speculative_decoding_mode": mode, "max_draft_len": drafts} if mode != "none" else {}
        if mode == DRAFT_MODEL:
            build["speculative_model"] = DRAFT
            (out[mode] / DRAFT).symlink_to(model.resolve())
        (out[mode] / "config.json").write_text(
            json.dumps({"version": "benchmark", "pretrained_config": config, "build_config": LIMITS | build})
        )
    return out


def answer(runtime: Runtime, prompt: tuple[int, ...], new: int) -> tuple[list[int], float, int]:
    """Tokens, processor seconds after the first of them, and steps in these seconds."""
    runtime.submit(Request(id=0, prompt=prompt, max_tokens=new))
    tokens: list[int] = []
    while not tokens:
        tokens += [token for output in runtime.step() for token in output.tokens]
    begin, steps = time.process_time(), 0
    while runtime.has_work:
        tokens += [token for output in runtime.step() for token in output.tokens]
        steps += 1
    return tokens, time.process_time() - begin, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafts", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = {name: tuple(tokenizer.encode(chat.format(text)).ids) for name, text in TEXTS.items()}
    plain: dict[str, tuple[list[int], float]] = {}
    print("| text | drafts | tokens a step | accepted | output tokens/s | of none |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        for mode, engine in engines(args.model, Path(work), args.drafts).items():
            runtime = Runtime(engine, device="cpu", enable_kv_cache_reuse=False)
            answer(runtime, prompts["a question"], 2)
            for name, prompt in prompts.items():
                before = runtime.stats()
                tokens, seconds, steps = answer(runtime, prompt, args.tokens)
                after, rate = runtime.stats(), (len(tokens) - 1) / seconds
                known, rate_of_none = plain.setdefault(name, (tokens, rate))
                assert tokens == known, f"{mode} changes the answer to {name}"
                drafted, accepted = (
                    after.get(key, 0) - before.get(key, 0) for key in ("draft_tokens", "accepted_draft_tokens")
                )
                share = f"{accepted / drafted:.0%} of {drafted}" if drafted else ""
                print(
                    f"| {name} | {mode} | {(len(tokens) - 1) / steps:.2f} | {share} | {rate:.1f} | "
                    f"{rate / rate_of_none:.0%} |",
                    flush=True,
                )
            runtime.close()


if __name__ == "__main__":
    main()
