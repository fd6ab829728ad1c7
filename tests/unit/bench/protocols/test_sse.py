"""Event streams in a body, whatever reads it was heard in: SseDecoder, and `events` of a whole exchange."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.wires import Asked, cut
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.http1 import pieces
from trtpipe.pipeline.bench.protocols.sse import SseDecoder, events
from trtpipe.pipeline.bench.protocols.transport import BadAnswer


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
    exchange = InFlightRequest("r", b"", input_tokens=1, max_tokens=1)
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
