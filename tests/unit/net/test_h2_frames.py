"""The HTTP/2 reader against frames made by hand."""

from __future__ import annotations

import itertools
import struct

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from tests.support.h2 import METHOD, Bench
from tests.support.wires import HEAD, TAIL, answer_bytes, prefixed
from trtpipe.pipeline.net.h2 import connection as connection_module
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.connection import OWN_MAX_FRAME, STREAM_WINDOW
from trtpipe.pipeline.net.h2.frames import ErrorCode, frame
from trtpipe.pipeline.net.h2.status import Code, Draining, Status, of_reset, of_trailers


def test_the_first_bytes_and_a_request_as_frames() -> None:
    bench = Bench({frames.MAX_FRAME_SIZE: 16384})
    bench.start(b"hello")
    (head, data) = bench.wire.frames()
    assert head[:3] == (frames.HEADERS, frames.END_HEADERS, 1)
    assert data == (frames.DATA, frames.END_STREAM, 1, prefixed(b"hello"))
    # The first block says that the table is empty for good; the next ones are the same bytes each time.
    assert head[3][0] == 0x20
    bench.start(b"again")
    second = bench.wire.frames()[0][3]
    bench.start(b"again")
    assert bench.wire.frames()[0][3] == second == head[3][1:]
    bench.loop.close()


RECORDED = b"".join(
    [
        frames.header_frames(1, b"\x20" + HEAD, 16384),
        frame(frames.DATA, 0, 1, prefixed(b"one")),
        frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 70_000, 0x99: 1}),
        # Two messages in a frame and a third over three of them, padding and all.
        frame(frames.DATA, 0, 1, prefixed(b"two") + prefixed(b"") + prefixed(b"three" * 20)[:40]),
        frame(frames.PING, 0, 0, b"abcdefgh"),
        frame(0x77, 0xFF, 3, b"an unknown frame"),
        frame(frames.DATA, frames.PADDED, 1, b"\x05" + prefixed(b"three" * 20)[40:60] + b"12345"),
        frames.header_frames(3, HEAD, 16384),
        frame(frames.PRIORITY, 0, 3, b"12345"),
        frame(frames.DATA, 0, 3, prefixed(b"other")),
        frame(frames.DATA, frames.PADDED, 1, b"\x00" + prefixed(b"three" * 20)[60:]),
        frame(frames.DATA, 0, 1, b""),
        frame(frames.WINDOW_UPDATE, 0, 1, struct.pack(">L", 10)),
        # A header block in parts, with padding and priority, which end up as one.
        frame(frames.HEADERS, frames.END_STREAM | 0x28, 1, b"\x0212345" + TAIL[:3] + b"--"),
        frame(frames.CONTINUATION, 0, 1, b""),
        frame(frames.CONTINUATION, 0, 1, TAIL[3:5]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, TAIL[5:]),
        frame(frames.DATA, 0, 3, prefixed(b"last")),
        frames.header_frames(3, TAIL, 16384, end_stream=True),
    ]
)  # fmt: skip


@given(cuts=st.lists(st.integers(0, len(RECORDED)), max_size=40))
def test_any_cutting_of_the_bytes_gives_the_same_messages(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(RECORDED)]
    check_recorded([RECORDED[start:end] for start, end in itertools.pairwise(places) if start < end])


def test_one_byte_at_a_time() -> None:
    check_recorded([RECORDED[place : place + 1] for place in range(len(RECORDED))])


def check_recorded(pieces: list[bytes]) -> None:
    bench = Bench()
    bench.start()
    bench.start()
    bench.wire.frames()
    bench.feed(*pieces)
    assert bench.got == {1: [b"one", b"two", b"", b"three" * 20], 3: [b"other", b"last"]}
    assert {number: status.code for number, status in bench.status.items()} == {1: Code.OK, 3: Code.OK}
    assert bench.wire.frames() == [
        (frames.SETTINGS, frames.ACK, 0, b""),
        (frames.PING, frames.ACK, 0, b"abcdefgh"),
    ]
    assert bench.connection.usable
    bench.connection.abort()
    bench.loop.close()


