"""The server of known timing: its schedule by a clock of the test's own, its protocols against independent clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import httpx
import psutil
import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import GRAIN_NS, Schedule, Timing
from trtpipe.pipeline.bench.mock_server.grpc import GrpcLink
from trtpipe.pipeline.bench.mock_server.http import HttpLink
from trtpipe.pipeline.bench.mock_server.link import Hub, Link
from trtpipe.pipeline.bench.mock_server.script import FAULTS, Script, Then, Truth, script_of
from trtpipe.pipeline.bench.mock_server.server import MockServer, write
from trtpipe.pipeline.net.h2 import frames, triton
from trtpipe.pipeline.net.h2.connection import Connection
from trtpipe.pipeline.net.h2.status import Status

MS = 1_000_000
T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 60))


# A server without sockets, at a time of the test's own


class Wire(asyncio.Transport):
    """Keeps what is written; once `full`, the link is told to pause."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.written: list[bytes] = []
        self.closed = False
        self.full = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))
        if self.full:
            self.link.pause_writing()

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        data = b"".join(self.written)
        self.written.clear()
        return data


class Bench:
    """The server's parts with `now` for a clock, and `alarm` for what it asks to be woken at."""

    def __init__(
        self, *, ttft_ms: float = 50, itl_ms: float = 10, tokens_per_response: int = 1, prefill_ms: float = 0
    ) -> None:
        self.now = 0
        self.alarm = 1 << 62
        timing = Timing(
            ttft_s=ttft_ms / 1e3,
            itl_s=itl_ms / 1e3,
            tokens_per_response=tokens_per_response,
            prefill_s=prefill_ms / 1e3,
        )
        self.hub = Hub(Schedule(timing, self, lambda: self.now))

    def at(self, at_ns: int) -> None:
        self.alarm = at_ns

    def connect(self, kind: Callable[[Hub], Link]) -> tuple[Any, Wire]:
        link = kind(self.hub)
        wire = Wire(link)
        link.connection_made(wire)
        return link, wire

    def wake(self, at_ns: int) -> None:
        self.now = at_ns
        self.hub.schedule.wake()

    def until(self, end_ns: int) -> None:
        """Wake exactly when it is asked for, up to `end_ns`."""
        while self.alarm <= end_ns:
            self.wake(max(self.now, self.alarm))
        self.now = max(self.now, end_ns)

    @property
    def stamps(self) -> dict[str, list[int]]:
        return {truth.id: truth.stamps_ns.tolist() for truth in self.hub.truth}


def come(link: Link, data: bytes) -> None:
    """Bytes of the client's reach the server, now."""
    link.feed(data, link.hub.schedule.clock())


def post(body: dict[str, Any], path: str = "/v2/models/ensemble/generate_stream") -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


def asked(request_id: str, max_tokens: int, prompt: str = "hello", **rest: Any) -> dict[str, Any]:
    return {"id": request_id, "text_input": prompt, "max_tokens": max_tokens, **rest}


def infer(prompt: str, max_tokens: int, request_id: str = "", *, empty_final: bool = True, **more: bool) -> bytes:
    inputs = [
        triton.Tensor("text_input", "BYTES", (1, 1), triton.pack_strings([prompt])),
        triton.Tensor("max_tokens", "INT32", (1, 1), struct.pack("<i", max_tokens)),
        *(triton.Tensor(name, "BOOL", (1, 1), struct.pack("<?", value)) for name, value in more.items()),
    ]
    return triton.infer_request("ensemble", inputs, request_id=request_id, empty_final=empty_final)


def call(number: int, message: bytes, *, last: bool = True, method: str = triton.STREAM_INFER) -> bytes:
    block = Encoder().encode([(":method", "POST"), (":path", method), ("content-type", "application/grpc")])
    flags = frames.END_STREAM if last else 0
    return frames.header_frames(number, block, 16384) + frames.frame(
        frames.DATA, flags, number, frames.PREFIX.pack(0, len(message)) + message
    )


