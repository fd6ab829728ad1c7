"""The load tester against servers that attack it before or beside the measurement: where they are asked who they are,
on their pages of metrics, through the libraries' transport, and with answers that are right and enormous."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from tests.attacks import hostile_servers as hostile
from tests.attacks.bench_child import Child
from tests.attacks.hostile_servers import (
    CHUNKED,
    MODEL,
    TOKENS,
    Pieces,
    after,
    chat,
    chunk,
    data,
    delta,
    drip,
    generated,
    head,
    headers,
    tokens,
    without_end,
)
from trtpipe.engines.errors import StageFailed
from trtpipe.engines.sampling import SamplingParams
from trtpipe.pipeline.net.h2.triton import MODEL_METADATA, SERVER_METADATA, messages
from trtpipe.pipeline.serving import generate

pytestmark = [pytest.mark.loopback, pytest.mark.process]

BLOCK = b"x" * (64 << 10)
DEEP = b"[" * 100_000 + b"]" * 100_000


def page(body: bytes) -> bytes:
    return head(b"content-length: %d" % len(body)) + body


# What an HTTP server says when it is asked who it is: the words of the error.
NO_ANSWER = "answers over HTTP at"
WHO = {
    "a body without an end": (lambda: after(head(), without_end(BLOCK)), "the answer has more than 1,048,576 bytes"),
    "a chunk of 2^63 bytes": (
        lambda: after(CHUNKED + b"8000000000000000\r\n", without_end(BLOCK)),
        "the answer has more than 1,048,576 bytes",
    ),
    "100 Continue without an end": (
        lambda: without_end(head(status=b"100 Continue") * 1000),
        "no whole answer within 1 s",
    ),
    "a byte at a time": (lambda: drip(page(b"[]" + b" " * 1000), 0.02), "no whole answer within 1 s"),
    "a head at a byte at a time": (lambda: drip(head(*[b"X: y"] * 99), 0.02), "no whole answer within 1 s"),
    "a head without an end": (lambda: after(b"HTTP/1.1 200 OK\r\nX: ", without_end(BLOCK)), NO_ANSWER),
    "JSON that is deep": (lambda: [page(DEEP)], "gives status 200 and no list"),
    "a number of 100,000 digits": (
        lambda: [page(b'{"data": ' + b"9" * 100_000 + b"}")],
        "gives status 200 and no list",
    ),
    "a list": (lambda: [page(b"[1]")], "gives status 200 and no list"),
    "models that are numbers": (lambda: [page(b'{"data": [1, 2]}')], "gives status 200 and no list"),
    "models whose names are lists": (lambda: [page(b'{"data": [{"id": [1]}]}')], "is not served at"),
}


@pytest.mark.parametrize("name", WHO)
def test_the_list_of_models(child: Child, name: str) -> None:
    wire, words = WHO[name]
    with closing(hostile.http_server(wire, on="/v1/models", good=0)) as server:
        found = child.measure(protocol="chat", url=f"http://127.0.0.1:{server.port}/v1")
    assert words in found["error"], found


NO_TRITON = [b"[1]", b'"x"', DEEP, b"{}", b'{"version": [], "inputs": {}}']
NO_MODEL = [
    b'{"inputs": [1], "outputs": []}',
    b'{"inputs": [{"name": "x", "datatype": 1, "shape": 3}], "outputs": []}',
    b'{"inputs": [{"name": "x", "datatype": "y", "shape": [1, 1, 1, 1, 1, 1, 1, 1, 1]}], "outputs": []}',
    b'{"versions": 7, "inputs": [], "outputs": [{}]}',
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[("/v2", body) for body in NO_TRITON],
        *[(f"/v2/models/{MODEL}", body) for body in [*NO_TRITON, *NO_MODEL]],
    ],
    ids=range(14),
)
def test_the_metadata_of_triton_over_http(child: Child, path: str, body: bytes) -> None:
    with closing(hostile.http_server(lambda: [page(body)], on=path, good=0)) as server:
        found = child.measure(protocol="http", url=f"http://127.0.0.1:{server.port}")
    assert found["error"].startswith(("HostError: what answers at", "UsageError: model", "HostError: model")), found


def metadata(**more: Any) -> bytes:
    return bytes(messages().ModelMetadataResponse(name=MODEL, **more).SerializeToString())


@pytest.mark.parametrize(
    ("method", "attack", "words"),
    [
        (SERVER_METADATA, lambda n: [unary(n, b"\xff" * 10)], "cannot be read"),
        (MODEL_METADATA, lambda n: [unary(n, b"\xff" * 10)], "cannot be read"),
        (MODEL_METADATA, lambda n: [unary(n, b"\x22\x00" * 250_000)], "takes no prompt"),
        (
            MODEL_METADATA,
            lambda n: [unary(n, metadata(inputs=[{"name": "x", "shape": [1] * 9000}]))],
            "of 9,000 dimensions",
        ),
        (MODEL_METADATA, lambda n: after(headers(n), without_end(data(n, b"x" * 100) * 100)), "more than 1,048,58"),
        (MODEL_METADATA, lambda n: [headers(n) + data(n, b"", length=2**32 - 1)], "a message of 4,294,967,295 bytes"),
        (MODEL_METADATA, lambda n: drip(headers(n), 0.5), "no answer within 1 s"),
    ],
    ids=range(7),
)
def test_the_metadata_of_triton_over_grpc(
    child: Child, method: str, attack: Callable[[int], Pieces], words: str
) -> None:
    with closing(hostile.grpc_server(attack, on=method, good=0)) as server:
        found = child.measure(protocol="grpc", url=f"127.0.0.1:{server.port}")
    assert words in found["error"], found


def unary(number: int, message: bytes) -> bytes:
    return headers(number) + data(number, message) + headers(number, hostile.GRPC_TAIL, last=True)


# Beside the measurement

LABELS = b",".join(b'l%d="x"' % number for number in range(200_000))
METRICS = {
    "without an end": (
        lambda: after(head(), without_end(b"a 1\n" * 10_000)),
        "the answer has more than 4,194,304 bytes",
    ),
    "a byte at a time": (lambda: drip(page(b"a 1\n" * 1000), 0.02), "no whole answer within 1 s"),
    "of a million lines": (lambda: [page(b"a 1\n" * 1_000_000)], ""),
    "of one line": (lambda: [page(b"a{" + LABELS + b"} 1\n")], ""),
    "of no metrics": (lambda: [page(b"\xff\0{}" * 1000)], ""),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_page_of_metrics(child: Child, name: str) -> None:
    wire, words = METRICS[name]
    with (
        closing(hostile.http_server(wire, on="/metrics", good=0)) as metrics,
        closing(hostile.http_server(lambda: (), good=1000)) as server,
    ):
        url = f"http://127.0.0.1:{metrics.port}/metrics"
        found = child.measure(protocol="chat", url=f"http://127.0.0.1:{server.port}/v1", metrics_url=url)
    assert found["kinds"] == {}, found
    assert found["good"] >= 4, found
    assert found["unread"] == ({url: words} if words else {}), found


# Through the libraries

LARGE = "an answer of more than"
LIBRARY = {
    "a body without an end": ("chat", lambda: after(CHUNKED, without_end(chunk(BLOCK))), "OversizedResponse", LARGE),
    "an error without an end": ("chat", lambda: after(head(status=b"500 No"), without_end(BLOCK)), "http 500", "xxxx"),
    "an error of gzip": (
        "chat",
        lambda: [head(b"content-encoding: gzip", b"content-length: 4", status=b"500 No") + b"\x1f\x8b\x08\0"],
        "http 500",
        "",
    ),
    "DATA without an end": (
        "grpc",
        # With pauses, or no other answer would have its turn: the lock of a connection is not fair.
        lambda n: after(headers(n), without_end(data(n, tokens(text="x" * 16_000)), pause_s=0.0005)),
        "OversizedResponse",
        LARGE,
    ),
    "a message of 4 GB": (
        "grpc",
        lambda n: [headers(n) + data(n, b"x", length=2**32 - 1)],
        "grpc RESOURCE_EXHAUSTED",
        "larger than max",
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_an_answer_through_the_libraries(child: Child, name: str) -> None:
    protocol, wire, kind, words = LIBRARY[name]
    attack: Any = wire
    made = hostile.grpc_server(attack) if protocol == "grpc" else hostile.http_server(attack)
    with closing(made) as server:
        url = f"127.0.0.1:{server.port}" if protocol == "grpc" else f"http://127.0.0.1:{server.port}/v1"
        found = child.measure(protocol=protocol, url=url, transport="tritonclient")
    # The library counts as broken what is on its way when a call is ended.
    assert kind in found["kinds"], found
    assert set(found["kinds"]) <= {kind, "grpc INTERNAL"}, found
    assert any(words in message for message in found["messages"]), found


# Right, and enormous


@pytest.mark.parametrize("protocol", ["chat", "grpc"])
def test_answers_that_are_right_and_enormous_are_kept_as_far_as_was_asked(child: Child, protocol: str) -> None:
    text = "word " * 700  # 3,500 bytes for each token
    if protocol == "chat":
        wire = CHUNKED + b"".join(map(chunk, [delta(text)] * TOKENS)) + chat()[len(CHUNKED) :]
        usage = b'"completion_tokens": 8'
        assert usage in wire
        server = hostile.http_server(lambda: [wire], good=0)
    else:
        server = hostile.grpc_server(lambda n: [enormous(n, text)], good=0)
    with closing(server):
        url = f"127.0.0.1:{server.port}" if protocol == "grpc" else f"http://127.0.0.1:{server.port}/v1"
        found = child.measure(protocol=protocol, url=url, requests=200)
    assert found["kinds"] == {}, found
    assert found["good"] >= 200, found
    # 200 answers of 28 kB.
    assert found["peak_mb"] < 25, found


def enormous(number: int, text: str) -> bytes:
    responses = [*[tokens(text=text)] * (TOKENS - 1), tokens(text=text, final=True)]
    body = b"".join(data(number, one) for one in responses)
    return headers(number) + body + headers(number, hostile.GRPC_TAIL, last=True)


# The command that asks for one answer


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (lambda n: after(headers(n), without_end(data(n, tokens(text="x" * 4000)))), "sent more than"),
        (lambda n: after(headers(n), without_end(data(n, tokens(text="")) * 100)), "sent more than"),
        (lambda n: [headers(n) + data(n, b"x", length=2**32 - 1)], "larger than max"),
        (lambda n: [generated(n, unreadable())], "cannot be read"),
    ],
    ids=["text without an end", "empty responses without an end", "a message of 4 GB", "a tensor that is cut"],
)
def test_generate(attack: Callable[[int], Pieces], words: str) -> None:
    with closing(hostile.grpc_server(attack, good=0)) as server:
        pieces = generate.stream(f"127.0.0.1:{server.port}", "Hello", SamplingParams(), model=MODEL, max_tokens=8)
        with pytest.raises(StageFailed) as caught:
            sum(len(piece) for piece in pieces)
    assert words in str(caught.value)


def test_generate_leaves_a_stream_that_its_server_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "LEAVE_SECONDS", 0.5)
    with closing(hostile.grpc_server(lambda n: [headers(n) + data(n, tokens(final=True))], good=0)) as server:
        began = time.monotonic()
        pieces = generate.stream(f"127.0.0.1:{server.port}", "Hello", SamplingParams(), model=MODEL, max_tokens=128)
        assert list(pieces) == [" word"]
    assert time.monotonic() - began < 10


def unreadable() -> bytes:
    out = messages().ModelStreamInferResponse.FromString(tokens())
    out.infer_response.raw_output_contents[0] = b"\xff\xff\xff\xff"
    return bytes(out.SerializeToString())
