"""The reference runtime on a real model: SmolLM2-135M in float32 says, token for token, what transformers says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import END, GREEDY, NEW_TOKENS, Served
from tests.support.golden import check_golden

pytestmark = pytest.mark.real


def answer(served: Served, prompt: tuple[int, ...]) -> tuple[list[int], int]:
    """Greedy tokens, and number of blocks of the prompt that were in the cache."""
    told = served.generate(
        "tensorrt_llm", input_ids=list(prompt), input_lengths=len(prompt), request_output_len=NEW_TOKENS, end_id=END,
        return_perf_metrics=True, streaming=False,
    )  # fmt: skip
    assert "error" not in told, told
    return told["output_ids"][: told["sequence_length"]], told["kv_cache_reused_blocks"]


def test_greedy_text_is_that_of_transformers(
    served: Served, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [tokens for tokens, _ in pool.map(lambda prompt: answer(served, prompt), prompts)] == expected
        # A second round finds the full blocks of the first; the longest prompt, which has some, is among these.
        again = list(pool.map(lambda prompt: answer(served, prompt), prompts[-3:]))
    assert [tokens for tokens, _ in again] == expected[-3:]
    assert sum(blocks for _, blocks in again) == full_blocks(prompts[-3:]) > 0


@pytest.mark.slow
def test_transformers_says_what_is_expected(
    smollm2_hf: Path, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_hf, dtype=torch.float32)
    with torch.inference_mode():
        out = [greedy(model, prompt, guess) for prompt, guess in zip(prompts, expected, strict=True)]
    check_golden(GREEDY, json.dumps(out) + "\n")


@pytest.mark.slow
def test_without_reuse_a_second_round_says_the_same(
    smollm2_engine_fp32: Path, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    from trtpipe.engines.engine_process.request import Request
    from trtpipe.engines.reference.runtime import Runtime

    runtime = Runtime(smollm2_engine_fp32, kv_cache_tokens=8192, enable_kv_cache_reuse=False)
    for _ in range(2):
        out: list[list[int]] = [[] for _ in prompts[-5:]]
        for index, prompt in enumerate(prompts[-5:]):
            runtime.submit(Request(id=index, prompt=prompt, max_tokens=NEW_TOKENS, end_id=END))
        while runtime.has_work:
            for output in runtime.step():
                out[output.id] += output.tokens
        assert out == expected[-5:]
    assert runtime.stats()["kv_reused_blocks"] == 0


def full_blocks(prompts: list[tuple[int, ...]]) -> int:
    return sum((len(prompt) - 1) // 32 for prompt in prompts)


def greedy(model: Any, prompt: tuple[int, ...], guess: list[int]) -> list[int]:
    """Answers of the model, the same for any draft: one pass confirms the right tokens of it and adds one."""
    import torch

    tokens: list[int] = []
    while len(tokens) < NEW_TOKENS and END not in tokens:
        said = model(torch.tensor([[*prompt, *guess]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        agreed = next((place for place, token in enumerate(guess) if said[place] != token), len(guess))
        tokens = said[: agreed + 1]
        guess = tokens
    return tokens[: tokens.index(END)] if END in tokens else tokens[:NEW_TOKENS]
