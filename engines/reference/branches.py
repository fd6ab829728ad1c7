"""Two linears of one input, as the halves of an MLP are: what they have in common is done once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engines.reference.linear import Fp8, Linear, Plain, divide_to_e4m3


class Branches(Protocol):
    """Two linears of one input: [T, in] -> two of [T, out]."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class Each:
    """Branches that have nothing in common but their input."""

    first: Linear
    second: Linear

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


@dataclass(frozen=True)
class OneProduct:
    """Branches [out, in] each, one below the other: a GPU reads the one matrix faster than two of half the size."""

    both: Linear

    @classmethod
    def of(cls, first: Plain | Fp8, second: Plain | Fp8) -> OneProduct | None:
        """None for branches that have not their scales in common."""
        if isinstance(first, Plain) and isinstance(second, Plain):
            return cls(Plain(torch.cat([first.weight, second.weight])))
        if isinstance(first, Fp8) and isinstance(second, Fp8) and torch.equal(first.output_scale, second.output_scale):
            # torch moves no e4m3 about.
            codes = torch.cat([one.codes.view(torch.int8) for one in (first, second)]).view(first.codes.dtype)
            return cls(replace(first, codes=codes)) if torch.equal(first.input_scale, second.input_scale) else None
        return None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.both(x).chunk(2, dim=-1)
        return first, second


@dataclass(frozen=True)
class OneInput:
    """FP8 branches whose inputs have the same scale, and so the same codes."""

    first: Fp8
    second: Fp8

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = divide_to_e4m3(x, self.first.input_scale)
        return self.first.product(codes, x.dtype), self.second.product(codes, x.dtype)


def make_branches(first: Linear, second: Linear) -> Branches:
    """Two linears of one input, what they have in common done once."""
    if isinstance(first, (Plain, Fp8)) and isinstance(second, (Plain, Fp8)):
        weight = first.weight if isinstance(first, Plain) else first.codes
        # Elsewhere weights are the page cache's memory, and side by side would be a copy.
        together = OneProduct.of(first, second) if weight.is_cuda else None
        if together is not None:
            return together
    if isinstance(first, Fp8) and isinstance(second, Fp8) and torch.equal(first.input_scale, second.input_scale):
        return OneInput(first, second)
    return Each(first, second)