@given(noise=st.binary(min_size=1, max_size=300), begun=st.booleans())
def test_garbage_ends_in_a_status_or_waits_for_more_and_never_raises(noise: bytes, begun: bool) -> None:
    bench = Bench()
    stream = bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384) if begun else b"", noise)
    assert stream.ended == (1 in bench.status)
    bench.connection.connection_lost(None)
    assert 1 in bench.status
    assert bench.problems == []
    bench.loop.close()


@given(
    seen=st.lists(
        st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 4), st.binary(max_size=40)), max_size=8
    )
)
def test_well_formed_frames_in_a_senseless_order_never_raise(seen: list[tuple[int, int, int, bytes]]) -> None:
    bench = Bench()
    bench.start()
    bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384), *(frame(*parts) for parts in seen))
    bench.connection.connection_lost(None)
    assert set(bench.status) == {1, 3}
    assert bench.problems == []
    bench.loop.close()


def test_a_broken_protocol_ends_all_calls_and_the_peer_is_told_why(bench: Bench) -> None:
    broken: list[tuple[bytes, ErrorCode]] = [
        (frame(frames.DATA, 0, 0, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 2, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 5, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, frames.PADDED, 1, b"\x05abcd"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, frames.PADDED, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS, 7, HEAD), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x40\x7f"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS | frames.HAS_PRIORITY, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.HEADERS, 0, 1, HEAD) + frame(frames.PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, HEAD) + frame(frames.DATA, 0, 1, prefixed(b"x" * 9)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, HEAD) + frame(frames.CONTINUATION, 0, 1) * 99, ErrorCode.ENHANCE_YOUR_CALM),
        (frame(frames.CONTINUATION, frames.END_HEADERS, 1, HEAD), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 0, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.RST_STREAM, 0, 9, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, frames.ACK, 0, b"123456"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame({frames.MAX_FRAME_SIZE: 5}), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.GOAWAY, 0, 0, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.GOAWAY, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frames.HEADER.pack(0x7F, 0, frames.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    ]
    for data, code in broken:
        made = Bench()
        made.start()
        made.start()
        made.wire.frames()
        made.feed(data)
        assert {status.code for status in made.status.values()} == {Code.INTERNAL}, data
        assert len(made.status) == 2
        last = made.wire.frames()[-1]
        assert (last[0], struct.unpack(">LL", last[3][:8])[1]) == (frames.GOAWAY, code), data
        assert made.wire.closed
        assert not made.connection.usable
        made.loop.close()


def test_a_stream_s_own_fault_leaves_the_others_alone(bench: Bench) -> None:
    wrong = {
        frames.header_frames(1, Encoder().encode([(":status", "404"), ("content-type", "text/html")]), 16384): (
            Code.UNIMPLEMENTED, "HTTP status 404"
        ),
        frames.header_frames(1, Encoder().encode([(":status", "200"), ("content-type", "text/html")]), 16384): (
            Code.UNKNOWN, "answered text/html, not gRPC"
        ),
        frame(frames.DATA, 0, 1, prefixed(b"early")): (Code.INTERNAL, "data before headers"),
        frames.header_frames(1, HEAD, 16384) * 2: (Code.INTERNAL, "headers twice"),
        frames.header_frames(1, HEAD, 16384) + frames.header_frames(1, TAIL, 16384): (Code.INTERNAL, "do not end"),
        frames.header_frames(1, HEAD, 16384) + frame(frames.DATA, 0, 1, b"\x01\0\0\0\0"): (Code.INTERNAL, "compressed"),
        frames.header_frames(1, HEAD, 16384) + frame(frames.DATA, 0, 1, b"\0\xff\xff\xff\xff"): (
            Code.RESOURCE_EXHAUSTED, "a message of 4,294,967,295 bytes"
        ),
        frame(frames.WINDOW_UPDATE, 0, 1, b"\0\0\0\0"): (Code.INTERNAL, "opened the stream's window by 0"),
    }  # fmt: skip
    for data, (code, telling) in wrong.items():
        stream = bench.start()
        neighbour = bench.start()
        bench.wire.frames()
        moved = _renumbered(data, stream.number)
        bench.feed(moved)
        assert bench.status[stream.number].code is code
        assert telling in bench.status[stream.number].message
        assert bench.wire.frames()[0][:3] == (frames.RST_STREAM, 0, stream.number)
        bench.feed(answer_bytes(neighbour.number, [b"fine"]))
        assert bench.status[neighbour.number].ok


def _renumbered(data: bytes, number: int) -> bytes:
    out = b""
    while data:
        high, low, kind, flags, _ = frames.HEADER.unpack_from(data)
        end = 9 + (high << 16 | low)
        out += frames.HEADER.pack(high, low, kind, flags, number) + data[9:end]
        data = data[end:]
    return out


def test_ends_that_say_too_little(bench: Bench) -> None:
    first, second, third, fourth = (bench.start().number for _ in range(4))
    bench.feed(frames.header_frames(first, HEAD, 16384), frame(frames.DATA, frames.END_STREAM, first, prefixed(b"x")))
    assert bench.status[first] == Status(Code.UNKNOWN, "the stream ended without a grpc-status")
    assert bench.got[first] == [b"x"]
    cut = frame(frames.DATA, 0, second, prefixed(b"long message")[:9])
    bench.feed(frames.header_frames(second, HEAD, 16384), cut)
    bench.feed(frames.header_frames(second, TAIL, 16384, end_stream=True))
    assert "within a message" in bench.status[second].message
    odd = Encoder().encode([(":status", "200"), ("grpc-status", "many"), ("grpc-message", "a%20b%zz")])
    bench.feed(frames.header_frames(third, odd, 16384, end_stream=True))
    assert bench.status[third] == Status(Code.UNKNOWN, "grpc-status b'many': a b%zz")
    informational = Encoder().encode([(":status", "103")])
    bench.feed(frames.header_frames(fourth, informational, 16384), answer_bytes(fourth, [b"y"]))
    assert bench.status[fourth].ok


def test_resets_and_what_they_mean(bench: Bench) -> None:
    for code, meaning in [
        (ErrorCode.REFUSED_STREAM, Code.UNAVAILABLE),
        (ErrorCode.CANCEL, Code.CANCELLED),
        (ErrorCode.ENHANCE_YOUR_CALM, Code.RESOURCE_EXHAUSTED),
        (ErrorCode.INTERNAL_ERROR, Code.INTERNAL),
        (ErrorCode.NO_ERROR, Code.INTERNAL),
    ]:
        stream = bench.start()
        bench.feed(frames.reset(stream.number, code), frames.reset(stream.number, code))
        assert bench.status[stream.number].code is meaning
        assert bench.status[stream.number].retry == (code is ErrorCode.REFUSED_STREAM)
    assert of_reset(77).message == "the server reset the stream (error 77)"


def test_goaway_finishes_what_is_below_and_gives_back_what_is_above(bench: Bench) -> None:
    below, above = bench.start(), bench.start()
    bench.feed(frames.goaway(below.number, ErrorCode.NO_ERROR))
    given_back = bench.status[above.number]
    assert (given_back.code, given_back.retry) == (Code.UNAVAILABLE, True)
    assert below.number not in bench.status
    with pytest.raises(Draining):
        bench.start()
    assert not bench.wire.closed
    bench.feed(answer_bytes(below.number, [b"end"]))
    assert bench.status[below.number].ok
    assert bench.wire.closed


def test_goaway_in_anger_says_why(bench: Bench) -> None:
    stream = bench.start()
    bench.feed(frames.goaway(0, ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings"))
    assert "ENHANCE_YOUR_CALM too_many_pings" in bench.status[stream.number].message


def test_data_waits_for_the_stream_s_window_and_for_the_connection_s() -> None:
    bench = Bench({frames.INITIAL_WINDOW_SIZE: 10})
    stream = bench.start(b"x" * 95)
    assert [entry[3] for entry in bench.wire.frames()[1:]] == [prefixed(b"x" * 95)[:10]]
    bench.feed(frame(frames.WINDOW_UPDATE, 0, 1, struct.pack(">L", 20)))
    assert [len(entry[3]) for entry in bench.wire.frames()] == [20]
    bench.feed(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 5}))  # 5 less than it was: the window is negative
    bench.wire.frames()
    bench.feed(frame(frames.WINDOW_UPDATE, 0, 1, struct.pack(">L", 5)))
    assert bench.wire.frames() == []
    bench.feed(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 65_535}))
    rest = [entry for entry in bench.wire.frames() if entry[0] == frames.DATA]
    assert sum(len(entry[3]) for entry in rest) == 70
    assert rest[-1][1] == frames.END_STREAM
    bench.feed(answer_bytes(stream.number, []))
    assert bench.status[1].ok

    large = bench.start(b"y" * 200_000)  # the connection's window is 65,535 less 100
    bench.feed(frame(frames.WINDOW_UPDATE, 0, large.number, struct.pack(">L", 1 << 20)))
    sent = [entry for entry in bench.wire.frames() if entry[0] == frames.DATA]
    assert sum(len(entry[3]) for entry in sent) == 65_435
    assert max(len(entry[3]) for entry in sent) == 16_384
    behind = bench.start(b"z")
    assert [entry[0] for entry in bench.wire.frames()] == [frames.HEADERS]
    bench.feed(frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 20)))
    sent = [entry for entry in bench.wire.frames() if entry[0] == frames.DATA]
    assert sum(len(entry[3]) for entry in sent if entry[2] == large.number) == 200_005 - 65_435
    assert sum(len(entry[3]) for entry in sent if entry[2] == behind.number) == 6
    bench.loop.close()


