"""Experts of a layer: a router picks some for each token, and the tokens of an expert are computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trtpipe.engines.model_config import Experts
from trtpipe.engines.reference.fused import Encode, swiglu, unchanged
from trtpipe.engines.reference.linear import Linear
from trtpipe.engines.reference.mlp import Mlp


@dataclass(frozen=True)
class Expert:
    """Linears of one expert: h hidden, f MLP features of the rank."""

    fc: Linear  # h -> 2 f, those of up and then those of gate, the activated one
    proj: Linear  # f -> h

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        up, activated = self.fc(x).chunk(2, dim=-1)
        return self.proj.product(swiglu(activated, up, self.proj.encode), x.dtype)


@dataclass(frozen=True)
class ExpertMlp(Mlp):
    """The experts that a rank holds, and the router, which every rank holds whole.

    router  [experts of the layer, h] float32
    first   number of the first expert that is held
    """

    facts: Experts
    router: torch.Tensor
    first: int
    held: Sequence[Expert]

    @property
    def encode(self) -> Encode:
        return unchanged  # the router and each expert encode the input by themselves

    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        x: torch.Tensor = operand
        shares, chosen = route(functional.linear(x.float(), self.router), self.facts)
        # TensorRT-LLM sums in float32 too.
        return weighted_sum(x, shares, chosen, self.held, self.first, torch.float32).to(dtype)


def route(scores: torch.Tensor, facts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares [T, top_k] of the experts of each token, and their numbers, from the router's scores [T, E] float32."""
    shares, chosen = scores.softmax(dim=-1).topk(facts.top_k, dim=-1)
    # The same as the softmax over the chosen scores.
    return shares / shares.sum(dim=-1, keepdim=True) if facts.normalize else shares, chosen


def weighted_sum(
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    held: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    first: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Sum over the experts `held`, those from number `first` on, for each token: [T, h], added up in `dtype` and in the
    order of the experts."""
    out = torch.zeros_like(x, dtype=dtype)
    order, (_, top_k) = chosen.flatten().argsort(stable=True), chosen.shape
    end = 0
    for number, count in enumerate(chosen.flatten().bincount(minlength=first + len(held)).tolist()):
        start, end = end, end + count
        if count and first <= number < first + len(held):
            picked = order[start:end]
            rows = picked // top_k
            made = held[number - first](x[rows]) * shares.flatten()[picked, None]
            out.index_add_(0, rows, made.to(dtype))
    return out
