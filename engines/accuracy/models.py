"""Weight sources of the two models of a comparison, for each supported kind of folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.checkpoint.layout import SAFETENSORS_DTYPE
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import family_of
from trtpipe.engines.hf.folder import DETAILS, locate_tensors, read_config_json, read_model_config
from trtpipe.engines.model_config import EmbeddingSharding
from trtpipe.engines.reference.hf_weights import HfFolder, QuantizedFolder
from trtpipe.engines.reference.weights import TORCH_DTYPE, RankFiles, WeightSource


def open_model(folder: Path, device: torch.device) -> WeightSource:
    """Open a TensorRT-LLM checkpoint, or a Hugging Face folder, quantized or plain.

    The compute type is the type that the embedding is stored in. Raises InputDataError as the three readers do.
    """
    raw = read_config_json(folder / "config.json", "model config")
    if "architecture" in raw:
        config = read_config(folder)
        return RankFiles(folder, config, TORCH_DTYPE[config.dtype], device)
    if raw.get("quantization_config") is not None or (folder / DETAILS).is_file():
        return QuantizedFolder(folder, _stored_type(folder), device)
    return HfFolder(folder, _stored_type(folder), device)


def check_pair(original: WeightSource, quantized: WeightSource, folder: Path) -> None:
    """Raise InputDataError unless the model `quantized`, read from `folder`, has the original's sizes."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        expected, found = getattr(original.config, name), getattr(quantized.config, name)
        if found != expected:
            raise InputDataError(
                f"{folder} was not made from the original",
                why=f"its {name} is {found}, the original's is {expected}",
                remedy="compare it with the folder it was made from",
            )


def embed(source: WeightSource, ids: torch.Tensor) -> torch.Tensor:
    """Embed token ids [...] -> [..., hidden_size], on the weights' device and in their type."""
    parts = source.embedding()
    ids = ids.to(parts[0].device)
    if source.config.embedding is EmbeddingSharding.HIDDEN:
        return torch.cat([functional.embedding(ids, part) for part in parts], dim=-1)
    height, width = parts[0].shape
    out = parts[0].new_empty(*ids.shape, width)
    for rank, part in enumerate(parts):
        own = ids // height == rank
        out[own] = part[ids[own] - rank * height]
    return out


def vocabulary_rows(parts: Sequence[torch.Tensor], first: int, last: int) -> torch.Tensor:
    """Rows [first, last) of a matrix that is split by rows into `parts` of equal height; [.., h] float32."""
    height = len(parts[0])
    spans = [(max(first - rank * height, 0), max(last - rank * height, 0)) for rank in range(len(parts))]
    return torch.cat([part[begin:end].float() for part, (begin, end) in zip(parts, spans, strict=True)])


def _stored_type(folder: Path) -> torch.dtype:
    names = family_of(read_model_config(folder, quantized=True)).names
    embedding = locate_tensors(folder).get(f"{names.embedding}.weight")
    stored = embedding.entry.dtype if embedding is not None else None
    # For a missing tensor, or one of another type, the reader of the weights raises the error.
    return next((TORCH_DTYPE[kind] for kind, name in SAFETENSORS_DTYPE.items() if name == stored), torch.bfloat16)
