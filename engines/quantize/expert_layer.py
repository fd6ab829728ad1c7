"""Experts of a layer for calibration: separate linears, which ModelOpt calibrates like those of a dense model.

transformers has the experts' weights in two stacks, of which ModelOpt finds no smoothing vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.model_config import Experts
from trtpipe.engines.quantize.scales import LinearScales
from trtpipe.engines.reference.experts import route, weighted_sum


class ExpertLayer(torch.nn.Module):
    """Router and experts of a layer, with `weights` by their names within it; `names` has the experts' names."""

    def __init__(self, names: SourceNames, facts: Experts, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names, self._facts = names, facts
        self._router = weights[f"{names.router}.weight"]
        self._mlps = [tuple(_linear(weights[f"{name}.weight"]) for name in mlp) for mlp in names.mlps]
        # ModelOpt finds the linears here, and makes them quantized ones in place.
        self._linears = torch.nn.ModuleList(linear for mlp in self._mlps for linear in mlp)

    def linears(self) -> dict[str, torch.nn.Module]:
        """The experts' linears by their names within the layer."""
        return dict(zip((name for mlp in self._names.mlps for name in mlp), self._linears, strict=True))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute as transformers does, rounding included, so that scales of the layers after it are ModelOpt's."""
        x = hidden.flatten(0, -2)
        scores = torch.nn.functional.linear(x, self._router.to(x.dtype)).float()
        held = [partial(self._compute, number) for number in range(self._facts.count)]
        return weighted_sum(x, *route(scores, self._facts), held, 0, x.dtype).view_as(hidden)

    def _compute(self, number: int, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self._mlps[number]
        made: torch.Tensor = down(torch.nn.functional.silu(gate(x)) * up(x))
        return made


def share_scales(linears: dict[str, LinearScales], names: SourceNames) -> list[int]:
    """Give all experts the largest input of any, and smoothing to those that no token reached: the mean of the others.

    Returns the numbers of the experts that no token reached. ModelOpt has the same rule, since engines have one scale
    of the inputs for all experts.
    """
    unreached = [number for number, mlp in enumerate(names.mlps) if _is_unknown(linears[mlp[0]])]
    for group in (names.mlp_inputs, [down for _, _, down in names.mlps]):
        amax = _maximum(linears[name].input_amax for name in group)
        vectors = [vector for name in group if (vector := linears[name].smooth) is not None]
        mean = torch.stack(vectors).mean(dim=0) if vectors else None
        for name in group:
            smooth = linears[name].smooth
            linears[name] = replace(linears[name], input_amax=amax, smooth=mean if smooth is None else smooth)
    return unreached


def _is_unknown(scales: LinearScales) -> bool:
    return scales.input_amax is None and scales.smooth is None


def _maximum(values: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    known = [value for value in values if value is not None]
    return torch.stack(known).amax() if known else None


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    out, width = weight.shape
    made = torch.nn.Linear(width, out, bias=False, device="meta", dtype=weight.dtype)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made
