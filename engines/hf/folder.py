"""Reader of a Hugging Face model folder: normalised config, locations of tensors, check of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError, suggestion
from trtpipe.engines.families import families, names_of
from trtpipe.engines.hf.chat_template import TEMPLATE, TOOL_TEMPLATE, require_template
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.hf.safetensors_file import SafetensorsError, TensorEntry, read_header
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.sizes import MOST_CONFIG_BYTES, MOST_CONFIG_VALUES

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# File of ModelOpt beside config.json, which says how the folder is quantized.
DETAILS = "hf_quant_config.json"
# A name of the index counts as 3 values and takes some 100 bytes; Qwen3-235B-A22B in NVFP4 has 145,000 tensors.
MOST_INDEX_BYTES, MOST_INDEX_VALUES = 16 << 20, 1_500_000
# Bound for the length of a shard's file name; every file system accepts such names.
MOST_NAME_LENGTH = 200
# Bytes of a tensor that are compared at a time.
COMPARED_BYTES = 8 << 20
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Files that serving reads; only tokenizer.json is required.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
    TOOL_TEMPLATE,
    "generation_config.json",
)


class UnknownModel(InputDataError):
    """A folder without a model of a known family."""


@dataclass(frozen=True, kw_only=True)
class LocatedTensor:
    """A tensor and the shard that stores it."""

    path: Path
    entry: TensorEntry


def read_model_config(folder: Path, *, quantized: bool = False) -> ModelConfig:
    """Read and normalise `folder`/config.json; with `quantized` it may describe quantized weights.

    Raises InputDataError, and UnknownModel for another architecture.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UnknownModel(
            f"{folder} is not a Hugging Face model folder",
            why="it has no config.json" if folder.is_dir() else "there is no such folder",
            remedy="give the model's folder",
        )
    return parse_model_config(read_config_json(path, "model config"), path, quantized=quantized)


def read_config_json(path: Path, what: str) -> dict[str, Any]:
    """Read the JSON object in a config.json. Raises InputDataError naming the file for anything else."""
    return read_json(path, what, max_bytes=MOST_CONFIG_BYTES, max_values=MOST_CONFIG_VALUES)


def is_checkpoint(folder: Path) -> bool:
    """Whether config.json is that of a TensorRT-LLM checkpoint. Raises InputDataError for one that cannot be read."""
    path = folder / "config.json"
    return path.is_file() and "architecture" in read_config_json(path, "model config")


def parse_model_config(raw: dict[str, Any], path: Path, *, quantized: bool = False) -> ModelConfig:
    """Normalise the content of a config.json as `read_model_config` does; messages name `path`."""
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if architecture is None and "architecture" in raw:
        raise UnknownModel(
            f"{path.parent} is a TensorRT-LLM checkpoint", remedy="give the Hugging Face folder that it was made of"
        )
    if architecture is None:
        raise UnknownModel(
            f"{path} names no architecture", remedy="give a folder whose config.json has `architectures`, a list"
        )
    family = families().get(architecture)
    if family is None:
        raise UnknownModel(
            f"{path} describes a {architecture}",
            why="trtpipe reads no model of this architecture",
            remedy=suggestion(architecture, families()),
        )
    if not quantized and (raw.get("quantization_config") is not None or (path.parent / DETAILS).is_file()):
        raise InputDataError(
            f"{path} describes an already quantized model",
            why="only an unquantized one can be quantized",
            remedy="`trtpipe convert` and `build` take it as it is; or start from the model's bf16 or fp16 folder",
        )
    return family.read_config(architecture, ConfigFields(path, raw))


def locate_tensors(folder: Path) -> dict[str, LocatedTensor]:
    """Locate all tensors by name, in one safetensors file or in the shards that an index names.

    Raises SafetensorsError for a damaged shard and InputDataError for a missing or contradictory one.
    """
    index_path = index_of(folder)
    if index_path is not None:
        return _from_index(folder, index_path)
    single = folder / SINGLE_NAME
    if single.is_file():
        return {name: LocatedTensor(path=single, entry=entry) for name, entry in read_header(single).tensors.items()}
    pickles = sorted(p.name for pattern in PICKLE_PATTERNS for p in folder.glob(pattern))
    if pickles:
        raise InputDataError(
            f"{folder} holds only pickle weights ({pickles[0]})",
            why="a pickle can run code when it is loaded",
            remedy="use the model's safetensors revision, or save it again with save_pretrained",
        )
    raise InputDataError(
        f"{folder} has no weights", why=f"neither {SINGLE_NAME} nor {INDEX_NAME} is there",
        remedy="download the model again, as safetensors",
    )  # fmt: skip


