"""The reference runtime on a real model: SmolLM2-135M in float32 says, token for token, what transformers says."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from engines.reference.request import Request
from engines.reference.runtime import Runtime

NEW_TOKENS = 64
END = 2
TEXTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "To bake bread you need flour, water,",
    "Photosynthesis is the process by which",
    "In 1969, the first human",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "import numpy as np\n\ndef mean(values):",
    "Q: What is the largest planet?\nA:",
    "A list of European countries: Germany,",
    "The theory of evolution was proposed by",
    "Roses are red, violets are",
    "SELECT name FROM users WHERE",
    "The recipe for a good life is simple:",
    "Mount Everest is",
    "An algorithm is a finite sequence of instructions. It differs from a heuristic in that",
    "She opened the door and saw, to her great surprise, that the room which had been full of furniture "
    "only an hour ago was now completely empty, save for a small wooden box in the middle of the floor.",
)


@pytest.fixture(scope="module")
def prompts(smollm2_hf: Path) -> list[tuple[int, ...]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_hf / "tokenizer.json"))
    out = [tuple(tokenizer.encode(text).ids) for text in TEXTS]
    assert max(len(prompt) for prompt in out) <= 64
    return out


@pytest.fixture(scope="module")
def expected(smollm2_hf: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """transformers' own greedy continuation of each prompt, without the end token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_hf, dtype=torch.float32)
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        full = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=END,
            pad_token_id=END,
        )
        tokens = full[0, len(prompt) :].tolist()
        out.append(tokens[: tokens.index(END)] if END in tokens else tokens)
    del model
    gc.collect()
    return out


def generate(runtime: Runtime, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """All prompts in flight together, as far as the engine's batch size allows."""
    out: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        runtime.submit(Request(id=index, prompt=prompt, max_tokens=NEW_TOKENS, end_id=END))
    while runtime.has_work:
        for output in runtime.step():
            out[output.id] += output.tokens
    return out


@pytest.mark.real
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no-reuse"])
def test_greedy_text_is_that_of_transformers(
    smollm2_engine_fp32: Path, prompts: list[tuple[int, ...]], expected: list[list[int]], reuse: bool
) -> None:
    runtime = Runtime(smollm2_engine_fp32, kv_cache_tokens=8192, enable_kv_cache_reuse=reuse)
    together = generate(runtime, prompts)
    alone = [generate(runtime, [prompt])[0] for prompt in prompts]
    assert together == expected
    assert alone == expected
    reused = runtime.stats()["kv_reused_blocks"]
    # A second round of the same prompts finds the full blocks of the first, if it may.
    assert reused == (sum((len(prompt) - 1) // 32 for prompt in prompts) if reuse else 0)
