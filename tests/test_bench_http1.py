"""The reader of HTTP/1.1 event streams: bytes fed by hand however they were cut, and servers of bytes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.errors import HostError, UsageError
from pipeline.bench.exchange import Exchange
from pipeline.bench.wire.http1 import MAX_HEAD, HttpConnection, HttpSender, error_text, pieces
from pipeline.bench.wire.http_setup import Site
from pipeline.bench.wire.sse import SseDecoder, events
from pipeline.bench.wire.transport import BadAnswer
from tests.loops import run
from tests.wires import Wire


class Asked(Exchange):
    """A request that counts its ends."""

    __slots__ = ("ends", "over")

    def __init__(self, message: bytes = b"POST / HTTP/1.1\r\n\r\n") -> None:
        super().__init__("r", message, input_tokens=1, max_tokens=8)
        self.ends = 0
        self.over = asyncio.Event()
        self.on_ended = self._end

    def _end(self, exchange: Exchange) -> None:
        self.ends += 1
        self.over.set()

    @property
    def failed(self) -> tuple[str, str]:
        assert self.ends == 1
        assert self.failure is not None
        return self.failure.kind, self.failure.message


class Bench:
    """A connection that a sender has at hand, on a wire of the test's own."""

    def __init__(self) -> None:
        self.sender = HttpSender(Site.of("http://127.0.0.1:8000"))
        self.wire = Wire()
        self.connection = HttpConnection(self.sender)
        self.connection.connection_made(self.wire)
        self.sender.release(self.connection)

    def ask(self, message: bytes = b"POST / HTTP/1.1\r\n\r\n") -> Asked:
        asked = Asked(message)
        self.sender.start([asked])
        assert self.wire.take() == message
        return asked

    def feed(self, *reads: bytes) -> None:
        """The read of number n has the stamp n."""
        for stamp, read in enumerate(reads, 1):
            self.connection.feed(read, stamp)


# However the bytes were cut


@dataclass(frozen=True)
class Answer:
    """As its server writes it.

    begins    where on the wire its body does
    events    the data of each event, and the place on the wire just behind it
    by_close  the end of the connection is its end
    keeps     the connection may be used again
    """

    wire: bytes
    begins: int
    body: bytes
    events: list[tuple[bytes, int]]
    by_close: bool
    keeps: bool


