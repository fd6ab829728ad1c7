"""A request in flight and what is kept of it."""

from __future__ import annotations

from trtpipe.pipeline.bench.loop.in_flight import PIECES, Failure, InFlightRequest


def request(message: bytes = b"ask", max_tokens: int = 8) -> InFlightRequest:
    return InFlightRequest("r", message, input_tokens=1, max_tokens=max_tokens)


def test_what_an_answer_may_have_follows_from_what_was_asked() -> None:
    asked = request(b"x" * 1000, max_tokens=100)
    assert (asked.limit, asked.response_limit) == (65_536 + 1000 + 409_600, 65_536 + 1000 + 6400)


def test_many_reads_are_put_together_while_the_request_is_in_flight() -> None:
    asked = request()
    asked.mark = b"data"
    reads = [(b"data" if number % 1000 == 0 else b":", number) for number in range(PIECES + 1)]
    for data, stamp in reads:
        asked.receive(data, stamp)
    asked.compact()
    assert asked.data == []
    assert asked.heard_ns() == 4000  # the last that was more than a sign of life
    asked.receive(b":", 5000)
    asked.compact()
    assert asked.data == [b":"]
    assert asked.heard_ns() == 4000
    asked.receive(b"data", 6000)
    assert asked.heard_ns() == 6000
    asked.end(7000)
    assert list(asked.reads()) == [*reads, (b":", 5000), (b"data", 6000)]


def test_a_warm_up_request_is_compressed_once_it_has_ended() -> None:
    asked = request()
    asked.warmup = True
    for stamp in range(PIECES + 1):
        asked.receive(b"word", stamp)
    asked.compact()
    asked.receive(b"word", 9000)
    asked.end(9001)
    assert len(asked._kept) < 200
    assert asked.body == b"word" * (PIECES + 2)
    assert [stamp for _, stamp in asked.reads()][-1] == 9000


def test_nothing_is_kept_of_a_request_that_failed() -> None:
    asked = request()
    asked.receive(b"data", 1)
    asked.end(2, Failure.of("Timeout", "late"))
    assert (asked.body, list(asked.reads()), len(asked.stamps)) == (b"", [], 0)
    assert asked.failure == Failure("Timeout", "late")


def test_the_words_of_a_failure_are_one_line_and_not_a_long_one() -> None:
    assert Failure.of("http 500", "a\n  b\r\nc").message == "a b c"
    assert Failure.of("http 500", "x" * 1000).message == "x" * 400 + "..."
