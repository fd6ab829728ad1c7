"""What `bench` and `compare` print: progress, load points side by side, a comparison."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.bench_records import Row, made
from tests.support.bench_reports import LATE, lines, load_point, saved
from trtpipe.pipeline.bench.compare.comparison import compare
from trtpipe.pipeline.bench.load.loads import Open
from trtpipe.pipeline.bench.loop.driver import NOTHING, Client, Live
from trtpipe.pipeline.bench.options import Progress
from trtpipe.pipeline.bench.results.metric import rounded
from trtpipe.pipeline.bench.results.report import BenchReport, LoadPointResult, SearchResult
from trtpipe.pipeline.bench.results.verdict import examine
from trtpipe.pipeline.bench.search import Found, Search
from trtpipe.pipeline.cli import console_bench
from trtpipe.pipeline.cli.app import app


def result(label: str = "1 in flight", **changes: Any) -> LoadPointResult:
    return LoadPointResult(
        **{**load_point(lines(4, seed=1)), "client": {"clock_step_ms": 0.0}, "label": label, **changes}
    )


def measured(*results: LoadPointResult) -> BenchReport:
    return BenchReport(command=[], options={}, tokenizer_sha256=None, started="", results=list(results))


def at(state: str = "running", total: int | None = 20, **changes: Any) -> Progress:
    live: dict[str, Any] = {
        "elapsed_s": 10.0,
        "warmed": 5,
        "done": 20,
        "failed": 0,
        "in_flight": 4,
        "responses": 640,
        "first_ns": [],
    }
    return Progress(protocol="grpc", label="4 in flight", total=total, live=Live(**live | changes), state=state)


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in (("COLUMNS", str(width)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


# Progress


def test_where_stderr_is_no_terminal_a_line_is_told_as_a_load_point_begins_and_ends_and_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with console_bench.progress() as progress:
        progress(at("begun"))
        for now[0] in (1.0, 14.9, 15.1, 16.0):
            progress(at(done=round(now[0])))
        progress(at("ended", elapsed_s=31.26, failed=1))
    assert capsys.readouterr().err.splitlines() == [
        "grpc, 4 in flight: begins, 20 requests",
        "grpc, 4 in flight: 15 of 20 done, 3 s left, 4 in flight, 2.0 requests/s, 64 responses/s",
        "grpc, 4 in flight: 20 requests in 31.3 s, 1 failed",
    ]


def test_on_a_terminal_a_load_point_that_has_ended_keeps_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    with console_bench.progress() as progress:
        progress(at("begun"))
        progress(at(done=3))
        progress(at("ended"))
    shown = err.getvalue()
    assert shown.endswith("\r\x1b[Kgrpc, 4 in flight: 20 requests in 10.0 s, 0 failed\n\r\x1b[K")
    assert "3 of 20 done" in shown
    assert shown.count("\n") == 1


def test_the_line_of_a_running_load_point_has_as_many_parts_as_fit() -> None:
    said = "4 in flight, 2.5 requests/s, 64 responses/s"
    line = console_bench.running_line
    assert line(at(total=80)) == f"grpc, 4 in flight: 20 of 80 done, 30 s left, {said}"
    assert line(at(total=None, left_s=12.3)) == f"grpc, 4 in flight: 20 done, 12 s left, {said}"
    first = [number * 1_000_000 for number in range(1, 101)]
    whole = f"grpc, 4 in flight: 20 done, 2 failed, first byte p50/p99 51/100 ms, {said}"
    assert line(at(total=None, first_ns=first, failed=2)) == whole
    assert line(at(total=None, first_ns=first, failed=2), 70) == whole[: whole.index(", 4 in flight, ")]
    assert line(at(total=None), 12) == "grpc, 4 in f"


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(0.15, 1, "0.15"), (0.0421, 1, "0.042"), (0.996, 1, "1.00"), (0.0, 1, "0.0"), (1.26, 1, "1.3"), (64.4, 0, "64"),
     (0.37, 0, "0.37"), (-0.15, 1, "-0.15"), (float("nan"), 1, "nan")],
)  # fmt: skip
def test_a_figure_below_1_has_two_significant_digits(value: float, digits: int, shown: str) -> None:
    assert rounded(value, digits) == shown


def test_a_rate_below_1_is_no_round_0(capsys: pytest.CaptureFixture[str]) -> None:
    slow = at(total=None, elapsed_s=100.0, warmed=0, done=15, responses=37)
    assert console_bench.running_line(slow).endswith("4 in flight, 0.15 requests/s, 0.37 responses/s")
    console_bench.report(measured(result(metrics={"request_throughput": {"value": 0.15}})))
    assert re.search(r"^requests/s +0\.15$", capsys.readouterr().out, re.MULTILINE)


def test_prompts_that_are_being_made_are_counted() -> None:
    making = Progress(
        protocol="grpc",
        label="9 requests/s",
        total=None,
        live=Live.sum([NOTHING, Live(**{**vars(NOTHING), "made": 120_000, "to_make": 300_000})]),
    )
    assert console_bench.running_line(making) == "grpc, 9 requests/s: making prompts, 120,000 of 300,000"


# Load points


def test_load_points_are_side_by_side_and_their_statistics_named(capsys: pytest.CaptureFixture[str]) -> None:
    console_bench.report(measured(result("1 in flight"), result("16 in flight", verdict=LATE)))
    told = capsys.readouterr().out.splitlines()
    assert [line.split() for line in told[:3]] == [["grpc", "grpc"], ["1", "in", "16", "in"], ["flight", "flight"]]
    names = [line[:14].strip() for line in told[3:]]
    assert names[:5] == ["requests", "failed", "TTFT p50 ms", "TTFT p90 ms", "TTFT p99 ms"]
    assert told[-1].split() == ["verdict", "INVALID"]
    assert all(line == line.rstrip() for line in told)


@pytest.mark.parametrize(("width", "blocks"), [(100, 1), (80, 1), (40, 2)])
def test_a_table_fits_its_terminal(
    width: int, blocks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(monkeypatch, width)
    console_bench.report(measured(*(result(f"{count} in flight") for count in (1, 4, 16, 32, 64, 128))))
    told = capsys.readouterr().out.splitlines()
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in told) <= width
    assert sum(line.startswith("TTFT p50 ms") for line in told) == blocks


def test_what_failed_is_coloured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(monkeypatch, 80)
    slo = {"met": False, "attainment": 0.5, "objectives": []}
    console_bench.report(measured(result(verdict=LATE, slo=slo)))
    told = capsys.readouterr().out
    assert "\x1b[31m   missed\x1b[0m" in told
    assert "\x1b[1;31m  INVALID\x1b[0m" in told


def test_a_search_for_goodput_shows_shares_and_load_points_that_miss_an_objective_of_one_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    late = {"metric": "time_to_first_token", "statistic": "p99", "limit": 200.0, "value": 300.0, "met": False}
    slow = {"metric": "output_token_throughput", "statistic": "value", "limit": 1000.0, "value": 9.0, "met": False}
    fast = {**slow, "value": 1001.0, "met": True}
    report = measured(
        *(result(slo={"met": False, "attainment": 0.95, "objectives": [late, row]}) for row in (fast, slow))
    )
    search = Search(goal="max-goodput", load=Open(rate=1.0, duration_s=1.0))
    report.searches.append(SearchResult(protocol="grpc", search=search, found=Found()))
    console_bench.report(report)
    assert re.search(r"^SLO +95\.0% +missed$", capsys.readouterr().out, re.MULTILINE)


# A comparison


def test_a_comparison_fits_80_columns_without_trailing_blanks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        saved(tmp_path / name, lines(50, seed=seed, ttft_ms=ttft))
        for seed, (name, ttft) in enumerate((("a", 50), ("b", 100)))
    ]
    console_bench.comparison(compare(paths), as_json=False)
    told = capsys.readouterr().out.splitlines()
    table = told[told.index("") + 1 :]
    table = table[: table.index("")]
    assert table[0].split() == ["A", "B", "B/A", "95%", "interval", "B", "is"]
    assert table[1] == "grpc, 1 in flight"
    assert table[2].split()[:3] == ["TTFT", "p50", "ms"]
    assert table[2].endswith("  worse")
    assert all(line == line.rstrip() and len(line) <= 80 for line in table)


# Where the report goes

CHECKED: dict[str, Any] = {"ttft_p50_ms": 5.0, "asked": 1}
BENCH = ("bench", "--grpc-url", "127.0.0.1:1", "--protocol", "grpc", "--tokenizer", __file__)


def test_a_run_has_a_folder_of_its_own_and_prints_its_report_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check = examine(made(Row(stamps=(5,))), (Client(lateness_ns=[0], cpu_ns=1, wall_ns=9, peak=1),), **CHECKED)
    monkeypatch.setattr("trtpipe.pipeline.bench.run.run", lambda *_: measured(result(client=check.figures)))
    for words in (BENCH, (*BENCH, "--json")):
        typer.main.get_command(app).main(list(words), standalone_mode=False)
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :]) == json.loads(Path("reports/latest/report.json").read_text())
    assert len([folder for folder in Path("reports").iterdir() if not folder.is_symlink()]) == 2


def test_a_run_that_is_interrupted_before_anything_was_measured_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("report.json").write_text("an earlier one")
    nothing = measured(result(requests={"measured": 0, "succeeded": 0, "failed": 0}))
    nothing.interrupted = True
    monkeypatch.setattr("trtpipe.pipeline.bench.run.run", lambda *_: nothing)
    for words in (BENCH, (*BENCH, "--report", "report.json")):
        assert typer.main.get_command(app).main(list(words), standalone_mode=False) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert Path("report.json").read_text() == "an earlier one"
