"""Experts of a layer: a router picks some for each token, and the tokens of an expert are computed together."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Sums over a token's experts are in float32, in the order of the experts, as TensorRT-LLM's are."""
        x: torch.Tensor = operand
        shares, chosen = self.route(x)
        out = torch.zeros_like(x, dtype=torch.float32)
        order = chosen.flatten().argsort(stable=True)
        end = 0
        for number, count in enumerate(chosen.flatten().bincount(minlength=self.facts.count).tolist()):
            start, end = end, end + count
            place = number - self.first
            if not count or not 0 <= place < len(self.held):
                continue
            picked = order[start:end]
            rows, fc, proj = picked // self.facts.top_k, *self.held[place]
            up, activated = fc(x[rows]).chunk(2, dim=-1)
            made = proj.product(swiglu(activated, up, proj.encode), dtype)
            out.index_add_(0, rows, made.float() * shares.flatten()[picked, None])
        return out.to(dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares [T, top_k] float32 of the experts of each token, and their numbers [T, top_k]."""
        scores = functional.linear(x.float(), self.router)
        if self.facts.normalize:
            best = scores.topk(self.facts.top_k, dim=-1)
            return best.values.softmax(dim=-1), best.indices
        best = scores.softmax(dim=-1).topk(self.facts.top_k, dim=-1)
        return best.values, best.indices


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    """The router and each expert encode the input by themselves."""
    return x
