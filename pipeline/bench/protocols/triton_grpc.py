"""Codec of Triton's gRPC protocol: ModelStreamInfer messages, and the server's description of a model."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.endpoint import ENGINE, Endpoint, Value, model_error
from trtpipe.pipeline.bench.protocols.transport import Answer, BadAnswer, Messages, ReadIds
from trtpipe.pipeline.net.h2.triton import (
    MODEL_METADATA,
    REPOSITORY_INDEX,
    SERVER_METADATA,
    Alike,
    MalformedMessage,
    Reader,
    Tensor,
    infer_request,
    messages,
    pack_strings,
    unpack_strings,
)

_PACKING = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I",
    "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip

# Calls a method with a message; returns the answer. Raises CallRefused for a status other than OK, HostError if none.
RequestSpec = Callable[[str, bytes], Awaitable[bytes]]


class CallRefused(Exception):
    """The server answered with an error status."""


# No message has this length.
_UNLIKE = Alike(-1, b"", 0, 0, b"", 0, 0)


class TritonGrpc:
    """Codec of one model. Made by `find`."""

    protocol = "grpc"

    def __init__(self, endpoint: Endpoint, tokenize: Callable[[str], list[int]]) -> None:
        self._endpoint = endpoint
        self._tokenize = tokenize
        family = endpoint.family()
        self._output, self._is_engine = family.output, family is ENGINE
        self._count = family.count if family.count in endpoint.outputs else None

    @classmethod
    async def find(cls, ask: RequestSpec, url: str, model: str, tokenize: Callable[[str], list[int]]) -> TritonGrpc:
        """Ask a server for its model. Raises HostError, UsageError, StageFailed."""
        return cls(await _endpoint(ask, url, model), tokenize)

    def described(self) -> dict[str, Any]:
        return self._endpoint.described()

    def encode(
        self, identity: str, prompt: str, max_tokens: int, options: Mapping[str, Any], messages: Messages | None = None
    ) -> bytes:
        inputs = self._endpoint.inputs
        values = self._endpoint.values(prompt, max_tokens, options, self._tokenize)
        tensors = [_tensor(name, value, *inputs[name]) for name, value in values.items()]
        outputs = [self._output, *([self._count] if self._count else ())]
        return infer_request(self._endpoint.model, tensors, outputs, request_id=identity)

    def decode(self, request: InFlightRequest) -> Answer:
        reader = Reader()
        output, count, is_engine = self._output, self._count, self._is_engine
        stamps: list[int] = []
        tokens: list[int] = []
        texts: list[bytes] = []
        final = False
        told = output if is_engine else count
        likes: dict[int, Alike] = {}  # by length of the message
        length, head, fixed_start, fixed_end, fixed, start, end = _UNLIKE
        for message, stamp in request.reads():
            if len(message) != length:
                length, head, fixed_start, fixed_end, fixed, start, end = likes.get(len(message), _UNLIKE)
            if (
                len(message) == length
                and message[fixed_start:fixed_end] == fixed
                and message.startswith(head)
                and (
                    number := (end - start) // 4
                    if is_engine
                    else int.from_bytes(message[start:end], "little", signed=True)
                )
            ):
                stamps.append(stamp)
                tokens.append(number)
                continue
            try:
                outputs, last, error = reader.read(message)
                if error:
                    raise BadAnswer("ServerError", error)
                final = final or last
                if not outputs:
                    continue  # the final flag may come on the last tokens or on a message without tokens
                data = outputs[output]
                if is_engine:
                    number = len(data) // 4
                elif count is not None:
                    (number,) = struct.unpack_from("<i", outputs[count])
                else:
                    (piece,) = unpack_strings(data)
                    texts.append(piece)
                    number = bool(piece)
            except (MalformedMessage, KeyError, ValueError, struct.error) as error:
                told = f"a response without {error}" if isinstance(error, KeyError) else repr(error)
                raise BadAnswer("MalformedResponse", told) from None
            if number:
                stamps.append(stamp)
                tokens.append(number)
            if told is not None and (like := reader.alike(told, len(message))) is not None:
                likes[len(message)] = like
                length = -1
        if not final:
            raise BadAnswer("TruncatedStream", f"it ended after {len(stamps)} responses without a final one")
        if is_engine or count is not None:
            if min(tokens, default=0) < 0:
                raise BadAnswer("MalformedResponse", f"a response of {min(tokens)} tokens")
            return Answer(stamps, tokens)
        return Answer(stamps, None, b"".join(texts).decode(errors="replace"))

    def content(self, request: InFlightRequest) -> str:
        return self.text(request)

    def text(self, request: InFlightRequest, read_ids: ReadIds | None = None) -> str:
        reader = Reader()
        try:
            outputs = [reader.read(message).outputs for message, _ in request.reads()]
            data = [one[self._output] for one in outputs if self._output in one]
            if self._is_engine:
                ids = [number for one in data for (number,) in struct.iter_unpack("<i", one[: len(one) // 4 * 4])]
                return "" if read_ids is None else read_ids(ids)
            return b"".join(piece for one in data for piece in unpack_strings(one)).decode(errors="replace")
        except MalformedMessage:
            return ""


async def _endpoint(ask: RequestSpec, url: str, model: str) -> Endpoint:
    from google.protobuf.message import DecodeError

    service_pb2 = messages()

    async def answer(method: str, question: bytes, kind: Any) -> Any:
        message = await ask(method, question)
        try:
            return kind.FromString(message)
        except DecodeError as error:
            raise _no_triton(url, f"its answer to {method} cannot be read: {error}") from None

    try:
        server = await answer(SERVER_METADATA, b"", service_pb2.ServerMetadataResponse)
    except CallRefused as error:
        raise _no_triton(url, str(error)) from None
    try:
        about = service_pb2.ModelMetadataRequest(name=model).SerializeToString()
        metadata = await answer(MODEL_METADATA, about, service_pb2.ModelMetadataResponse)
    except CallRefused:
        try:
            listing = await answer(REPOSITORY_INDEX, b"", service_pb2.RepositoryIndexResponse)
        except CallRefused:  # not every server has a repository index
            listing = service_pb2.RepositoryIndexResponse()
        index = [(entry.name, entry.state, entry.reason) for entry in listing.models]
        raise model_error(model, url, index) from None
    return Endpoint(
        protocol="grpc",
        url=url,
        server_name=server.name,
        server_version=server.version,
        model=model,
        model_versions=tuple(metadata.versions),
        inputs={tensor.name: (tensor.datatype, len(tensor.shape)) for tensor in metadata.inputs},
        outputs=frozenset(tensor.name for tensor in metadata.outputs),
    )


def _no_triton(url: str, why: str) -> HostError:
    return HostError(
        f"what answers at {url} is not Triton's gRPC endpoint",
        why=why,
        remedy="give the address of Triton's gRPC port (8001 by default)",
    )


def _tensor(name: str, value: Value, dtype: str, rank: int) -> Tensor:
    values = value if isinstance(value, list) else [value]
    # Shape [1, n] where the model has a batch dimension; a scalar is one element.
    shape = (*[1] * (rank - 1), len(values))
    try:
        if dtype == "BYTES":
            data = pack_strings([str(one) for one in values])
        else:
            data = struct.pack(f"<{len(values)}{_PACKING[dtype]}", *values)
    except (struct.error, KeyError) as error:
        raise UsageError(f"input '{name}' is of type {dtype}", why=f"{value!r}: {error}") from None
    return Tensor(name, dtype, shape, data)
