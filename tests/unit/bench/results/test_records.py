"""From what a stream brought to columns: who counted the tokens, and what is known of a request that failed."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_records import Row, made
from trtpipe.pipeline.bench.loop.in_flight import Failure, InFlightRequest
from trtpipe.pipeline.bench.protocols.transport import Answer, BadAnswer
from trtpipe.pipeline.bench.results.records import NONE, SERVER, TOKENIZER, USAGE, Records, read_objects, settle
from trtpipe.pipeline.bench.results.report import load_point_result
from trtpipe.pipeline.bench.results.statistics import load_point_metrics
from trtpipe.pipeline.bench.results.verdict import SelfCheck

MS = 1_000_000


def exchange(identity: str, *, failure: Failure | None = None, sent: int | None = 10, end: int = 99) -> InFlightRequest:
    made = InFlightRequest(identity, b"bytes", input_tokens=7, max_tokens=6)
    made.slot, made.due_ns, made.sent_ns = 2, 8 * MS, None if sent is None else sent * MS
    made.receive(b"what came", 20 * MS)
    made.end(end * MS, failure)
    return made


def settled(*answers: Answer | BadAnswer | Failure) -> Records:
    """Of requests r0, r1... that brought these."""

    def decode(ended: InFlightRequest) -> Answer:
        answer = answers[int(ended.id[1:])]
        assert not isinstance(answer, Failure), "a failed request has nothing to decode"
        if isinstance(answer, BadAnswer):
            raise answer
        return answer

    exchanges = [
        exchange(f"r{number}", failure=answer if isinstance(answer, Failure) else None)
        for number, answer in enumerate(answers)
    ]
    return settle(exchanges, decode, lambda text: len(text.split()))


def stamps(*moments: int) -> list[int]:
    return [moment * MS for moment in moments]


COUNTED = Answer(stamps(20, 30, 40), [1, 2, 3], text="", usage=5)
SAID = Answer(stamps(20, 30), None, text="three words here", usage=9)
TEXT = Answer(stamps(20, 30), None, text="three words here")


@pytest.mark.parametrize(
    ("answer", "source", "total", "tokens"),
    [
        # The server's counts go before its usage, and that before our own count of the text.
        (COUNTED, SERVER, 6, [1, 2, 3]),
        (SAID, USAGE, 9, [NONE, NONE]),
        (TEXT, TOKENIZER, 3, [NONE, NONE]),
        # As many tokens as responses: each carried one, whoever counted.
        (SAID._replace(usage=2), USAGE, 2, [1, 1]),
        (TEXT._replace(text="two words"), TOKENIZER, 2, [1, 1]),
        # An end token is counted, and has no response; one token more without an end is not known to be one.
        (SAID._replace(usage=3, ended=True), USAGE, 3, [2, 1]),
        (SAID._replace(usage=3), USAGE, 3, [NONE, NONE]),
        (SAID._replace(usage=4, ended=True), USAGE, 4, [NONE, NONE]),
        # Reasoning that was not streamed is counted, and came before the first response.
        (SAID._replace(usage=12, unstreamed=10), USAGE, 12, [11, 1]),
        (SAID._replace(usage=13, unstreamed=10, ended=True), USAGE, 13, [12, 1]),
        (SAID._replace(usage=14, unstreamed=10, ended=True), USAGE, 14, [NONE, NONE]),
        (SAID._replace(usage=2, unstreamed=1), USAGE, 2, [1, 1]),  # it was streamed as text
        # Our own count of the text has no end token.
        (TEXT._replace(ended=True), TOKENIZER, 3, [NONE, NONE]),
    ],
    ids=[
        "server", "usage", "tokenizer", "usage, one each", "tokenizer, one each", "end", "no end", "no end alone",
        "hidden", "hidden and end", "hidden and unknown", "not hidden", "no end of ours",
    ],
)  # fmt: skip
def test_who_counts_the_tokens(answer: Answer, source: str, total: int, tokens: list[int]) -> None:
    records = settled(answer)
    assert records.sources == [source]
    assert records.output_tokens.tolist() == [total]
    assert records.tokens.tolist() == tokens
    known = NONE not in tokens
    assert records.unstreamed_tokens.tolist() == [tokens[0] - 1 if known and source == USAGE else answer.unstreamed]
    assert records.stamps.tolist() == answer.stamps_ns


def test_a_prompt_is_as_long_as_the_server_says() -> None:
    """Of a chat only it knows what the template adds."""
    assert settled(SAID._replace(prompt=40), SAID).input_tokens.tolist() == [40, exchange("r").input_tokens]


def test_a_usage_of_one_token_a_response_makes_token_exact_gaps() -> None:
    def gaps(usage: int) -> int:
        records = settled(Answer(stamps(20, 30, 50), None, usage=usage))
        found: int = load_point_metrics(records, None)["inter_token_latency"]["n"]
        return found

    assert gaps(3) == 2
    assert gaps(4) == 0


@pytest.mark.parametrize(
    ("answers", "source"),
    [
        ([COUNTED, COUNTED], "server"),
        ([SAID], "usage"),
        ([TEXT], "tokenizer"),
        ([COUNTED, TEXT], "mixed"),
        ([COUNTED, Failure("Timeout", "late")], "server"),
        ([Failure("Timeout", "late")], None),
    ],
)
def test_a_load_point_says_who_counted(answers: list[Answer | Failure], source: str | None) -> None:
    check = SelfCheck(figures={}, reasons=[])
    result = load_point_result(settled(*answers), None, check, protocol="grpc", label="1 in flight", load={})
    assert result.token_count_source == source


def test_speculation_is_as_the_one_engine_of_the_server_counts_it() -> None:
    def metrics(*engines: dict[str, float | None]) -> dict[str, Any]:
        server = {"engines": list(engines)}
        check = SelfCheck(figures={}, reasons=[])
        return load_point_result(
            settled(COUNTED), None, check, protocol="grpc", label="1 in flight", load={}, server=server
        ).metrics

    guessing: dict[str, float | None] = {"tokens_per_step": 1.75, "draft_acceptance": 0.25}
    plain: dict[str, float | None] = dict.fromkeys(guessing)
    found = metrics(plain, guessing)
    assert found["tokens_per_step"] == {"value": 1.75, "interval": None}
    assert found["draft_acceptance_rate"] == {"value": 0.25, "interval": None}
    for engines in ((), (plain,), (guessing, guessing)):
        assert "tokens_per_step" not in metrics(*engines)


@pytest.mark.parametrize(
    "answer",
    [
        Answer([], None),
        Answer([], []),
        Answer([], None, usage=4),  # tokens, but no moment at which one came
        Answer(stamps(20), None, text="words", usage=0),
        Answer(stamps(20, 30), None, text=" "),
        Answer(stamps(20), [0]),
    ],
    ids=["nothing", "no response", "no moment", "no usage", "no words", "no tokens"],
)
def test_an_answer_without_a_token_is_a_failure(answer: Answer) -> None:
    records = settled(answer)
    assert records.failures == [Failure("EmptyOutput", "the stream ended without a token of the 6 asked for")]
    assert records.output_tokens.tolist() == [NONE]
    assert records.sources == [None]
    assert records.stamps.tolist() == records.tokens.tolist() == []
    assert not records.good().any()


def test_an_answer_that_cannot_be_read_is_a_failure_of_its_class_in_one_line() -> None:
    records = settled(BadAnswer("MalformedResponse", "no JSON:\n  Traceback"), COUNTED)
    assert records.failures == [Failure("MalformedResponse", "no JSON: Traceback"), None]
    assert records.offsets.tolist() == [0, 0, 3]


def test_a_failed_request_has_no_count_and_keeps_its_moments() -> None:
    failed = exchange("r0", failure=Failure("ConnectFailed", "nobody there"), sent=None)
    records = settle([failed, exchange("r1")], lambda _: COUNTED, len)
    assert records.output_tokens.tolist() == [NONE, 6]
    assert records.sources == [None, SERVER]
    assert records.due.tolist() == [8 * MS, 8 * MS]
    assert records.sent.tolist() == [NONE, 10 * MS]
    assert records.end.tolist() == [99 * MS, 99 * MS]
    assert records.slot.tolist() == [2, 2]
    assert records.input_tokens.tolist() == [7, 7]
    assert records.max_tokens.tolist() == [6, 6]
    assert records.failed.tolist() == [True, False]


def test_bytes_are_forgotten_once_they_are_read() -> None:
    one, other = exchange("r0"), exchange("r1", failure=Failure("Timeout", "late"))
    settle([one, other], lambda _: COUNTED, len)
    assert one.body == other.body == b""


def test_warm_up_is_neither_measured_nor_good() -> None:
    warmup = exchange("r0")
    warmup.warmup = True
    records = settle(
        [warmup, exchange("r1"), exchange("r2", failure=Failure("Timeout", "late"))], lambda _: COUNTED, len
    )
    assert records.measured().tolist() == [False, True, True]
    assert records.good().tolist() == [False, True, False]


def test_no_requests_are_records_too() -> None:
    records = settle([], lambda _: COUNTED, len)
    assert len(records) == 0
    assert list(records.objects()) == []
    assert records.good().tolist() == []


def test_the_lines_of_a_file() -> None:
    warmup = exchange("w")
    warmup.warmup = True
    failed = exchange("f", failure=Failure("http 500", "no\nmemory"), sent=None)
    answers = {"w": COUNTED, "s": SAID}
    records = settle([warmup, failed, exchange("s")], lambda ended: answers[ended.id], len)
    alone = {"slot": 2, "session": None, "turn": None, "due_ns": 8 * MS, "end_ns": 99 * MS}
    common = {**alone, "input_tokens": 7, "max_tokens": 6, "unstreamed_tokens": 0}
    assert [json.loads(json.dumps(line)) for line in records.objects()] == [
        {
            **common, "id": "w", "warmup": True, "sent_ns": 10 * MS, "stamps_ns": stamps(20, 30, 40),
            "tokens": [1, 2, 3], "output_tokens": 6, "failure": None,
        },
        {
            **common, "id": "f", "warmup": False, "sent_ns": None, "stamps_ns": [],
            "tokens": [], "output_tokens": None, "failure": {"kind": "http 500", "message": "no\nmemory"},
        },
        {
            **common, "id": "s", "warmup": False, "sent_ns": 10 * MS, "stamps_ns": stamps(20, 30),
            "tokens": None, "output_tokens": 9, "failure": None,
        },
    ]  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    found = sorted(draw(st.lists(st.integers(0, 10**18), max_size=6)))
    if draw(st.booleans()):
        return Answer(found, draw(st.lists(st.integers(1, 9), min_size=len(found), max_size=len(found))))
    return Answer(found, None, usage=draw(st.integers(0, 9)))


@given(st.lists(st.one_of(answers(), st.just(Failure("http 500", "no"))), max_size=8))
def test_the_lines_of_a_file_have_all_that_the_metrics_need(brought: list[Answer | Failure]) -> None:
    before = settled(*brought)
    lines = [json.loads(json.dumps(line)) for line in before.objects()]

    def column(name: str) -> list[int]:
        return [NONE if line[name] is None else line[name] for line in lines]

    assert [line["id"] for line in lines] == before.ids
    assert [line["failure"] and Failure(**line["failure"]) for line in lines] == before.failures
    assert [line["warmup"] for line in lines] == before.warmup.tolist()
    assert column("due_ns") == before.due.tolist()
    assert column("sent_ns") == before.sent.tolist()
    assert column("end_ns") == before.end.tolist()
    assert column("input_tokens") == before.input_tokens.tolist()
    assert column("max_tokens") == before.max_tokens.tolist()
    assert column("output_tokens") == before.output_tokens.tolist()
    assert [0, *accumulate(len(line["stamps_ns"]) for line in lines)] == before.offsets.tolist()
    assert [stamp for line in lines for stamp in line["stamps_ns"]] == before.stamps.tolist()
    carried = [count for line in lines for count in line["tokens"] or [NONE] * len(line["stamps_ns"])]
    assert carried == before.tokens.tolist()


def test_requests_come_back_from_their_file() -> None:
    records = made(
        Row(due=1, sent=2, stamps=(5, 9), tokens=(1, 2), slot=3),
        Row(due=3, sent=None, end=4, failed="ConnectFailed"),
        Row(due=3, sent=4, stamps=(6,), tokens=None, output=4, unstreamed=2, warmup=True),
    )
    again = read_objects(json.loads(json.dumps(list(records.objects()))))
    for name in (
        "slot",
        "session",
        "turn",
        "due",
        "sent",
        "end",
        "input_tokens",
        "max_tokens",
        "output_tokens",
        "unstreamed_tokens",
        "offsets",
        "stamps",
    ):
        assert getattr(again, name).tolist() == getattr(records, name).tolist(), name
    assert again.tokens.tolist() == [1, 2, NONE]
    assert again.warmup.tolist() == [False, False, True]
    assert (again.ids, again.failures) == (records.ids, records.failures)


def test_what_another_tool_does_not_tell_is_unknown_and_in_no_metric() -> None:
    line: dict[str, Any] = dict.fromkeys(
        ("due_ns", "end_ns", "tokens", "input_tokens", "output_tokens", "max_tokens", "failure")
    )
    line |= {"id": "a", "warmup": False, "sent_ns": 1_000_000, "stamps_ns": [3_000_000]}
    told = load_point_metrics(read_objects([line]), None)
    assert told["time_to_first_token"]["p50"] == 2.0
    undefined = ("time_to_first_token_from_due", "dispatch_delay", "input_sequence_length", "output_sequence_length")
    for name in (*undefined, "output_token_throughput_per_user", "time_per_output_token", "request_latency_from_due"):
        assert told[name]["n"] == 0, name
