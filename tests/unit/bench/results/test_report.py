"""A whole run against a server of known timing: what the report holds, and what it says when things go wrong."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from trtpipe.engines.errors import HostError, InputDataError, StageFailed, UsageError
from trtpipe.pipeline.bench.load.loads import Closed, Load, Open, Replay, Stage, Staged
from trtpipe.pipeline.bench.load.texts import load_tokenizer
from trtpipe.pipeline.bench.load.work import Sessions, SharedPrefix, Work
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.triton import TOKEN_ID
from trtpipe.pipeline.bench.options import BenchOptions, Progress, Target
from trtpipe.pipeline.bench.protocols.connect import Wiring
from trtpipe.pipeline.bench.results import verdict
from trtpipe.pipeline.bench.results.files import read_again, write_report
from trtpipe.pipeline.bench.results.report import SCHEMA, BenchReport
from trtpipe.pipeline.bench.results.slo import parse_objective
from trtpipe.pipeline.bench.run import run
from trtpipe.pipeline.bench.search import Found, Search

pytestmark = [pytest.mark.loopback, pytest.mark.process]

TWO = Closed(concurrency=2, requests=8)
SHARED = SharedPrefix(share=0.5, tokens=8)


def target(known: MockServerProcess, protocol: str, model: str = "ensemble") -> Target:
    url = f"http://127.0.0.1:{known.http_port}"
    urls = {"grpc": f"127.0.0.1:{known.grpc_port}", "http": url, "completions": f"{url}/v1", "chat": f"{url}/v1"}
    return Target(protocol=protocol, url=urls[protocol], model=model)


def measure(
    known: MockServerProcess, tokenizer: Path, *protocols: str, loads: tuple[Load, ...] = (TWO,), **fields: Any
) -> BenchReport:
    work = fields.pop("work", Work(input_tokens=8, output_tokens=6))
    targets = tuple(target(known, protocol) for protocol in protocols or ("grpc",))
    return run(BenchOptions(targets=targets, tokenizer=tokenizer, loads=loads, work=work, **fields), None, None)


def test_a_run_measures_every_protocol_under_every_load(known: MockServerProcess, tokenizer: Path) -> None:
    protocols = ("grpc", "http", "completions", "chat")
    loads = (TWO, Open(rate=200, requests=10, arrivals="constant"))
    report = measure(known, tokenizer, *protocols, loads=loads, repeat=2)
    asked = [(p, load, n) for p in protocols for load in ("2 in flight", "200 requests/s") for n in (0, 1)]
    assert [(one.protocol, one.label, one.repeat) for one in report.results] == asked
    for result, records in zip(report.results, report.records, strict=True):
        assert result.errors == []
        assert (
            result.requests["succeeded"]
            == result.requests["measured"]
            == (8 if result.repeat >= 0 and result.load["kind"] == "closed" else 10)
        )
        assert result.wrong_length == 0
        source = {"grpc": "server", "http": "server"}.get(result.protocol, "usage")
        assert result.token_count_source == source
        assert (records.output_tokens[records.good()] == 6).all()
        # Each response carried one token, whoever counted: the gaps are exact.
        assert result.metrics["inter_token_latency"]["n"] == result.requests["succeeded"] * 5
        first = result.metrics["time_to_first_token"]["min"]
        assert first >= 10.0, "the server answered before it was due"
        assert len(set(records.ids)) == len(records)
        assert len(result.samples) == 3
        assert {one["id"] for one in result.samples} <= {
            name for name, warmup in zip(records.ids, records.warmup.tolist(), strict=True) if not warmup
        }
        assert {one["answer"] for one in result.samples} == {" the" * 6}
        assert len({one["prompt"] for one in result.samples}) == 3
        assert all(one["prompt"] for one in result.samples)


def test_samples_of_a_model_that_answers_in_ids_are_text(known: MockServerProcess, tokenizer: Path) -> None:
    work = Work(input_tokens=8, output_tokens=6)
    engine = (target(known, "grpc", "tensorrt_llm"),)
    report = run(BenchOptions(targets=engine, tokenizer=tokenizer, loads=(TWO,), work=work), None, None)
    answer = load_tokenizer(tokenizer).decode([TOKEN_ID] * 6)
    assert answer
    assert [one["answer"] for one in report.results[0].samples] == [answer] * 3


def test_the_file_has_all_it_takes_to_judge_a_run_and_to_repeat_it(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path
) -> None:
    report = measure(known, tokenizer, objectives=(parse_objective("ttft:10s"),), seed=7)
    places = write_report(report, tmp_path / "out" / "report.json")
    assert [place.name for place in places] == ["report.requests.jsonl", "report.csv", "report.html", "report.json"]
    value = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (value["schema"], value["partial"], value["seed"]) == (SCHEMA, False, 7)
    assert value["options"]["work"]["input_tokens"] == 8
    (load,) = value["options"]["loads"]
    assert load == {"concurrency": 2, "requests": 8, "duration_s": None, "warmup": 1, "cooldown": True, "ramp_s": 0.0}
    assert value["endpoints"][0]["model"] == "ensemble"
    assert set(value["client"]) >= {"trtpipe", "uvloop", "tokenizers"}
    assert value["host"]["usable_cores"] >= 1
    page = (tmp_path / "out" / "report.html").read_text()
    for name in ("report.json", "report.csv", "report.requests.jsonl"):
        assert f'<a href="{name}">{name}</a>' in page
    (load_point,) = value["levels"]
    assert set(load_point["metrics"]) <= set(value["metrics"])
    assert load_point["slo"]["met"] is True
    assert load_point["slo"]["attainment"] == 1.0
    requests = [json.loads(line) for line in (tmp_path / "out" / "report.requests.jsonl").read_text().splitlines()]
    assert len(requests) == load_point["requests"]["measured"] + load_point["requests"]["warmup"]
    assert all(one["sent_ns"] <= one["stamps_ns"][0] <= one["end_ns"] for one in requests)
    assert {sum(one["tokens"]) for one in requests if not one["warmup"]} == {6}
    table = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    ttft = next(row for row in table if row["metric"] == "time_to_first_token")
    assert float(ttft["p99"]) == load_point["metrics"]["time_to_first_token"]["p99"]


EVERYTHING: dict[str, Any] = {
    "objectives": (parse_objective("ttft:p99<10s"),),
    "wiring": Wiring(connections=2),
    "seed": 7,
    "repeat": 2,
    "timeout_s": 20.0,
}


@pytest.mark.parametrize(
    ("loads", "work"),
    [
        ((TWO, Open(rate=5, requests=3, cooldown_s=0.5)), Work(input_tokens="normal:20,3", shared_prefix=SHARED)),
        ((Closed(concurrency=1, duration_s=0.5),), Work(sessions=Sessions(turns=2, think_s="uniform:0,0.1"))),
        (
            (Staged(stages=(Stage(duration_s=1, start=1, end=5),)),),
            Work(options={"temperature": 0.5}, ignore_eos=False),
        ),
        ((Replay(trace=Path("trace.jsonl"), speedup=2.0),), Work(trace=Path("trace.jsonl"))),
        ((TWO,), Work(prompts=Path("p.txt"), shuffle=True, folder=Path("there"))),
    ],
)
def test_options_come_back_from_the_report(loads: tuple[Load, ...], work: Work, tokenizer: Path) -> None:
    targets = (Target(protocol="chat", url="http://host:9000/v1", model="m", metrics_url="http://host/metrics"),)
    search = Search(goal="max-rate", load=Open(rate=2, duration_s=9, arrivals="gamma", burstiness=0.5))
    options = BenchOptions(targets=targets, tokenizer=tokenizer, loads=loads, work=work, search=search, **EVERYTHING)
    value = json.loads(json.dumps(options.to_json()))
    read = BenchOptions.from_json(value, "report.json")
    # Where files are is told in full: the report may be read from anywhere.
    assert read.to_json() == value
    assert read.loads == tuple(
        replace(load, trace=load.trace.absolute()) if isinstance(load, Replay) else load for load in loads
    )
    assert (read.targets, read.search, read.objectives) == (options.targets, search, options.objectives)
    assert read.work.files == work.files
    value["loads"][0]["wrong"] = None
    value["seed"] = "seven"
    with pytest.raises(InputDataError, match=r"report.json does not say how it was measured: seed"):
        BenchOptions.from_json(value, "report.json")


def test_a_key_is_in_no_report(tokenizer: Path) -> None:
    targets = (Target(protocol="chat", url="http://host:9000/v1", model="m"),)
    wiring = Wiring(headers={"Authorization": "Bearer secret"})
    assert "secret" not in json.dumps(BenchOptions(targets=targets, tokenizer=tokenizer, wiring=wiring).to_json())


def test_a_report_is_enough_to_measure_once_more(known: MockServerProcess, tokenizer: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nworld\nhello world\n", encoding="utf-8")
    load = Open(rate=100, requests=12)
    first = measure(known, tokenizer, loads=(load,), work=Work(prompts=prompts, output_tokens=4, shuffle=True), seed=3)
    assert first.to_json()["distinct_prompts"] == 3
    assert str(first.said_again()).startswith("3 different prompts were asked ")
    assert first.results[0].samples == (), "a user's prompts are private"
    place = tmp_path / "report.json"
    write_report(first, place)
    assert "hello" not in place.read_text() + place.with_suffix(".html").read_text()
    second = run(read_again(place), None, None)
    for column in ("due", "input_tokens", "max_tokens"):
        both = (first.records[0], second.records[0])
        one, other = (getattr(records, column)[np.argsort(records.due)] for records in both)
        if column == "due":
            one, other = np.diff(one), np.diff(other)
        assert list(one) == list(other)
    prompts.write_text("hello\n", encoding="utf-8")
    with pytest.raises(InputDataError, match=r"prompts.txt is not what it was in .*report.json; bring it back"):
        read_again(place)
    prompts.unlink()
    with pytest.raises(
        InputDataError, match=r"prompts.txt cannot be read: No such file or directory; bring it back, or"
    ):
        read_again(place)


def test_samples_of_a_user_s_prompts_are_kept_where_that_is_asked_for(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path
) -> None:
    prompts, place = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text("hello <world>\n", encoding="utf-8")
    work = Work(prompts=prompts, output_tokens=2)
    write_report(measure(known, tokenizer, work=work, log_samples=True), place)
    found = json.loads(place.read_text())["levels"][0]["samples"]
    assert {(one["prompt"], one["answer"]) for one in found} == {("hello <world>", " the the")}
    assert "hello &lt;world&gt;" in place.with_suffix(".html").read_text()
    again = read_again(tmp_path, tokenizer.parent)
    assert again.tokenizer == tokenizer
    assert len(run(again, None, None).results[0].samples) == 3
    # `trtpipe gc` has deleted the tokenizer, and a running server has the same.
    told = json.loads(place.read_text())
    told["options"]["tokenizer"] = str(tmp_path / "gone" / "tokenizer.json")
    place.write_text(json.dumps(told))
    assert read_again(tmp_path, others=[tmp_path / "none", prompts, tokenizer]).tokenizer == tokenizer
    with pytest.raises(
        InputDataError, match=r"the tokenizer of .* is gone: it was .*gone/tokenizer.json; give --token"
    ):
        read_again(tmp_path, others=[prompts])
    assert measure(known, tokenizer, log_samples=False).results[0].samples == ()


@pytest.mark.parametrize(
    ("text", "telling"),
    [("{", "cannot be read"), ("[]", "not a report"), ('{"schema": "trtpipe.bench/1"}', "trtpipe.bench/2")],
)
def test_what_is_no_report(tmp_path: Path, text: str, telling: str) -> None:
    (tmp_path / "report.json").write_text(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputDataError, match=telling):
        read_again(tmp_path / "report.json")
    with pytest.raises(UsageError, match=r"folder .*empty has no report.json; name the file"):
        read_again(tmp_path / "empty")


@pytest.fixture
def excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is never the limit: this machine may be busy with other things."""
    for name, value in (("LATENESS_MS", 1e6), ("DISPATCH_MS", 1e6), ("CPU_SHARE", 100.0), ("RATE_SHARE", 0.0)):
        monkeypatch.setattr(verdict, name, value)


