"""A load shared among processes: the same requests at the same times as one process asks, and one result."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.bench_records import Row, made
from tests.support.factories import write_tokenizer
from trtpipe.engines.errors import TrtpipeError, UsageError
from trtpipe.pipeline.bench.load.loads import Closed, Load, Open
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.load.workload import Workload
from trtpipe.pipeline.bench.loop.driver import Live
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.options import BenchOptions, Progress, Target
from trtpipe.pipeline.bench.results.records import NONE, joined
from trtpipe.pipeline.bench.results.report import BenchReport
from trtpipe.pipeline.bench.run import run
from trtpipe.pipeline.bench.workers.share import Share

pytestmark = [pytest.mark.real, pytest.mark.loopback, pytest.mark.process]


def options(known: MockServerProcess, tokenizer: Path, *loads: Load, workers: int = 2, **fields: Any) -> BenchOptions:
    target = Target(protocol="grpc", url=f"127.0.0.1:{known.grpc_port}", model="ensemble")
    work = Work(input_tokens="uniform:8,20", output_tokens="uniform:2,9")
    return BenchOptions(targets=(target,), tokenizer=tokenizer, loads=loads, work=work, workers=workers, **fields)


def measure(*arguments: Any, **fields: Any) -> BenchReport:
    return run(options(*arguments, **fields), None, None)


def test_an_open_loop_is_the_same_for_one_and_for_three(known: MockServerProcess, tokenizer: Path) -> None:
    load = Open(rate=100, requests=30)
    one, three = (measure(known, tokenizer, load, workers=workers).records[0] for workers in (1, 3))
    assert len(three) == len(one)
    order, again = np.argsort(one.due), np.argsort(three.due)
    # The same schedule to the nanosecond, and the same lengths at the same moments: nobody waited for another.
    assert (np.diff(one.due[order]) == np.diff(three.due[again])).all()
    assert (one.input_tokens[order] == three.input_tokens[again]).all()
    assert (one.max_tokens[order] == three.max_tokens[again]).all()
    assert (one.warmup[order] == three.warmup[again]).all()
    assert len(set(three.ids)) == len(three)
    assert np.abs(three.sent - three.due).max() < 1e9


def test_a_closed_loop_keeps_its_places_and_its_window(known: MockServerProcess, tokenizer: Path) -> None:
    report = measure(known, tokenizer, Closed(concurrency=5, requests=23))
    (result,), (records,) = report.results, report.records
    assert result.requests["measured"] == result.requests["succeeded"] == 23
    assert set(records.slot.tolist()) == {0, 1, 2, 3, 4}
    assert result.window_s is not None
    assert result.client["processes"] == 2
    assert result.client["in_flight"] == {"asked": 5, "reached": 5}
    assert report.to_json()["options"]["workers"] == 2
    assert [bool(one["prompt"]) and bool(one["answer"]) for one in result.samples] == [True] * 3
    # Measured lengths are those that one process draws, whoever asks them.
    alone = measure(known, tokenizer, Closed(concurrency=5, requests=23), workers=1).records[0]
    for column in ("input_tokens", "max_tokens"):
        mine, its = (getattr(one, column)[one.measured()] for one in (records, alone))
        assert sorted(mine.tolist()) == sorted(its.tolist())


def test_no_prompt_is_asked_twice(tokenizer: Path) -> None:
    from trtpipe.pipeline.bench.load.texts import load_tokenizer

    def prompts(share: Share) -> list[str]:
        asks = Workload(Work(input_tokens=12), load_tokenizer(tokenizer), 0).asks(share)
        return [next(asks).prompt for _ in range(20)]

    parts = [prompts(Share(index, 3)) for index in range(3)]
    whole = prompts(Share())
    assert [prompt for three in zip(*parts, strict=True) for prompt in three][:20] == whole
    assert len({prompt for part in parts for prompt in part}) == 60


@pytest.mark.parametrize(("total", "of", "counts"), [(10, 3, [4, 3, 3]), (2, 2, [1, 1]), (7, 1, [7])])
def test_workers_share_requests_evenly(total: int, of: int, counts: list[int]) -> None:
    assert [Share(index, of).count(total) for index in range(of)] == counts
    assert [len(list(Share(index, of).take(range(total)))) for index in range(of)] == counts


def test_records_are_put_one_after_the_other() -> None:
    first = made(Row(due=0, sent=1, stamps=(5, 6), tokens=(1, 1), max_tokens=2))
    other = made(
        Row(due=2, sent=3, stamps=(9,), tokens=(2,), max_tokens=2), Row(due=4, sent=5, end=8, failed="Timeout")
    )
    whole = joined([first, other])
    assert whole.offsets.tolist() == [0, 2, 3, 3]
    assert whole.stamps.tolist() == [*first.stamps.tolist(), *other.stamps.tolist()]
    assert whole.output_tokens.tolist() == [2, 2, NONE]
    assert [failure and failure.kind for failure in whole.failures] == [None, None, "Timeout"]
    assert joined([first]) is first


def test_what_all_do_is_shown_as_one(known: MockServerProcess, tokenizer: Path) -> None:
    seen: list[Progress] = []
    run(options(known, tokenizer, Closed(concurrency=4, duration_s=1.2)), None, seen.append)
    assert max(one.live.in_flight for one in seen) == 4
    assert seen[-1].live.done > max(one.live.done for one in seen[:2])


def test_sums_of_where_a_load_point_stands() -> None:
    parts = [
        Live(elapsed_s=1.0, warmed=1, done=2, failed=0, in_flight=3, responses=4, first_ns=[5]),
        Live(elapsed_s=2.0, warmed=10, done=20, failed=1, in_flight=30, responses=40, first_ns=[50, 60]),
    ]
    assert Live.sum(parts) == Live(
        elapsed_s=2.0, warmed=11, done=22, failed=1, in_flight=33, responses=44, first_ns=[5, 50, 60]
    )


def children() -> list[psutil.Process]:
    """Load processes that run: what has ended has no command."""
    out = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "trtpipe.pipeline.bench.workers.processes" in " ".join(child.cmdline()):
                out.append(child)
    return out


def once_under_way(action: Callable[[], None]) -> Callable[[Progress], None]:
    """A view of the run that does it when the first requests have ended."""
    done: list[Progress] = []

    def look(progress: Progress) -> None:
        if progress.live.done and not done:
            done.append(progress)
            action()

    return look


@pytest.mark.parametrize(
    ("ending", "status"),
    [(signal.SIGINT, "KeyboardInterrupt()"), (signal.SIGTERM, "Ended(143)"), (signal.SIGHUP, "Ended(129)")],
)
def test_an_interrupt_leaves_a_partial_report_of_all_and_no_process(
    known: MockServerProcess, tokenizer: Path, ending: signal.Signals, status: str
) -> None:
    interrupt = once_under_way(lambda: os.kill(os.getpid(), ending))
    report = run(options(known, tokenizer, Closed(concurrency=4, duration_s=60.0)), None, interrupt)
    assert report.interrupted
    assert repr(report.interruption()) == status
    assert report.results[0].interrupted
    assert report.results[0].requests["cut"] > 0
    assert len(report.records[0]) > 0
    # Whether this machine was busy meanwhile or not: nobody expects the load of a load point that was ended.
    assert "the load was not reached" not in str(report.verdict())
    assert children() == []


def test_a_load_process_that_dies_ends_the_load_point_with_what_the_others_have(
    known: MockServerProcess, tokenizer: Path
) -> None:
    kill = once_under_way(lambda: children()[0].kill())
    report = run(options(known, tokenizer, Closed(concurrency=4, duration_s=3600.0)), None, kill)
    assert re.match(r"load process \d ended: signal 9", str(report.broken))
    (result,) = report.results
    assert result.stopped == str(report.broken)
    assert not result.interrupted
    assert result.requests["measured"] > 0
    assert result.client["processes"] == 1
    assert children() == []


def test_a_load_process_that_no_longer_hears_is_ended(
    known: MockServerProcess, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtpipe.pipeline.bench.workers.processes.END_S", 0.5)

    def hang() -> None:
        children()[0].suspend()
        os.kill(os.getpid(), signal.SIGINT)

    report = run(options(known, tokenizer, Closed(concurrency=4, duration_s=3600.0)), None, once_under_way(hang))
    assert report.interrupted
    assert report.results[0].client["processes"] == 1
    assert re.match(r"load process \d ended: signal 9", str(report.broken))
    assert children() == []


def test_errors_of_a_load_process_are_those_of_one(known: MockServerProcess, tokenizer: Path, tmp_path: Path) -> None:
    def told(workers: int, **fields: Any) -> str:
        with pytest.raises(TrtpipeError) as caught:
            measure(known, tokenizer, Closed(concurrency=2), workers=workers, **fields)
        return f"{type(caught.value).__name__}: {caught.value}"

    (tmp_path / "tokenizer.json").write_text("{}")
    assert told(2) == told(1)
    write_tokenizer(tmp_path)
    known_port = known.grpc_port
    known.grpc_port = 1
    try:
        assert told(2) == told(1)
    finally:
        known.grpc_port = known_port


def test_more_workers_than_places(known: MockServerProcess, tokenizer: Path) -> None:
    with pytest.raises(UsageError, match="3 workers cannot share 2 in flight"):
        options(known, tokenizer, Closed(concurrency=2), workers=3)
    with pytest.raises(UsageError, match="workers is 0"):
        options(known, tokenizer, Closed(concurrency=2), workers=0)


def test_a_chat_template_goes_along(known: MockServerProcess, tokenizer: Path, tmp_path: Path) -> None:
    from trtpipe.engines.hf.chat_template import compile_template

    file = tmp_path / "conversations.json"
    turns = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hello"}]
    file.write_text(json.dumps([{"id": str(number), "conversations": turns} for number in range(3)]))
    render = compile_template(tmp_path, "{% for m in messages %}{{ m.content }} {% endfor %}")
    asked = BenchOptions(
        targets=options(known, tokenizer, Closed(concurrency=2)).targets,
        tokenizer=tokenizer,
        loads=(Closed(concurrency=2, requests=4),),
        work=Work(sharegpt=file),
        workers=2,
    )
    report = run(asked, render, None)
    assert report.results[0].requests["succeeded"] == 4