def cut(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of each frame."""
    out = []
    while data:
        high, low, kind, flags, number = frames.HEADER.unpack_from(data)
        end = 9 + (high << 16 | low)
        assert end <= len(data)
        out.append((kind, flags, number, data[9:end]))
        data = data[end:]
    return out


def data_of(sent: list[tuple[int, int, int, bytes]], number: int) -> bytes:
    return b"".join(payload for kind, _, stream, payload in sent if (kind, stream) == (frames.DATA, number))


def messages(data: bytes) -> list[bytes]:
    out = []
    while data:
        compressed, length = frames.PREFIX.unpack_from(data)
        assert not compressed
        assert 5 + length <= len(data)
        out.append(data[5 : 5 + length])
        data = data[5 + length :]
    return out


# When tokens go out


def test_requests_that_come_faster_than_they_can_be_begun_wait_for_one_another() -> None:
    bench = Bench(ttft_ms=50, itl_ms=10, prefill_ms=20)
    for name in ("a", "b", "c"):
        come(bench.connect(HttpLink)[0], post(asked(name, 2)))
    bench.until(1000 * MS)
    come(bench.connect(HttpLink)[0], post(asked("d", 1)))
    bench.until(2000 * MS)
    assert bench.stamps == {
        "a": [50 * MS, 60 * MS], "b": [70 * MS, 80 * MS], "c": [90 * MS, 100 * MS], "d": [1050 * MS],
    }  # fmt: skip


def test_token_k_goes_out_at_arrival_and_ttft_and_k_times_itl() -> None:
    bench = Bench(ttft_ms=50, itl_ms=10)
    link, wire = bench.connect(HttpLink)
    whole = post(asked("a", 4))
    bench.now = 1 * MS
    come(link, whole[:-1])
    assert bench.hub.truth == []  # not a request yet
    bench.now = 7 * MS
    come(link, whole[-1:])
    assert bench.alarm == 57 * MS
    assert wire.take() == b""
    bench.until(86 * MS)
    assert wire.take().count(b"data:") == 3
    assert bench.alarm == 87 * MS
    bench.until(1000 * MS)
    assert bench.stamps == {"a": [57 * MS, 67 * MS, 77 * MS, 87 * MS]}
    (truth,) = bench.hub.truth
    assert (truth.protocol, truth.arrival_ns, truth.end_ns, truth.tokens) == ("http", 7 * MS, 87 * MS, 4)
    assert wire.take().endswith(b"\r\n0\r\n\r\n")


def test_tokens_are_counted_from_the_stamp_of_the_request_s_last_bytes() -> None:
    """Over both protocols; the second one is read after a later one, the third when its second token is due."""
    bench = Bench(ttft_ms=50, itl_ms=10)
    bench.now = 70 * MS
    whole = post(asked("a", 3))
    link, _ = bench.connect(HttpLink)
    link.feed(whole[:-1], 2 * MS)
    link.feed(whole[-1:], 40 * MS)
    bench.connect(GrpcLink)[0].feed(frames.PREFACE + call(1, infer("x", 3, "b")), 30 * MS)
    bench.connect(HttpLink)[0].feed(post(asked("c", 3)), 10 * MS)
    bench.until(1000 * MS)
    assert [(truth.id, truth.arrival_ns) for truth in bench.hub.truth] == [
        ("a", 40 * MS),
        ("b", 30 * MS),
        ("c", 10 * MS),
    ]
    assert bench.stamps == {
        "a": [90 * MS, 100 * MS, 110 * MS], "b": [80 * MS, 90 * MS, 100 * MS], "c": [70 * MS, 70 * MS, 80 * MS],
    }  # fmt: skip


def test_a_late_wake_makes_no_other_token_late() -> None:
    bench = Bench(ttft_ms=50, itl_ms=10)
    link, wire = bench.connect(HttpLink)
    come(link, post(asked("a", 6)))
    bench.wake(75 * MS)  # for 50, with 60 and 70 due as well
    assert len(wire.written) == 1
    assert wire.take().count(b"data:") == 3
    bench.until(1000 * MS)
    assert bench.stamps == {"a": [75 * MS, 75 * MS, 75 * MS, 80 * MS, 90 * MS, 100 * MS]}


def test_tokens_closer_than_the_grain_go_out_together_and_never_early() -> None:
    bench = Bench(ttft_ms=50, itl_ms=10)
    wires = []
    for index in range(3):
        link, wire = bench.connect(HttpLink)
        bench.now = index * 1000
        come(link, post(asked(str(index), 2)))
        wires.append(wire)
    bench.until(1000 * MS)
    second = 50 * MS + GRAIN_NS
    assert bench.stamps == {
        "0": [50 * MS, 60 * MS],
        "1": [second, 60 * MS + GRAIN_NS],
        "2": [second, 60 * MS + GRAIN_NS],
    }


class Noted:
    """An answer that notes when each of its ticks was due."""

    due_ns = 0

    def __init__(self, name: int, ticks: int, log: list[tuple[int, int]]) -> None:
        self.name = name
        self.left = ticks
        self.log = log
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def tick(self) -> None:
        self.log.append((self.due_ns, self.name))

    end = tick


@given(
    st.integers(0, 20),
    st.integers(0, 7),
    st.lists(st.one_of(st.tuples(st.integers(1, 9), st.integers(0, 60)), st.tuples(st.just(0), st.integers(0, 40)))),
)
def test_after_every_wake_all_that_was_due_has_gone_in_its_order(
    ttft: int, itl: int, events: list[tuple[int, int]]
) -> None:
    """An event is a request of so many ticks that is read so much after it came, or, with none, a wake so much later;
    the times are in milliseconds."""
    bench = Bench(ttft_ms=ttft, itl_ms=itl)
    log: list[tuple[int, int]] = []
    answers: list[tuple[Noted, list[int]]] = []
    for ticks, number in [*events, (0, 1000)]:
        if ticks:
            answer = Noted(len(answers), ticks, log)
            came = bench.now - number * MS
            answers.append((answer, [came + (ttft + k * itl) * MS for k in range(ticks)]))
            bench.hub.schedule.add(answer, came)
            continue
        earlier = len(log)
        bench.wake(bench.now + number * MS)
        for answer, dues in answers:
            gone = [due for due, name in log if name == answer.name]
            assert gone == [due for due in dues if due <= bench.now]
            assert answer.begun == bool(gone)
        assert [due for due, _ in log[earlier:]] == sorted(due for due, _ in log[earlier:])


def test_responses_of_several_tokens_come_when_their_first_one_is_due() -> None:
    bench = Bench(ttft_ms=50, itl_ms=10, tokens_per_response=4)
    link, wire = bench.connect(HttpLink)
    come(link, post(asked("a", 10, return_num_output_tokens=True)))
    bench.until(1000 * MS)
    assert bench.stamps == {"a": [50 * MS, 90 * MS, 130 * MS]}
    assert bench.hub.truth[0].tokens == 10
    told = [json.loads(line[6:]) for line in wire.take().splitlines() if line.startswith(b"data:")]
    assert [value["num_output_tokens"] for value in told] == [4, 4, 2]
    assert "".join(value["text_output"] for value in told) == " the" * 10


def test_what_is_due_together_is_one_write_of_each_connection() -> None:
    bench = Bench()
    link, wire = bench.connect(GrpcLink)
    other, others_wire = bench.connect(GrpcLink)
    come(link, frames.PREFACE + b"".join(call(number, infer("x", 3, str(number))) for number in (1, 3, 5)))
    come(other, frames.PREFACE + call(1, infer("x", 3, "other")))
    wire.take(), others_wire.take()
    bench.wake(60 * MS)
    assert (len(wire.written), len(others_wire.written)) == (1, 1)
    sent = cut(wire.take())
    assert [len(messages(data_of(sent, number))) for number in (1, 3, 5)] == [2, 2, 2]


def test_a_client_that_has_gone_is_written_to_no_more() -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    come(link, post(asked("a", 100)))
    bench.until(50 * MS)
    link.connection_lost(None)
    bench.until(2000 * MS)
    (truth,) = bench.hub.truth
    assert (len(wire.written), truth.tokens, truth.end_ns) == (1, 1, None)
    assert bench.hub.links == set()


def test_what_a_full_socket_does_not_take_waits_unstamped() -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    come(link, post(asked("a", 4)))
    wire.full = True
    bench.until(75 * MS)  # the first write fills the socket
    assert bench.stamps == {"a": [50 * MS]}
    bench.now, wire.full = 76 * MS, False
    link.resume_writing()
    assert bench.stamps == {"a": [50 * MS, 76 * MS, 76 * MS]}
    bench.until(1000 * MS)
    assert bench.stamps == {"a": [50 * MS, 76 * MS, 76 * MS, 80 * MS]}
    assert wire.take().count(b"data:") == 4


def test_a_fault_comes_after_responses_of_full_size() -> None:
    bench = Bench(tokens_per_response=2)
    link, wire = bench.connect(HttpLink)
    come(link, post(asked("a", 8, "!error 5 no more")))
    bench.until(1000 * MS)
    assert bench.stamps == {"a": [50 * MS, 70 * MS]}
    (truth,) = bench.hub.truth
    assert (truth.tokens, truth.then, truth.end_ns) == (4, "error", 90 * MS)
    assert wire.take().count(b" the the") == 2


def test_times_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="before their request"):
        Timing(ttft_s=0.1, itl_s=-0.1)
    for size in (0, 1001):
        with pytest.raises(UsageError, match="tokens a response"):
            Timing(ttft_s=0.1, itl_s=0.1, tokens_per_response=size)


# HTTP/2, by hand


def test_pings_and_settings_are_answered() -> None:
    _, wire = (bench := Bench()).connect(GrpcLink)
    link = wire.link
    hello = cut(wire.take())
    assert [kind for kind, *_ in hello] == [frames.SETTINGS, frames.WINDOW_UPDATE]
    ping = frames.frame(frames.PING, 0, 0, b"12345678")
    data = frames.PREFACE + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 9}) + ping
    for index in range(len(data)):
        come(link, data[index : index + 1])
    assert cut(wire.take()) == [
        (frames.SETTINGS, frames.ACK, 0, b""),
        (frames.PING, frames.ACK, 0, b"12345678"),
    ]
    come(link, frames.frame(frames.PING, frames.ACK, 0, b"12345678"))
    assert wire.take() == b""
    assert bench.hub.truth == []


def test_a_request_in_many_frames_padded_and_continued() -> None:
    bench = Bench()
    link, wire = bench.connect(GrpcLink)
    block = Encoder().encode([(":path", triton.STREAM_INFER), ("x-long", "y" * 50)])
    message = infer("x", 1, "a")
    body = frames.PREFIX.pack(0, len(message)) + message
    priority = b"\0\0\0\0\7"
    come(
        link,
        frames.PREFACE
        + frames.frame(
            frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, 1, b"\3" + priority + block[:20] + b"\0" * 3
        )
        + frames.frame(frames.CONTINUATION, 0, 1, block[20:30])
        + frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[30:])
        + frames.frame(frames.DATA, frames.PADDED, 1, b"\2" + body[:7] + b"\0\0")
        + frames.frame(frames.DATA, 0, 1, body[7:]),
    )
    wire.take()
    bench.until(1000 * MS)
    assert len(messages(data_of(cut(wire.take()), 1))) == 2  # the token, and the empty final response
    come(link, frames.frame(frames.DATA, frames.END_STREAM, 1))
    ((kind, flags, _, trailers),) = cut(wire.take())
    assert (kind, flags) == (frames.HEADERS, frames.END_STREAM | frames.END_HEADERS)
    assert Decoder().decode(trailers, raw=True) == [(b"grpc-status", b"0")]


def test_a_reset_ends_its_request_alone() -> None:
    bench = Bench()
    link, wire = bench.connect(GrpcLink)
    come(link, frames.PREFACE + call(1, infer("x", 9, "a")) + call(3, infer("x", 9, "b")))
    bench.until(60 * MS)
    come(link, frames.reset(1, frames.ErrorCode.CANCEL))
    wire.take()
    bench.until(1000 * MS)
    sent = cut(wire.take())
    assert {number for *_, number, _ in sent} == {3}
    assert [(truth.id, truth.tokens, truth.end_ns) for truth in bench.hub.truth] == [
        ("a", 2, None),
        ("b", 9, 130 * MS),
    ]


def unlimited(prompt: str, tokens: int) -> list[bytes]:
    """The messages of an answer that no window holds back."""
    bench = Bench()
    link, wire = bench.connect(GrpcLink)
    come(link, frames.PREFACE + call(1, infer(prompt, tokens, "a")))
    bench.until(1000 * MS)
    return messages(data_of(cut(wire.take()), 1))


@given(
    st.integers(0, 300), st.lists(st.tuples(st.sampled_from([0, 1, 3]), st.integers(1, 400)), max_size=60), st.data()
)
def test_nothing_is_sent_beyond_the_windows_and_nothing_is_lost(
    initial: int, grants: list[tuple[int, int]], data: Any
) -> None:
    """Stream windows start at `initial`, and `grants` open them (or, as 0, the connection's) between wakes."""
    whole = unlimited("x", 12)
    bench = Bench()
    link, wire = bench.connect(GrpcLink)
    settings = frames.settings_frame({frames.INITIAL_WINDOW_SIZE: initial})
    come(link, frames.PREFACE + settings + call(1, infer("x", 12, "a")) + call(3, infer("x", 12, "a")))
    link.window = 500  # it begins at 65,535, more than these answers need
    wire.take()
    window = {0: 500, 1: initial, 3: initial}
    got = {1: b"", 3: b""}
    trailers = []

    def take() -> None:
        for kind, flags, number, payload in cut(wire.take()):
            if kind == frames.DATA:
                got[number] += payload
                for key in (0, number):
                    window[key] -= len(payload)
                    assert window[key] >= 0
            elif kind == frames.HEADERS and flags & frames.END_STREAM:
                assert messages(got[number]) == whole
                trailers.append(number)
        for number, truth in zip((1, 3), bench.hub.truth, strict=True):
            complete, position = 0, 0
            while position + 5 <= len(got[number]):
                position += 5 + frames.PREFIX.unpack_from(got[number], position)[1]
                complete += position <= len(got[number])
            assert len(truth.stamps_ns) == min(complete, 12)

    def opened(number: int, increment: int) -> None:
        window[number] += increment
        come(link, frames.window_update(number, increment))
        take()

    for number, increment in grants:
        bench.until(bench.now + data.draw(st.sampled_from([0, 10, 40])) * MS)
        take()
        opened(number, increment)
    changed = data.draw(st.integers(0, 300))
    for number in (1, 3):
        window[number] += changed - initial  # below zero is legal: then nothing more is sent
    come(link, frames.settings_frame({frames.INITIAL_WINDOW_SIZE: changed}))
    take()
    bench.until(bench.now + 1000 * MS)
    take()
    for number in (0, 1, 3):
        opened(number, 1 << 20)
    assert sorted(trailers) == [1, 3]
    assert link.streams == {}
    assert all(truth.tokens == 12 and truth.end_ns for truth in bench.hub.truth)


def test_a_message_longer_than_a_frame_goes_in_several() -> None:
    bench = Bench()
    link, wire = bench.connect(GrpcLink)
    come(link, frames.PREFACE + call(1, infer("x", 2, "n" * 20_000)))
    wire.take()
    bench.until(1000 * MS)
    sent = cut(wire.take())
    assert max(len(payload) for *_, payload in sent) == 16384
    whole = messages(data_of(sent, 1))
    assert [len(triton.parse(message).outputs) for message in whole] == [1, 1, 0]
    assert bench.stamps == {"n" * 20_000: [50 * MS, 60 * MS]}


def test_a_client_is_told_that_it_may_send_more() -> None:
    bench = Bench()
    link, wire = bench.connect(GrpcLink)
    message = infer("x" * 3_000_000, 1, "a")
    body = frames.PREFIX.pack(0, len(message)) + message
    come(link, frames.PREFACE + call(1, b"", last=False)[: -5 - 9])
    wire.take()
    told = {0: 0, 1: 0}
    for start in range(0, len(body), 16384):
        come(link, frames.frame(frames.DATA, 0, 1, body[start : start + 16384]))
        for kind, _, number, payload in cut(wire.take()):
            assert kind == frames.WINDOW_UPDATE
            told[number] += int.from_bytes(payload, "big")
            assert told[number] <= start + 16384
    assert min(told.values()) > 2_000_000
    bench.until(50 * MS)
    assert bench.stamps == {"a": [50 * MS]}


# Faults


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", Script(8)),
        ("!", Script(8)),
        ("!unknown 3", Script(8)),
        ("say !stall 3", Script(8)),
        ("!stall 3", Script(3, Then.STALL)),
        ("!cut", Script(0, Then.CUT)),
        ("!short 3", Script(3)),
        ("!short 30", Script(8)),
        ("!empty", Script(0)),
        ("!garbage 2 x", Script(2, Then.GARBAGE)),
        ("!error 3 out of memory", Script(3, Then.ERROR, words="out of memory")),
        ("!status 429", Script(0, Then.STATUS, words="429")),
        ("!status", Script(0, Then.STATUS, words="503")),
        ("!burst", Script(8, burst=True)),
    ],
)
def test_what_a_prompt_asks_for(prompt: str, expected: Script) -> None:
    assert script_of(prompt, 8) == expected


