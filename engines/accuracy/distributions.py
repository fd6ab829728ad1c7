"""Comparison of two models' distributions over the next token, one slice of the vocabulary at a time.

No row of logits is held whole: sums of exponentials are relative to the largest logit so far, and are rescaled
when a larger logit comes.
"""

from __future__ import annotations

import torch


class Running:
    """Running sums of one model at P positions.

    peak    [P] float32, the largest logit so far
    total   [P] float64, sum of exp(logit - peak)
    best    [P], token of the largest logit; the first one of equal logits
    target  [P] float32, logit of the text's next token
    """

    def __init__(self, positions: int, device: torch.device) -> None:
        self.peak = torch.full((positions,), -torch.inf, device=device)
        self.total = torch.zeros(positions, dtype=torch.float64, device=device)
        self.best = torch.zeros(positions, dtype=torch.int64, device=device)
        self.target = torch.zeros(positions, device=device)

    def add(
        self, at: slice, first: int, logits: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add logits; return (exp(logit - peak) [p, v], factor [p] that rescales earlier sums)."""
        peak, token = logits.max(dim=1)
        before = self.peak[at]
        higher = peak > before
        peak = peak.where(higher, before)
        shrink = (before - peak).double().exp()
        shares = (logits - peak[:, None]).exp()
        self.peak[at] = peak
        self.total[at] = self.total[at] * shrink + shares.sum(dim=1, dtype=torch.float64)
        self.best[at] = (token + first).where(higher, self.best[at])
        local = targets - first
        here = (local >= 0) & (local < logits.shape[1])
        chosen = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.target[at] = chosen.where(here, self.target[at])
        return shares, shrink

    @property
    def log_total(self) -> torch.Tensor:
        """[P] float64, logarithm of the sum of exp(logit)."""
        return self.peak + self.total.log()

    @property
    def nll(self) -> torch.Tensor:
        """[P] float64, negative log likelihood of the next token, nats."""
        return self.log_total - self.target


class Distributions:
    """Running sums of both models at P positions, whose next tokens in the text are `targets` [P]."""

    def __init__(self, targets: torch.Tensor) -> None:
        self._targets = targets
        self.original = Running(len(targets), targets.device)
        self.quantized = Running(len(targets), targets.device)
        self._cross = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)

    def add(self, at: slice, first: int, original: torch.Tensor, quantized: torch.Tensor) -> None:
        """Add logits [p, v] float32 of the positions `at` and the tokens from `first` on; each token once, in order."""
        shares, shrink = self.original.add(at, first, original, self._targets[at])
        self.quantized.add(at, first, quantized, self._targets[at])
        difference = (shares * (original - quantized)).sum(dim=1, dtype=torch.float64)
        self._cross[at] = self._cross[at] * shrink + difference

    def divergence(self) -> torch.Tensor:
        """[P] float64, Kullback-Leibler divergence of the original from the quantized, nats."""
        exact = self._cross / self.original.total - self.original.log_total + self.quantized.log_total
        # Only rounding can make the divergence negative.
        return exact.clamp(min=0.0)

    def nll(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[P] float64 of the original and of the quantized model: negative log likelihood of the next token, nats."""
        return self.original.nll, self.quantized.nll

    def agreement(self) -> torch.Tensor:
        """[P] bool, whether both models prefer the same token."""
        return self.original.best == self.quantized.best