LINES = st.binary(max_size=12).map(lambda data: data.translate(None, b"\r\n").lstrip(b" "))
LINE_ENDS = st.sampled_from([b"\n", b"\n", b"\r\n"])
HEADS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n",
        b"HTTP/1.1 200\r\n",
        b"HTTP/1.1 200 All is well\r\nX-Empty:\r\nConnection: keep-alive\r\n",
        b"HTTP/1.0 200 OK\r\nCONNECTION: Keep-Alive\r\n",
    ]
)
LEAVING_HEADS = st.sampled_from([b"HTTP/1.1 200 OK\r\nconnection: Close\r\n", b"HTTP/1.0 200 OK\r\n"])
INTERIM = st.sampled_from(
    [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\ncontent-length: 5\r\n\r\n"]
)
EXTENSIONS = st.sampled_from([b"", b"", b";name=value", b';a="b c";d', b" ", b" ; x"])
TRAILERS = st.sampled_from([b"x-trailer: 0\r\n", b"grpc-status: 0\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, list[tuple[bytes, int]]]:
    """A body, and its events with the place in it behind each."""
    body = b""
    found = []
    for lines in draw(st.lists(st.lists(LINES, min_size=1, max_size=2), max_size=6)):
        body += draw(st.sampled_from([b"", b"", b": a comment\n", b"event: token\r\n", b"\n"]))
        for line in lines:
            body += draw(st.sampled_from([b"data: ", b"data:"])) + line + draw(LINE_ENDS)
        body += draw(LINE_ENDS)
        found.append((b"\n".join(lines), len(body)))
    return body, found


@st.composite
def answers(draw: st.DrawFn, *, keeps: bool | None = None) -> Answer:
    """`keeps`, unless left to chance."""
    keeps = draw(st.booleans()) if keeps is None else keeps
    framing = draw(st.sampled_from(["chunks", "chunks", "length", *([] if keeps else ["close"])]))
    body, found = draw(bodies())
    wire = b"".join(draw(st.lists(INTERIM, max_size=2)))
    # An answer that only the end of the connection ends never keeps it, whatever its head says.
    wire += draw(HEADS if keeps or framing == "close" else LEAVING_HEADS)
    if framing == "length":
        wire += b"Content-Length: %d\r\n" % len(body)
    elif framing == "chunks":
        wire += draw(st.sampled_from([b"transfer-encoding: chunked\r\n", b"Transfer-Encoding:  Chunked \r\n"]))
    wire += b"\r\n"
    begins = len(wire)
    places = list(range(begins + 1, begins + len(body) + 1))  # on the wire, just behind each byte of the body
    if framing == "chunks":
        places.clear()
        cuts = draw(st.lists(st.integers(0, len(body)), max_size=6))
        for start, end in itertools.pairwise(sorted({0, *cuts, len(body)})):
            size = draw(st.sampled_from([b"%x", b"%X", b"000%x"])) % (end - start)
            wire += size + draw(EXTENSIONS) + b"\r\n"
            places += range(len(wire) + 1, len(wire) + 1 + end - start)
            wire += body[start:end] + b"\r\n"
        wire += draw(st.sampled_from([b"0", b"000"])) + draw(EXTENSIONS) + b"\r\n"
        wire += b"".join(draw(st.lists(TRAILERS, max_size=2))) + b"\r\n"
    else:
        wire += body
    return Answer(wire, begins, body, [(data, places[end - 1]) for data, end in found], framing == "close", keeps)


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    """In reads, none of which is empty."""
    ends = sorted({0, len(wire), *(place % len(wire) for place in places)})
    return [wire[start:end] for start, end in itertools.pairwise(ends)]


def check(bench: Bench, asked: Asked, answer: Answer, reads: list[bytes]) -> None:
    ends = list(itertools.accumulate(map(len, reads)))
    bench.feed(*reads[:-1])
    assert asked.ends == 0, "it ended before its last byte"
    bench.connection.feed(reads[-1], len(reads))
    if answer.by_close:
        assert asked.ends == 0
        bench.connection.connection_lost(None)
    else:
        assert asked.end_ns == len(reads)
    assert asked.ends == 1
    assert asked.failure is None
    assert b"".join(piece for piece, _ in pieces(asked)) == answer.body
    assert events(asked) == [(data, 1 + bisect_left(ends, place)) for data, place in answer.events]


CUTS = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(answers(), CUTS)
def test_events_stamps_and_the_end_do_not_depend_on_how_the_bytes_were_cut(answer: Answer, cuts: list[int]) -> None:
    bench = Bench()
    check(bench, bench.ask(), answer, cut(answer.wire, cuts))
    assert bench.wire.closed == (not answer.keeps and not answer.by_close)


@given(answers())
def test_one_byte_at_a_time(answer: Answer) -> None:
    bench = Bench()
    check(bench, bench.ask(), answer, [answer.wire[place : place + 1] for place in range(len(answer.wire))])


@given(st.lists(st.tuples(answers(keeps=True), CUTS), min_size=2, max_size=4))
def test_a_kept_connection_begins_anew_with_each_answer(kept: list[tuple[Answer, list[int]]]) -> None:
    bench = Bench()
    for number, (answer, cuts) in enumerate(kept):
        check(bench, bench.ask(b"request %d" % number), answer, cut(answer.wire, cuts))
        assert not bench.wire.closed


@given(answers(), st.data(), st.sampled_from([None, ConnectionResetError("reset by peer")]))
def test_a_connection_that_ends_early_fails_the_request(answer: Answer, data: Any, error: Exception | None) -> None:
    bench = Bench()
    asked = bench.ask()
    place = data.draw(st.integers(0, len(answer.wire) - (not answer.by_close)))
    reads = cut(answer.wire[:place], data.draw(CUTS)) if place else []
    bench.feed(*reads)
    bench.connection.connection_lost(error)
    if answer.by_close and place >= answer.begins and error is None:
        assert asked.failure is None
        with contextlib.suppress(BadAnswer):  # cut within an event
            assert [event for event, _ in events(asked)] == [event for event, end in answer.events if end <= place]
    else:
        assert asked.failed == (
            "ConnectionLost",
            f"{error or 'the server closed it'} (after {len(asked.stamps)} reads)",
        )


def test_a_broken_connection_is_no_end() -> None:
    for error, failed in [(None, False), (ConnectionResetError("reset by peer"), True)]:
        bench = Bench()
        asked = bench.ask()
        bench.feed(b"HTTP/1.1 200 OK\r\n\r\ndata: a\n\n")
        bench.connection.connection_lost(error)
        assert (asked.failure is not None) == failed


@given(st.binary(max_size=200), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 500\r\n"]), CUTS)
def test_garbage_never_raises_and_a_failure_closes_the_connection(noise: bytes, head: bytes, cuts: list[int]) -> None:
    for begun in (head + noise, head + b"transfer-encoding: chunked\r\n\r\n" + noise):
        if not begun:
            continue
        bench = Bench()
        asked = bench.ask()
        for read in cut(begun, cuts):
            bench.connection.feed(read, 1)
        assert bench.wire.closed or asked.failure is None or asked.failure.kind == "http 500"
        bench.connection.connection_lost(None)
        assert asked.ends == 1
        with contextlib.suppress(BadAnswer):
            events(asked)


@given(answers(), st.data())
def test_a_damaged_answer_ends_once_and_is_read_without_another_error(answer: Answer, data: Any) -> None:
    damaged = bytearray(answer.wire)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.sampled_from(b"0-fx;\r\n \xff"))
    bench = Bench()
    asked = bench.ask()
    for read in cut(bytes(damaged), data.draw(CUTS)):
        bench.connection.feed(read, 1)
    bench.connection.connection_lost(None)
    assert asked.ends == 1
    with contextlib.suppress(BadAnswer):
        events(asked)


# What is no answer


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-OpenSSH_9.2p1",
        b"HTTP/1.1",
        b"HTTP/1.1 fine OK",
        b"HTTP/1.1 -200 OK",
        b"HTTP/2 200 OK",
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: many",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length:",
    ],
)
def test_a_head_that_is_none(head: bytes) -> None:
    bench = Bench()
    asked = bench.ask()
    bench.feed(head + b"\r\n\r\n")
    assert asked.failed == ("MalformedResponse", f"no HTTP answer: {head!r}")
    assert bench.wire.closed


@pytest.mark.parametrize("line", [b"xyz", b"", b";x=1", b"-6", b"-1", b"+5", b"0x5", b"1_0", b"5 5", b"\xb2"])
def test_a_chunk_without_a_length(line: bytes) -> None:
    chunk = line + b"\r\ndata: a\n\n\r\n0\r\n\r\n"
    for reads in ([chunk], [b"9\r\ndata: b\n\n\r\n" + chunk], [chunk[:1], chunk[1:]]):
        bench = Bench()
        asked = bench.ask()
        bench.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *reads)
        assert asked.failed == ("MalformedResponse", "a chunk without a length")
        assert bench.wire.closed