# Fault, number of tokens that come, and how the answer ends: over gRPC, generate_stream and OpenAI's completions.
ENDS = [
    ("!short 3", 3, "ok", "ok", "ok"),
    ("!burst", 8, "ok", "ok", "ok"),
    ("!empty", 0, "ok", "ok", "ok"),
    ("!error 3 out of memory", 3, "out of memory", "out of memory", "out of memory"),
    ("!garbage 3", 3, "malformed", "malformed", "malformed"),
    ("!cut 3", 3, "UNAVAILABLE", "lost", "lost"),
    ("!status 429", 0, "UNAVAILABLE", "429", "429"),
    ("!stall 3", 3, "silence", "silence", "silence"),
]
SILENCE_S = 0.3


@contextlib.asynccontextmanager
async def serving(*, ttft_ms: float = 5, itl_ms: float = 2, size: int = 1) -> AsyncIterator[MockServer]:
    timing = Timing(ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3, tokens_per_response=size)
    server = await MockServer.start(timing)
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def grpc_client(server: MockServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.grpc_port}", options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        yield channel


@contextlib.asynccontextmanager
async def http_client(server: MockServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{server.http_port}"
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=httpx.Timeout(30, read=SILENCE_S * 20)
    ) as client:
        yield client


def tokens_of(response: Any) -> list[bytes]:
    return list(response.infer_response.raw_output_contents)


