"""When the mock server's tokens go out, by a clock of the test's own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.mock_server import MS, Bench, asked, call, come, cut, data_of, infer, messages, post
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.mock_server.clock import GRAIN_NS, Timing
from trtpipe.pipeline.bench.mock_server.grpc import GrpcLink
from trtpipe.pipeline.bench.mock_server.http import HttpLink
from trtpipe.pipeline.net.h2 import frames


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
