"""Check of a GGUF file's header before a library reads it: counts, lengths and sizes must match the file.

Format (ggml, docs/gguf.md), little-endian: "GGUF", version u32, number of tensors u64, number of keys u64; the keys,
each a name, a type u32 and a value; for each tensor its name, number of dimensions u32, the dimensions u64 (columns
first), type u32 and offset u64. A string is its length u64 and its bytes; an array its type u32, length u64 and values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.gguf_tokenizer import BYTE_LEVEL
from trtpipe.engines.sizes import LARGEST, excess

# Versions that the library reads, and architecture names of a dense Llama.
VERSIONS = (2, 3)
ARCHITECTURES = ("llama", "mistral")

# Remedy for a model of which the library would read a part.
_OTHERWISE = "give the folder of the model's safetensors"
# A Llama has some 30 keys; the longest arrays are the vocabulary and its merges.
MOST_KEYS, MOST_ITEMS, MOST_STRING = 10_000, 1 << 20, 1 << 20
MOST_TENSORS = 20 * LARGEST["num_hidden_layers"]
# The smallest of BLOCKS has 18 bytes for 128 elements.
LEAST_BITS = 1.125
# Elements and bytes of a block of each type of tensor (ggml, ggml-common.h).
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
# Of the tensors, in bytes, where the file states none.
ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufError(InputDataError):
    """A GGUF file whose header is truncated, inconsistent with the file, or of another kind of model."""


def check_gguf(path: Path) -> None:
    """Raise GgufError unless the header of `path` is complete and describes a Llama whose tensors are in the file."""
    try:
        with path.open("rb") as file:
            header = _Header(path, file)
            magic = file.read(4)
            if magic != b"GGUF":
                why = f"it begins with {magic!r}"
                raise GgufError(f"{path} is not a GGUF file", why=why, remedy="download it again")
            keys, tensors = header.read()
            begin = file.tell()
    except OSError as error:
        raise GgufError(f"GGUF file {path} cannot be read", why=error.strerror or str(error)) from None
    elements = sum(prod(tensor.shape) for tensor in tensors.values())
    if elements * LEAST_BITS / 8 > header.size:
        raise header.damaged(f"its tensors have {elements:,} elements, in a file of {header.size:,} bytes")
    if _end(path, begin, keys, tensors) > header.size:
        raise header.damaged("it ends within its tensors")
    _check_llama(path, keys, {name: tensor.shape for name, tensor in tensors.items()})
    _check_rotary(path, keys)
    _check_tokenizer(path, keys)


@dataclass(frozen=True)
class _Tensor:
    """Dimensions, number of the type, and the byte behind the header at which the values begin."""

    shape: tuple[int, ...]
    type: int
    offset: int


def _end(path: Path, begin: int, keys: dict[str, Any], tensors: dict[str, _Tensor]) -> int:
    """The byte at which the last tensor ends, in a file whose header ends at `begin`. Raises GgufError for a type that
    is not known."""
    alignment, last = keys.get("general.alignment", ALIGNMENT), 0
    if type(alignment) is not int or not 0 < alignment <= MOST_STRING:
        raise GgufError(f"{path}: general.alignment is {alignment!r}", remedy="download it again")
    for name, tensor in tensors.items():
        if tensor.type not in BLOCKS:
            raise GgufError(f"tensor '{name}' in {path} is of the unknown type {tensor.type}", remedy=_OTHERWISE)
        elements, size = BLOCKS[tensor.type]
        last = max(last, tensor.offset + prod(tensor.shape) // elements * size)
    return -(-begin // alignment) * alignment + last


class _Header:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.size = path.stat().st_size

    def damaged(self, why: str) -> GgufError:
        return GgufError(f"{self._path} is damaged", why=why, remedy="download it again")

    def read(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        """Return the keys' values (for an array its length) and the tensors."""
        version = self._scalar("I")
        if version not in VERSIONS:
            raise GgufError(f"{self._path} is of GGUF version {version}", why="2 and 3 are read")
        count = self._count("tensors", MOST_TENSORS)
        keys: dict[str, Any] = {}
        for _ in range(self._count("keys", MOST_KEYS)):
            name = self._string()
            keys[name] = self._value(self._scalar("I"))
        tensors = {}
        for _ in range(count):
            name = self._string()
            dimensions = self._scalar("I")
            if dimensions > 4:
                raise self.damaged(f"tensor '{name}' has {dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(dimensions))
            tensors[name] = _Tensor(shape, self._scalar("I"), self._scalar("Q"))
        return keys, tensors

    def take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise self.damaged("it ends within its header")
        return data

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def _count(self, what: str, most: int) -> int:
        count: int = self._scalar("Q")
        if count > most:
            raise self.damaged(f"its header states {count:,} {what}, and at most {most:,} are read")
        return count

    def _string(self) -> str:
        return self.take(self._count("bytes of a string", MOST_STRING)).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"a value has the unknown type {kind}")
        inner = self._scalar("I")
        count = self._count("items of an array", MOST_ITEMS)
        if inner in _SCALARS:
            self.take(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        elif inner == _STRING:
            for _ in range(count):
                self.take(self._count("bytes of a string", MOST_STRING))
        else:
            raise self.damaged(f"an array holds values of type {inner}")
        return count


def _check_llama(path: Path, keys: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    """Raise GgufError for a missing tensor or a wrong shape: the library would invent its values. And for a tensor
    more: the library would leave it out."""
    kind = keys.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise GgufError(f"{path} describes a {kind}", why="GGUF files of Llama and Mistral alone are read")

    def size(key: str, name: str, default: int | None = None) -> int:
        value = keys.get(f"{kind}.{key}", default)
        if type(value) is not int or value < 1:
            raise GgufError(f"{path}: {kind}.{key} is {value!r}, not a positive whole number")
        if excess(name, value):
            raise GgufError(f"{path}: {kind}.{excess(name, value).replace(name, key, 1)}", remedy="download it again")
        return value

    layers = size("block_count", "num_hidden_layers")
    hidden = size("embedding_length", "hidden_size")
    ffn = size("feed_forward_length", "intermediate_size")
    heads = size("attention.head_count", "num_attention_heads")
    kv_heads = size("attention.head_count_kv", "num_key_value_heads", heads)
    head = size("attention.key_length", "head_dim", max(1, hidden // heads))
    queries, cache = heads * head, kv_heads * head
    of_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (hidden, queries), "attn_k": (hidden, cache), "attn_v": (hidden, cache),
        "attn_output": (queries, hidden), "ffn_norm": (hidden,), "ffn_gate": (hidden, ffn), "ffn_up": (hidden, ffn),
        "ffn_down": (ffn, hidden),
    }  # fmt: skip
    wanted: dict[str, tuple[int, ...]] = {"output_norm.weight": (hidden,)}
    for layer in range(layers):
        wanted |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise GgufError(f"tensor '{name}' is missing from {path}", why=f"{kind}.block_count is {layers}")
        if tensors[name] != shape:
            raise GgufError(
                f"tensor '{name}' in {path} has the dimensions {list(tensors[name])}",
                why=f"its keys imply {list(shape)}",
            )
    table = tensors.get("token_embd.weight", ())
    if len(table) != 2 or table[0] != hidden:
        raise GgufError(f"{path} has no usable tensor 'token_embd.weight'", why=f"{kind}.embedding_length is {hidden}")
    extra = sorted(tensors.keys() - wanted.keys() - {"token_embd.weight", "output.weight"})
    if extra:
        # `rope_freqs.weight` holds the rotary scaling of Llama 3.1 and newer.
        raise GgufError(
            f"{path} has a tensor '{extra[0]}', which is not read from a GGUF file",
            why="the model would be another without it",
            remedy=_OTHERWISE,
        )


def _check_rotary(path: Path, keys: dict[str, Any]) -> None:
    """Raise GgufError for scaled rotary positions, which the library does not read."""
    kind = f"{keys['general.architecture']}.rope"
    scaling = keys.get(f"{kind}.scaling.type", "linear")
    factor = keys.get(f"{kind}.scaling.factor", keys.get(f"{kind}.scale_linear", 1))
    if scaling != "none" and not (scaling == "linear" and factor in (0, 1)):
        raise GgufError(
            f"{path} scales its rotary positions ({scaling}, factor {factor})",
            why="no scaling is read from a GGUF file",
            remedy=_OTHERWISE,
        )


def _check_tokenizer(path: Path, keys: dict[str, Any]) -> None:
    """Raise GgufError for no tokenizer, one of another model, such as bert, and a byte-level one whose rule is not
    known: the library takes GPT-2's for all."""
    if not keys.get("tokenizer.ggml.tokens"):
        raise GgufError(f"{path} has no tokenizer", why="tokenizer.ggml.tokens is missing", remedy=_OTHERWISE)
    kind, pre = keys.get("tokenizer.ggml.model", "llama"), keys.get("tokenizer.ggml.pre")
    if kind != "llama" and not (kind == "gpt2" and pre in BYTE_LEVEL):
        raise GgufError(
            f"{path} has a tokenizer that is not read here (model {kind}, pre {pre})",
            why=f"of byte-level tokenizers {' and '.join(BYTE_LEVEL)} are read",
            remedy=_OTHERWISE,
        )
