"""Comparison job: checks the request, runs the worker process, which has torch, and returns plain numbers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpipe.engines.backends.base import longest_sequence
from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.engines.hf.folder import is_checkpoint, read_model_config
from trtpipe.engines.json_input import read_json
from trtpipe.engines.process import Progress, run_worker

DEVICES = ("auto", "cpu", "cuda")
# Nats beyond which a perplexity overflows a JSON number.
MOST_NATS = 700.0


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """Errors of a layer's output: means over tokens of a ratio of two vector norms.

    x and y are input and output of the layer in the original, y' is the output of the quantized layer.

    local        |y'(x) - y| / |y - x|: error of this layer alone, relative to its update, for the original's input x
    accumulated  |y'(x') - y| / |y|: error of all layers so far; the input x' is the quantized previous layer's output
    """

    layer: int
    local: float
    accumulated: float


@dataclass(frozen=True, kw_only=True)
class Saturation:
    """Inputs of a linear, or of the KV cache, that exceed the range of their static scale and are clipped.

    An FP8 scale s holds |x / s| up to 448, an INT8 scale |round(x / s)| up to 127.

    linear  attention.qkv, attention.dense, mlp.fc, mlp.gate, mlp.proj or attention.kv_cache
    beyond  number of clipped values
    inputs  number of all values
    """

    layer: int
    linear: str
    beyond: int
    inputs: int

    @property
    def share(self) -> float:
        return self.beyond / self.inputs if self.inputs else 0.0


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Result for a model that is run alone, quantized or not; names as in `Measured`, of the quantized model."""

    rows: int
    seq_len: int
    device: str
    vocab_size: int
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    quantized_dtype: str
    quantized_nll: float
    saturation: Sequence[Saturation]

    @property
    def positions(self) -> int:
        return self.rows * (self.seq_len - 1)

    @property
    def quantized_perplexity(self) -> float:
        return _exp(self.quantized_nll)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of a comparison. `positions` are those with a next token in the text: rows * (seq_len - 1).

    quant_algo, kv_cache_quant_algo  stated by the second model's config, TensorRT-LLM's names
    original_dtype, quantized_dtype  compute types: each model computes in the type that its embedding is stored in
    original_nll, quantized_nll      mean negative log likelihood of the text's next token, nats
    mean_kl, p99_kl                  Kullback-Leibler divergence of the next token's distributions, original from
                                     quantized, nats; over the positions
    top1_agreement                   share of positions where both models prefer the same token
    saturation                       empty for algorithms without static input scales
    """

    rows: int
    seq_len: int
    device: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    original_dtype: str
    quantized_dtype: str
    original_nll: float
    quantized_nll: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    layers: Sequence[LayerError]
    saturation: Sequence[Saturation]

    @property
    def positions(self) -> int:
        return self.rows * (self.seq_len - 1)

    @property
    def original_perplexity(self) -> float:
        return _exp(self.original_nll)

    @property
    def quantized_perplexity(self) -> float:
        return _exp(self.quantized_nll)

    @property
    def perplexity_ratio(self) -> float:
        return _exp(self.quantized_nll - self.original_nll)

    def worst(self, count: int) -> list[LayerError]:
        """The layers with the largest local errors, the worst first."""
        return sorted(self.layers, key=lambda layer: -layer.local)[:count]


def measure(
    original: Path,
    quantized: Path,
    rows: npt.NDArray[np.int32],
    *,
    device: str = "auto",
    log: Path,
    progress: Progress = lambda done, total: None,
) -> Measured:
    """Run token ids `rows` [rows, seq_len] through both models, and compare the models at every layer and position.

    original   a Hugging Face folder, usually an unquantized one
    quantized  a TensorRT-LLM checkpoint of any mapping, or a Hugging Face folder, plain or quantized
    progress   called with (bytes of the weights done, bytes in all)

    Raises UsageError for rows that cannot be run, InputDataError for folders that are no such models, do not match
    or compute numbers that are not finite, HostError without device or memory.
    """
    _check(original, rows, device)
    _check_config(quantized)
    spec = {"original": str(original), "quantized": str(quantized), "device": device}
    found = _run(spec, rows, log, "comparing with the original", progress)
    layers = tuple(LayerError(**layer) for layer in found.pop("layers"))
    return Measured(layers=layers, **found)


def measure_alone(
    quantized: Path,
    rows: npt.NDArray[np.int32],
    *,
    device: str = "auto",
    log: Path,
    progress: Progress = lambda done, total: None,
) -> Alone:
    """Run token ids `rows` through a quantized Hugging Face folder. Arguments and errors are those of `measure`."""
    _check(quantized, rows, device)
    spec = {"original": None, "quantized": str(quantized), "device": device}
    return Alone(**_run(spec, rows, log, "running the model", progress))


def _run(spec: dict[str, Any], rows: npt.NDArray[np.int32], log: Path, what: str, progress: Progress) -> dict[str, Any]:
    """Run the worker; the fields of its result, and sizes of the rows."""
    with tempfile.TemporaryDirectory(prefix=".accuracy.", dir=log.parent) as scratch:
        ids, out = Path(scratch, "rows.npy"), Path(scratch, "measured.json")
        np.save(ids, rows)
        spec = {**spec, "rows": str(ids), "out": str(out)}
        run_worker("trtpipe.engines.accuracy.worker", spec, log, what=what, progress=progress)
        found = read_json(out, "result")
    saturation = tuple(Saturation(**entry) for entry in found.pop("saturation"))
    return {"rows": rows.shape[0], "seq_len": rows.shape[1], "saturation": saturation, **found}


def _check(original: Path, rows: npt.NDArray[np.int32], device: str) -> None:
    if device not in DEVICES:
        raise UsageError(f"unknown device '{device}'", remedy=suggestion(device, DEVICES))
    model = read_model_config(original, quantized=True)
    if rows.ndim != 2 or not len(rows) or rows.shape[1] < 2:
        raise UsageError(
            f"rows of shape {list(rows.shape)} have no next token to predict",
            remedy="pass --rows 1 --seq-len 2 or more",
        )
    if rows.min() < 0 or rows.max() >= model.vocab_size:
        raise InputDataError(
            "the rows have token ids outside the vocabulary",
            why=f"{original} has {model.vocab_size} tokens",
            remedy="take the tokenizer of the model itself",
        )
    # Both models run with the reference runtime's layers.
    limit = longest_sequence(model, "reference")
    if rows.shape[1] > limit:
        raise UsageError(
            f"rows of {rows.shape[1]} tokens are too long for {original}",
            why=f"the model takes {limit}",
            remedy=f"use --seq-len {limit} or less",
        )


def _check_config(quantized: Path) -> None:
    """Check the folder's config.json before the worker starts, so that an error need not wait for torch."""
    if is_checkpoint(quantized):
        read_config(quantized)
    else:
        read_model_config(quantized, quantized=True)


def _exp(nats: float) -> float:
    return math.exp(min(nats, MOST_NATS))
