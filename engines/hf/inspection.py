"""Inspection of a checkpoint folder, HF or TensorRT-LLM: content and problems, from headers and config only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.checkpoint.convert import DERIVED_SUFFIX, check_source
from trtpipe.engines.checkpoint.layout import ROTARY_TABLES, SAFETENSORS_DTYPE, rank_file, rank_layout
from trtpipe.engines.errors import InputDataError, TrtpipeError
from trtpipe.engines.families import family_of
from trtpipe.engines.hf.folder import INDEX_NAME, locate_tensors, read_config_json, read_model_config
from trtpipe.engines.hf.safetensors_file import TensorEntry, read_header
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization
from trtpipe.engines.quantize import unified

FOR_WHOM = (
    "transformers does not know quant_method modelopt: it loads such a folder with a mere warning, takes codes for "
    "weights and computes nonsense; the folder is for vLLM and TensorRT-LLM's LLM API"
)
_FLOATS = tuple(SAFETENSORS_DTYPE.values())

# Tensor name -> (allowed types, shape), as a config implies them.
_Layout = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]


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
    tensors: list[TensorInfo] = []
    method = raw.get("quantization_config")
    quantized = method is not None or (folder / unified.DETAILS).is_file()
    quantization = method if isinstance(method, dict) else {}
    try:
        located = locate_tensors(folder)
        tensors = [_info(tensor.path, tensor.entry) for tensor in located.values()]
    except TrtpipeError as error:
        problems.append(str(error))
        tensors = _readable(sorted(folder.glob("*.safetensors")), problems)
        located = {}
    try:
        if quantized:
            model = read_model_config(folder, quantized=True)
            declared = unified.read_settings(folder, model)
            quantization = {"quant_method": "modelopt", **unified.summary(declared)}
            problems += _unified_problems(model, declared, tensors) if located else []
        elif located:
            check_source(folder, read_model_config(folder), located)
    except TrtpipeError as error:
        problems.append(str(error))
    names = raw["architectures"]
    return Inspection(
        kind="huggingface",
        architecture=str(names[0] if isinstance(names, list) and names else None),
        dtype=raw.get("torch_dtype", raw.get("dtype")),
        mapping={"shards": len({tensor.file for tensor in tensors}), "index": (folder / INDEX_NAME).is_file()},
        quantization=quantization,
        tensors=tuple(tensors),
        problems=tuple(problems),
        notes=(FOR_WHOM,) if quantized and quantization.get("quant_method", "modelopt") == "modelopt" else (),
    )


def _unified_problems(model: ModelConfig, quantization: Quantization, tensors: list[TensorInfo]) -> list[str]:
    """Differences between the tensors of ModelOpt's folder and those that its config implies."""
    layout = {
        plan.name: ((plan.dtype,) if plan.dtype else _FLOATS, plan.shape) for plan in unified.plan(model, quantization)
    }
    head = f"{family_of(model).names.head}.weight"
    # Some folders store a head although the config ties it, and buffers of older exports; loaders read neither.
    unread = {
        tensor.name
        for tensor in tensors
        if tensor.name.endswith(DERIVED_SUFFIX) or (model.tie_word_embeddings and tensor.name == head)
    }
    return list(_deviations({tensor.name: tensor for tensor in tensors if tensor.name not in unread}, layout))


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
        layout = {tensor: ((dtype,), shape) for tensor, (dtype, shape) in rank_layout(config, pp_rank=pp_rank).items()}
        found = {info.name: info for info in tensors if info.file == name and info.name not in ROTARY_TABLES}
        out += _deviations(found, layout, f"{name}: ")
    out += [f"{name} is of no rank: the mapping has {world}" for name in sorted(files - expected.keys())]
    return out


def _deviations(found: Mapping[str, TensorInfo], layout: _Layout, within: str = "") -> Iterator[str]:
    """Differences between the tensors and `layout`; `within` is the prefix of a line on a missing tensor."""
    for name, (dtypes, shape) in layout.items():
        info = found.get(name)
        if info is None:
            yield f"{within}tensor '{name}' is missing"
        elif info.shape != shape:
            yield f"{_named(info)} has shape {list(info.shape)}, config.json implies {list(shape)}"
        elif info.dtype not in dtypes:
            yield f"{_named(info)} is {info.dtype}, config.json implies {' or '.join(dtypes)}"
    yield from (f"{_named(info)} has no place in this model" for name, info in found.items() if name not in layout)


def _named(info: TensorInfo) -> str:
    return f"{info.file}: tensor '{info.name}'"


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
