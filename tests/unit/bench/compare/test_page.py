"""The page of a comparison: several reports in one chart, ratios and verdicts, and what differs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench_reports import LATE, lines, load_point, report, save, saved
from tests.unit.bench.compare.test_importers import AIPERF, VLLM, VLLM_CHAT
from tests.unit.bench.results.test_page import Page, figures, marks
from trtpipe.pipeline.bench.compare.comparison import compare
from trtpipe.pipeline.bench.compare.importers import read_report
from trtpipe.pipeline.bench.compare.page import render
from trtpipe.pipeline.bench.results.page.curves import Run, against_latency, against_load
from trtpipe.pipeline.cli import app as cli


def h100(**changes: Any) -> dict[str, Any]:
    return {"target": "m.h100.fp8", "engine": {"gpu": "h100", "quant_algo": "FP8", **changes}}


def test_the_command_draws_several_reports_in_one_chart(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [[lines(40, seed=seed + ttft, ttft_ms=ttft * (1 + seed)) for seed in range(3)] for ttft in (50, 100)]
    paths = [
        saved(in_folder / f"{at}", *load_points, **h100(tp_size=1 + at, pp_size=1))
        for at, load_points in enumerate(runs)
    ]
    monkeypatch.setattr(sys, "argv", ["trtpipe", "compare", *map(str, paths), "--html", str(paths[1])])
    before = paths[1].read_bytes()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, paths[1].read_bytes()) == (2, before)
    assert "is read by the same command" in capsys.readouterr().err
    command = ["compare", *map(str, paths), "--fail-if", "p50_ttft > 1.5x", "--html", "pages/c.html"]
    monkeypatch.setattr(sys, "argv", ["trtpipe", *command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 5
    text = (in_folder / "pages" / "c.html").read_text()
    page = Page(text)
    assert ("h1", "m on h100, FP8 against m on 2 x h100, FP8") in page.texts
    drawn = {one.get("aria-label"): one for one in figures(text)}
    assert list(drawn) == [
        "TTFT p99 against throughput", "ITL p99 against throughput", "Latency p99 against throughput",
        "Throughput against load, closed loop", "TTFT p99 against load, closed loop",
        "Goodput against load, closed loop",
    ]  # fmt: skip
    titles = [mark.findtext("title", "") for mark in marks(drawn["TTFT p99 against load, closed loop"])]
    assert [title.partition(":")[0] for title in titles] == [
        "A, grpc, closed loop", *(f"A, grpc, {one} in flight" for one in (1, 2, 4)),
        "B, grpc, closed loop", *(f"B, grpc, {one} in flight" for one in (1, 2, 4)),
    ]  # fmt: skip
    cells = [text for tag, text in page.texts if tag in ("th", "td")]
    at = cells.index("TTFT p50 ms")
    assert re.fullmatch(r"2\.\d+|1\.9\d+", cells[at + 3])
    assert cells[at + 5] == "worse"
    assert "fired" in cells
    assert "The runs differ: engine tp_size: A 1, B 2." in page.words


def test_throughput_is_of_a_gpu_where_every_report_says_how_many() -> None:
    found = load_point(lines(20, seed=1))
    found["metrics"] |= {
        "output_token_throughput": {"value": 300.0},
        "output_token_throughput_per_user": {"p50": 75.0},
    }
    one, two = (
        Run(name=name, report=report([found], **h100(tp_size=gpus, pp_size=1))) for name, gpus in (("A", 1), ("B", 2))
    )
    drawn = against_latency([one, two])[-1]
    assert drawn.title == "Throughput of a GPU against speed of one client"
    assert [curve["y"] for curve in drawn.charts[0]["curves"]] == [[300], [150]]
    unsaid = Run(name="B", report=report([found]))
    drawn = against_latency([one, unsaid])[-1]
    assert drawn.title == "Throughput of the server against speed of one client"
    assert [curve["y"] for curve in drawn.charts[0]["curves"]] == [[300], [300]]
    cpu = Run(name="B", report=report([found], target="m.cpu.fp32", engine={"gpu": "cpu", "tp_size": 1, "pp_size": 1}))
    assert against_latency([cpu])[-1].title == "Throughput of the server against speed of one client"


@pytest.mark.parametrize(("unit", "axis"), [("requests/s", "Requests/s"), ("conversations/s", "Conversations/s")])
def test_the_load_of_conversations_is_drawn_in_conversations(unit: str, axis: str) -> None:
    points = [load_point(lines(20, seed=1), rate=rate, label=f"{rate:g} {unit}") for rate in (2.0, 4.0)]
    drawn = against_load([Run(name="", report=report(points))])
    assert drawn
    assert all(f"{axis} asked for" in str(one) for one in drawn)


def test_a_curve_of_one_of_two_reports_is_named() -> None:
    closed, open_ = load_point(lines(20, seed=1)), load_point(lines(20, seed=1), rate=4.0, label="4 requests/s")
    drawn = against_load([Run(name=name, report=report([one])) for name, one in (("A", closed), ("B", open_))])
    notes = {figure.title: figure.note for figure in drawn}
    assert notes["TTFT p99 against load, closed loop"].startswith("The only curve is A, grpc, closed loop.")
    assert "The only curve" not in str(against_load([Run(report=report([closed]))]))


def test_an_invalid_run_and_results_of_other_tools_have_a_page(tmp_path: Path) -> None:
    good = save(tmp_path / "a", report([load_point(lines(20, seed=1))]))
    bad = save(tmp_path / "b", report([load_point(lines(20, seed=2), verdict=LATE)], verdict=LATE))
    found = compare([good, bad])
    text = render(found, {"A": read_report(good), "B": read_report(bad)})
    page = Page(text)
    assert ("td", "INVALID") in page.texts
    assert any("is INVALID: " in word for word in page.words)
    # A heading of ours holds for the figures of another tool only where they are the same.
    text = render(compare([AIPERF, VLLM_CHAT]), {"A": read_report(AIPERF), "B": read_report(VLLM_CHAT)})
    cells = [text for tag, text in Page(text).texts if tag in ("th", "td")]
    at = cells.index("latency p99 ms")
    named = [[re.sub("[0-9.]+ ", "", cell) for cell in cells[start : start + 3]] for start in (at + 5, at + 11)]
    assert named == [
        ["81.29", "(Chunk gap p99)", "104"],
        ["(Time to first chunk p99)", "(Chunk gap with role p99)", "(Latency to last chunk p99)"],
    ]
    both = compare([VLLM, VLLM])
    text = render(both, {letter: read_report(VLLM) for letter in "AB"})
    assert "p99 against throughput" in text


def test_what_another_wrote_into_a_report_breaks_no_page(tmp_path: Path) -> None:
    good = saved(tmp_path / "a", lines(20, seed=1))
    found = compare([good, good])
    load_point_ = load_point(lines(20, seed=2), load={"kind": "closed", "concurrency": "<b>"}, slo=["x"], repeat="y")
    odd = report([load_point_], target=["<img>"], engine={"gpu": {"<i>": 1}, "tp_size": "2", "pp_size": None})
    text = render(found, {"A": read_report(good), "B": odd})
    assert "<img>" not in text
    assert "<b>" not in text
    assert Page(text).words
