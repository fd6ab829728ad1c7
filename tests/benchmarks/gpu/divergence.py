"""Distance of two distributions over tokens."""

from __future__ import annotations

from typing import Any


def whole(a: Any, b: Any) -> tuple[float, float, int]:
    """(sum of KL(a || b), places with the same likeliest token, places) of log-probabilities [places, vocabulary]."""
    divergence = (a.exp() * (a - b)).sum(-1)
    return float(divergence.sum()), float((a.argmax(-1) == b.argmax(-1)).sum()), len(a)


def partly(ids: Any, logprobs: Any, b: Any) -> tuple[float, float, int]:
    """The same where only the likeliest tokens of the first are known: all others count as one.

    So it is a lower bound; near, for what the others weigh is little.
    """
    there = b.gather(1, ids)
    p, q = logprobs.exp().double(), there.exp().double()
    rest, others = (1 - p.sum(-1)).clamp(min=1e-9), (1 - q.sum(-1)).clamp(min=1e-9)
    divergence = (p * (p.log() - q.log())).sum(-1) + rest * (rest.log() - others.log())
    return float(divergence.sum()), float((ids[:, 0] == b.argmax(-1)).sum()), len(b)


def mean(pairs: list[tuple[float, float, int]]) -> dict[str, float]:
    divergence, same, places = (sum(column) for column in zip(*pairs, strict=True))
    return {"kl": divergence / places, "top1": same / places, "places": places}