@pytest.mark.clock
@pytest.mark.usefixtures("excused")
@pytest.mark.parametrize("goal", ["max-goodput", pytest.param("max-rate", marks=pytest.mark.slow)])
def test_a_search_finds_what_the_server_can_begin(tokenizer: Path, tmp_path: Path, goal: str) -> None:
    """It begins 100 requests a second; above that they wait ever longer for one another. A machine that does something
    else for a moment makes it less: then it is looked once more."""
    server = MockServerProcess.start(Timing(ttft_s=0.01, itl_s=0.001, prefill_s=0.01), tmp_path / "truth.jsonl")
    try:
        search_finds(goal, server, tokenizer)
    finally:
        server.stop()


def search_finds(goal: str, server: MockServerProcess, tokenizer: Path) -> None:
    search = Search(goal=goal, load=Open(rate=1, duration_s=0.6, arrivals="constant"), known=False, precision=0.15)
    for _ in range(4):
        report = measure(server, tokenizer, search=search, objectives=(parse_objective("ttft:p90<40ms"),))
        (one,) = report.searches
        if one.found.ended is not None or (one.found.rate or 0) < 80:
            continue
        assert one.found.rate is not None
        assert one.found.rate <= 125
        value = report.to_json()
        assert value["searches"][0]["rate"] == one.found.rate
        # Where it began, and every run, are load points of the report.
        assert value["levels"][0]["label"] == "1 in flight"
        assert len(value["levels"]) == 1 + one.found.runs
        assert one.said().startswith(f"grpc: {goal} {one.found.rate:g} requests/s (")
        return
    pytest.fail(f"{goal}: {one.found}")


