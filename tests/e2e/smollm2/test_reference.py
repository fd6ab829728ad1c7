"""The reference runtime on a real model: SmolLM2-135M in float32 says, token for token, what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import together
from trtpipe.engines.reference.runtime import Runtime


@pytest.mark.real
@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["reuse", "no-reuse"])
def test_greedy_text_is_that_of_transformers(
    smollm2_engine_fp32: Path, prompts: list[tuple[int, ...]], expected: list[list[int]], reuse: bool
) -> None:
    runtime = Runtime(smollm2_engine_fp32, kv_cache_tokens=8192, enable_kv_cache_reuse=reuse)
    first = len(prompts) if reuse else 5
    assert together(runtime, prompts[-first:]) == expected[-first:]
    # A second round finds the full blocks of the first, if it may; the longest prompt, which has some, is among these.
    again = prompts[-5:]
    assert together(runtime, again) == expected[-5:]
    found = sum((len(prompt) - 1) // 32 for prompt in again)
    assert found > 0
    assert runtime.stats()["kv_reused_blocks"] == (found if reuse else 0)
