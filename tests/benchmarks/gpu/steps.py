"""Answers of the reference runtime step by step, and how two of them differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.benchmarks.gpu.in_process import Reference


def greedy(one: Reference, prompts: list[list[int]], new: int) -> list[list[int]]:
    return [tokens(outputs) for outputs in decoded(one, prompts, new)]


def tokens(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def decoded(one: Reference, prompts: list[list[int]], new: int, *, logits: bool = False) -> list[list[Any]]:
    """What each prompt's steps put out, with their logits if asked for."""
    from trtpipe.engines.engine_process.request import Request

    for number, prompt in enumerate(prompts):
        wanted = Request(id=number, prompt=tuple(prompt), max_tokens=new, return_generation_logits=logits)
        one.runtime.submit(wanted)
    said: list[list[Any]] = [[] for _ in prompts]
    while one.runtime.has_work:
        for output in one.runtime.step():
            said[output.id].append(output)
    return said


def compare_steps(ours: list[list[Any]], theirs: list[list[Any]]) -> dict[str, float]:
    """Of the steps up to where two answers part: how many there are, in how many all logits are equal, and how far
    they are from each other at most."""
    steps = equal = 0
    largest = 0.0
    for pair in zip(ours, theirs, strict=True):
        for a, b in zip(*pair, strict=True):
            difference = float(np.abs(a.generation_logits - b.generation_logits).max())
            steps, equal, largest = steps + 1, equal + (difference == 0), max(largest, difference)
            if a.tokens != b.tokens:
                break
    return {"steps": steps, "equal": equal, "largest": largest}


def context_logits(one: Reference, tokens: Any) -> list[Any]:
    """[length - 1, vocabulary] of each row: what follows every token but the last."""
    from trtpipe.engines.engine_process.request import Request

    for number, row in enumerate(tokens):
        one.runtime.submit(Request(id=number, prompt=tuple(row.tolist()), max_tokens=1, return_context_logits=True))
    parts: dict[int, Any] = {}
    while one.runtime.has_work:
        for output in one.runtime.step():
            if output.context_logits is not None:
                parts[output.id] = output.context_logits
    return [parts[number][:-1] for number in range(len(tokens))]
