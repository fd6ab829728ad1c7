"""Lengths of a load's requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a load's requests: mean lengths, and the longest prompt and sequence."""

    mean_input: float
    mean_output: float
    longest_input: int
    longest: int

    @property
    def mean(self) -> int:
        """Mean length of a whole sequence."""
        return max(2, round(self.mean_input + self.mean_output))
