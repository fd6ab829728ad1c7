"""Reports side by side: ratios and intervals against resampling by hand, and what is said of unlike runs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bench_reports import LATE, failed, line, lines, load_point, report, save, saved
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.bench.compare import request_files
from trtpipe.pipeline.bench.compare.bootstrap import RESAMPLES, Resampler, repeats
from trtpipe.pipeline.bench.compare.comparison import Cell, Comparison, compare
from trtpipe.pipeline.cli import app as cli


def cell(found: Comparison, metric: str, statistic: str, letter: str = "B") -> Cell:
    cells = [row.cells[letter] for row in found.rows if (row.metric, row.statistic) == (metric, statistic)]
    assert len(cells) == 1
    return cells[0]


@pytest.fixture
def run(in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def trtpipe(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/trtpipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return trtpipe


# Ratios and intervals


def test_a_report_beside_itself_differs_in_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", lines(60, seed=1), lines(60, seed=2))
    found = compare([path, path])
    assert found.warnings == ()
    assert {row.place for row in found.rows} == {"grpc, 1 in flight", "grpc, 2 in flight"}
    ratios = [row.cells["B"].ratio for row in found.rows if row.cells["A"].value]
    assert len(ratios) > 60
    assert set(ratios) == {1.0}
    assert not any(row.cells["B"].significant for row in found.rows)
    assert found.refusal() is None


def test_ratios_of_known_times(tmp_path: Path) -> None:
    a = [line(number, 1000.0 * number, 50.0, [10.0] * 4) for number in range(400)]
    b = [line(number, 1000.0 * number, 75.0, [5.0] * 4) for number in range(400)]
    found = compare([saved(tmp_path / "a", a), saved(tmp_path / "b", b)])
    ttft = cell(found, "time_to_first_token", "p99")
    assert (ttft.value, ttft.ratio, ttft.interval) == (75.0, 1.5, (1.5, 1.5))
    assert (ttft.significant, ttft.better) == (True, False)
    assert cell(found, "inter_token_latency", "p50").ratio == pytest.approx(0.5)
    assert cell(found, "inter_token_latency", "p50").better is True
    # 50 + 4 * 10 and 75 + 4 * 5 ms
    assert cell(found, "request_latency", "mean").ratio == pytest.approx(95 / 90)
    # Answers of equal length: longer or shorter would be neither better nor worse.
    assert cell(found, "output_sequence_length", "mean").better is None


def test_intervals_are_those_of_resampling_by_hand() -> None:
    """Percentiles of one value a request come from a Beta distribution, those of gaps from groups of ranks."""
    requests = lines(400, seed=3, spread=0.5, tokens=12)
    resampler = Resampler(request_files.by_load_point(requests)[0][0], closed=True, seed=(0,))
    ttft = np.array([(one["stamps_ns"][0] - one["sent_ns"]) / 1e6 for one in requests])
    gaps = np.array([np.diff(one["stamps_ns"]) / 1e6 for one in requests])
    picked = np.random.default_rng(9).integers(0, 400, (2_000, 400))
    for share, statistic in ((50, "p50"), (90, "p90"), (99, "p99")):
        for metric, expected in (
            ("time_to_first_token", np.percentile(ttft[picked], share, axis=1)),
            (
                "inter_chunk_latency",
                np.percentile(gaps[picked].reshape(2_000, -1), share, axis=1, method="inverted_cdf"),
            ),
        ):
            drawn = resampler.draws(metric, statistic, 0.0)
            assert drawn is not None
            assert len(drawn) == RESAMPLES
            for edge in (2.5, 50, 97.5):
                near = pytest.approx(np.percentile(expected, edge), rel=0.05)
                assert np.percentile(drawn, edge) == near, (metric, statistic, edge)
    mean = resampler.draws("time_to_first_token", "mean", 0.0)
    assert mean is not None
    assert np.std(mean) == pytest.approx(np.std(ttft[picked].mean(axis=1)), rel=0.1)


def test_of_a_percentile_that_few_requests_do_not_bound_nothing_is_said(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / name, lines(100, seed=seed, spread=0.5)) for seed, name in enumerate("ab"))
    found = compare([a, b])
    for statistic, told in (("p50", True), ("p90", True), ("p99", False)):
        tail = cell(found, "time_to_first_token", statistic)
        assert tail.ratio is not None
        assert (tail.interval is not None) == (tail.significant is not None) == told
    # A request has several gaps.
    assert cell(found, "inter_token_latency", "p99").significant is not None


def test_a_rate_varies_as_the_requests_do() -> None:
    requests = lines(40, seed=3, spread=0.5)
    found = request_files.by_load_point(requests)[0][0]
    tokens, seconds = np.full(40, 8.0), np.array([(one["end_ns"] - one["sent_ns"]) / 1e9 for one in requests])
    picked = np.random.default_rng(9).integers(0, 40, (20_000, 40))
    expected = tokens[picked].sum(axis=1) / seconds[picked].sum(axis=1)
    value = tokens.sum() / seconds.sum()
    closed = Resampler(found, closed=True, seed=(0,)).draws("output_token_throughput", "value", value)
    assert closed is not None
    assert np.percentile(closed, (2.5, 97.5)) == pytest.approx(np.percentile(expected, (2.5, 97.5)), rel=0.05)
    # An open loop's rate is that of its schedule: requests of equal length say nothing about its chance.
    assert Resampler(found, closed=False, seed=(0,)).draws("output_token_throughput", "value", value) is None
    assert Resampler(found, closed=True, seed=(0,)).draws("request_goodput", "value", 3.0) is None


def test_large_load_points_are_resampled_in_blocks_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = request_files.by_load_point(lines(50, seed=4))[0][0]
    whole = Resampler(found, closed=True, seed=(5,)).draws("time_to_first_token", "mean", 0.0)
    monkeypatch.setattr("trtpipe.pipeline.bench.compare.bootstrap._AT_ONCE", 50 * 300)
    blocks = Resampler(found, closed=True, seed=(5,)).draws("time_to_first_token", "mean", 0.0)
    assert whole is not None
    assert blocks is not None
    assert len(blocks) == RESAMPLES
    assert np.percentile(blocks, (2.5, 50, 97.5)) == pytest.approx(np.percentile(whole, (2.5, 50, 97.5)), rel=0.02)


def test_chance_alone_is_seldom_significant(tmp_path: Path) -> None:
    """Of load points drawn from one distribution about one in twenty differs."""
    load_points = [lines(60, seed=seed, tokens=3) for seed in range(120)]
    a, b = saved(tmp_path / "a", *load_points[:60]), saved(tmp_path / "b", *load_points[60:])
    found = compare([a, b])
    told = [
        row.cells["B"].significant
        for row in found.rows
        if (row.metric, row.statistic) in {("time_to_first_token", "mean"), ("request_latency", "p50")}
    ]
    assert len(told) == 120
    assert 1 <= told.count(True) <= 14


def test_the_same_seed_gives_the_same_intervals(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, lines(30, seed=seed)) for seed, name in enumerate("ab")]
    first, again, other = (compare(paths, seed=seed).to_json()["rows"] for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_errors_have_no_ratio_to_none_but_a_verdict(tmp_path: Path) -> None:
    good = lines(50, seed=1)
    bad = [*good[:40], *(failed(number, 0.0) for number in range(10))]
    found = cell(compare([saved(tmp_path / "a", good), saved(tmp_path / "b", bad)]), "error_rate", "value")
    assert found.value == pytest.approx(0.2)
    assert (found.ratio, found.interval) == (None, None)
    assert (found.significant, found.better) == (True, False)


def test_without_requests_nothing_is_said_of_significance(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", lines(50, seed=1))
    b = save(tmp_path / "b", report([load_point(lines(50, seed=2, ttft_ms=500))]))
    found = compare([a, b])
    assert found.from_records == {"A": True, "B": False}
    ttft = cell(found, "time_to_first_token", "p50")
    assert ttft.ratio is not None
    assert ttft.ratio > 5
    assert (ttft.interval, ttft.significant, ttft.better) == (None, None, None)
    assert found.summary() == ["B against A: from summaries, no significance: the requests of B are not at hand"]


def test_of_more_requests_than_can_be_resampled_the_summaries_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtpipe.pipeline.bench.results.records.MOST_REQUESTS", 50)
    a, b = (saved(tmp_path / name, lines(count, seed=1)) for name, count in (("a", 50), ("b", 51)))
    found = compare([a, b], fail_if=["p50_ttft > 2x"])
    assert found.warnings == (
        "grpc, 1 in flight: only the summary of B is compared: it has 51 requests and 408 tokens or more, too many for "
        "intervals: the bounds are 50 requests, and 4,000,000 tokens and 16 for each response",
    )
    assert found.from_records == {"A": True, "B": False}
    assert [one.fired for one in found.judgements] == [False]
    assert cell(found, "time_to_first_token", "p50").significant is None


def test_a_load_point_with_too_many_requests_costs_no_other_its_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtpipe.pipeline.bench.results.records.MOST_REQUESTS", 50)
    a, b = (saved(tmp_path / name, lines(50, seed=1), lines(51, seed=2)) for name in "ab")
    found = compare([a, b])
    assert [line.partition(":")[0] for line in found.warnings] == ["grpc, 2 in flight"] * 2
    significant = {
        row.place: row.cells["B"].significant
        for row in found.rows
        if (row.metric, row.statistic) == ("time_to_first_token", "p50")
    }
    assert significant == {"grpc, 1 in flight": False, "grpc, 2 in flight": None}


def test_one_run_of_each_does_not_say_what_differs_between_runs(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / name, lines(50, seed=seed)) for seed, name in enumerate("ab"))
    (told,) = compare([a, b]).summary()
    assert told.endswith(
        "; by chance alone 5 of 100 figures would differ so, and more from one run to the next: --repeat tells how much"
    )
    twice = [load_point(lines(50, seed=seed), repeat=seed) for seed in range(2)]
    c, d = (save(tmp_path / name, report(twice), [lines(50, seed=seed) for seed in range(2)]) for name in "cd")
    (told,) = compare([c, d]).summary()
    assert told.endswith("; by chance alone 5 of 100 figures would differ so")


def test_repeats_are_averaged_and_their_own_spread_counts(tmp_path: Path) -> None:
    def repeated(name: str, *times: float) -> Path:
        runs = [lines(50, seed=seed, ttft_ms=ttft, spread=0.05) for seed, ttft in enumerate(times)]
        return save(tmp_path / name, report([load_point(one, repeat=at) for at, one in enumerate(runs)]), runs)

    steady, shaky = repeated("steady", 100, 100, 100), repeated("shaky", 90, 110, 103)
    found = compare([steady, shaky])
    mean = cell(found, "time_to_first_token", "mean")
    assert mean.value == pytest.approx(101, rel=0.02)
    # Each run alone is known to 1 %, but the runs differ by 20 %.
    assert mean.interval is not None
    assert mean.interval[1] - mean.interval[0] > 0.1
    assert mean.significant is False
    one = np.linspace(1, 2, RESAMPLES)
    assert repeats([one], (0,)) is one


def test_cost_of_a_million_tokens(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    load_points = [load_point(requests), load_point(requests)]
    for found, tokens_per_s in zip(load_points, (1000.0, 500.0), strict=True):
        found["metrics"]["output_token_throughput"]["value"] = tokens_per_s
    a, b = (
        save(tmp_path / name, report([found]), [requests]) for name, found in zip("ab", load_points, strict=True)
    )  # fmt: skip
    one_price = compare([a, b], price_per_hour=[3.6])
    assert cell(one_price, "cost_per_million_output_tokens", "value", "A").value == pytest.approx(1.0)
    assert cell(one_price, "cost_per_million_output_tokens", "value").ratio == pytest.approx(2.0)
    two = compare([a, b], price_per_hour=[3.6, 1.8], fail_if=["cost > 1.01", "cost > 1.01x"])
    assert cell(two, "cost_per_million_output_tokens", "value").ratio == pytest.approx(1.0)
    assert two.refusal() is None
    assert "cost_per_million_output_tokens" not in {row.metric for row in compare([a, b]).rows}
    for prices, says in (
        ([1.0, 2.0, 3.0], "3 prices for 2 reports"),
        ([0.0], "not a positive number"),
        ([float("inf")], "not a positive number"),
    ):
        with pytest.raises(UsageError, match=says):
            compare([a, b], price_per_hour=prices)


# Which load points meet


def test_load_points_meet_by_protocol_and_load(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    a = report(
        [load_point(requests, concurrency=16), load_point(requests, concurrency=4), load_point(requests, rate=20.0)]
    )
    b = report(
        [
            load_point(requests, rate=20),
            load_point(requests, concurrency=16.0),
            load_point(requests, concurrency=8),
            load_point(requests, concurrency=4, protocol="openai"),
        ]
    )
    found = compare([save(tmp_path / "a", a), save(tmp_path / "b", b)])
    assert {row.place for row in found.rows} == {"grpc, 16 in flight", "grpc, 20 requests/s"}
    assert {line for line in found.warnings if "in flight" in line} == {
        "grpc, 4 in flight: not in B", "grpc, 8 in flight: only in B", "openai, 4 in flight: only in B"
    }  # fmt: skip


def test_loads_that_differ_in_small_things_meet_and_it_is_said(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    loads = [{"kind": "closed", "concurrency": 4, **more} for more in ({"warmup": 1, "ramp_s": None}, {"warmup": 2})]
    a, b = (
        save(tmp_path / name, report([load_point(requests, load=load)])) for name, load in zip("ab", loads, strict=True)
    )
    found = compare([a, b])
    assert found.rows
    assert list(found.warnings) == ["grpc, 1 in flight: load warmup: A 1, B 2"]


def test_a_trace_in_another_folder_is_the_same_load(tmp_path: Path) -> None:
    requests = lines(20, seed=1)

    def traced(folder: str, *speedups: float) -> list[dict[str, Any]]:
        load = {"kind": "open", "arrivals": "trace", "trace": f"{folder}/day.jsonl", "max_in_flight": None}
        return [load_point(requests, load={**load, "speedup": by}, label=f"day.jsonl at {by:g}") for by in speedups]

    a = save(tmp_path / "a", report(traced("/builds/1", 1.0, 2.0)))
    b = save(tmp_path / "b", report(traced("/builds/2", 2.0, 1.0)))
    found = compare([a, b], fail_if=["p99_ttft > 1.1x"])
    assert found.warnings == ()
    assert [(one.place, one.fired) for one in found.judgements] == [
        ("grpc, day.jsonl at 1", False), ("grpc, day.jsonl at 2", False),
    ]  # fmt: skip
    # Another speed is another load.
    once, faster = (save(tmp_path / f"{by}", report(traced("/builds/1", by))) for by in (1.0, 4.0))
    assert compare([once, faster]).rows == ()


def test_chat_is_one_of_the_openai_protocols(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    a = save(tmp_path / "a", report([load_point(requests), load_point(requests, protocol="openai")]))
    b = save(tmp_path / "b", report([load_point(requests), load_point(requests, protocol="chat")]))
    found = compare([a, b])
    assert {row.place for row in found.rows} == {"grpc, 1 in flight", "openai, 1 in flight"}
    assert found.warnings == ("openai, 1 in flight: protocol: A openai, B chat",)


def test_one_protocol_against_another_meets_by_load(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    a, b = (
        save(tmp_path / protocol, report([load_point(requests, protocol=protocol)])) for protocol in ("grpc", "openai")
    )
    found = compare([a, b])
    assert {row.place for row in found.rows} == {"1 in flight"}
    assert found.warnings == ("protocol: A grpc, B openai; load points are matched by their load alone",)


def test_no_load_point_in_common_is_said_and_no_gate(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    a, b = (save(tmp_path / str(size), report([load_point(requests, concurrency=size)])) for size in (1, 2))
    found = compare([a, b], fail_if=["p99_ttft > 2x"])
    assert "nothing is compared" in found.warnings[-1]
    assert str(found.refusal()) == "the comparison fails: p99_ttft > 2x (no load point in common)"


def test_a_load_point_that_was_not_measured_has_not_passed(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    a = save(tmp_path / "a", report([load_point(requests, concurrency=size) for size in (2, 4)]))
    died = report([load_point(requests, concurrency=2)], partial=True, broken="the server died; see its log")
    found = compare([a, save(tmp_path / "b", died)], fail_if=["p99_ttft > 2x"])
    assert "B is partial: the server died; see its log" in found.warnings
    assert [(one.place, one.fired) for one in found.judgements] == [
        ("grpc, 2 in flight", False),
        ("grpc, 4 in flight", None),
    ]
    assert str(found.refusal()) == (
        "the comparison fails: p99_ttft > 2x (B at grpc, 4 in flight cannot be judged: it was not measured)"
    )
    turned = compare([tmp_path / "b", a, a], fail_if=["p99_ttft > 2x", "error_rate > 1%", "p99_ttft > 20ms"])
    # A figure alone needs no base.
    assert str(turned.refusal()) == (
        "the comparison fails: p99_ttft > 20ms (B at grpc, 2 in flight has 67.05 ms, C at grpc, 2 in flight has "
        "67.05 ms, B at grpc, 4 in flight has 67.05 ms, and 1 more); "
        "p99_ttft > 2x (A at grpc, 4 in flight cannot be judged: it was not measured)"
    )


@pytest.mark.parametrize("early", [{"stopped": "5 requests in a row failed"}, {"interrupted": True}])
def test_a_load_point_that_ended_early_has_not_passed(tmp_path: Path, early: dict[str, Any]) -> None:
    requests = lines(20, seed=1)
    a, b = (
        save(tmp_path / name, report([load_point(requests, **changes)])) for name, changes in (("a", {}), ("b", early))
    )
    found = compare([a, b], fail_if=["p99_ttft > 2x"])
    assert str(found.refusal()) == (
        "the comparison fails: p99_ttft > 2x (B at grpc, 1 in flight cannot be judged: B ended early)"
    )


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda value: value.update(levels=None), "levels of the report is null"),
        (lambda value: value.update(levels=[None]), "load point 0 is not a mapping"),
        (lambda value: value["levels"][0].pop("metrics"), "load point 0 has no metrics"),
        (lambda value: value["levels"][0].update(metrics=[]), "metrics of load point 0 is []"),
        (
            lambda value: value["levels"][0]["metrics"]["time_to_first_token"].update(p99="fast"),
            "load point 0: p99 of time_to_first_token is 'fast'",
        ),
        (
            lambda value: value["levels"][0]["metrics"]["time_to_first_token"].update(p99=-5),
            "load point 0: p99 of time_to_first_token is -5",
        ),
        (lambda value: value["levels"][0].update(load=None), "load of load point 0 is null"),
        (lambda value: value["levels"][0].update(load={}), "the load of load point 0 has no kind"),
        (lambda value: value["levels"][0].update(verdict={"reasons": []}), "the verdict of load point 0 has no valid"),
        (lambda value: value.update(verdict={"valid": "no", "reasons": []}), 'valid of its verdict is "no"'),
        (lambda value: value.update(options=[]), "options of the report is []"),
        (lambda value: value.update(engine=[3]), "engine of the report is [3]"),
        (lambda value: value.update(records=5), "records of the report is 5"),
        (lambda value: value.update(work_sha256=5), "work_sha256 of the report is 5"),
        (
            lambda value: value["levels"][0].update(unknown_requests={"inter_token_latency": "few"}),
            'inter_token_latency of unknown_requests of load point 0 is "few"',
        ),
        (
            lambda value: value["levels"][0]["requests"].update(measured="many"),
            'measured of requests of load point 0 is "many"',
        ),
    ],
)
def test_a_damaged_report_is_named(tmp_path: Path, damage: Callable[[dict[str, Any]], Any], told: str) -> None:
    a = saved(tmp_path / "a", lines(20, seed=1))
    value = report([load_point(lines(20, seed=2))])
    damage(value)
    b = save(tmp_path / "b", value)
    with pytest.raises(InputDataError, match=re.escape(f"{b} is damaged: {told}; measure again")):
        compare([a, b])


def test_requests_of_another_run_are_refused(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / name, lines(20, seed=seed)) for seed, name in enumerate("ab"))
    shutil.copy(a.with_name("report.requests.jsonl"), b.parent)
    with pytest.raises(InputDataError, match=r"report\.requests\.jsonl is not what was written with .*/b/rep"):
        compare([a, b])


def test_a_statistic_that_one_side_lacks_is_left_out(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    lacking = load_point(requests)
    lacking["metrics"]["time_to_first_token"]["p99"] = None
    a, b = save(tmp_path / "a", report([load_point(requests)])), save(tmp_path / "b", report([lacking]))
    ((_, ((_, rows),)),) = compare([a, b]).tables()
    named = [row[0] for row in rows]
    assert "TTFT p50 ms" in named
    assert "TTFT p99 ms" not in named
    assert "latency p99 ms" in named


def test_of_single_requests_nothing_is_significant(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, lines(1, seed=seed)) for seed, name in enumerate("ab")]
    assert compare(paths).summary() == [
        "B against A: no significance: there are too few requests for intervals, or too many, or all are alike"
    ]


def test_three_reports_are_set_against_the_first(tmp_path: Path) -> None:
    paths = [saved(tmp_path / name, lines(50, seed=seed, ttft_ms=ttft)) for seed, (name, ttft) in enumerate(
        (("a", 50), ("b", 100), ("c", 25)))]  # fmt: skip
    found = compare(paths, fail_if=["p50_ttft > 1.5x"])
    assert cell(found, "time_to_first_token", "mean", "B").ratio == pytest.approx(2, rel=0.1)
    assert cell(found, "time_to_first_token", "mean", "C").ratio == pytest.approx(0.5, rel=0.1)
    assert [(one.letter, one.fired) for one in found.judgements] == [("B", True), ("C", False)]
    heads = [head for head, _ in found.tables()]
    assert heads == [("", "A", x, f"{x}/A", "95% interval", f"{x} is") for x in "BC"]
    assert all(len(row) == 6 for _, sections in found.tables() for _, rows in sections for row in rows)


# What makes runs unlike

CHANGES: list[tuple[dict[str, Any], str]] = [
    (
        {"engine": {"gpu": "A100", "tensorrt_llm": "1.2.1", "build": {"max_batch_size": 64}}},
        "engine gpu: A H100, B A100",
    ),
    (
        {"engine": {"gpu": "H100", "tensorrt_llm": "1.2.1", "build": {"max_batch_size": 8}}},
        "engine build.max_batch_size: A 64, B 8",
    ),
    ({"engine": None}, "engine: B has no entry"),
    ({"seed": 3}, "seed: A 0, B 3"),
    ({"options": {"input_tokens": 32, "output_tokens": 8}}, "option input_tokens: A 16, B 32"),
    ({"options": {"input_tokens": 16}}, "option output_tokens: A 8, B has no entry"),
    ({"repository_sha256": "0" * 64}, "repository_sha256: A abababababab, B 000000000000"),
    ({"tokenizer_sha256": "1" * 64}, "tokenizer_sha256: A cdcdcdcdcdcd, B 111111111111"),
    ({"partial": True}, "B is partial: it was interrupted, or load points ended early"),
    (
        {"verdict": {**LATE, "reasons": [{**LATE["reasons"][0], "what": "grpc: the event loop was late"}]}},
        "B is INVALID: grpc: the event loop was late: by 31.0 ms",
    ),
    ({"endpoints": [{"protocol": "grpc", "model": "other", "server": "triton 2.51.0"}]}, "model: A ensemble, B other"),
    ({"endpoints": [{"protocol": "grpc", "model": "ensemble", "server": "vllm"}]}, "server: A triton 2.51.0, B vllm"),
    ({"host": {"cpu": "EPYC", "usable_cores": 1}}, "client's usable_cores: A 2, B 1"),
    ({"client": {"trtpipe": "0.16.0"}}, "tool: A trtpipe 0.15.0, B trtpipe 0.16.0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), CHANGES, ids=[says.partition(":")[0] for _, says in CHANGES])
def test_every_difference_of_the_runs_is_said(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    requests = lines(20, seed=1)
    a, b = (
        save(tmp_path / "a", report([load_point(requests)])),
        save(tmp_path / "b", report([load_point(requests)], **changes)),
    )
    (told,) = compare([a, b]).warnings
    assert told.startswith(says)


def test_the_same_prompts_sent_again_to_one_server_are_said(tmp_path: Path) -> None:
    """A server that keeps KV blocks has them from the first run."""

    def run_of(name: str, url: str = "http://host:8000", seed: int = 0, **changes: Any) -> Path:
        whole = {"endpoints": [{"protocol": "http", "url": url}], "seed": seed, "started": name}
        options = {"work": {"input_tokens": 16, "prompts": None, **changes}}
        return save(tmp_path / name, report([load_point(lines(20, seed=1))], **whole, options=options))

    a, b, c = run_of("a"), run_of("b"), run_of("c")
    said = (
        "A, B and C sent the same prompts to the same address: where the server was not restarted between them and "
        "keeps KV blocks, it answers the later run faster; take another --seed for that run"
    )

    def told(*paths: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = compare(paths)
        return found.notes, found.warnings

    assert told(a, b, c) == ((said,), ())
    assert told(a, a) == ((), ())
    assert told(a, run_of("d", url="http://other:8000")) == ((), ())
    # As the note advises; of two servers, another seed is a difference.
    assert told(a, run_of("e", seed=1)) == ((), ())
    assert told(a, run_of("f", url="http://other:8000", seed=1)) == ((), ("seed: A 0, B 1",))
    assert told(*(run_of(name, prompts="/some.jsonl") for name in "gh")) == ((), ())


def test_a_tpot_of_another_formula_is_not_judged_against_the_base(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    old = report([load_point(requests)])
    for name in ("time_per_output_token", "time_to_first_token"):
        old["metrics"][name]["formula"] = "as it was before"
    paths = save(tmp_path / "a", old), save(tmp_path / "b", report([load_point(requests)]))
    found = compare(paths, fail_if=["p50_tpot > 9x", "p50_tpot > 900ms", "p50_ttft > 9x"])
    why = "the reports measure it differently; measure the base again"
    assert found.warnings == (f"time_per_output_token: {why}",)
    assert [one.fired for one in found.judgements] == [None, False, False]
    assert found.judgements[0].told.endswith(f"cannot be judged: {why}")


@pytest.mark.parametrize(
    ("objectives", "says"),
    [
        ([], "none"),
        ([{"metric": "inter_token_latency", "statistic": "mean", "limit_ms": 30.5}], "itl:mean<30.5ms"),
        (
            [{"metric": "time_of_day", "statistic": "p99", "limit_ms": 1}],
            '[{"metric": "time_of_day", "statistic": "p99"',
        ),
        ([{"metric": ["itl"], "statistic": "p99", "limit_ms": 1}], '[{"metric": ["itl"], "statistic": "p99"'),
        (["itl:30ms"], '["itl:30ms"]'),
        (7, "7"),
    ],
)
def test_objectives_that_differ_are_said_as_options(tmp_path: Path, objectives: Any, says: str) -> None:
    base = [{"metric": f"{name}_from_due", "statistic": "p99", "limit_ms": 200.0} for name in
            ("time_to_first_token", "request_latency")]  # fmt: skip
    found = [report([load_point(lines(20, seed=1))], options={"objectives": value}) for value in (base, objectives)]
    (told,) = compare([save(tmp_path / name, one) for name, one in zip("ab", found, strict=True)]).warnings
    assert told.startswith(f"option objectives: A ttft:p99<200ms latency:p99<200ms, B {says}")


def test_files_of_prompts_are_compared_by_what_is_in_them(tmp_path: Path) -> None:
    def measured(folder: str, digest: str, name: str = "ask.jsonl") -> Path:
        file = f"{folder}/{name}"
        options = {"work": {"prompts": file, "output_tokens": 8, "folder": folder}}
        changes: dict[str, Any] = {"options": options, "work_sha256": {file: digest * 64}}
        return save(tmp_path / f"{folder[1:]}{digest}{name}", report([load_point(lines(20, seed=1))], **changes))

    here = measured("/one", "a")
    assert compare([here, measured("/two", "a")]).warnings == ()
    changed = "file ask.jsonl: A aaaaaaaaaaaa, B bbbbbbbbbbbb"
    assert compare([here, measured("/one", "b")]).warnings == (changed,)
    assert compare([here, measured("/two", "b")]).warnings == (changed,)
    assert compare([here, measured("/two", "a", "say.jsonl")]).warnings == (
        "file ask.jsonl: A aaaaaaaaaaaa, B has no entry",
        "file say.jsonl: A has no entry, B aaaaaaaaaaaa",
        "option work.prompts: A ask.jsonl, B say.jsonl",
    )
    # Without digests the paths are all there is.
    old = save(
        tmp_path / "old", report([load_point(lines(20, seed=1))], options={"work": {"prompts": "/one/ask.jsonl"}})
    )
    assert compare([old, old]).warnings == ()


def test_loads_of_another_length_are_said(tmp_path: Path) -> None:
    def measured(name: str, *loads: dict[str, Any]) -> Path:
        return save(tmp_path / name, report([load_point(lines(20, seed=1))], options={"loads": list(loads)}))

    closed = {"concurrency": 4, "requests": 400, "duration_s": None, "warmup": 1}
    whole = measured("a", closed, {**closed, "concurrency": 1})
    assert compare([whole, measured("b", closed)]).warnings == ()
    assert compare([whole, measured("c", {**closed, "requests": 50})]).warnings == (
        "option loads.requests: A 400, B 50",
    )
    assert compare([whole, measured("d", {**closed, "requests": None, "duration_s": 60.0})]).warnings == (
        "option loads.requests: A 400, B has no entry", "option loads.duration_s: A has no entry, B 60",
    )  # fmt: skip
    opened = {"rate": 2.0, "requests": 400, "duration_s": None, "warmup_s": 5.0, "cooldown_fraction": None}
    assert compare([whole, measured("e", closed, opened)]).warnings == (
        "option loads.warmup_s: A has no entry, B 5, none",
    )


def test_loads_that_one_report_alone_has_are_no_difference_in_length(tmp_path: Path) -> None:
    def measured(name: str, *concurrencies: int) -> Path:
        points = [load_point(lines(20, seed=1), concurrency=concurrency) for concurrency in concurrencies]
        loads = [{"concurrency": concurrency, "requests": 100 * concurrency} for concurrency in concurrencies]
        return save(tmp_path / name, report(points, options={"loads": loads}))

    assert compare([measured("a", 1, 4), measured("b", 4, 16)]).warnings == (
        "grpc, 1 in flight: not in B", "grpc, 16 in flight: only in B",
    )  # fmt: skip
    assert compare([measured("c", 1, 4), measured("d", 1, 4, 16)]).warnings == ("grpc, 16 in flight: only in B",)
    assert compare([measured("e", 1), measured("f", 16)]).warnings[:2] == (
        "grpc, 1 in flight: not in B", "grpc, 16 in flight: only in B",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_count_source": "tokenizer"}, "tokens counted by: A server, B tokenizer"),
        ({"stopped": "too many failures"}, "B ended early: too many failures"),
        ({"interrupted": True}, "B ended early: interrupted"),
        ({"wrong_length": 3}, "B has 3 answers of another length than asked for"),
    ],
)
def test_differences_of_load_points_are_said(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    requests = lines(20, seed=1)
    a, b = (
        save(tmp_path / "a", report([load_point(requests)])),
        save(tmp_path / "b", report([load_point(requests, **changes)])),
    )
    assert compare([a, b]).warnings == (f"grpc, 1 in flight: {says}",)


def test_lengths_and_repeats_that_differ_are_said(tmp_path: Path) -> None:
    short, long = lines(20, seed=1, tokens=8), lines(20, seed=1, tokens=16)
    a = save(tmp_path / "a", report([load_point(short)]))
    b = save(tmp_path / "b", report([load_point(long), load_point(long, repeat=1)]))
    assert compare([a, b]).warnings == (
        "grpc, 1 in flight: mean output_sequence_length: A 8, B 16",
        "grpc, 1 in flight: repeats: A 1, B 2",
    )


def test_a_metric_in_another_unit_is_not_compared(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    other = report([load_point(requests)])
    other["metrics"]["request_latency"]["unit"] = "s"
    found = compare([save(tmp_path / "a", report([load_point(requests)])), save(tmp_path / "b", other)])
    assert "request_latency" not in {row.metric for row in found.rows}
    assert found.warnings == ("request_latency: not compared, since its unit differs",)


# What is refused


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = saved(tmp_path / "a", lines(5, seed=1))
    with pytest.raises(UsageError, match="one report is given; give from 2 to 26"):
        compare([one])
    empty = save(tmp_path / "empty", report([]))
    with pytest.raises(InputDataError, match="holds no load point"):
        compare([one, empty])


# The command


def test_the_command(tmp_path: Path, run: Callable[..., Any]) -> None:
    a, b = (saved(tmp_path / str(ttft), lines(50, seed=ttft, ttft_ms=ttft)) for ttft in (50, 100))
    code, out, err = run("compare", a, b, "--fail-if", "p50_ttft > 1.5x", "--fail-if", "error_rate > 1%")
    assert code == 5
    assert err.splitlines()[-1].startswith("error: the comparison fails: p50_ttft > 1.5x (B at grpc, 1 in flight has ")
    told = out.splitlines()
    assert told[:2] == [f"A: {a}", f"B: {b}"]
    (ttft,) = [line for line in told if "TTFT p50" in line]
    assert ttft.split()[-1] == "worse"
    assert any(line.startswith("FIRED: p50_ttft > 1.5x: B at grpc, 1 in flight has 2.") for line in told)
    assert any(line.startswith("not fired: error_rate > 1%: ") for line in told)
    assert any(line.startswith("B against A: of ") for line in told)


def test_the_command_warns_before_the_numbers(tmp_path: Path, run: Callable[..., Any]) -> None:
    requests = lines(20, seed=1)
    a, b = (save(tmp_path / str(seed), report([load_point(requests)], seed=seed)) for seed in (0, 1))
    code, out, _ = run("compare", a, b)
    assert code == 0
    assert out.index("unlike: seed: A 0, B 1") < out.index("TTFT p50 ms")


def test_the_command_writes_json(tmp_path: Path, run: Callable[..., Any]) -> None:
    a, b = (saved(tmp_path / str(ttft), lines(50, seed=ttft, ttft_ms=ttft)) for ttft in (50, 100))
    code, out, _ = run("compare", a, b, "--json", "--fail-if", "p50_ttft > 1.5x", "--price-per-hour", "2.5,5")
    value = json.loads(out)
    assert code == 5
    assert value["failed"] is True
    assert value["paths"] == {"A": str(a), "B": str(b)}
    (row,) = [row for row in value["rows"] if (row["metric"], row["statistic"]) == ("time_to_first_token", "p50")]
    low, high = row["cells"]["B"]["interval"]
    assert low < row["cells"]["B"]["ratio"] < high
    assert value["judgements"][0]["fired"] is True
    assert {"cost_per_million_output_tokens"} < {row["metric"] for row in value["rows"]}


def test_without_a_price_the_file_of_each_gpu_has_one(
    tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTPIPE_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "gpus").mkdir(parents=True)
    (tmp_path / "home" / "gpus" / "h100.yaml").write_text("price_per_hour: 1.8\n", encoding="utf-8")
    engine = {"gpu": "h100", "tp_size": 2, "pp_size": 1}
    paths = [saved(tmp_path / name, lines(60, seed=1)) for name in "ab"]
    for path in paths:
        path.write_text(
            json.dumps({**json.loads(path.read_text(encoding="utf-8")), "engine": engine}), encoding="utf-8"
        )
    _, out, _ = run("compare", *paths, "--json")
    (row,) = [row for row in json.loads(out)["rows"] if row["metric"] == "cost_per_million_output_tokens"]
    throughput = json.loads(paths[0].read_text(encoding="utf-8"))["levels"][0]["metrics"]["output_token_throughput"]
    assert row["cells"]["A"]["value"] == pytest.approx(2 * 1.8 / 3600 / throughput["value"] * 1e6)
    # Another GPU's has none, and then nothing is said of any.
    other = json.dumps({**json.loads(paths[1].read_text(encoding="utf-8")), "engine": {**engine, "gpu": "a100"}})
    paths[1].write_text(other, encoding="utf-8")
    assert "cost_per_million_output_tokens" not in run("compare", *paths, "--json")[1]


def test_a_price_that_is_no_number(tmp_path: Path, run: Callable[..., Any]) -> None:
    code, _, err = run("compare", tmp_path, tmp_path, "--price-per-hour", "2,x")
    assert code == 2
    assert "'2,x' is not a list of numbers" in err
