"""What an HTTP/2 peer may send: bytes of an answer and of a message, and frames that bring nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.h2 import Bench
from tests.support.wires import HEAD, TAIL, prefixed
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.frames import frame
from trtpipe.pipeline.net.h2.status import Code, Status


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.connection.abort()
    made.loop.close()


@pytest.mark.parametrize("most", [5, 1000, 4 << 20, (4 << 20) + 1, 8 << 20, (8 << 20) + 7, 13 << 20])
def test_an_answer_may_have_just_as_many_bytes_as_its_caller_says(bench: Bench, most: int) -> None:
    within, beyond = bench.start(max_bytes=most), bench.start(max_bytes=most)
    for stream in (within, beyond):
        bench.feed(frames.header_frames(stream.number, HEAD, 16384))
        left = most
        while left:
            size = min(left, 60_000)
            size -= size < left < size + 5  # a message has a prefix of five bytes
            bench.feed(frame(frames.DATA, 0, stream.number, prefixed(bytes(size - 5))))
            left -= size
        assert stream.number not in bench.status
    bench.feed(frame(frames.DATA, 0, beyond.number, b"\0"))
    assert bench.status[beyond.number] == Status(
        Code.RESOURCE_EXHAUSTED, f"an answer of more than {most:,} bytes", oversized=True
    )
    bench.feed(frames.header_frames(within.number, TAIL, 16384, end_stream=True))
    assert bench.status[within.number].ok


def test_a_message_may_have_just_as_many_bytes_as_its_caller_says(bench: Bench) -> None:
    stream = bench.start(max_message=10)
    bench.feed(frames.header_frames(stream.number, HEAD, 16384), frame(frames.DATA, 0, 1, prefixed(bytes(10))[:7]))
    bench.feed(frame(frames.DATA, 0, 1, bytes(8)))
    assert bench.got[1] == [bytes(10)]
    bench.feed(frame(frames.DATA, 0, 1, b"\0\0\0\0\x0b"))
    assert bench.status[1].oversized


def test_a_peer_that_reads_no_answers_is_left(bench: Bench) -> None:
    stream = bench.start()
    ping = frame(frames.PING, 0, 0, bytes(8))
    bench.feed(ping * 20_000)
    assert len(bench.wire.frames()) == 20_002
    bench.connection.pause_writing()
    bench.feed(ping * 10_000)
    bench.connection.resume_writing()
    bench.connection.pause_writing()
    bench.feed(ping * 9_999, frames.settings_frame({}))
    assert bench.status == {}
    bench.feed(ping)
    assert bench.status[stream.number].message == "10000 frames whose answers are not read (ENHANCE_YOUR_CALM)"


@pytest.mark.parametrize(
    "nothing",
    [frame(frames.DATA, 0, 1), frame(frames.PING, frames.ACK, 0, bytes(8)), frame(0x99, 0, 0, b"x")],
    ids=["DATA", "PING", "unknown"],
)
def test_a_peer_that_sends_nothing_but_frames_is_left(bench: Bench, nothing: bytes) -> None:
    stream = bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384))
    message = frame(frames.DATA, 0, 1, prefixed(b"word"))
    bench.feed(nothing * 100_000, message, nothing * 100_000)
    assert bench.got[1] == [b"word"]
    assert bench.status == {}
    bench.feed(nothing)
    assert bench.status[stream.number].message == ("100,000 frames in a row without a message (ENHANCE_YOUR_CALM)")


def test_informational_headers_have_an_end(bench: Bench) -> None:
    stream = bench.start()
    hints = frames.header_frames(1, b"\x08\x03103", 16384)
    bench.feed(hints * 100)
    assert bench.status == {}
    bench.feed(hints)
    assert "informational headers without end" in bench.status[stream.number].message
