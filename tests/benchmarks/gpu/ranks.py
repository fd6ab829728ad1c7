"""Ranks over NCCL against the same shards in one process. Runs in the engine's environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu import loop
from tests.benchmarks.gpu.divergence import mean, whole
from tests.benchmarks.gpu.in_process import Reference
from tests.benchmarks.gpu.steps import compare_steps, context_logits, decoded, tokens

# In the cache of engines that are compared.
TOKENS = 65536


def compare(engine: str, alone: str, prompts: list[list[int]], new: int, levels: list[int]) -> dict[str, Any]:
    """A tensor-parallel engine over NCCL, the same shards in one process, and the engine of one rank.

    Every place of every prompt and greedy answer is compared, once read and once decoded; the first also with itself.
    Tokens a second are measured at `levels`.
    """
    import torch

    settings = {"kv_cache_tokens": TOKENS, "enable_kv_cache_reuse": False}
    apart = Reference(Path(engine), apart=True, **settings)
    said = decoded(apart, prompts, new, logits=True)
    out: dict[str, Any] = {"again": compare_steps(said, decoded(apart, prompts, new, logits=True)), "pairs": []}
    answers = [tokens(outputs) for outputs in said]
    rows = np.array([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    theirs = context_logits(apart, rows)
    out["tokens_per_s"] = loop.measure(apart, levels, None)
    apart.runtime.close()
    for name, folder in (("the same shards in one process", engine), ("one rank", alone)):
        one = Reference(Path(folder), apart=False, **settings)
        steps = decoded(one, prompts, new, logits=True)
        pairs, largest = [], 0.0
        for ours, their in zip(context_logits(one, rows), theirs, strict=True):
            a, b = torch.from_numpy(ours), torch.from_numpy(their)
            pairs.append(whole(a.log_softmax(-1), b.log_softmax(-1)))
            largest = max(largest, float((a - b).abs().max()))
        answered = sum(tokens(outputs) == answer for outputs, answer in zip(steps, answers, strict=True))
        out["pairs"].append(
            {
                "to": name, **mean(pairs), "largest": largest, "answers": answered, "of": len(prompts),
                "decoded": compare_steps(said, steps),
            }
        )  # fmt: skip
        if folder == alone:
            out["tokens_per_s_of_one"] = loop.measure(one, levels, None)
        del one
        torch.cuda.empty_cache()
    return out