def test_a_full_socket_holds_data_back(bench: Bench) -> None:
    bench.connection.pause_writing()
    stream = bench.start(b"x" * 50)
    assert [entry[0] for entry in bench.wire.frames()] == [frames.HEADERS]
    bench.connection.resume_writing()
    assert sum(len(entry[3]) for entry in bench.wire.frames()) == 55
    stream.cancel()


def test_both_windows_are_renewed_by_half_and_a_peer_that_ignores_them_is_refused(bench: Bench) -> None:
    stream = bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384))
    bench.wire.frames()
    message = frame(frames.DATA, 0, 1, prefixed(b"x" * (OWN_MAX_FRAME - 5)))
    renewed = 0
    total = 0
    while total < STREAM_WINDOW * 2:
        bench.feed(message)
        total += OWN_MAX_FRAME
        renewed += sum(struct.unpack(">L", entry[3])[0] for entry in bench.wire.frames() if entry[2] == 1)
        assert STREAM_WINDOW + renewed - total + OWN_MAX_FRAME > STREAM_WINDOW // 2
    assert len(bench.got[1]) == total // OWN_MAX_FRAME
    assert renewed >= total - STREAM_WINDOW // 2
    # The connection's is two gigabytes: as if it had been used.
    bench.connection._window_left = connection_module.CONNECTION_WINDOW // 2 + 10
    bench.feed(message)
    ((kind, _, number, payload),) = [entry for entry in bench.wire.frames() if entry[2] == 0]
    assert (kind, number) == (frames.WINDOW_UPDATE, 0)
    assert struct.unpack(">L", payload)[0] == (1 << 30) - 10 + OWN_MAX_FRAME
    stream._renew_in = -(STREAM_WINDOW // 2)
    bench.feed(message)
    assert bench.status[1].code is Code.INTERNAL
    assert "window" in bench.status[1].message


def test_frames_of_a_cancelled_call_are_passed_over(bench: Bench) -> None:
    stream, other = bench.start(), bench.start()
    stream.cancel()
    assert bench.wire.frames()[-1] == (frames.RST_STREAM, 0, 1, struct.pack(">L", ErrorCode.CANCEL))
    bench.feed(answer_bytes(1, [b"late"]), answer_bytes(other.number, [b"fine"]))
    assert bench.got == {1: [], 3: [b"fine"]}
    assert set(bench.status) == {3}


def test_header_tables_of_the_peer_are_followed(bench: Bench) -> None:
    """A server that uses the dynamic table, as it may before it has read our settings."""
    encoder = Encoder()
    for _ in range(3):
        stream = bench.start()
        head = encoder.encode([(":status", "200"), ("content-type", "application/grpc"), ("x-own", "value")])
        tail = encoder.encode([("grpc-status", "5"), ("grpc-message", "no such model")])
        bench.feed(frames.header_frames(stream.number, head, 16384))
        bench.feed(frames.header_frames(stream.number, tail, 16384, end_stream=True))
        assert bench.status[stream.number] == Status(Code.NOT_FOUND, "no such model")
    assert not bench.connection._headers_of.known
    encoder.header_table_size = 0
    for _ in range(2):
        stream = bench.start()
        bench.feed(frames.header_frames(stream.number, encoder.encode([(":status", "200"), ("content-type", "application/grpc")]), 16384))  # fmt: skip # noqa: E501
        tail = encoder.encode([("grpc-status", "5"), ("grpc-message", "none")])
        bench.feed(frames.header_frames(stream.number, tail, 16384, end_stream=True))
        assert bench.status[stream.number] == Status(Code.NOT_FOUND, "none")
    assert bench.connection._headers_of.known


def test_a_callback_that_fails_ends_its_own_call(bench: Bench) -> None:
    ends: list[Status] = []

    def broken(data: bytes, stamp: int) -> None:
        raise ZeroDivisionError("in the caller")

    bench.connection.start(METHOD, b"", on_data=broken, on_end=lambda status, stamp: ends.append(status))
    other = bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384) + frame(frames.DATA, 0, 1, prefixed(b"long enough")) * 2)
    bench.feed(answer_bytes(other.number, [b"fine"]))
    assert len(ends) == 1
    assert "in the caller" in ends[0].message
    assert bench.status[other.number].ok
    assert len(bench.problems) == 1


