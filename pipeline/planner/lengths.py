"""How long a load's requests are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a load's requests: means, and the longest prompt and sequence that it asks for."""

    mean_input: float
    mean_output: float
    longest_input: int
    longest: int

    @property
    def mean(self) -> int:
        """Of a whole sequence."""
        return max(2, round(self.mean_input + self.mean_output))
