"""Triton's gRPC messages, read and written without protobuf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from trtpipe.pipeline.net.h2 import triton


def response(outputs: list[tuple[str, bytes]], *, final: bool | None = None, error: str = "", name: str = "m") -> bytes:
    out = service_pb2.ModelStreamInferResponse(error_message=error)
    out.infer_response.model_name = name
    if final is not None:
        out.infer_response.parameters[triton.FINAL].bool_param = final
    for output, data in outputs:
        out.infer_response.outputs.add(name=output, datatype="INT32", shape=[1, 1])
        out.infer_response.raw_output_contents.append(data)
    return bytes(out.SerializeToString())


messages = st.builds(
    response,
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([b"", b"1234", b"5678", b"x" * 200])), max_size=3),
    final=st.sampled_from([None, False, True]),
    error=st.sampled_from(["", "", "", "it failed"]),
    name=st.sampled_from(["m", "n"]),
)  # fmt: skip


@given(st.lists(messages, min_size=1, max_size=12))
def test_the_fast_reader_agrees_with_protobuf(stream: list[bytes]) -> None:
    reader = triton.Reader()
    for message in stream:
        assert reader.read(message) == triton.parse(message)


@given(st.data())
def test_the_fast_reader_agrees_on_damaged_messages(data: Any) -> None:
    whole = response([("a", b"1234"), ("b", b"x" * 130)], final=False)
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    reader = triton.Reader()
    reader.read(whole)

    def attempt(read: Callable[[bytes], triton.Reply]) -> triton.Reply | str:
        try:
            return read(bytes(damaged))
        except triton.MalformedMessage:
            return "malformed"

    assert attempt(reader.read) == attempt(triton.parse)


def test_a_response_s_parts() -> None:
    reply = triton.parse(response([("output_ids", b"\1\0\0\0"), ("sequence_length", b"\1\0\0\0")], final=True))
    assert reply == ({"output_ids": b"\1\0\0\0", "sequence_length": b"\1\0\0\0"}, True, "")
    assert triton.parse(response([], error="no")).error == "no"
    with pytest.raises(triton.MalformedMessage):
        triton.parse(b"\xff\xff\xff")
    odd = service_pb2.ModelStreamInferResponse()
    odd.infer_response.outputs.add(name="x")
    with pytest.raises(triton.MalformedMessage, match="1 outputs and 0 raw contents"):
        triton.parse(odd.SerializeToString())


def test_a_request_is_what_triton_reads() -> None:
    data = triton.infer_request(
        "tensorrt_llm",
        [triton.Tensor("input_ids", "INT32", (1, 2), b"\1\0\0\0\2\0\0\0")],
        ["output_ids"],
        request_id="r",
        parameters={"flag": True, "number": 3, "word": "w"},
    )
    request = service_pb2.ModelInferRequest.FromString(data)
    assert (request.model_name, request.id, list(request.raw_input_contents)) == (
        "tensorrt_llm", "r", [b"\1\0\0\0\2\0\0\0"]
    )  # fmt: skip
    assert request.inputs[0].name == "input_ids"
    assert list(request.inputs[0].shape) == [1, 2]
    assert [output.name for output in request.outputs] == ["output_ids"]
    assert request.parameters[triton.EMPTY_FINAL].bool_param
    assert request.parameters["flag"].bool_param
    assert request.parameters["number"].int64_param == 3
    assert request.parameters["word"].string_param == "w"


def test_strings_on_the_wire() -> None:
    packed = triton.pack_strings(["é", b"", "ab"])
    assert packed == b"\2\0\0\0\xc3\xa9\0\0\0\0\2\0\0\0ab"
    assert triton.unpack_strings(packed) == ["é".encode(), b"", b"ab"]
    for cut in (1, 5, len(packed) - 1):
        with pytest.raises(triton.MalformedMessage):
            triton.unpack_strings(packed[:cut])
