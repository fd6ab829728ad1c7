"""Triton's stream messages (KServe v2 over gRPC): requests as bytes, responses as outputs by name.

tritonclient's protobuf classes define the wire format. `parse` reads any response with them. `Reader` reads the
responses of one call: those of equal length differ only in their contents, so the layout found in one applies to the
next one with the same bytes in all other positions (in a quarter of the time; a test compares the two).
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
SERVER_METADATA = "/inference.GRPCInferenceService/ServerMetadata"
MODEL_READY = "/inference.GRPCInferenceService/ModelReady"
MODEL_METADATA = "/inference.GRPCInferenceService/ModelMetadata"
MODEL_CONFIG = "/inference.GRPCInferenceService/ModelConfig"
REPOSITORY_INDEX = "/inference.GRPCInferenceService/RepositoryIndex"

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"

# Most message lengths that a Reader remembers. Pieces of text have a dozen.
MOST_SHAPES = 64

_LENGTH = struct.Struct("<I")


@cache
def messages() -> Any:
    """tritonclient's protobuf messages alone: importing its package loads grpc and more, 0.2 s and 35 MB."""
    name = "tritonclient.grpc"
    found = importlib.util.find_spec("tritonclient")
    if name in sys.modules or found is None or not found.submodule_search_locations:
        return importlib.import_module(f"{name}.service_pb2")
    stand_in = ModuleType(name)
    stand_in.__path__ = [str(Path(folder) / "grpc") for folder in found.submodule_search_locations]
    sys.modules[name] = stand_in
    try:
        return importlib.import_module(f"{name}.service_pb2")
    finally:
        del sys.modules[name]


class MalformedMessage(ValueError):
    """The bytes are not a valid message, or the message contradicts itself."""


@dataclass(frozen=True)
class Tensor:
    """An input tensor; `data` is raw little-endian bytes, as Triton expects them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def infer_request(
    model: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[str] = (),
    *,
    request_id: str = "",
    empty_final: bool = True,
    parameters: Mapping[str, bool | int | str] | None = None,
) -> bytes:
    """A ModelInferRequest. `empty_final` asks for a final response even where it carries no tensors."""
    message = messages().ModelInferRequest(model_name=model, id=request_id)
    if empty_final:
        message.parameters[EMPTY_FINAL].bool_param = True
    for key, value in (parameters or {}).items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param" if isinstance(value, int) else "string_param"
        setattr(message.parameters[key], kind, value)
    for tensor in inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for name in outputs:
        message.outputs.add(name=name)
    return bytes(message.SerializeToString())


def pack_strings(values: Iterable[str | bytes]) -> bytes:
    """Serialize BYTES elements: each with its length in front."""
    raw = [value.encode() if isinstance(value, str) else value for value in values]
    return b"".join(_LENGTH.pack(len(value)) + value for value in raw)


def unpack_strings(data: bytes) -> list[bytes]:
    """The elements of a BYTES tensor. Raises MalformedMessage."""
    out = []
    position = 0
    while position < len(data):
        if position + 4 > len(data):
            raise MalformedMessage("a BYTES tensor is cut short")
        (length,) = _LENGTH.unpack_from(data, position)
        position += 4 + length
        if position > len(data):
            raise MalformedMessage("a BYTES tensor is cut short")
        out.append(data[position - length : position])
    return out


class Reply(NamedTuple):
    """A response: raw outputs by name, whether it is the last of its request, and the server's error if any."""

    outputs: dict[str, bytes]
    final: bool
    error: str = ""


def parse(message: bytes) -> Reply:
    """Read a ModelStreamInferResponse. Raises MalformedMessage."""
    return _reply(_decode(message))


def _decode(message: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return messages().ModelStreamInferResponse.FromString(message)
    except DecodeError as error:
        raise MalformedMessage(str(error)) from None


def _reply(decoded: Any) -> Reply:
    response = decoded.infer_response
    raw = response.raw_output_contents
    if len(raw) != len(response.outputs):
        # Triton writes raw contents only; typed contents are for other servers of the protocol.
        raise MalformedMessage(f"{len(response.outputs)} outputs and {len(raw)} raw contents")
    outputs = {output.name: data for output, data in zip(response.outputs, raw, strict=True)}
    parameters = response.parameters
    final = FINAL in parameters and parameters[FINAL].bool_param
    return Reply(outputs, final, decoded.error_message)


class Alike(NamedTuple):
    """Layout of messages: one of `length` bytes has it if it starts with `head` and has `fixed` at
    fixed_start:fixed_end; its content is at start:end."""

    length: int
    head: bytes
    fixed_start: int
    fixed_end: int
    fixed: bytes
    start: int
    end: int


class _Shape(NamedTuple):
    """Positions of the contents in messages of one length.

    head     all bytes up to the first content
    between  (start, end, bytes) of the bytes between two contents
    places   (output, start, end) of each content
    """

    head: bytes
    between: tuple[tuple[int, int, bytes], ...]
    places: tuple[tuple[str, int, int], ...]
    final: bool


class Reader:
    """Reads the responses of one call, or of several calls with the same layout."""

    __slots__ = ("_shapes",)

    def __init__(self) -> None:
        self._shapes: dict[int, _Shape] = {}  # by message length: texts of tokens have few

    def read(self, message: bytes) -> Reply:
        """The same as `parse`, faster for a message like an earlier one. Raises MalformedMessage."""
        shape = self._shapes.get(len(message))
        if shape is not None and message.startswith(shape.head):
            for start, end, fixed in shape.between:
                if message[start:end] != fixed:
                    break
            else:
                return Reply({name: message[start:end] for name, start, end in shape.places}, shape.final)
        decoded = _decode(message)
        reply = _reply(decoded)
        self._learn(message, decoded, reply)
        return reply

    def alike(self, name: str, length: int) -> Alike | None:
        """Layout of messages of `length` bytes that were read before, with the position of output `name`; None where
        it is unknown. For loops over many messages, in which a call of `read` costs more than the comparison."""
        shape = self._shapes.get(length)
        if shape is None or shape.final or len(shape.between) > 1:
            return None
        between = shape.between[0] if shape.between else (0, 0, b"")
        return next(
            (Alike(length, shape.head, *between, *place) for output, *place in shape.places if output == name), None
        )

    def _learn(self, message: bytes, decoded: Any, reply: Reply) -> None:
        """Remember where the contents are. Protobuf writes fields by number, so raw contents are the message's end."""
        self._shapes.pop(len(message), None)
        raw = list(decoded.infer_response.raw_output_contents)
        names = [output.name for output in decoded.infer_response.outputs]
        if reply.error or not raw or len(set(names)) != len(names):
            return
        places: list[tuple[int, int]] = []
        end = len(message)
        for data in reversed(raw):
            tag = b"\x32" + _varint(len(data))  # field 6, bytes
            start = end - len(data)
            if message[start:end] != data or message[start - len(tag) : start] != tag:
                return  # written in another order: left to protobuf
            places.append((start, end))
            end = start - len(tag)
        places.reverse()
        if len(self._shapes) == MOST_SHAPES:
            self._shapes.clear()
        self._shapes[len(message)] = _Shape(
            head=message[: places[0][0]],
            between=tuple((a, b, message[a:b]) for (_, a), (b, _) in itertools.pairwise(places)),
            places=tuple((name, *place) for name, place in zip(names, places, strict=True)),
            final=reply.final,
        )


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