async def through_grpc(server: MockServer, prompt: str) -> tuple[int, str]:
    """Number of tokens, and how it ended."""
    tokens = 0
    async with grpc_client(server) as channel:
        method = channel.stream_stream(triton.STREAM_INFER)  # bytes, so that what is malformed is seen here
        stream = method()
        await stream.write(infer(prompt, 8, "g", stream=True))
        await stream.done_writing()
        while True:
            try:
                message = await asyncio.wait_for(stream.read(), SILENCE_S if tokens == 3 and "stall" in prompt else 30)
            except asyncio.TimeoutError:
                return tokens, "silence"
            except grpc.aio.AioRpcError as error:
                return tokens, error.code().name
            if message is grpc.aio.EOF:
                assert await stream.code() is grpc.StatusCode.OK
                return tokens, "ok"
            try:
                reply = triton.parse(message)
            except triton.MalformedMessage:
                return tokens, "malformed"
            if reply.error:
                return tokens, reply.error
            assert reply.final == (not reply.outputs)
            tokens += bool(reply.outputs)


async def through_http(server: MockServer, prompt: str, openai_way: bool) -> tuple[int, str]:
    body: dict[str, Any] = {"max_tokens": 8, "stream": True}
    body |= {"model": "ensemble", "prompt": prompt} if openai_way else {"id": "h", "text_input": prompt}
    path = "/v1/completions" if openai_way else "/v2/models/ensemble/generate_stream"
    tokens = 0
    async with http_client(server) as client:
        try:
            async with client.stream("POST", path, json=body, headers={"X-Request-Id": "h"}) as response:
                if response.status_code != 200:
                    await response.aread()
                    assert "error" in response.json()
                    return tokens, str(response.status_code)
                lines = response.aiter_lines()
                while True:
                    stalled = tokens == 3 and "stall" in prompt
                    line = await asyncio.wait_for(anext_or_none(lines), SILENCE_S if stalled else 30)
                    if line is None:
                        return tokens, "ok"
                    if line in ("", "data: [DONE]"):
                        continue
                    try:
                        event = json.loads(line.removeprefix("data: "))
                    except ValueError:
                        return tokens, "malformed"
                    if "error" in event:
                        return tokens, event["error"]["message"] if openai_way else event["error"]
                    tokens += bool(event["choices"][0]["text"] if openai_way else event["text_output"])
        except asyncio.TimeoutError:
            return tokens, "silence"
        except httpx.RemoteProtocolError:
            return tokens, "lost"


