"""Experts of a layer: a router picks some for each token, and the tokens of an expert are computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from trtpipe.engines.model_config import Experts
from trtpipe.engines.reference.cuda.fused import Encode, swiglu
from trtpipe.engines.reference.linear import Linear
from trtpipe.engines.reference.mlp import Mlp


class Expert(NamedTuple):
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
        return _unchanged

    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        x: torch.Tensor = operand
        shares, chosen = route(x, self.router, self.facts)
        return weighted_sum(x, shares, chosen, self.held, self.first).to(dtype)


def route(x: torch.Tensor, router: torch.Tensor, facts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares [T, top_k] float32 of the experts of each token, and their numbers [T, top_k]."""
    scores = functional.linear(x.float(), router.float())
    if facts.normalize:
        best = scores.topk(facts.top_k, dim=-1)
        return best.values.softmax(dim=-1), best.indices
    best = scores.softmax(dim=-1).topk(facts.top_k, dim=-1)
    return best.values, best.indices


def weighted_sum(
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    held: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    first: int = 0,
) -> torch.Tensor:
    """Sum over the experts `held`, those from number `first` on, for each token: [T, h] float32.

    It is in float32 and in the order of the experts, as TensorRT-LLM's is.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    order, (_, top_k) = chosen.flatten().argsort(stable=True), chosen.shape
    end = 0
    for number, count in enumerate(chosen.flatten().bincount(minlength=first + len(held)).tolist()):
        start, end = end, end + count
        if count and first <= number < first + len(held):
            picked = order[start:end]
            rows = picked // top_k
            out.index_add_(0, rows, held[number - first](x[rows]).float() * shares.flatten()[picked, None])
    return out


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    """The router and each expert encode the input by themselves."""
    return x
