"""The load tester against servers that attack it: each attack ends in a failure of a stated class, within a bound of
memory and of time, and never in a traceback."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.attacks import hostile_servers as hostile
from tests.attacks.bench_child import Child
from tests.attacks.hostile_servers import (
    CHUNKED,
    GRPC_HEAD,
    Pieces,
    after,
    chat,
    chunk,
    data,
    delta,
    drip,
    event,
    generated,
    head,
    headers,
    tokens,
    without_end,
)
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.frames import frame

pytestmark = [pytest.mark.loopback, pytest.mark.process]

BLOCK = b"x" * (64 << 10)


@dataclass(frozen=True)
class Attack:
    """`wire` is what comes in place of an answer; `fails` the class of the failure, and of what a request beside it may
    fail by."""

    wire: Callable[..., Pieces]
    fails: str | tuple[str, ...]
    says: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    slow: bool = False


def named(attacks: dict[str, Attack]) -> list[Any]:
    """Parameters of a test: the names, those that take seconds marked so."""
    return [pytest.param(name, marks=[pytest.mark.slow] * attack.slow, id=name) for name, attack in attacks.items()]


IMPATIENT = {"timeout_s": 0.5, "token_timeout_s": 10}
DEEP = b"[" * 30_000 + b"]" * 30_000
NO_CHUNK = "a chunk without a length"
LARGE = "an answer of more than"


def now_and_then(piece: bytes, pause_s: float, times: int) -> Iterator[bytes]:
    for _ in range(times):
        time.sleep(pause_s)
        yield piece


HTTP = {
    "a body without an end or a newline": Attack(
        lambda: after(CHUNKED, without_end(chunk(BLOCK))), "OversizedResponse", LARGE
    ),
    "the same in one chunk": Attack(
        lambda: after(CHUNKED + b"7fffffff\r\n", without_end(BLOCK)), "OversizedResponse", LARGE
    ),
    "a body that ends with its connection": Attack(
        lambda: after(head(), without_end(BLOCK)), "OversizedResponse", LARGE
    ),
    "a chunk of 2^63 bytes": Attack(lambda: [CHUNKED, b"8000000000000000\r\n"], "OversizedResponse", LARGE),
    "a chunk of 2^400 bytes": Attack(lambda: [CHUNKED, b"1" + b"0" * 100 + b"\r\n"], "MalformedResponse", NO_CHUNK),
    "a chunk of -5 bytes": Attack(lambda: [CHUNKED, b"-5\r\n"], "MalformedResponse", NO_CHUNK),
    "a chunk length without an end": Attack(
        lambda: after(CHUNKED, without_end(b"0" * 1000)), "MalformedResponse", NO_CHUNK
    ),
    "chunk extensions without an end": Attack(
        lambda: after(CHUNKED, without_end(b"1;" + b"e" * 60_000 + b"\r\nx\r\n")), "OversizedResponse", LARGE
    ),
    "chunks of a byte": Attack(lambda: after(CHUNKED, without_end(chunk(b"x") * 1000)), "OversizedResponse", LARGE),
    "trailers without an end": Attack(
        lambda: after(CHUNKED + chunk(delta("x")) + b"0\r\n", without_end(b"X: y\r\n" * 100)),
        "OversizedResponse",
        LARGE,
    ),
    "a content-length of 2^63": Attack(
        lambda: [head(b"content-length: 9223372036854775808"), BLOCK], "OversizedResponse", LARGE
    ),
    "a content-length of 5,000 digits": Attack(
        lambda: [head(b"content-length: " + b"9" * 5000), BLOCK], "OversizedResponse", LARGE
    ),
    "a negative content-length": Attack(
        lambda: [head(b"content-length: -1"), BLOCK], "MalformedResponse", "no HTTP answer"
    ),
    "a status of 5,000 digits": Attack(lambda: [head(status=b"2" * 5000)], "MalformedResponse", "no HTTP answer"),
    "a head without an end": Attack(
        lambda: after(b"HTTP/1.1 200 OK\r\nX: ", without_end(BLOCK)),
        "MalformedResponse",
        "a head of more than 65536 bytes",
    ),
    "header lines without an end": Attack(
        lambda: after(b"HTTP/1.1 200 OK\r\n", without_end(b"X: y\r\n" * 100)),
        "MalformedResponse",
        "a head of more than 65536 bytes",
    ),
    "100 Continue without an end": Attack(
        lambda: without_end(head(status=b"100 Continue") * 10_000),
        "MalformedResponse",
        "more than 100 informational answers",
    ),
    "a status below 100, without an end": Attack(
        lambda: without_end(head(status=b"000 No") * 1000), "MalformedResponse", "more than 100 informational answers"
    ),
    "comments without an end": Attack(
        lambda: after(CHUNKED, without_end(chunk(b": ping\n\n") * 100)), "OversizedResponse", LARGE
    ),
    "events without an end": Attack(
        lambda: after(CHUNKED, without_end(chunk(delta(" word")) * 100)), "OversizedResponse", LARGE
    ),
    "an event that is too large": Attack(lambda: [chat(delta("x" * 68_000))], "OversizedResponse", "an event of 68,"),
    "JSON that is deep": Attack(
        lambda: [chat(b"data: " + DEEP + b"\n\n")], "MalformedResponse", "nested more than 64 deep"
    ),
    "JSON of half the depth of Python's own limit": Attack(
        lambda: [chat(b'data: {"error": ' + b"[" * 500 + b"]" * 500 + b"}\n\n")],
        "MalformedResponse",
        "nested more than 64 deep",
    ),
    "a number of 5,000 digits": Attack(
        lambda: [chat(b'data: {"choices": [], "usage": {"prompt_tokens": ' + b"9" * 5000 + b"}}\n\n")],
        "MalformedResponse",
        "digits",
    ),
    "a usage beyond all numbers": Attack(
        lambda: [chat(usage={"prompt_tokens": 4, "completion_tokens": 1e308})],
        "MalformedResponse",
        "completion_tokens is 1e+308",
    ),
    "a usage that is a negative number": Attack(
        lambda: [chat(usage={"prompt_tokens": -4, "completion_tokens": 8})], "MalformedResponse", "prompt_tokens is -4"
    ),
    "a usage of a billion tokens": Attack(
        lambda: [chat(usage={"prompt_tokens": 4, "completion_tokens": 10**9})],
        "WrongLength",
        "1000000000 tokens by the server's count, where",
    ),
    "half of a surrogate pair": Attack(
        lambda: [chat(b'data: {"choices": [{"delta": {"content": "\\ud800"}}]}\n\n')],
        "MalformedResponse",
        "surrogate pair",
    ),
    "lists for objects": Attack(lambda: [chat(event([1, 2]))], "MalformedResponse", "AttributeError"),
    "a number for a text": Attack(lambda: [chat(event({"choices": [{"delta": {"content": 7}}]}))], "MalformedResponse"),
    "an error of megabytes": Attack(lambda: after(head(status=b"500 No"), without_end(BLOCK)), "http 500", "xxxx"),
    "an error that is deep": Attack(
        lambda: [head(b"content-length: %d" % len(DEEP), status=b"500 No") + DEEP], "http 500", "[[[["
    ),
    "a byte at a time": Attack(lambda: drip(chat(), 0.02), "Timeout", "not over within 0.5 s", IMPATIENT),
    "a head at a byte at a time": Attack(lambda: drip(CHUNKED, 0.02), "Timeout", "not over within 0.5 s", IMPATIENT),
    "comments now and then": Attack(
        lambda: after(CHUNKED, now_and_then(chunk(b":\n\n"), 0.1, 200)),
        "Stalled",
        "nothing more within 0.5 s",
        {"timeout_s": 10, "token_timeout_s": 0.5},
    ),
    "gzip": Attack(
        lambda: [head(b"content-encoding: gzip", b"content-length: 4") + b"\x1f\x8b\x08\0"], "MalformedResponse"
    ),
}


@pytest.mark.parametrize("name", named(HTTP))
def test_an_answer_over_http(child: Child, name: str) -> None:
    attack = HTTP[name]
    with closing(hostile.http_server(attack.wire)) as server:
        found = child.measure(protocol="chat", url=f"http://127.0.0.1:{server.port}/v1", **attack.options)
    check(found, attack)


def check(found: dict[str, Any], attack: Attack) -> None:
    first, *others = [attack.fails] if isinstance(attack.fails, str) else attack.fails
    assert first in found["kinds"], found
    assert set(found["kinds"]) <= {first, *others}, found
    assert found["good"] == 0, found
    assert any(attack.says in message for message in found["messages"]), found
    assert all(len(message) <= 403 for message in found["messages"]), found


def endless_block(number: int) -> Iterator[bytes]:
    yield frame(frames.HEADERS, 0, number, GRPC_HEAD)
    while True:
        yield frame(frames.CONTINUATION, 0, number, b"") * 100


def bomb(number: int) -> Pieces:
    """A header block that puts 4,000 bytes into the table and names them 16,000 times."""
    entry = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4000
    return [headers(number, GRPC_HEAD + entry + b"\xbe" * 16_000)]


def nested(depth: int) -> bytes:
    out = b""
    for _ in range(depth):
        out = b"\x12" + _varint(len(out)) + out
    return out


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def settings(key: int, value: int) -> bytes:
    return frames.settings_frame({key: value})


IDLE = "100,000 frames in a row without a message"
# What is on its way when a call is ended comes all the same, and the other call's connection may end by it.
SPILLED = ("OversizedResponse", "ConnectionLost")

GRPC = {
    "DATA without an end": Attack(
        lambda n: after(headers(n), without_end(data(n, tokens(text="x" * 16_000)))), "OversizedResponse", LARGE
    ),
    "responses without an end": Attack(
        lambda n: after(headers(n), without_end(data(n, tokens()) * 100)), SPILLED, LARGE
    ),
    "empty messages without an end": Attack(
        lambda n: after(headers(n), without_end(data(n, b"") * 1000)), SPILLED, LARGE
    ),
    "messages of two bytes without an end": Attack(
        lambda n: after(headers(n), without_end(data(n, b"\x0a\x00") * 1000)), SPILLED, LARGE
    ),
    "empty DATA frames without an end": Attack(
        lambda n: after(headers(n), without_end(frame(frames.DATA, 0, n) * 1000)), "ConnectionLost", IDLE
    ),
    "padding without an end": Attack(
        lambda n: after(headers(n), without_end(frame(frames.DATA, frames.PADDED, n, b"\xff" + bytes(255)))),
        "OversizedResponse",
        LARGE,
    ),
    "a message of 4 GB": Attack(
        lambda n: after(headers(n), without_end(frame(frames.DATA, 0, n, b"\0\xff\xff\xff\xff" + BLOCK[:10_000]))),
        "OversizedResponse",
        "a message of 4,294,967,295 bytes",
    ),
    "a message that is too large": Attack(
        lambda n: [headers(n) + data(n, tokens(text="x" * 70_000))], "OversizedResponse", "a message of 70,"
    ),
    "a compressed message": Attack(lambda n: [headers(n) + data(n, b"x", compressed=1)], "grpc INTERNAL", "compressed"),
    "a frame of 16 MB": Attack(
        lambda n: after(headers(n), without_end(b"\xff\xff\xff\0\0" + struct.pack(">L", n) + BLOCK)),
        "ConnectionLost",
        "a frame of 16777215 bytes",
    ),
    "informational headers without an end": Attack(
        lambda n: without_end(headers(n, b"\x08\x03103") * 1000),
        "ConnectionLost",
        "informational headers without end",
        slow=True,
    ),
    "a header block without an end": Attack(endless_block, "ConnectionLost", "a header block"),
    "a header block of megabytes": Attack(
        lambda n: after(
            frame(frames.HEADERS, 0, n, GRPC_HEAD), without_end(frame(frames.CONTINUATION, 0, n, BLOCK[:16_000]))
        ),
        "ConnectionLost",
        "a header block of over",
    ),
    "an HPACK bomb": Attack(bomb, "ConnectionLost", "headers that cannot be decoded"),
    "an HPACK integer without an end": Attack(
        lambda n: [headers(n, b"\xff" * 16_000)], "ConnectionLost", "headers that cannot be decoded"
    ),
    "settings without an end, and no answer is read": Attack(
        lambda n: without_end(settings(frames.INITIAL_WINDOW_SIZE, 7) * 1000), "ConnectionLost", IDLE, slow=True
    ),
    "pings without an end, and no answer is read": Attack(
        lambda n: without_end(frame(frames.PING, 0, 0, bytes(8)) * 1000), "ConnectionLost", IDLE
    ),
    "pings between messages, and no answer is read": Attack(
        lambda n: after(headers(n), without_end(frame(frames.PING, 0, 0, bytes(8)) * 50_000 + data(n, b"\x0a\x00"))),
        "ConnectionLost",
        "whose answers are not read",
        slow=True,
    ),
    "settings of ten thousand windows": Attack(
        lambda n: without_end(frame(frames.SETTINGS, 0, 0, struct.pack(">HL", frames.INITIAL_WINDOW_SIZE, 1) * 10_000)),
        "Timeout",
        "not over within 0.5 s",
        IMPATIENT,
    ),
    "a window of nothing": Attack(
        lambda n: [frame(frames.WINDOW_UPDATE, 0, n, bytes(4))], "ConnectionLost", "opened the stream's window by 0"
    ),
    "a window beyond the largest": Attack(
        lambda n: [frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")], "ConnectionLost", "a window opened by"
    ),
    "a push": Attack(
        lambda n: [frame(frames.PUSH_PROMISE, frames.END_HEADERS, n, struct.pack(">L", 2) + GRPC_HEAD)],
        "ConnectionLost",
        "a push",
    ),
    "a stream refused without an end": Attack(
        lambda n: [frame(frames.RST_STREAM, 0, n, struct.pack(">L", 7))], "Timeout", "not over within 0.5 s", IMPATIENT
    ),
    "a stream refused after each answer": Attack(
        lambda n: [headers(n) + data(n, tokens()) * 1000 + frame(frames.RST_STREAM, 0, n, struct.pack(">L", 7))],
        "OversizedResponse",
    ),
    "a stream refused after half an answer": Attack(
        lambda n: [headers(n) + data(n, tokens()) + frame(frames.RST_STREAM, 0, n, struct.pack(">L", 7))],
        "ConnectionLost",
        "REFUSED_STREAM",
    ),
    "protobuf of 30,000 empty outputs": Attack(
        lambda n: [generated(n, part(b"\x2a\x00" * 30_000))],
        "MalformedResponse",
        "30000 outputs and 0 raw contents",
    ),
    "protobuf that is deep": Attack(lambda n: [generated(n, nested(10_000))], ("MalformedResponse",)),
    "no protobuf": Attack(lambda n: [generated(n, b"\xff" * 100)], "MalformedResponse"),
    "a response of -5 tokens": Attack(
        lambda n: [generated(n, tokens(-5))], "MalformedResponse", "a response of -5 tokens"
    ),
    "a response of a billion tokens": Attack(
        lambda n: [generated(n, tokens(10**9))], "WrongLength", "tokens by the server's count, where"
    ),
    "a status with 16,000 bytes of words": Attack(
        lambda n: [
            headers(n, GRPC_HEAD)
            + headers(n, b"\x00\x0bgrpc-status\x0213\x00\x0cgrpc-message\x7f\x81\x7c" + b"w" * 16_000, last=True)
        ],
        "grpc INTERNAL",
        "wwww",
    ),
}


def part(content: bytes) -> bytes:
    """A response whose infer_response is `content`."""
    return b"\x12" + _varint(len(content)) + content


@pytest.mark.parametrize("name", named(GRPC))
def test_an_answer_over_grpc(child: Child, name: str) -> None:
    attack = GRPC[name]
    with closing(hostile.grpc_server(attack.wire, reads_on="no answer is read" not in name)) as server:
        found = child.measure(protocol="grpc", url=f"127.0.0.1:{server.port}", **attack.options)
    check(found, attack)