async def anext_or_none(lines: AsyncIterator[str]) -> str | None:
    async for line in lines:
        return line
    return None


@pytest.mark.loopback
@pytest.mark.parametrize(("prompt", "tokens", "over_grpc", "over_http", "over_openai"), ENDS)
def test_faults_as_independent_clients_see_them(
    prompt: str, tokens: int, over_grpc: str, over_http: str, over_openai: str
) -> None:
    async def scenario() -> list[Truth]:
        async with serving() as server:
            seen, end = await through_grpc(server, prompt)
            assert end == over_grpc
            # What came right before the cut may be lost within grpc.
            assert seen == tokens or ("cut" in prompt and seen < tokens)
            assert await through_http(server, prompt, openai_way=False) == (tokens, over_http)
            assert await through_http(server, prompt, openai_way=True) == (tokens, over_openai)
            return server.truth

    truth = run(scenario())
    assert [(one.id, one.protocol, one.tokens) for one in truth] == [
        ("g", "grpc", tokens), ("h", "http", tokens), ("h", "openai", tokens)
    ]  # fmt: skip
    ended = not {over_grpc, over_http} & {"lost", "silence"}
    assert [one.end_ns is not None for one in truth] == [ended] * 3
    if prompt == "!burst":
        assert [len(set(one.stamps_ns)) for one in truth] == [1, 1, 1]


# Independent clients


def test_no_fault_goes_untested() -> None:
    assert {row[0].split()[0].removeprefix("!") for row in ENDS} == set(FAULTS)