@pytest.mark.parametrize(
    ("start", "more", "telling"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-more: and more\r\n", f"a head of more than {MAX_HEAD} bytes"),
        (b"", b"x", f"a head of more than {MAX_HEAD} bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"0", "a chunk without a length"),
    ],
)
def test_a_head_and_a_line_that_never_end(start: bytes, more: bytes, telling: str) -> None:
    bench = Bench()
    asked = bench.ask()
    bench.feed(start)
    for _ in range(MAX_HEAD // 4096 + 1):
        assert asked.ends == 0
        bench.feed(more * (4096 // len(more) + 1))
        if bench.wire.closed:
            break
    assert asked.failed == ("MalformedResponse", telling)
    assert bench.wire.closed


@pytest.mark.parametrize(
    ("framed", "found"),
    [
        (b"content-length: 9\r\n\r\ndata: a\n\n", [b"a"]),
        (b"content-length: 0\r\n\r\n", []),
        (b"transfer-encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n0\r\n\r\n", [b"a"]),
    ],
)
def test_bytes_behind_the_end_belong_to_no_answer_and_cost_the_connection(framed: bytes, found: list[bytes]) -> None:
    whole = b"HTTP/1.1 200 OK\r\n" + framed
    for reads in ([whole + b"data: b\n\n"], [whole[:-3], whole[-3:] + b"x"], [whole, b"HTTP/1.1 408 Too Late\r\n\r\n"]):
        bench = Bench()
        asked = bench.ask()
        bench.feed(*reads)
        assert asked.ends == 1
        assert [event for event, _ in events(asked)] == found
        assert bench.wire.closed


@pytest.mark.parametrize("head", [b"HTTP/1.1 100 Continue", b"HTTP/1.1 103 Early Hints\r\nlink: </x>; rel=y"])
def test_what_comes_before_the_answer_is_none(head: bytes) -> None:
    bench = Bench()
    asked = bench.ask()
    bench.feed(head + b"\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: a\n\n")
    assert events(asked) == [(b"a", 2)]
    assert (asked.ends, asked.end_ns, bench.wire.closed) == (1, 2, False)


# What the end says


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": "in ensemble,\\n the engine died"}', "in ensemble, the engine died"),
        (b'{"error": {"message": "too many", "type": "x"}}', "too many"),
        (b'{"error": {"code": 3}}', '{"error": {"code": 3}}'),
        (b'["error"]', '["error"]'),
        (b"null", "null"),
        (b"Bad\xff\nGateway" + b"x" * 300, "Bad\ufffd Gateway" + "x" * 188),
        (b"", ""),
    ],
)
@pytest.mark.parametrize("framing", ["chunks", "length", "close"])
def test_a_status_and_the_server_s_words(body: bytes, words: str, framing: str) -> None:
    bench = Bench()
    asked = bench.ask()
    if framing == "chunks":
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        bench.feed(b"HTTP/1.1 429 Too Many\r\ntransfer-encoding: chunked\r\n\r\n" + chunk, b"0\r\n\r\n")
    elif framing == "length":
        bench.feed(b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    else:
        bench.feed(b"HTTP/1.1 429 Too Many\r\n\r\n" + body)
        bench.connection.connection_lost(None)
    assert asked.failed == ("http 429", words)
    if framing != "close":
        assert not bench.wire.closed
        assert bench.ask().ends == 0  # on the same connection


def test_words_of_an_error_that_are_no_text() -> None:
    assert error_text(b'{"error": 5}') == "5"
    assert error_text(b"\xff\xfe") == "\ufffd\ufffd"


def test_events_that_end_within_a_line() -> None:
    for tail in (b"data: b", b"data: b\n", b"data: b\r\n", b"d"):
        asked = Asked()
        asked.receive(b"data: a\n\n" + tail, 1)
        with pytest.raises(BadAnswer, match="ended within an event, after 1 events") as caught:
            events(asked)
        assert caught.value.kind == "TruncatedStream"


@pytest.mark.parametrize("read", [b"data: a\n\n", b"data: a\r\n\r\n", b"data: a\r\n\n", b"data: a\n\r\n"])
def test_a_line_may_end_in_both_ways(read: bytes) -> None:
    assert SseDecoder().feed(read) == [b"a"]
    decoder = SseDecoder()
    assert [event for byte in read for event in decoder.feed(bytes([byte]))] == [b"a"]


def test_comments_other_fields_and_several_data_lines() -> None:
    assert SseDecoder().feed(b": hi\nid: 3\ndata:a\ndata: b\n\n\n") == [b"a\nb"]


@pytest.mark.parametrize("line", [b"<html>gateway</html>", b"datum: a", b"{", b"Data: a", b" data: a"])
def test_what_is_no_line_of_an_event_stream_is_no_answer(line: bytes) -> None:
    for body in (line, line + b"\n\ndata: a\n\n", b"data: a\n\n" + line + b"\ndata: a\n\n"):
        asked = Asked()
        asked.receive(body, 1)
        with pytest.raises(BadAnswer, match="no line of an event stream") as caught:
            events(asked)
        assert caught.value.kind == "MalformedResponse"


def test_an_error_that_comes_with_a_good_status_is_told() -> None:
    for body in (b'{"error": {"message": "overloaded"}}', b'{\n "error": "overloaded"\n}\n'):
        asked = Asked()
        asked.receive(body, 1)
        with pytest.raises(BadAnswer, match=r"^overloaded$") as caught:
            events(asked)
        assert caught.value.kind == "ServerError"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
def test_the_last_event_of_openai_needs_no_line_end(end: bytes) -> None:
    asked = Asked()
    asked.receive(b"data: a\n\ndata: [DONE]" + end, 1)
    assert events(asked) == [(b"a", 1), (b"[DONE]", 1)]


EVENT_PIECES = st.sampled_from([b"data: 1", b"data: ", b"data:", b"\n", b"\n\n", b"\r\n", b": hi", b"x", b"0"])


@given(
    st.lists(st.lists(EVENT_PIECES, max_size=5).map(b"".join) | st.sampled_from([b"data: a\n\n", b"data: bc\n\n"])),
    st.lists(st.integers(0, 200)),
    st.sampled_from([b"0\r\n\r\n", b"0\r\n", b"00\r\n\r\n", b"0\r\na: b\r\n\r\n", b""]),
)
@example(chunks=[b"data: a\n\n"] * 2, cuts=[12], end=b"0\r\n\r\n")  # cut before the line end after a chunk
def test_events_are_the_same_however_the_body_is_read(chunks: list[bytes], cuts: list[int], end: bytes) -> None:
    """Of one chunk an event, which is read in one go, and of any other body."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk) + end
    exchange = Exchange("r", b"", input_tokens=1, max_tokens=1)
    exchange.chunked = True
    for number, piece in enumerate(cut(body, cuts) if body else []):
        exchange.receive(piece, 10 * number)
    exchange.end(10_000)

    decoder = SseDecoder()
    try:
        expected = [(event, stamp) for piece, stamp in pieces(exchange) for event in decoder.feed(piece)]
        decoder.check_tail()
    except ValueError:
        with pytest.raises(BadAnswer, match="no line of an event stream"):
            events(exchange)
        return
    if decoder.unfinished:
        with pytest.raises(BadAnswer, match="the body ended within an event"):
            events(exchange)
    else:
        assert events(exchange) == expected


# A request's life


def test_a_request_leaves_at_once_and_its_bytes_are_not_kept() -> None:
    bench = Bench()
    assert bench.wire.high == 0, "a write buffer would make the stamp a lie"
    before = time.monotonic_ns()
    asked = Asked(b"the bytes")
    bench.sender.start([asked])
    assert asked.sent_ns is not None
    assert before <= asked.sent_ns <= bench.wire.moments[0]
    assert bench.wire.take() == b"the bytes"
    assert asked.message == b""


def test_a_cancelled_request_gets_no_more_calls_and_its_connection_goes() -> None:
    bench = Bench()
    asked = bench.ask()
    bench.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n")
    seen = list(asked.data)
    bench.sender.cancel(asked)
    bench.sender.cancel(asked)
    assert bench.wire.closed
    bench.feed(b"9\r\ndata: b\n\n\r\n0\r\n\r\n")
    bench.connection.connection_lost(None)
    assert (asked.ends, asked.data) == (0, seen)


def test_cancelling_what_has_ended_leaves_the_connection_alone() -> None:
    bench = Bench()
    asked = bench.ask()
    bench.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    bench.sender.cancel(asked)
    assert not bench.wire.closed


def test_only_the_first_end_counts() -> None:
    asked = Asked()
    asked.end(5)
    asked.fail("Timeout", "too late")
    assert (asked.ends, asked.end_ns, asked.failure) == (1, 5, None)


# Connections


class Server:
    """Answers every request by `answer`, or closes where that is empty."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: a\n\n"
        self.requests: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.greets = True  # otherwise it closes what it has accepted
        self.idle_close = asyncio.Event()
        self.port = 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while self.greets:
                    head = await reader.readuntil(b"\r\n\r\n")
                    self.requests.append(head)
                    writer.write(self.answer)
                    if not self.answer or b"close" in self.answer:
                        break
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, HttpSender]]:
    made = Server()
    server = await asyncio.start_server(made._accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    sender = HttpSender(Site.of(f"http://127.0.0.1:{made.port}"))
    try:
        yield made, sender
    finally:
        await sender.close()
        server.close()
        for writer in made.connections:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def answered(sender: HttpSender, *asked: Asked) -> None:
    sender.start(asked)
    await asyncio.gather(*(one.over.wait() for one in asked))


@pytest.mark.loopback
def test_as_many_connections_as_requests_at_once() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            for count, connections in [(1, 1), (1, 1), (3, 3), (2, 3), (3, 3), (130, 130)]:
                asked = [Asked() for _ in range(count)]
                await answered(sender, *asked)
                assert [one.failure for one in asked] == [None] * count
                assert len(server.connections) == connections
            assert len(server.requests) == 140

    run(scenario())


@pytest.mark.loopback
def test_connections_are_there_before_the_requests() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            await sender.warm(70)
            await sender.warm(5)
            while len(server.connections) < 70:  # accepted by the kernel, perhaps not yet by the server
                await asyncio.sleep(0.001)
            asked = [Asked() for _ in range(70)]
            sender.start(asked)
            assert None not in [one.sent_ns for one in asked], "with a connection at hand a request leaves at once"
            await asyncio.gather(*(one.over.wait() for one in asked))
            assert len(server.connections) == 70

    run(scenario())


@pytest.mark.loopback
def test_a_server_that_closes_after_each_answer() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            server.answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: a\n\n"
            for _ in range(3):
                asked = Asked()
                await answered(sender, asked)
                assert asked.failure is None
            assert len(server.connections) == 3
            server.answer = b""
            await answered(sender, asked := Asked())
            assert asked.failed == ("ConnectionLost", "the server closed it (after 0 reads)")

    run(scenario())


@pytest.mark.loopback
@pytest.mark.parametrize("connections", [0, 2])
def test_connections_that_the_server_closed_while_nobody_looked_are_not_used(connections: int) -> None:
    """Servers close what is idle; prompts of the next level are made meanwhile, and the loop does not turn."""

    async def scenario() -> None:
        async with serving() as (server, sender):
            await sender.warm(2)
            while len(server.connections) < 2:
                await asyncio.sleep(0.001)
            for writer in server.connections:
                with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as own:
                    own.shutdown(socket.SHUT_RDWR)
            await sender.warm(connections)
            asked = [Asked(), Asked()]
            await answered(sender, *asked)
            assert [one.failure for one in asked] == [None, None]

    run(scenario())


@pytest.mark.loopback
def test_a_server_that_closes_what_it_accepts_does_not_hold_us_for_ever() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            server.greets = False
            with contextlib.suppress(HostError):
                await asyncio.wait_for(sender.warm(200), 20)
            await answered(sender, asked := Asked())
            assert asked.failed[0] == "ConnectionLost"

    run(scenario())


@pytest.mark.loopback
def test_a_request_cancelled_before_it_has_a_connection_is_never_sent() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            given_up = Asked(b"the first\r\n\r\n")
            sender.start([given_up])
            sender.cancel(given_up)
            await answered(sender, Asked(b"the second\r\n\r\n"))
            assert server.requests == [b"the second\r\n\r\n"]
            assert (given_up.ends, given_up.sent_ns) == (0, None)

    run(scenario())


@pytest.mark.loopback
def test_nobody_listens() -> None:
    async def scenario() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        sender = HttpSender(Site.of(f"http://127.0.0.1:{port}"))
        await answered(sender, asked := Asked())
        assert asked.failed[0] == "ConnectFailed"
        assert "refused" in asked.failed[1]
        with pytest.raises(HostError, match=rf"http://127\.0\.0\.1:{port} takes no connections any more: .*refused"):
            await sender.warm(2)
        await sender.close()

    run(scenario())


@pytest.mark.loopback
def test_what_is_in_flight_at_the_close_is_abandoned() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            server.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: a\n\n"  # and no end
            asked, late = Asked(), Asked()
            sender.start([asked])
            while not asked.data:
                await asyncio.sleep(0.001)
            sender.start([late])
            await sender.close()
            await asked.over.wait()
            assert asked.failed[0] == "ConnectionLost"
            assert late.sent_ns is None

    run(scenario())


def test_tls_is_for_the_library() -> None:
    with pytest.raises(UsageError, match=r"https://x is TLS, .*; use --transport tritonclient"):
        HttpSender(Site.of("https://x"))
