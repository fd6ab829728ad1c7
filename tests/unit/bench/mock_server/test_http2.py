"""The mock server's HTTP/2, in frames made by hand."""

from __future__ import annotations

from typing import Any

from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from tests.support.mock_server import MS, Bench, call, come, cut, data_of, infer, messages
from trtpipe.pipeline.bench.mock_server.grpc import GrpcLink
from trtpipe.pipeline.net.h2 import frames, triton


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