def inference(request_id: str, tokens: int, *, empty_final: bool = True) -> Any:
    return service_pb2.ModelInferRequest.FromString(
        infer("hello", tokens, request_id, empty_final=empty_final, stream=True, return_num_output_tokens=True)
    )


def decoded(response: Any) -> tuple[str, bool, dict[str, bytes]]:
    reply = response.infer_response
    outputs = {output.name: data for output, data in zip(reply.outputs, reply.raw_output_contents, strict=True)}
    return reply.id, reply.parameters[triton.FINAL].bool_param, outputs


TOKEN = {"text_output": b"\4\0\0\0 the", "num_output_tokens": b"\1\0\0\0"}


@pytest.mark.loopback
def test_many_streams_on_one_connection_and_on_several() -> None:
    async def one(channel: Any, request_id: str, tokens: int) -> None:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(inference(request_id, tokens))
        await call.done_writing()
        seen = [decoded(response) async for response in call]
        assert seen == [(request_id, False, TOKEN)] * tokens + [(request_id, True, {})]
        assert await call.code() is grpc.StatusCode.OK

    async def scenario() -> list[Truth]:
        async with serving() as server, contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(grpc_client(server)) for _ in range(3)]
            await asyncio.gather(*(one(channels[n % 3], str(n), n % 7 + 1) for n in range(60)))
            return server.truth

    truth = run(scenario())
    assert sorted((int(one.id), one.tokens) for one in truth) == [(n, n % 7 + 1) for n in range(60)]
    assert [one.arrival_ns for one in truth] == sorted(one.arrival_ns for one in truth)


@pytest.mark.loopback
def test_several_requests_on_one_stream() -> None:
    async def scenario() -> dict[str, list[bool]]:
        async with serving() as server, grpc_client(server) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            for request_id, tokens in (("a", 5), ("b", 2), ("c", 0)):
                await call.write(inference(request_id, tokens))
            seen: dict[str, list[bool]] = {"a": [], "b": [], "": []}
            for _ in range(6 + 3 + 1):
                response = await call.read()
                if response.error_message:
                    assert response.error_message == "a request without max_tokens of one or more"
                request_id, final, _ = decoded(response)
                seen[request_id].append(final)
            # The stream goes on until its client ends it.
            await call.write(inference("b", 1, empty_final=False))
            assert decoded(await call.read()) == ("b", True, TOKEN)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            return seen

    assert run(scenario()) == {"a": [False] * 5 + [True], "b": [False] * 2 + [True], "": [False]}


@pytest.mark.loopback
def test_token_ids_of_the_engine_s_own_model() -> None:
    async def scenario() -> None:
        async with serving(size=2) as server, grpc_client(server) as channel:
            message = triton.infer_request(
                "tensorrt_llm",
                [
                    triton.Tensor("input_ids", "INT32", (1, 2), b"\1\0\0\0\2\0\0\0"),
                    triton.Tensor("request_output_len", "INT32", (1, 1), b"\3\0\0\0"),
                    triton.Tensor("streaming", "BOOL", (1, 1), b"\1"),
                ],
                request_id="t",
            )
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await call.write(service_pb2.ModelInferRequest.FromString(message))
            await call.done_writing()
            two = {"output_ids": b"\7\0\0\0" * 2, "sequence_length": b"\2\0\0\0"}
            last = {"output_ids": b"\7\0\0\0", "sequence_length": b"\1\0\0\0"}
            assert [decoded(response) async for response in call] == [
                ("t", False, two), ("t", False, last), ("t", True, {})
            ]  # fmt: skip

    run(scenario())


