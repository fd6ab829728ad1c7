"""The reference runtime on a real model: SmolLM2-135M in float32 says, token for token, what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.reference.request import Request
from engines.reference.runtime import Runtime
from tests.e2e.conftest import END, NEW_TOKENS


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
