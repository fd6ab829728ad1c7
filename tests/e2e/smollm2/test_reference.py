"""The reference runtime on a real model: SmolLM2-135M in float32 says, token for token, what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import together
from trtpipe.engines.reference.runtime import Runtime

pytestmark = pytest.mark.real


def test_greedy_text_is_that_of_transformers(
    runtime: Runtime, prompts: list[tuple[int, ...]], guesses: list[list[int]], expected: list[list[int]]
) -> None:
    assert guesses == expected
    # A second round finds the full blocks of the first; the longest prompt, which has some, is among these.
    assert together(runtime, prompts[-5:]) == expected[-5:]
    assert runtime.stats()["kv_reused_blocks"] == full_blocks(prompts[-5:]) > 0


@pytest.mark.slow
def test_without_reuse_a_second_round_says_the_same(
    smollm2_engine_fp32: Path, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    runtime = Runtime(smollm2_engine_fp32, kv_cache_tokens=8192, enable_kv_cache_reuse=False)
    for _ in range(2):
        assert together(runtime, prompts[-5:]) == expected[-5:]
    assert runtime.stats()["kv_reused_blocks"] == 0


def full_blocks(prompts: list[tuple[int, ...]]) -> int:
    return sum((len(prompt) - 1) // 32 for prompt in prompts)