@pytest.mark.loopback
def test_what_the_server_says_of_itself_over_grpc() -> None:
    async def scenario() -> None:
        async with serving() as server, grpc_client(server) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert (await stub.ServerLive(service_pb2.ServerLiveRequest())).live
            assert (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
            assert (await stub.ServerMetadata(service_pb2.ServerMetadataRequest())).name == "known_server"
            for name, ready in (("ensemble", True), ("tensorrt_llm", True), ("none", False)):
                assert (await stub.ModelReady(service_pb2.ModelReadyRequest(name=name))).ready is ready
            metadata = await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="ensemble"))
            assert list(metadata.versions) == ["1"]
            assert {"text_input", "max_tokens", "stream"} <= {tensor.name for tensor in metadata.inputs}
            assert [tensor.name for tensor in metadata.outputs] == ["text_output", "num_output_tokens"]
            config = (await stub.ModelConfig(service_pb2.ModelConfigRequest(name="tensorrt_llm"))).config
            assert config.model_transaction_policy.decoupled
            index = await stub.RepositoryIndex(service_pb2.RepositoryIndexRequest())
            assert [(model.name, model.state) for model in index.models] == [
                ("ensemble", "READY"), ("tensorrt_llm", "READY")
            ]  # fmt: skip
            for refused, code in (
                (stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="nö")), grpc.StatusCode.NOT_FOUND),
                (stub.ModelStatistics(service_pb2.ModelStatisticsRequest()), grpc.StatusCode.UNIMPLEMENTED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await refused
                assert caught.value.code() is code
                if code is grpc.StatusCode.NOT_FOUND:
                    assert caught.value.details() == "Request for unknown model: 'nö' is not found"

    run(scenario())


@pytest.mark.loopback
def test_no_stamp_is_before_its_due_time_or_after_its_arrival_at_the_client() -> None:
    async def scenario() -> tuple[list[Truth], dict[str, int], dict[str, list[int]]]:
        sent: dict[str, int] = {}
        seen: dict[str, list[int]] = {}
        async with serving(ttft_ms=20, itl_ms=3) as server:
            connection = await Connection.open("127.0.0.1", server.grpc_port)
            ends: list[asyncio.Future[Status]] = []
            for index in range(20):
                name, end = str(index), asyncio.get_running_loop().create_future()
                seen[name] = []

                def data(message: bytes, stamp: int, kept: list[int] = seen[name]) -> None:
                    if triton.parse(message).outputs:
                        kept.append(stamp)

                def ended(status: Status, stamp: int, end: asyncio.Future[Status] = end) -> None:
                    end.set_result(status)

                ends.append(end)
                sent[name] = time.monotonic_ns()
                connection.start(triton.STREAM_INFER, infer("hello", 10, name), on_data=data, on_end=ended)
                await asyncio.sleep(0.001)
            assert all(status.ok for status in await asyncio.gather(*ends))
            connection.close()
            return server.truth, sent, seen

    truth, sent, seen = run(scenario())
    assert len(truth) == 20
    for one in truth:
        assert sent[one.id] <= one.arrival_ns
        dues = [one.arrival_ns + 20 * MS + index * 3 * MS for index in range(10)]
        assert all(due <= stamp for due, stamp in zip(dues, one.stamps_ns, strict=True))
        assert all(stamp <= later for stamp, later in zip(one.stamps_ns, seen[one.id], strict=True))
        assert one.end_ns == one.stamps_ns[-1]


@pytest.mark.loopback
def test_a_request_arrives_when_it_reaches_the_machine_and_not_when_the_server_reads_it() -> None:
    """The kernel begins to stamp a while after it was first asked to, and until then tells when it was read."""

    async def scenario() -> tuple[list[Truth], dict[str, int]]:
        read: dict[str, int] = {}
        async with serving(ttft_ms=1) as server, contextlib.AsyncExitStack() as stack:
            for number in range(20):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
                peer.sendall(post(asked(str(number), 1)))
                time.sleep(0.2)  # the server stands still
                read[str(number)] = time.monotonic_ns()
                while len(server.truth) <= number:
                    await asyncio.sleep(0.001)
                if server.truth[-1].arrival_ns <= read[str(number)] - 100 * MS:
                    break
            while not server.truth[-1].tokens:
                await asyncio.sleep(0.001)
            return server.truth, read

    truth, read = run(scenario())
    assert truth[-1].arrival_ns <= read[truth[-1].id] - 100 * MS
    assert truth[-1].stamps_ns[0] >= read[truth[-1].id], "late, and known to be"


def test_what_happened_is_told_in_the_order_in_which_requests_came() -> None:
    bench = Bench()
    for name, stamp in (("a", 7), ("b", 5), ("c", 6)):
        bench.connect(HttpLink)[0].feed(post(asked(name, 1)), stamp)
    alarm: Any = bench
    listeners: Any = [SimpleNamespace(port=port) for port in (8001, 8000)]
    server = MockServer(bench.hub, alarm, listeners)
    assert [one.id for one in server.truth] == ["b", "c", "a"]


@pytest.mark.loopback
def test_openai_s_own_client() -> None:
    import openai

    async def scenario() -> list[Truth]:
        async with serving(size=2) as server:
            url = f"http://127.0.0.1:{server.http_port}/v1"
            plain = openai.DefaultAsyncHttpxClient(trust_env=False)
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, http_client=plain) as client:
                assert [model.id async for model in client.models.list()] == ["ensemble"]
                chat = await client.chat.completions.create(
                    model="ensemble",
                    messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "two words"}],
                    max_completion_tokens=5,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers={"X-Request-Id": "chat"},
                )
                chunks = [chunk async for chunk in chat]
                first, *content, last, usage = chunks
                assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
                assert [chunk.choices[0].delta.content for chunk in content] == [" the the", " the the", " the"]
                assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
                assert usage.choices == []
                assert usage.usage is not None
                assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (2, 5)
                assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5
                text = await client.completions.create(
                    model="ensemble", prompt="!short 2", max_tokens=5, stream=True,
                    extra_headers={"X-Request-Id": "text"},
                )  # fmt: skip
                pieces = [(chunk.choices[0].text, chunk.choices[0].finish_reason) async for chunk in text]
                assert pieces == [(" the the", None), ("", "stop")]
                with pytest.raises(openai.RateLimitError, match="status 429"):
                    await client.completions.create(model="ensemble", prompt="!status 429", stream=True)
                with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
                    await client.completions.create(model="other", prompt="x", stream=True)
                with pytest.raises(openai.BadRequestError, match="streams only"):
                    await client.completions.create(model="ensemble", prompt="x")
            return server.truth

    assert [(one.id, one.tokens) for one in run(scenario())] == [("chat", 5), ("text", 2), ("", 0)]


def test_the_role_of_a_chat_goes_out_before_any_token() -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    come(link, post(body, "/v1/chat/completions"))
    head = wire.take()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.count(b"data:") == head.count(b'"role":"assistant"') == 1
    bench.until(50 * MS)
    assert wire.take().count(b'"content":" the"') == 1
    assert bench.hub.truth[0].stamps_ns.tolist() == [50 * MS]


