"""Folding of smoothing (SmoothQuant, AWQ) into the weights before a linear, for a format that has no place for it.

A linear's input is to be multiplied by a vector. What makes the input is multiplied instead:

    q, k, v      the norm before them
    gate, up     the norm before them; experts have one vector, and the router is divided by it
    down         the rows of up, the last of their linears: the input is act(gate) * up
    o            the rows of v, the last of theirs: the input is a mean of values. Query heads that share a key/value
                 head need one vector for all: the smallest factor of each feature, and o makes up for the rest. So the
                 largest input stays what it was, and smaller ones become smaller still
"""

from __future__ import annotations

import torch

from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.quantize.algorithms import Tensors

# Name of a linear -> its weight with the inverse of the vector folded in, and the vector or None.
Smoothed = dict[str, tuple[torch.Tensor, torch.Tensor | None]]


def fold(linears: Smoothed, others: Tensors, source: SourceNames, head_size: int) -> tuple[Smoothed, float]:
    """Linears without vectors, in float32, and the largest factor of a value; norms and biases in `others` change.

    The values of the KV cache are multiplied by at most that factor.
    """
    weights, vectors = {}, {}
    for name, (weight, vector) in linears.items():
        assert vector is not None, name
        weights[name], vectors[name] = weight.float(), vector.float()
    attention = source.attention_inputs
    for name, norm in ((attention[0], source.input_norm), (source.mlp_inputs[0], source.post_norm)):
        _multiply(others, f"{norm}.weight", vectors[name])
    if source.experts:
        # The router reads the same norm.
        _multiply(others, f"{source.router}.weight", 1.0 / vectors[source.mlp_inputs[0]])
    for *_, up, down in source.mlps:
        weights[up] = _last_rows(weights[up], vectors[down])
    keys_and_values = sum(len(weights[name]) for name in attention) - len(vectors[source.o])
    heads = vectors[source.o].view(keys_and_values // 2 // head_size, -1, head_size)
    shared = heads.amin(dim=1, keepdim=True)
    weights[source.o] = weights[source.o] * (heads / shared).flatten()
    values = shared.flatten()
    weights[attention[-1]] = _last_rows(weights[attention[-1]], values)
    _multiply(others, f"{source.v}.bias", values)
    return {name: (weight, None) for name, weight in weights.items()}, float(values.max())


def _last_rows(weight: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """The weight [rows, columns] whose last len(vector) rows are multiplied by the numbers of `vector`."""
    rest = len(weight) - len(vector)
    return torch.cat([weight[:rest], weight[rest:] * vector[:, None]])


def _multiply(tensors: Tensors, name: str, vector: torch.Tensor) -> None:
    if name in tensors:
        tensors[name] = (tensors[name].float() * vector).to(tensors[name].dtype)
