"""Inspection of a checkpoint folder, HF or TensorRT-LLM: content and problems, from headers and config.

Of a tied model with a head of its own, head and embedding are compared too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.checkpoint.convert import check_source
from trtpipe.engines.checkpoint.layout import ROTARY_TABLES, rank_file, rank_layout
from trtpipe.engines.errors import InputDataError, TrtpipeError
from trtpipe.engines.hf.folder import (
    LocatedTensor,
    check_tied_head,
    index_of,
    locate_tensors,
    read_config_json,
    read_model_config,
)
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.hf.stored import MODELOPT, deviations, read_stored
from trtpipe.engines.quantize import unified

FOR_WHOM = (
    "transformers does not know quant_method modelopt: it loads such a folder with a mere warning, takes codes for "
    "weights and computes nonsense; the folder is for vLLM and TensorRT-LLM's LLM API"
)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a folder: file, type, shape and number of bytes."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Content of a folder.

    kind      huggingface, quantized or not, or tensorrt_llm
    problems  errors; empty for a sound folder
    notes     remarks on a sound folder
    """

    kind: str
    architecture: str
    dtype: str | None
    mapping: dict[str, Any]
    quantization: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors)


def inspect(folder: Path) -> Inspection:
    """Inspect `folder`. Raises InputDataError when it is neither kind of checkpoint."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputDataError(
            f"{folder} is not a checkpoint",
            why="it has no config.json" if folder.is_dir() else "there is no such folder",
            remedy="name a Hugging Face folder, or one that `trtpipe convert` wrote",
        )
    raw = read_config_json(path, "config")
    if "architectures" in raw:
        return _huggingface(folder, raw)
    if "architecture" in raw:
        return _tensorrt_llm(folder, raw)
    if "pretrained_config" in raw:
        raise InputDataError(f"{folder} is an engine folder, not a checkpoint", remedy="see its passport.json")
    raise InputDataError(f"{path} names no architecture", why="neither a Hugging Face nor a TensorRT-LLM config")


def _huggingface(folder: Path, raw: dict[str, Any]) -> Inspection:
    problems: list[str] = []
    method = raw.get("quantization_config")
    quantization = method if isinstance(method, dict) else {}
    notes: tuple[str, ...] = ()
    index = None
    try:
        index = index_of(folder)
        located = locate_tensors(folder)
        tensors = list(located.values())
    except TrtpipeError as error:
        problems.append(str(error))
        tensors = _readable(sorted(folder.glob("*.safetensors")), problems)
        located = {}
    try:
        stored = read_stored(folder)
        model = read_model_config(folder, quantized=True)
        if stored is not None:
            quantization = {"quant_method": stored.method, **unified.summary(stored.quantization)}
            notes = (FOR_WHOM,) if stored.method == MODELOPT else ()
            problems += stored.faults(model, located) if located else []
            check_tied_head(model, located)
        elif located:
            check_source(folder, model, located)
    except TrtpipeError as error:
        problems.append(str(error))
    names = raw["architectures"]
    return Inspection(
        kind="huggingface",
        architecture=str(names[0] if isinstance(names, list) and names else None),
        dtype=raw.get("torch_dtype", raw.get("dtype")),
        mapping={"shards": len({tensor.path for tensor in tensors}), "index": index is not None},
        quantization=quantization,
        tensors=tuple(map(_info, tensors)),
        problems=tuple(dict.fromkeys(problems)),
        notes=notes,
    )


def _tensorrt_llm(folder: Path, raw: dict[str, Any]) -> Inspection:
    mapping = raw.get("mapping") if isinstance(raw.get("mapping"), dict) else {}
    quantization = raw.get("quantization") if isinstance(raw.get("quantization"), dict) else {}
    assert mapping is not None
    assert quantization is not None
    problems: list[str] = []
    files = sorted(folder.glob("rank*.safetensors"))
    tensors = _readable(files, problems)
    problems += _rank_problems(folder, tensors, {path.name for path in files})
    return Inspection(
        kind="tensorrt_llm",
        architecture=str(raw["architecture"]),
        dtype=raw.get("dtype"),
        mapping=mapping,
        quantization=quantization,
        tensors=tuple(map(_info, tensors)),
        problems=tuple(dict.fromkeys(problems)),
    )


def _rank_problems(folder: Path, tensors: list[LocatedTensor], files: set[str]) -> list[str]:
    """Differences between the rank files and those that config.json implies."""
    try:
        config = read_config(folder)
    except InputDataError as error:
        return [str(error)]
    out = []
    world = config.mapping.world_size
    expected = {rank_file(folder, rank).name: rank // config.mapping.tp_size for rank in range(world)}
    for name, pp_rank in expected.items():
        if name not in files:
            out.append(f"{name} is missing: the mapping has {world} ranks")
            continue
        layout = rank_layout(config, pp_rank=pp_rank)
        found = {
            tensor.entry.name: tensor
            for tensor in tensors
            if tensor.path.name == name and tensor.entry.name not in ROTARY_TABLES
        }
        out += deviations(
            found, {tensor: ((dtype,), (shape,)) for tensor, (dtype, shape) in layout.items()}, f"{name}: "
        )
    out += [f"{name} is of no rank: the mapping has {world}" for name in sorted(files - expected.keys())]
    return out


def _readable(files: list[Path], problems: list[str]) -> list[LocatedTensor]:
    out: list[LocatedTensor] = []
    for path in files:
        try:
            out += [LocatedTensor(path=path, entry=entry) for entry in read_header(path).tensors.values()]
        except InputDataError as error:
            problems.append(str(error))
    return out


def _info(tensor: LocatedTensor) -> TensorInfo:
    entry = tensor.entry
    return TensorInfo(file=tensor.path.name, name=entry.name, dtype=entry.dtype, shape=entry.shape, nbytes=entry.nbytes)