def index_of(folder: Path) -> Path | None:
    """The index of the model's shards; None without one, and where a single file is read in their place.

    Raises InputDataError for an index that cannot be read.
    """
    index_path = folder / INDEX_NAME
    if not index_path.is_file() or ((folder / SINGLE_NAME).is_file() and superseded(index_path)):
        return None
    return index_path


def superseded(index_path: Path) -> set[str]:
    """The names of an index and of its shards, which are not read beside a single file: transformers takes the file
    where a folder has both. Empty where the file is one of the shards. Raises InputDataError."""
    shards = set(read_index(index_path).values())
    return set() if SINGLE_NAME in shards else {INDEX_NAME, *shards}


def check_tied_head(model: ModelConfig, located: Mapping[str, LocatedTensor]) -> None:
    """Raises InputDataError for a head that differs from the embedding of a model that ties the two: it was trained
    apart, and transformers 5 does not tie it."""
    if not model.tie_word_embeddings:
        return
    names = names_of(model)
    head, table = (located.get(f"{name}.weight") for name in (names.head, names.embedding))
    if head is not None and table is not None and not _equal(head, table):
        raise InputDataError(
            f"tensor '{head.entry.name}' in {head.path} is not the embedding, to which config.json ties it",
            why="with the embedding as its head the model would give other answers",
            remedy='in the model\'s folder, or a copy of it that --model names, set "tie_word_embeddings": false in '
            f"config.json, or remove {head.entry.name} if the model was not trained with it",
        )


def _equal(one: LocatedTensor, other: LocatedTensor) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if (one.entry.dtype, one.entry.shape) != (other.entry.dtype, other.entry.shape):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.entry.offset)
        second.seek(other.entry.offset)
        for done in range(0, one.entry.nbytes, COMPARED_BYTES):
            size = min(COMPARED_BYTES, one.entry.nbytes - done)
            if first.read(size) != second.read(size):
                return False
    return True


def require_tokenizer(folder: Path) -> None:
    """Raise InputDataError unless the folder has the fast tokenizer that serving loads, sound settings, and a chat
    template that can be read or none."""
    file = folder / TOKENIZER_FILES[0]
    if not file.is_file():
        raise no_tokenizer(str(folder))
    if file.stat().st_size == 0:
        raise InputDataError(f"{file} is empty", remedy="copy the model's tokenizer again")
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            read_json(folder / name, "settings file")
    require_template(folder)


def no_tokenizer(where: str) -> InputDataError:
    return InputDataError(
        f"{where} has no tokenizer.json",
        why="serving reads the fast tokenizer only, so that no code from a model folder ever runs",
        remedy="save it with AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained",
    )


def read_index(path: Path) -> dict[str, str]:
    """Read an index of shards: the name of each tensor -> its file. Raises InputDataError."""
    index = read_json(path, "weight index", max_bytes=MOST_INDEX_BYTES, max_values=MOST_INDEX_VALUES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputDataError(f"{path} has no usable weight_map", remedy="download the model again")
    return weight_map


def _from_index(folder: Path, index_path: Path) -> dict[str, LocatedTensor]:
    weight_map = read_index(index_path)
    located: dict[str, LocatedTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", "..") or len(shard) > MOST_NAME_LENGTH:
            raise InputDataError(f"{index_path} names a shard outside its folder ({shard[:MOST_NAME_LENGTH]!r})")
        path = folder / shard
        if not path.is_file():
            raise InputDataError(
                f"{shard} is missing", why=f"{index_path} names it", remedy="download the model again to complete it"
            )
        for name, entry in read_header(path).tensors.items():
            if weight_map.get(name) != shard:
                raise InputDataError(f"tensor '{name}' is in {shard}, the index says {weight_map.get(name)}")
            located[name] = LocatedTensor(path=path, entry=entry)
    absent = sorted(weight_map.keys() - located.keys())
    if absent:
        raise SafetensorsError(
            f"tensor '{absent[0]}' is not in {weight_map[absent[0]]}",
            why=f"{index_path} says it is",
            remedy="download the model again",
        )
    return located
