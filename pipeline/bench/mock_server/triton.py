"""Triton's messages of the mock server: model descriptions, parsed requests, serialized responses."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from trtpipe.pipeline.bench.mock_server.script import TOKEN_TEXT
from trtpipe.pipeline.net.h2.status import Code
from trtpipe.pipeline.net.h2.triton import EMPTY_FINAL, FINAL, MalformedMessage, pack_strings, unpack_strings

NAME = "known_server"
VERSION = "2.0"  # version of the protocol
MODEL_VERSION = "1"
EXTENSIONS = ["generate", "model_configuration", "model_repository"]
TOKEN_ID = 7


@dataclass(frozen=True)
class Model:
    """A declared model: Triton datatype of each input and output. All have the shape [-1, -1]."""

    inputs: dict[str, str]
    outputs: dict[str, str]


_SAMPLING = {"min_tokens": "INT32", "end_id": "INT32", "pad_id": "INT32", "return_num_output_tokens": "BOOL"}
MODELS = {
    "ensemble": Model(
        inputs={"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"}
        | _SAMPLING
        | {"top_k": "INT32", "top_p": "FP32", "temperature": "FP32", "seed": "UINT64"},
        outputs={"text_output": "BYTES", "num_output_tokens": "INT32"},
    ),
    "tensorrt_llm": Model(
        inputs={"input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32", "streaming": "BOOL"}
        | _SAMPLING
        | {"runtime_top_k": "INT32", "runtime_top_p": "FP32", "seed": "UINT64", "exclude_input_in_output": "BOOL"},
        outputs={"output_ids": "INT32", "sequence_length": "INT32"},
    ),
}


class Refused(Exception):
    """A request that the server refuses; the message is for its sender."""

    def __init__(self, words: str, code: Code = Code.INVALID_ARGUMENT) -> None:
        super().__init__(words)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for tokens.

    counted  whether the client asked the text model for the number of tokens of each response
    alone    whether the final response comes by itself, without tokens
    """

    model: str
    id: str
    prompt: str
    max_tokens: int
    counted: bool
    alone: bool


def model_of(name: str) -> Model:
    """The model of this name. Raises Refused."""
    if name not in MODELS:
        raise Refused(f"Request for unknown model: '{name}' is not found", Code.NOT_FOUND)
    return MODELS[name]


def metadata(name: str) -> dict[str, Any]:
    """Metadata of a model as JSON. Raises Refused."""
    model = model_of(name)
    inputs, outputs = (
        [{"name": key, "datatype": kind, "shape": [-1, -1]} for key, kind in tensors.items()]
        for tensors in (model.inputs, model.outputs)
    )
    return {"name": name, "versions": [MODEL_VERSION], "platform": "", "inputs": inputs, "outputs": outputs}


def config(name: str) -> Any:
    """ModelConfig of a model. Raises Refused."""
    model = model_of(name)
    out = model_config_pb2.ModelConfig(name=name)
    out.model_transaction_policy.decoupled = True
    for declared, tensors in ((out.input, model.inputs), (out.output, model.outputs)):
        for key, kind in tensors.items():
            declared.add(name=key, data_type=f"TYPE_{'STRING' if kind == 'BYTES' else kind}", dims=[-1])
    return out


def index() -> list[dict[str, str]]:
    return [{"name": name, "version": MODEL_VERSION, "state": "READY"} for name in MODELS]


def describe(method: str, message: bytes) -> bytes:
    """The answer to a call other than ModelStreamInfer. Raises Refused."""
    if method not in _DESCRIPTIONS:
        raise Refused(f"no method {method}", Code.UNIMPLEMENTED)
    request = _read(getattr(service_pb2, f"{method}Request"), message)
    return bytes(_DESCRIPTIONS[method](request).SerializeToString())


def _read(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Refused(f"a request that cannot be read: {error}") from None


_DESCRIPTIONS: dict[str, Any] = {
    "ServerLive": lambda request: service_pb2.ServerLiveResponse(live=True),
    "ServerReady": lambda request: service_pb2.ServerReadyResponse(ready=True),
    "ServerMetadata": lambda request: service_pb2.ServerMetadataResponse(
        name=NAME, version=VERSION, extensions=EXTENSIONS
    ),
    "ModelReady": lambda request: service_pb2.ModelReadyResponse(ready=request.name in MODELS),
    "ModelMetadata": lambda request: service_pb2.ModelMetadataResponse(**metadata(request.name)),
    "ModelConfig": lambda request: service_pb2.ModelConfigResponse(config=config(request.name)),
    "RepositoryIndex": lambda request: service_pb2.RepositoryIndexResponse(models=index()),
}


def asked(message: bytes) -> Asked:
    """Read a ModelInferRequest. Raises Refused."""
    request = _read(service_pb2.ModelInferRequest, message)
    model_of(request.model_name)
    given = {tensor.name: data for tensor, data in zip(request.inputs, request.raw_input_contents, strict=False)}
    text = request.model_name == "ensemble"
    length, streamed = ("max_tokens", "stream") if text else ("request_output_len", "streaming")
    try:
        prompt = unpack_strings(given.get("text_input", b""))[:1]
    except MalformedMessage as error:
        raise Refused(f"text_input: {error}") from None
    if text and not prompt:
        raise Refused("a request without text_input")
    max_tokens = int.from_bytes(given.get(length, b""), "little", signed=True)
    if max_tokens <= 0:
        raise Refused(f"a request without {length} of one or more")
    if not any(given.get(streamed, b"\1")):
        raise Refused(f"this server streams only: {streamed} is false")
    return Asked(
        model=request.model_name,
        id=request.id,
        prompt=prompt[0].decode(errors="replace") if prompt else "",
        max_tokens=max_tokens,
        counted=any(given.get("return_num_output_tokens", b"")),
        alone=EMPTY_FINAL in request.parameters and request.parameters[EMPTY_FINAL].bool_param,
    )


def response(request: Asked, tokens: int, *, final: bool = False) -> bytes:
    """A ModelStreamInferResponse with this many tokens; with 0, the empty final response."""
    out = service_pb2.ModelStreamInferResponse()
    reply = out.infer_response
    reply.model_name, reply.model_version, reply.id = request.model, MODEL_VERSION, request.id
    reply.parameters[FINAL].bool_param = final
    count = struct.pack("<i", tokens)
    if request.model == "ensemble":
        contents = [("text_output", [1, 1], pack_strings([TOKEN_TEXT * tokens]))]
        if request.counted:
            contents.append(("num_output_tokens", [1, 1], count))
    else:
        ids = struct.pack(f"<{tokens}i", *[TOKEN_ID] * tokens)
        contents = [("output_ids", [1, 1, tokens], ids), ("sequence_length", [1, 1], count)]
    for name, shape, data in contents if tokens else ():
        reply.outputs.add(name=name, datatype=MODELS[request.model].outputs[name], shape=shape)
        reply.raw_output_contents.append(data)
    return bytes(out.SerializeToString())


def error(words: str) -> bytes:
    """A ModelStreamInferResponse that reports a failure."""
    return bytes(service_pb2.ModelStreamInferResponse(error_message=words).SerializeToString())