@pytest.mark.usefixtures("excused")
def test_a_search_ends_where_the_client_is_the_limit(
    known: MockServerProcess, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "CPU_SHARE", 0.0)
    search = Search(goal="max-rate", load=Open(rate=20, duration_s=0.2), repeats=2)
    report = measure(known, tokenizer, search=search, objectives=(parse_objective("ttft:p99<10s"),))
    found = report.searches[0].found
    assert found.rate is None
    assert (found.ended or "").startswith("at 20 requests/s the client was the limit: the client's core")
    assert len(report.results) == 2  # not ended by one busy moment


def test_reports_whose_names_have_dots_do_not_share_files(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path
) -> None:
    report = measure(known, tokenizer, seed=7)
    first, second = (write_report(report, tmp_path / name) for name in ("llama-3.1", "llama-3.2"))
    assert [place.name for place in first] == [
        "llama-3.1.requests.jsonl", "llama-3.1.csv", "llama-3.1.html", "llama-3.1"
    ]  # fmt: skip
    assert not {*first} & {*second}


@pytest.mark.usefixtures("excused")
def test_a_search_that_comes_to_a_rate_at_which_nothing_is_due(known: MockServerProcess, tokenizer: Path) -> None:
    search = Search(goal="max-rate", load=Open(rate=1, duration_s=0.2), known=True, repeats=1)
    report = measure(known, tokenizer, search=search, objectives=(parse_objective("ttft:p99<10s"),))
    found = report.searches[0].found
    assert (found.rate, found.ended) == (None, "at 1 requests/s no request is due in the measured part")