def test_a_callback_may_cancel_and_close(bench: Bench) -> None:
    seen: list[bytes] = []

    def once(data: bytes, stamp: int) -> None:
        seen.append(data)
        stream.cancel()

    stream = bench.connection.start(METHOD, b"", on_data=once, on_end=lambda status, stamp: seen.append(b"end"))
    bench.feed(frames.header_frames(1, HEAD, 16384))
    bench.feed(frame(frames.DATA, 0, 1, prefixed(b"a long message") * 2) + answer_bytes(1, [b"a long message"]))
    assert seen == [b"a long message"]

    def leave(data: bytes, stamp: int) -> None:
        bench.connection.close()

    bench.connection.start(
        METHOD, b"", on_data=leave, on_end=lambda status, stamp: seen.append(status.code.name.encode())
    )
    bench.feed(answer_bytes(3, [b"a long message"] * 3))
    assert seen[1:] == [b"CANCELLED"]


def test_stream_numbers_run_out(bench: Bench) -> None:
    bench.connection._next = frames.LARGEST_STREAM_ID - 2
    stream = bench.start()
    with pytest.raises(Draining, match="used up"):
        bench.start()
    bench.feed(answer_bytes(stream.number, [b"last"]))
    assert bench.wire.closed


def test_trailers_of_all_codes() -> None:
    for code in Code:
        assert of_trailers({b"grpc-status": b"%d" % code}).code is code
    assert str(of_trailers({b"grpc-status": b"8", b"grpc-message": b"full%21"})) == "RESOURCE_EXHAUSTED: full!"
