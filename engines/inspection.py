"""What is in a checkpoint folder, HF or TensorRT-LLM, and what is wrong with it, from headers and config alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engines.errors import InputDataError, TrtpipeError
from engines.files import read_json
from engines.hf_folder import INDEX_NAME, locate_tensors, read_model_config
from engines.safetensors_file import TensorEntry, read_header
from engines.tensorrt_llm.checkpoint import ROTARY_TABLES, rank_file, rank_layout, read_config
from engines.tensorrt_llm.convert import check_source


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a folder: which file, of what type and shape, how many bytes."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A folder's content. `kind` is huggingface or tensorrt_llm; `problems` is empty for a sound one."""

    kind: str
    architecture: str
    dtype: str | None
    mapping: dict[str, Any]
    quantization: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors)


def inspect(folder: Path) -> Inspection:
    """Look into `folder`. Raises InputDataError when it is neither kind of checkpoint."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputDataError(f"{folder} is no checkpoint", why="it has no config.json")
    raw = read_json(path, "config")
    if "architectures" in raw:
        return _huggingface(folder, raw)
    if "architecture" in raw:
        return _tensorrt_llm(folder, raw)
    if "pretrained_config" in raw:
        raise InputDataError(f"{folder} is an engine folder, not a checkpoint", remedy="see its passport.json")
    raise InputDataError(f"{path} names no architecture", why="neither a Hugging Face nor a TensorRT-LLM config")


def _huggingface(folder: Path, raw: dict[str, Any]) -> Inspection:
    problems: list[str] = []
    tensors: list[TensorInfo] = []
    try:
        located = locate_tensors(folder)
        tensors = [_info(tensor.path, tensor.entry) for tensor in located.values()]
        check_source(folder, read_model_config(folder), located)
    except TrtpipeError as error:
        problems.append(str(error))
        if not tensors:
            tensors = _readable(sorted(folder.glob("*.safetensors")), problems)
    return Inspection(
        kind="huggingface",
        architecture=str(raw["architectures"][0] if raw["architectures"] else None),
        dtype=raw.get("torch_dtype", raw.get("dtype")),
        mapping={"shards": len({tensor.file for tensor in tensors}), "index": (folder / INDEX_NAME).is_file()},
        quantization=raw.get("quantization_config") or {},
        tensors=tuple(tensors),
        problems=tuple(problems),
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
        tensors=tuple(tensors),
        problems=tuple(problems),
    )


def _rank_problems(folder: Path, tensors: list[TensorInfo], files: set[str]) -> list[str]:
    """Where the rank files are not what config.json implies."""
    try:
        config = read_config(folder)
    except InputDataError as error:
        return [str(error)]
    out = []
    found = {(tensor.file, tensor.name): tensor for tensor in tensors}
    world = config.mapping.world_size
    for rank in range(world):
        name = rank_file(folder, rank).name
        if name not in files:
            out.append(f"{name} is missing: the mapping has {world} ranks")
            continue
        expected = rank_layout(config, pp_rank=rank // config.mapping.tp_size)
        for tensor, (dtype, shape) in expected.items():
            info = found.pop((name, tensor), None)
            if info is None:
                out.append(f"{name}: tensor '{tensor}' is missing")
            elif info.shape != shape:
                out.append(f"{name}: tensor '{tensor}' has shape {list(info.shape)}, config.json implies {list(shape)}")
            elif info.dtype != dtype:
                out.append(f"{name}: tensor '{tensor}' is {info.dtype}, config.json implies {dtype}")
    out += [f"{file}: tensor '{name}' has no place in this model" for file, name in found if name not in ROTARY_TABLES]
    return out


def _readable(files: list[Path], problems: list[str]) -> list[TensorInfo]:
    out: list[TensorInfo] = []
    for path in files:
        try:
            out += [_info(path, entry) for entry in read_header(path).tensors.values()]
        except InputDataError as error:
            problems.append(str(error))
    return out


def _info(path: Path, entry: TensorEntry) -> TensorInfo:
    return TensorInfo(file=path.name, name=entry.name, dtype=entry.dtype, shape=entry.shape, nbytes=entry.nbytes)
