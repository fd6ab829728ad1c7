"""Two models' distributions over the next token, compared a slice of the vocabulary at a time.

No row of logits is ever held whole: sums of exponentials are kept relative to the largest logit so far, and scaled
down whenever a larger one comes.
"""

from __future__ import annotations

import torch


class _Running:
    """One model's side at each of P positions.

    peak    [P] float32, the largest logit so far
    total   [P] float64, sum of exp(logit - peak)
    best    [P], the token of the largest logit, the first of equals
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
        """(exp(logit - peak) [p, v], what sums made before are to be multiplied by [p])."""
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
        """[P] float64, the logarithm of the sum of exp(logit)."""
        return self.peak + self.total.log()


class Distributions:
    """Both sides at P positions, whose next tokens in the text are `targets` [P]."""

    def __init__(self, targets: torch.Tensor) -> None:
        self._targets = targets
        self.original = _Running(len(targets), targets.device)
        self.quantized = _Running(len(targets), targets.device)
        self._cross = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)

    def add(self, at: slice, first: int, original: torch.Tensor, quantized: torch.Tensor) -> None:
        """Logits [p, v] float32 of the positions `at`, of the tokens from `first` on; every token once, in order."""
        shares, shrink = self.original.add(at, first, original, self._targets[at])
        self.quantized.add(at, first, quantized, self._targets[at])
        difference = (shares * (original - quantized)).sum(dim=1, dtype=torch.float64)
        self._cross[at] = self._cross[at] * shrink + difference

    def divergence(self) -> torch.Tensor:
        """[P] float64, Kullback-Leibler divergence of the original from the quantized, nats."""
        exact = self._cross / self.original.total - self.original.log_total + self.quantized.log_total
        # Never negative but for rounding.
        return exact.clamp(min=0.0)

    def nll(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[P] float64 of the original and of the quantized: minus the log likelihood of the next token, nats."""
        return self.original.log_total - self.original.target, self.quantized.log_total - self.quantized.target

    def agreement(self) -> torch.Tensor:
        """[P], whether both prefer the same token."""
        return self.original.best == self.quantized.best