def test_a_search_without_an_objective_looks_for_nothing(known: MockServerProcess, tokenizer: Path) -> None:
    with pytest.raises(UsageError, match="nothing says what a load has to meet"):
        measure(known, tokenizer, search=Search(goal="max-rate", load=Open(rate=1, duration_s=1)))


@pytest.mark.usefixtures("excused")
def test_a_search_that_the_first_request_ends(known: MockServerProcess, tokenizer: Path) -> None:
    search = Search(goal="max-rate", load=Open(rate=1, duration_s=0.2), known=False)
    report = measure(known, tokenizer, search=search, objectives=(parse_objective("ttft:p99<1ms"),))
    why = "one request at a time does not meet the objectives"
    assert (report.searches[0].found.rate, report.searches[0].found.ended) == (None, why)
    assert {result.label for result in report.results} == {"1 in flight"}


@pytest.mark.usefixtures("excused")
def test_a_search_with_conversations_counts_conversations(
    known: MockServerProcess, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []

    async def find(search: Search, start: float, *rest: object) -> Found:
        begun.append(start)
        return Found(rate=start)

    monkeypatch.setattr("trtpipe.pipeline.bench.run.find", find)
    work = Work(input_tokens=8, output_tokens=2, sessions=Sessions(turns=4))
    search = Search(goal="max-rate", load=Open(rate=1, duration_s=0.2), known=False)
    report = measure(known, tokenizer, search=search, objectives=(parse_objective("ttft:p99<10s"),), work=work)
    # It begins at the conversations of one client, a quarter of the requests.
    throughput = report.results[0].metrics["request_throughput"]["value"]
    assert begun == [pytest.approx(throughput / 4)]
    (found,) = report.searches
    assert found.said().startswith(f"grpc: max-rate {begun[0]:g} conversations/s (")
    assert found.to_json()["unit"] == "conversations/s"


def test_the_rate_of_a_load_of_conversations_is_told_in_conversations(
    known: MockServerProcess, tokenizer: Path
) -> None:
    work = Work(input_tokens=8, output_tokens=2, sessions=Sessions(turns=2))
    stages = Staged(stages=(Stage(duration_s=0.2, start=20, end=20),))
    seen: list[Progress] = []
    options = BenchOptions(
        targets=(target(known, "grpc"),), tokenizer=tokenizer, loads=(Open(rate=20, duration_s=0.2), stages), work=work,
    )  # fmt: skip
    report = run(options, None, seen.append)
    labels = ["20 conversations/s", "1 stages to 20 conversations/s"]
    assert [result.label for result in report.results] == labels
    assert list(dict.fromkeys(one.label for one in seen)) == labels


@pytest.mark.usefixtures("excused")
def test_one_worker_of_several_sends_one_request_at_a_time(known: MockServerProcess, tokenizer: Path) -> None:
    search = Search(goal="max-rate", load=Open(rate=1, duration_s=0.2), known=False)
    slo = (parse_objective("ttft:p99<1ms"),)
    seen: list[Progress] = []
    options = BenchOptions(
        targets=(target(known, "grpc"),), tokenizer=tokenizer, loads=(Open(rate=1, duration_s=0.2),), search=search,
        work=Work(input_tokens=8, output_tokens=2), objectives=slo, workers=3,
    )  # fmt: skip
    report = run(options, None, seen.append)
    (result,) = report.results
    assert (result.label, result.requests["measured"]) == ("1 in flight", 8)
    assert result.client["in_flight"] == {"asked": 1, "reached": 1}
    assert {one.total for one in seen} == {8}
    assert report.searches[0].found.ended == "one request at a time does not meet the objectives"


def test_failures_are_counted_by_class_and_averaged_into_nothing(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    faults = ["!error 2 out of memory", "!cut 1", "!empty", "!garbage 1", "!short 3"]
    # Not the first, or the run would not begin.
    prompts.write_text("\n".join(["hello", "world", *faults]), encoding="utf-8")
    report = measure(known, tokenizer, "http", loads=(Closed(concurrency=1, requests=14, warmup=0),),
                     work=Work(prompts=prompts, output_tokens=6))  # fmt: skip
    (result,) = report.results
    assert result.requests["failed"] == 10
    assert {entry["kind"]: entry["count"] for entry in result.errors} == {
        "ServerError": 2, "ConnectionLost": 2, "EmptyOutput": 2, "MalformedResponse": 2, "WrongLength": 2,
    }  # fmt: skip
    assert report.failures() == {entry["kind"]: entry["count"] for entry in result.errors}
    assert next(entry for entry in result.errors if entry["kind"] == "WrongLength")["messages"] == [
        "3 tokens, not 6: where a server ends answers itself, ask for --natural-end"
    ]
    assert next(entry for entry in result.errors if entry["kind"] == "ServerError")["messages"] == ["out of memory"]
    assert result.metrics["time_to_first_token"]["n"] == 4
    assert result.metrics["error_rate"]["value"] == pytest.approx(10 / 14)


def test_answers_that_may_end_where_they_end_have_no_wrong_length(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n!short 3\n", encoding="utf-8")
    report = measure(known, tokenizer, loads=(Closed(concurrency=1, requests=4, warmup=0),),
                     work=Work(prompts=prompts, output_tokens=6, ignore_eos=False))  # fmt: skip
    (result,) = report.results
    assert (result.requests["succeeded"], result.wrong_length) == (4, 2)


def test_a_first_request_that_fails_ends_the_run(known: MockServerProcess, tokenizer: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("!status 429\n", encoding="utf-8")
    with pytest.raises(StageFailed, match=r"the first request over http failed: http 429: .*; see the server's log"):
        measure(known, tokenizer, "http", work=Work(prompts=prompts, output_tokens=6))


@pytest.mark.parametrize("protocol", ["grpc", "http", "chat"])
def test_a_stream_that_stalls_is_given_up_and_the_place_goes_on(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path, protocol: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nworld\n!stall 2\n", encoding="utf-8")
    report = measure(known, tokenizer, protocol, loads=(Closed(concurrency=1, requests=4, warmup=0),),
                     work=Work(prompts=prompts, output_tokens=6), token_timeout_s=0.5)  # fmt: skip
    (result,) = report.results
    assert [(entry["kind"], entry["count"]) for entry in result.errors] == [("Stalled", 1)]
    assert result.requests["succeeded"] == 3


def test_a_server_that_dies_ends_the_load_point_and_says_so(tokenizer: Path, tmp_path: Path) -> None:
    server = MockServerProcess.start(Timing(ttft_s=0.01, itl_s=0.002), tmp_path / "truth.jsonl")
    threading.Timer(1.0, server.stop).start()
    report = measure(server, tokenizer, loads=(Closed(concurrency=2, duration_s=120), TWO))
    (result,) = report.results  # of the second load_point there is none, which costs the first nothing
    assert report.partial
    assert isinstance(report.broken, HostError)
    *_, written = write_report(report, tmp_path / "report.json")
    said = json.loads(written.read_text(encoding="utf-8"))
    assert (said["partial"], said["broken"]) == (True, str(report.broken))
    assert "Triton takes no further connection" in said["broken"]
    assert "requests in a row failed" in str(result.stopped)
    assert {entry["kind"] for entry in result.errors} <= {"ConnectionLost", "ConnectFailed"}
    with pytest.raises(HostError, match="no Triton answers over gRPC"):
        measure(server, tokenizer)


def test_each_load_point_is_told_when_it_begins_and_when_it_has_ended(
    known: MockServerProcess, tokenizer: Path
) -> None:
    seen: list[Progress] = []
    options = BenchOptions(
        targets=(target(known, "grpc"),), tokenizer=tokenizer, work=Work(input_tokens=8, output_tokens=6),
        loads=(Closed(concurrency=2, requests=9), Open(rate=50, duration_s=0.2)),
    )  # fmt: skip
    report = run(options, None, seen.append)
    told = [one for one in seen if one.state != "running"]
    assert [(one.label, one.state, one.total, one.live.failed) for one in told] == [
        ("2 in flight", "begun", 9, 0), ("2 in flight", "ended", 9, 0),
        ("50 requests/s", "begun", None, 0), ("50 requests/s", "ended", None, 0),
    ]  # fmt: skip
    assert [one.live.done for one in told] == [0, 9, 0, report.results[1].requests["succeeded"]]
    assert 0.2 < told[3].live.elapsed_s < 30


def test_ctrl_c_keeps_what_was_measured_and_says_so(known: MockServerProcess, tokenizer: Path) -> None:
    seen: list[Progress] = []

    def progress(at: Progress) -> None:
        seen.append(at)
        if at.live.done >= 2:
            os.kill(os.getpid(), signal.SIGINT)

    options = BenchOptions(
        targets=(target(known, "grpc"), target(known, "http")), tokenizer=tokenizer,
        loads=(Closed(concurrency=2, duration_s=120),), work=Work(input_tokens=8, output_tokens=6),
    )  # fmt: skip
    report = run(options, None, progress)
    assert report.interrupted
    assert report.partial
    (result,) = report.results
    assert result.interrupted
    assert result.requests["succeeded"] >= 2
    assert (seen[0].protocol, seen[0].label, seen[0].total) == ("grpc", "2 in flight", None)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_ctrl_c_does_not_wait_for_a_first_request_that_stalls(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path, protocol: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("!stall 0\n", encoding="utf-8")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    report = measure(known, tokenizer, protocol, work=Work(prompts=prompts, output_tokens=6), token_timeout_s=60)
    assert time.monotonic() - began < 30
    assert (report.interrupted, report.partial, report.results) == (True, True, [])
    assert len(write_report(report, tmp_path / "report.json")) == 4


def test_of_a_report_that_cannot_be_written_all_files_stay_as_they_were(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    old = tmp_path / "out" / "report.requests.jsonl"
    old.write_text("of an earlier run", encoding="utf-8")
    report = measure(known, tokenizer)
    # Room for some of its files, but not for all.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, limits[1]))
    try:
        with pytest.raises(HostError, match=r"report .*report\.json cannot be written: File too large; give another"):
            write_report(report, tmp_path / "out" / "report.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [old.name]
    assert old.read_text(encoding="utf-8") == "of an earlier run"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"targets": ()}, "there is nothing to measure"),
        ({"loads": ()}, "there is no load"),
        ({"repeat": 0}, "repeat is 0"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"wiring": Wiring(transport="triton")}, "unknown transport 'triton'; did you mean 'tritonclient'?"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"targets": (Target(protocol="grpc", url="h:1", model="m"),), "tokenizer": tmp_path}
    with pytest.raises(UsageError) as caught:
        BenchOptions(**{**given, **changes})
    assert says in str(caught.value)


def test_an_unknown_protocol_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown protocol 'htp'; did you mean 'http'\?"):
        Target(protocol="htp", url="", model="m")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_no_loop_runs_is_not_lost(
    known: MockServerProcess, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Nor is the handler of SIGTERM, which ends what has been started around the measurement."""

    class Loop:
        def __init__(self) -> None:
            self.own = make()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.own, name)

        def run_until_complete(self, work: Any) -> Any:
            if when == "before":
                signal.raise_signal(signal.SIGINT)
            self.own.run_until_complete(work)
            if when == "after":
                signal.raise_signal(signal.SIGINT)

    make = uvloop.new_event_loop
    monkeypatch.setattr(uvloop, "new_event_loop", Loop)
    told: list[int] = []
    handlers = [signal.getsignal(signal.SIGINT), lambda number, frame: told.append(number)]
    kept = signal.signal(signal.SIGTERM, handlers[1])
    try:
        report = measure(known, tokenizer, loads=(Closed(concurrency=1, requests=1),))
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert report.interrupted
    assert len(report.results) == (when == "after")
