"""Worker process of a comparison, or of one model alone: one layer at a time, so that only one of each is in memory.

The hidden states of all rows of both models stay on the device; each model's layers read its own hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtpipe.engines.accuracy.distributions import Distributions, Running
from trtpipe.engines.accuracy.job import LayerError, Saturation
from trtpipe.engines.accuracy.models import check_pair, embed, open_model, vocabulary_rows
from trtpipe.engines.accuracy.watch import Count, watched
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import write_json
from trtpipe.engines.process import Progress, serve_worker
from trtpipe.engines.reference.devices import find_device, named_memory_errors
from trtpipe.engines.reference.fused import rms_norm
from trtpipe.engines.reference.layer import run_layer
from trtpipe.engines.reference.rope import rotary_tables
from trtpipe.engines.reference.weights import LayerShard, WeightSource

# Tokens in one pass through a layer: enough to fill a GPU, few enough for the caches of a CPU.
BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}
# Number of positions, and of vocabulary tokens, in one block of logits: 64 MiB of float32 per model.
POSITIONS = 2048
VOCABULARY = 8192


@dataclass
class _Stream:
    """A model and its current hidden states [rows, seq_len, hidden_size]."""

    folder: Path
    source: WeightSource
    hidden: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def start(cls, folder: Path, source: WeightSource, ids: torch.Tensor) -> _Stream:
        hidden = embed(source, ids)
        cos, sin = rotary_tables(source.config, ids.shape[1])
        stream = cls(folder, source, hidden, (cos.to(hidden.device), sin.to(hidden.device)))
        stream.require_finite(hidden, "the embedding")
        return stream

    def run(self, shards: tuple[LayerShard, ...], hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Run layer `index` over [batch, seq_len, hidden_size]. Raises InputDataError for a non-finite value."""
        out = run_layer(self.source.config, shards, hidden.to(self.hidden.dtype), *self.tables)
        self.require_finite(out, f"layer {index}")
        return out

    def require_finite(self, tensor: torch.Tensor, where: str) -> None:
        if not tensor.isfinite().all():
            raise InputDataError(
                f"{where} of {self.folder} gives numbers that are not finite",
                why="its weights or scales are damaged, or too large for its type",
                remedy="make the folder again",
            )

    def final(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Normed states [P, hidden_size] of all positions with a next token, and the head's parts."""
        norm, parts, _ = self.source.head()
        states = self.hidden[:, :-1].flatten(0, 1)
        return rms_norm(states, norm, self.source.config.norm_epsilon), parts


def work(spec: dict[str, Any], progress: Progress) -> None:
    """Run a job of `job.measure` or `job.measure_alone`; `spec` has its arguments as plain values. Writes `out`."""
    device, where = find_device(spec["device"]), ["reading the models"]
    remedy = "pass fewer --rows" + (", or --device cpu" if device.type == "cuda" else "")
    with torch.inference_mode(), named_memory_errors(device, where, remedy):
        quantized, rows = Path(spec["quantized"]), np.load(spec["rows"])
        if spec["original"] is None:
            found = _run_alone(quantized, rows, device, where, progress)
        else:
            found = _compare(Path(spec["original"]), quantized, rows, device, where, progress)
    write_json(Path(spec["out"]), found)


def _bytes(folder: Path) -> int:
    """Bytes of the weights, which progress counts, as quantizing does. The head comes last, and counts as a layer."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _run_alone(folder: Path, rows: Any, device: torch.device, where: list[str], progress: Progress) -> dict[str, Any]:
    source, ids = open_model(folder, device), torch.from_numpy(rows).long()
    stream = _Stream.start(folder, source, ids)
    saturation: list[Saturation] = []
    count, length = source.config.num_hidden_layers, ids.shape[1]
    total = _bytes(folder)
    for index in range(count):
        where[0] = f"running layer {index}"
        counted, counts = watched(source.layer(index))
        for part in _slices(len(ids), max(1, BATCH_TOKENS[device.type] // length)):
            stream.hidden[part] = stream.run(counted, stream.hidden[part], index)
        saturation += _saturation(index, counts)
        progress((index + 1) * total // (count + 1), total)
    where[0] = "predicting the next tokens"
    targets = ids[:, 1:].flatten().to(device)
    (states, head), running = stream.final(), Running(len(targets), device)
    for words in _slices(source.config.vocab_size, VOCABULARY):
        weight = vocabulary_rows(head, words.start, words.stop).t()
        for at in _slices(len(targets), POSITIONS):
            running.add(at, words.start, states[at].float() @ weight, targets[at])
    stream.require_finite(running.log_total, "the head")
    progress(total, total)
    said = source.config.quantization
    return {
        "device": device.type,
        "vocab_size": source.config.vocab_size,
        "quant_algo": said.quant_algo and said.quant_algo.value,
        "kv_cache_quant_algo": said.kv_cache_quant_algo and said.kv_cache_quant_algo.value,
        "quantized_dtype": source.config.dtype.value,
        "quantized_nll": float(running.nll.mean()),
        "saturation": [asdict(entry) for entry in saturation],
    }


def _saturation(layer: int, counts: Mapping[str, Count]) -> list[Saturation]:
    return [
        Saturation(layer=layer, linear=name, beyond=count.beyond, inputs=count.inputs) for name, count in counts.items()
    ]


def _compare(
    original_folder: Path, folder: Path, rows: Any, device: torch.device, where: list[str], progress: Progress
) -> dict[str, Any]:
    sources = open_model(original_folder, device), open_model(folder, device)
    check_pair(*sources, folder)
    ids = torch.from_numpy(rows).long()
    original = _Stream.start(original_folder, sources[0], ids)
    quantized = _Stream.start(folder, sources[1], ids)
    total = _bytes(original_folder) + _bytes(folder)
    layers: list[LayerError] = []
    saturation: list[Saturation] = []
    count = original.source.config.num_hidden_layers
    for index in range(count):
        where[0] = f"comparing layer {index}"
        error, found = _compare_layer(original, quantized, index)
        layers.append(error)
        saturation += found
        progress((index + 1) * total // (count + 1), total)
    where[0] = "comparing the next tokens"
    compared = _compare_tokens(original, quantized, ids[:, 1:].flatten().to(device))
    progress(total, total)
    said = quantized.source.config.quantization
    return {
        "device": device.type,
        "quant_algo": said.quant_algo and said.quant_algo.value,
        "kv_cache_quant_algo": said.kv_cache_quant_algo and said.kv_cache_quant_algo.value,
        "original_dtype": original.source.config.dtype.value,
        "quantized_dtype": quantized.source.config.dtype.value,
        **compared,
        "layers": [asdict(layer) for layer in layers],
        "saturation": [asdict(entry) for entry in saturation],
    }


def _compare_layer(original: _Stream, quantized: _Stream, index: int) -> tuple[LayerError, list[Saturation]]:
    """Errors of one layer; advances both streams through the layer."""
    true, coded = original.source.layer(index), quantized.source.layer(index)
    # Saturation is counted in the quantized model's own stream, which has the inputs of a served model.
    counted, counts = watched(coded)
    rows, length, _ = original.hidden.shape
    local = accumulated = 0.0
    for part in _slices(rows, max(1, BATCH_TOKENS[original.hidden.device.type] // length)):
        x = original.hidden[part]
        y = original.run(true, x, index)
        alone, own = quantized.run(coded, x, index), quantized.run(counted, quantized.hidden[part], index)
        local += _sum_of_ratios(alone, y, y.float() - x.float())
        accumulated += _sum_of_ratios(own, y, y.float())
        original.hidden[part], quantized.hidden[part] = y, own
    tokens = rows * length
    error = LayerError(layer=index, local=local / tokens, accumulated=accumulated / tokens)
    return error, _saturation(index, counts)


def _sum_of_ratios(found: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> float:
    """Sum over tokens of |found - expected| / |base|, norms of vectors [..., hidden_size]."""
    # A mean of the tokens' ratios: one ratio over all tokens would be dominated by a Llama's few very large tokens.
    off = (found.float() - expected.float()).norm(dim=-1).double()
    return float((off / base.norm(dim=-1).double().clamp(min=torch.finfo(torch.float32).tiny)).sum())


def _compare_tokens(original: _Stream, quantized: _Stream, targets: torch.Tensor) -> dict[str, float]:
    """Likelihood, divergence and agreement over the positions whose next tokens are `targets` [P]."""
    both = Distributions(targets)
    (states, head), (other_states, other_head) = original.final(), quantized.final()
    for words in _slices(original.source.config.vocab_size, VOCABULARY):
        # In float32: the rounding of logits to 16 bits would count as divergence.
        weight = vocabulary_rows(head, words.start, words.stop).t()
        other_weight = vocabulary_rows(other_head, words.start, words.stop).t()
        for at in _slices(len(targets), POSITIONS):
            both.add(at, words.start, states[at].float() @ weight, other_states[at].float() @ other_weight)
    original.require_finite(both.original.log_total, "the head")
    quantized.require_finite(both.quantized.log_total, "the head")
    divergence = both.divergence().cpu().numpy()
    nll, other_nll = both.nll()
    return {
        "original_nll": float(nll.mean()),
        "quantized_nll": float(other_nll.mean()),
        "mean_kl": float(divergence.mean()),
        "p99_kl": float(np.quantile(divergence, 0.99)),
        "top1_agreement": float(both.agreement().double().mean()),
    }


def _slices(count: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(count)."""
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


if __name__ == "__main__":
    serve_worker(work)
