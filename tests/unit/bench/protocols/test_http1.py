"""The reader of HTTP/1.1 event streams: bytes fed by hand however they were cut."""

from __future__ import annotations

import contextlib
import itertools
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wires import Asked, Wire, cut
from trtpipe.pipeline.bench.protocols.http1 import MAX_HEAD, HttpConnection, HttpSender, error_text, pieces
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.protocols.sse import events
from trtpipe.pipeline.bench.protocols.transport import BadAnswer


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
    count = len(asked.stamps)
    bench.connection.connection_lost(error)
    if answer.by_close and place >= answer.begins and error is None:
        assert asked.failure is None
        with contextlib.suppress(BadAnswer):  # cut within an event
            assert [event for event, _ in events(asked)] == [event for event, end in answer.events if end <= place]
    else:
        assert asked.failed == (
            "ConnectionLost",
            f"{error or 'the server closed it'} (after {count} reads)",
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