@pytest.mark.loopback
def test_what_the_server_says_of_itself_over_http() -> None:
    async def scenario() -> None:
        async with serving() as server, http_client(server) as client:
            assert (await client.get("/v2")).json()["name"] == "known_server"
            assert (await client.get("/v2/health/ready")).status_code == 200
            assert (await client.get("/v2/models/ensemble/ready")).status_code == 200
            metadata = (await client.get("/v2/models/ensemble")).json()
            assert metadata["versions"] == ["1"]
            assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, -1]}
            index = (await client.post("/v2/repository/index")).json()
            assert [(model["name"], model["state"]) for model in index] == [
                ("ensemble", "READY"), ("tensorrt_llm", "READY")
            ]  # fmt: skip
            counted = 'nv_inference_request_success{model="ensemble",version="1"} '
            assert counted + "0" in (await client.get("/metrics")).text
            path = "/v2/models/ensemble/generate_stream"
            for body in (asked("a", 2), asked("b", 1)):
                answer = await client.post(path, json=body)
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.text.count("data:") == body["max_tokens"]
            assert counted + "2" in (await client.get("/metrics")).text
            refusals = [
                (await client.get("/v2/models/none"), 404),
                (await client.get("/nowhere"), 404),
                (await client.post("/v2/models/none/generate_stream", json=asked("c", 1)), 404),
                (await client.post(path, json={"max_tokens": 1}), 400),
                (await client.post(path, json=asked("c", 0)), 400),
                (await client.post(path, json=asked("c", 1, stream=False)), 400),
                (await client.post(path, content=b"[]"), 400),
                (await client.post(path, content=b"{"), 400),
            ]
            assert [answer.status_code for answer, _ in refusals] == [status for _, status in refusals]
            assert all(answer.json()["error"] for answer, _ in refusals)

    run(scenario())


def test_one_request_after_the_other_on_a_connection() -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    for number in range(3):
        come(link, post(asked(str(number), 1)))
        bench.until(bench.now + 50 * MS)
        assert wire.take().startswith(b"HTTP/1.1 200 OK")
    last = post(asked("3", 1)).replace(b"host: x", b"connection: close")
    come(link, last)
    bench.until(bench.now + 50 * MS)
    assert wire.closed
    assert list(bench.stamps) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("strange", [b"\x16\x03\x01 hello", post(asked("b", 1))])
def test_what_comes_into_an_answer_cuts_it(strange: bytes) -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    come(link, post(asked("a", 5)))
    bench.until(60 * MS)
    come(link, strange)
    assert wire.closed
    bench.until(1000 * MS)
    assert [(truth.id, truth.tokens, truth.end_ns) for truth in bench.hub.truth] == [("a", 2, None)]


def test_what_is_not_http_is_told_so() -> None:
    link, wire = Bench().connect(HttpLink)
    come(link, b"\x16\x03\x01 hello")
    assert wire.take().startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert wire.closed


# As a process


def test_truth_is_the_same_once_written_and_read(tmp_path: Path) -> None:
    bench = Bench(tokens_per_response=2)
    for index in range(3):
        link, _ = bench.connect(HttpLink)
        come(link, post(asked(f"é{index}", 5)))
    bench.until(70 * MS)
    write(bench.hub.truth, tmp_path / "truth")
    lines = [json.loads(line) for line in (tmp_path / "truth").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {
        "id": "é0", "protocol": "http", "arrival_ns": 0, "scripted": 5, "then": "finish", "tokens_per_response": 2,
        "stamps_ns": [50 * MS, 70 * MS], "end_ns": None, "tokens": 4,
    }  # fmt: skip
    assert [Truth.from_json(line) for line in lines] == bench.hub.truth


@pytest.mark.loopback
@pytest.mark.process
def test_a_process_serves_and_says_what_it_did(tmp_path: Path) -> None:
    timing = Timing(ttft_s=0.01, itl_s=0.002, tokens_per_response=2)
    server = MockServerProcess.start(timing, tmp_path / "truth", cpu=min(os.sched_getaffinity(0)))
    try:
        assert os.sched_getaffinity(server.pid) == {min(os.sched_getaffinity(0))}
        before = time.monotonic_ns()
        url = f"http://127.0.0.1:{server.http_port}/v2/models/ensemble/generate_stream"
        answer = httpx.post(url, json=asked("a", 9), trust_env=False, timeout=60)
        after = time.monotonic_ns()
        assert answer.text.count("data:") == 5
    finally:
        truth = server.stop()
    (one,) = truth
    assert (one.id, one.tokens, len(one.stamps_ns)) == ("a", 9, 5)
    assert before < one.arrival_ns < one.arrival_ns + 10 * MS <= one.stamps_ns[0]
    assert [*one.stamps_ns] == sorted(one.stamps_ns)
    assert one.end_ns == one.stamps_ns[-1] < after


@pytest.mark.process
def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = (
        f"import os, pathlib; from {MockServerProcess.__module__} import MockServerProcess, Timing; "
        f"truth = pathlib.Path({str(tmp_path / 'truth')!r}); "
        "server = MockServerProcess.start(Timing(ttft_s=0.01, itl_s=0.002), truth); "
        "print(server.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)


@pytest.mark.loopback
@pytest.mark.process
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            with pytest.raises(HostError, match=f"cannot listen on 127.0.0.1:{server.http_port}"):
                await MockServer.start(Timing(ttft_s=0, itl_s=0), http_port=server.http_port)

    run(scenario())
    with pytest.raises(HostError, match="does not start: cannot stay on core 99999"):
        MockServerProcess.start(Timing(ttft_s=0, itl_s=0), tmp_path / "truth", cpu=99999)
