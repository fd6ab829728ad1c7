"""MLP of a layer, and its pair of linears with one input, gate and up: shared work is done once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from trtpipe.engines.reference.fused import Encode, swiglu, unchanged
from trtpipe.engines.reference.linear import Fp8, Fp8Block, Int8, Linear, Nvfp4, Plain
from trtpipe.engines.reference.lora import Add


class Mlp(ABC):
    """A rank's part of the MLP of a layer: [T, hidden] -> [T, hidden], to be summed over the ranks.

    It has two steps, like `Linear`.
    """

    @property
    @abstractmethod
    def encode(self) -> Encode:
        """First step, row by row."""

    @abstractmethod
    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        """Second step, with what `encode` made of an input of type `dtype`."""

    def adapted(self, operand: Any, x: torch.Tensor, add: Add, dtype: torch.dtype) -> torch.Tensor:
        """`product`, with adapters added by `add`; `operand` is `x` encoded. Experts have no adapters."""
        return self.product(operand, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.encode(x), x.dtype)


class Branches(ABC):
    """Two linears of one input: [T, in] -> two outputs [T, out]. It has two steps, like `Linear`."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Any:
        """First step: return the operand of the products."""

    @abstractmethod
    def product(self, operand: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Second step: the products with `operand`, which `encode` made of an input of type `dtype`."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.product(self.encode(x), x.dtype)


@dataclass(frozen=True)
class Each(Branches):
    """Branches that share nothing but the input."""

    first: Linear
    second: Linear

    def encode(self, x: torch.Tensor) -> tuple[Any, Any]:
        return self.first.encode(x), self.second.encode(x)

    def product(self, operand: tuple[Any, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = operand
        return self.first.product(first, dtype), self.second.product(second, dtype)


@dataclass(frozen=True)
class OneProduct(Branches):
    """Branches [out, in] stacked into one matrix, which a GPU reads faster than two matrices of half the size.

    activated  which of its halves is the first branch: 0 or 1
    """

    both: Linear
    activated: int = 0

    @classmethod
    def of(cls, first: Linear, second: Linear) -> OneProduct | None:
        """Stack two linears; None if they do not share their scales."""
        if isinstance(first, Plain) and isinstance(second, Plain):
            return cls(Plain(torch.cat([first.weight, second.weight])))
        if not one_input(first, second):
            return None
        if isinstance(first, Int8) and isinstance(second, Int8):
            codes = torch.cat([first.codes, second.codes])
            return cls(replace(first, codes=codes, output_scale=torch.cat([first.output_scale, second.output_scale])))
        if isinstance(first, Fp8) and isinstance(second, Fp8) and torch.equal(first.output_scale, second.output_scale):
            # Concatenated as int8, since torch cannot concatenate e4m3.
            codes = torch.cat([one.codes.view(torch.int8) for one in (first, second)]).view(first.codes.dtype)
            return cls(replace(first, codes=codes))
        return None

    def encode(self, x: torch.Tensor) -> Any:
        return self.both.encode(x)

    def product(self, operand: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        halves = self.both.product(operand, dtype).chunk(2, dim=-1)
        return halves[self.activated], halves[1 - self.activated]


@dataclass(frozen=True)
class OneInput(Branches):
    """Branches whose inputs have the same scales and therefore the same codes."""

    first: Linear
    second: Linear

    def encode(self, x: torch.Tensor) -> Any:
        return self.first.encode(x)

    def product(self, operand: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first.product(operand, dtype), self.second.product(operand, dtype)


def one_input(first: Linear, second: Linear) -> bool:
    """Whether both linears encode an input alike: with one static scale, or with scales of the input's blocks alone."""
    if isinstance(first, Fp8Block) and isinstance(second, Fp8Block):
        return True
    same = type(first) is type(second) and isinstance(first, (Fp8, Int8, Nvfp4))
    return same and torch.equal(first.input_scale, second.input_scale)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class GatedMlp(Mlp):
    """SwiGLU: `branches` has the activated linear first."""

    branches: Branches
    proj: Linear

    @property
    def encode(self) -> Encode:
        return self.branches.encode

    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        activated, gate = self.branches.product(operand, dtype)
        return self.proj.product(swiglu(activated, gate, self.proj.encode), dtype)

    def adapted(self, operand: Any, x: torch.Tensor, add: Add, dtype: torch.dtype) -> torch.Tensor:
        activated, gate = self.branches.product(operand, dtype)
        # TensorRT-LLM's gate is up_proj.
        add(x, [("gate", activated), ("up", gate)])
        inner = swiglu(activated, gate, unchanged)
        out = self.proj.product(self.proj.encode(inner), dtype)
        add(inner, [("down", out)])
        return out


def make_branches(first: Linear, second: Linear) -> Branches:
    """Combine two linears of one input; shared work is done once."""
    # Only on a GPU: on a CPU the weights are the page cache's memory, and stacking them would copy them.
    together = OneProduct.of(first, second) if _on_gpu(first) else None
    if together is not None:
        return together
    return OneInput(first, second) if one_input(first, second) else Each(first, second)


def _on_gpu(linear: Linear) -> bool:
    weight = linear.weight if isinstance(linear, Plain) else linear.codes if isinstance(linear, (Fp8, Int8)) else None
    return weight is not None and weight.is_cuda
