"""The page of a report: its plots on paper, what it says, what others may put into it, and as a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_reports import LATE, lines, load_point, report, sample
from tests.support.chromium import PROGRAM, Chromium
from tests.unit.bench.compare.test_importers import ALL
from trtpipe.pipeline.bench.compare.importers import read_report
from trtpipe.pipeline.bench.results.page import UNKNOWN, render
from trtpipe.pipeline.pages import axes, plots

HOSTILE = """</script><img src=x onerror=alert(1)>"'&<b>{{ 7 * 7 }}</title></svg>"""


def full(
    count: int = 4,
    protocols: Sequence[str] = ("grpc", "openai"),
    *,
    steps: int = 60,
    samples: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """A report with everything a page can show."""
    load_points = []
    for protocol in protocols:
        for number in range(count):
            concurrency = 1 + 4 * number
            found = load_point(
                lines(20, seed=number, ttft_ms=40 + concurrency), concurrency=concurrency, protocol=protocol
            )
            found["metrics"]["output_token_throughput"]["value"] = 4000 * concurrency / (concurrency + 12)
            rng = np.random.default_rng(number)
            series = {name: rng.uniform(1, 9, steps).tolist() for name in ("in_flight", "tokens_per_s")}
            series |= {name: [None, *rng.uniform(1, 9, steps - 1)] for name in ("ttft_p50_ms", "latency_p99_ms")}
            found["series"] = {"interval_s": 0.5, "t_s": [0.5 * step for step in range(steps)], **series}
            for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
                edges = np.geomspace(1, 1000, 61)
                counts = np.histogram(rng.lognormal(3, 1, 500), edges)[0].tolist()
                found["histograms"][name] = {"edges": edges.tolist(), "counts": counts}
            objective = {"metric": "time_to_first_token", "statistic": "p99", "limit": 90.0, "unit": "ms"}
            value = found["metrics"]["time_to_first_token"]["p99"]
            found["slo"] = {"objectives": [{**objective, "value": value, "met": value < 90}], "met": value < 90}
            spread = {"p50": 0.1, "p99": 0.4, "max": 2.0}
            found["client"] = {
                "loop_lateness_ms": spread, "dispatch_delay_ms": spread, "cpu_share": 0.31,
                "in_flight": {"asked": concurrency, "reached": concurrency}, "cpu_s_per_1000_tokens": 0.012,
            }  # fmt: skip
            found["server"] = {
                "models": [{"model": "ensemble", "succeeded": 999.0, "succeeded_per_s": 2.5, "queue_ms": 0.25}],
                "engines": [
                    {"model": "tensorrt_llm", "output_tokens": 888.0, "kv_reuse_share": 0.125, "in_flight_max": 64.0}
                ],
                "output_tokens": {"server": 800, "client": None, "agree": True},
                "series": {"t_s": [0.0, 1.0, 2.0], "kv_fraction": [0.5, None, 0.75], "waiting": [None, None, None]},
                "nvml": {
                    "gpus": {"0": {"name": "H100", "power_w": 512.0, "memory_peak_bytes": 40 * 2**30}},
                    "energy_j_per_token": 0.5, "series": {"t_s": [0.0, 1.0], "gpu 0 memory": [2**30, 2**31]},
                },
            }  # fmt: skip
            found["samples"] = [sample()] if samples is None else samples
            found["errors"] = [{"kind": "grpc UNAVAILABLE", "count": 3, "messages": ["queue is full"]}]
            load_points.append(found)
    return report(load_points, **changes)


class Page(HTMLParser):
    """texts: (tag, text); attributes: (tag, name, value); tags in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.tags[-1], data.strip()))

    @property
    def words(self) -> list[str]:
        return [text for _, text in self.texts]


def figures(page: str) -> Iterator[ElementTree.Element]:
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        yield ElementTree.fromstring(svg)


def trade_off(page: str, metric: str) -> ElementTree.Element:
    """The figure of a metric's p99 against throughput."""
    start = f"{metric} p99 against throughput"
    return next(figure for figure in figures(page) if figure.get("aria-label", "").startswith(start))


def marks(figure: ElementTree.Element) -> list[ElementTree.Element]:
    return [part for part in figure.iter("path") if "mark" in part.get("class", "").split()]


# Axes


@pytest.mark.parametrize(
    ("values", "low", "high", "ticks", "log"),
    [
        ([3, 47], 0, 50, (0, 10, 20, 30, 40, 50), False),
        ([0.02, 0.11], 0, 0.15, (0, 0.05, 0.1, 0.15), False),
        ([5, 100], 5, 100, (5, 10, 20, 50, 100), True),
        ([1, 4000], 1, 5000, (1, 10, 100, 1000), True),
        ([0, 4000], 0, 4000, (0, 1000, 2000, 3000, 4000), False),
        ([0], 0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1), False),
        ([], 0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1), False),
        ([3, 90], 2, 100, (2, 5, 10, 20, 50, 100), True),
        ([-3, 3], -4, 4, (-4, -2, 0, 2, 4), False),
    ],
)
def test_an_axis_fits_its_values(
    values: list[float], low: float, high: float, ticks: tuple[float, ...], log: bool
) -> None:
    found = axes.fitting("ms", values)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.log == log
    assert found.ticks == ticks


def test_a_low_panel_has_few_ticks() -> None:
    assert axes.fitting("ms", [600, 15_000], ticks=2).ticks == (1000, 10_000)
    assert axes.fitting("ms", [2, 45], ticks=2).ticks == (2, 50)
    assert axes.fitting("%", [1, 90], linear=True).ticks == (0, 20, 40, 60, 80, 100)


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_its_values_between_round_ticks(values: list[float], from_zero: bool) -> None:
    found = axes.fitting("ms", values, from_zero=from_zero)
    shares = [found.share(value) for value in sorted(values)]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
    assert all(after >= before - 1e-12 for before, after in pairwise(shares))
    assert 1 <= len(found.ticks) <= 12
    assert all(before < after for before, after in pairwise(found.ticks))
    assert all(f"{tick:.2e}"[0] in "1234568790" and len(axes.tick(tick)) <= 7 for tick in found.ticks)
    # Nothing is far from the ends: the plot is used.
    assert found.log or found.high <= 2.6 * max(values)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (2500, "2500"), (20000, "20k"), (1.5e6, "1.5M"), (3e9, "3G"), (2e13, "20T")],
)
def test_ticks_are_written_short(value: float, text: str) -> None:
    assert axes.tick(value) == text


# Drawing


def test_a_gap_in_a_series_stays_a_gap() -> None:
    values = [1.0, 2.0, None, 2.0, None, 1.0]
    drawn = plots.timeline(
        "x",
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        [plots.Panel(label="ms", lines=[plots.Line(name="p50", style=0, values=values)])],
    )
    (line,) = marks(next(figures(drawn.drawing)))
    path = line.get("d", "")
    assert path.count("M") == 3
    assert path.count("L") == 1
    # The two that stand alone are short strokes.
    assert path.count("h3") == 2
    (chart,) = drawn.charts
    assert chart["curves"] == [{"name": "p50", "style": 0, "x": [0, 1, 2, 3, 4, 5], "y": values}]


def test_a_series_of_nothing_draws_nothing() -> None:
    panels = [plots.Panel(label="ms", lines=[plots.Line(name="p50", style=0, values=[None, None])])]
    assert marks(next(figures(plots.timeline("x", [0.0, 1.0], panels).drawing))) == []


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=3000))
def test_a_thinned_series_keeps_its_extremes(values: list[float | None]) -> None:
    seconds = [float(at) for at in range(len(values))]
    thinned = plots._thinned(seconds, values)
    assert len(thinned) <= 2 * plots.COLUMNS + 2
    assert [second for second, _ in thinned] == sorted(second for second, _ in thinned)
    known = [value for value in values if value is not None]
    kept = [value for _, value in thinned if value is not None]
    assert bool(known) == bool(kept)
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))
    assert set(thinned) <= set(zip(seconds, values, strict=True)) | {(second, None) for second in seconds}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=500).filter(any))
def test_merged_bins_hold_the_same_values_between_the_same_ends(counts: list[int]) -> None:
    edges = [float(at) for at in range(len(counts) + 1)]
    new_edges, new_counts = plots._merged(edges, counts)
    assert len(new_edges) == len(new_counts) + 1 <= plots.BINS + 1
    assert sum(new_counts) == sum(counts)
    assert (new_edges[0], new_edges[-1]) == (edges[0], edges[-1])


def test_no_label_lies_over_another() -> None:
    points = [plots.Point(x=100 + number / 10, y=50.0, label=str(number), title="") for number in range(30)]
    drawn = plots.curves("x", [plots.Curve(name="grpc", style=0, points=points)], x="tokens/s", y="ms")
    labels = [part for part in next(figures(drawn.drawing)).iter("text") if part.get("class") == "point"]
    boxes = [(float(part.get("x", 0)), float(part.get("y", 0)), 5.6 * len(part.text or "")) for part in labels]
    assert 1 <= len(boxes) < 30
    for number, (x, y, _) in enumerate(boxes):
        for other_x, other_y, width in boxes[:number]:
            assert abs(y - other_y) > 10 or x > other_x + width or x < other_x - width


# What the page says


def test_the_page_has_every_part() -> None:
    page = render(full())
    found = Page(page)
    headings = [text for tag, text in found.texts if tag == "h2"]
    assert headings == [
        "Throughput and latency", "Against load", "Load points", "Objectives", "Distributions", "Over time", "Errors",
        "What the server says", "What the client says of itself", "Sample prompts and answers", "Facts",
    ]  # fmt: skip
    assert {"trtpipe bench --concurrency 1,4", "H100", "64", "localhost:8001"} <= {
        word for text in found.words for word in (text, *re.split(r"url |, ", text))
    }
    assert "INVALID" not in found.words
    # 3 of throughput and latency, 3 over load, 3 of distributions, 8 over time, 1 of errors, 16 of the server.
    drawn = list(figures(page))
    assert len(drawn) == 34
    for figure in drawn:
        assert marks(figure), figure.get("aria-label")
        assert all((mark.find("title") is not None and mark.find("title").text) for mark in marks(figure))  # type: ignore[union-attr]
        labels = [part.text for part in figure.iter("text") if part.get("class") == "label"]
        assert labels
        assert all(label and (label[0].isupper() or label[0].isdigit()) for label in labels)


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        (
            {"target": "tinyllama-1.1b.h100.fp8.tp2",
             "engine": {"gpu": "h100", "dtype": "bfloat16", "quant_algo": "FP8", "tp_size": 2, "pp_size": 1}},
            "tinyllama-1.1b on 2 x h100, FP8",
        ),
        ({"target": None, "engine": {"gpu": "a100", "dtype": "bfloat16"}}, "a100, bfloat16"),
        ({"engine": None, "endpoints": [{"protocol": "chat", "url": "x", "model": "qwen"}]}, "qwen"),
        ({"engine": None}, "Triton"),
    ],
)  # fmt: skip
def test_the_title_is_model_gpu_and_precision(changes: dict[str, Any], title: str) -> None:
    found = Page(render(full(1, **changes)))
    assert [text for tag, text in found.texts if tag in ("h1", "title")][:2] == [title, title]


def test_the_summary_is_of_the_best_load_point() -> None:
    value = full(3, ("grpc",))
    for found, throughput, met in zip(value["levels"], (100.0, 250.0, 900.0), (True, True, False), strict=True):
        found["metrics"]["output_token_throughput"]["value"] = throughput
        found["metrics"]["time_to_first_token"]["p99"] = throughput / 2
        found["slo"]["met"] = met
        found["errors"] = []
    page = Page(render(value))
    texts = [text for _, text in page.texts]
    at = texts.index("Output tokens/s")
    assert texts[at : at + 7] == [
        "Output tokens/s", "250", "at grpc, 5 in flight", "TTFT p99", "125", "ms", "from 50 ms at its lowest"
    ]  # fmt: skip
    assert "The client kept up with the load." in texts
    assert "No request of 60 failed." in texts
    value["levels"][0]["requests"]["failed"] = 3
    assert "3 of 60 requests failed." in Page(render(value)).words


def test_a_card_without_a_value_has_the_short_name() -> None:
    found = load_point(lines(20, seed=1))
    found["metrics"]["time_to_first_token"] = {}
    texts = [text for _, text in Page(render(report([found]))).texts]
    assert texts[texts.index("TTFT p99") + 1] == UNKNOWN


def test_the_figures_of_the_table() -> None:
    found = load_point(lines(20, seed=1))
    found["metrics"]["time_to_first_token"] |= {"p50": 12.3456, "p90": 1234.5, "p99": 0.5}
    found["metrics"]["time_to_first_token"]["interval"]["p50"] = [11.5, 13.25]
    page = Page(render(report([found])))
    cells = [text for tag, text in page.texts if tag == "td"]
    assert cells[:4] == ["20", "12.35", "1,234", "0.5"]
    assert ("td", "title", "95 %: 11.5 to 13.25") in page.attributes


def test_the_curve_of_a_protocol_has_a_point_for_each_load_point() -> None:
    figure = trade_off(render(full()), "Latency")
    assert figure.get("aria-label") == "Latency p99 against throughput"
    titles = [mark.findtext("title", "") for mark in marks(figure)]
    assert titles[0] == "grpc, closed loop"
    assert [title.partition(":")[0] for title in titles[1:5]] == [
        f"grpc, {concurrency} in flight" for concurrency in (1, 5, 9, 13)
    ]
    assert titles[5] == "openai, closed loop"
    labels = [part.text for part in figure.iter("text") if part.get("class") == "point"]
    assert set(labels) <= {"1", "5", "9", "13"}
    assert [part.text for part in figure.iter("text") if part.get("class") == "label"] == [
        "Latency p99, ms", "Output tokens/s"
    ]  # fmt: skip


def test_what_is_unknown_is_a_dash_and_never_0() -> None:
    found = load_point(lines(20, seed=1))
    for metric in found["metrics"].values():
        for key in metric:
            metric[key] = None
    found["requests"] = dict.fromkeys(found["requests"])
    page = render(report([found], seed=None, engine=None, command=None, host=None, tokenizer_sha256=None))
    cells = [text for tag, text in Page(page).texts if tag == "td"]
    assert set(cells) == {UNKNOWN}
    assert list(figures(page)) == []
    assert ("td", "title", "undefined: no successful request") in Page(page).attributes
    assert "None" not in Page(page).words


def test_an_invalid_run_says_so_first_with_reasons_and_remedies() -> None:
    value = full(2, verdict={"valid": False, "reasons": [{**LATE["reasons"][0], "what": "grpc, 5 in flight: late"}]})
    value["levels"][1]["verdict"] = LATE
    page = Page(render(value))
    body = page.words[page.words.index("INVALID") :]
    assert body[:3] == ["INVALID", "Benchmark", "H100"]
    assert body.index("grpc, 5 in flight: late: by 31.0 ms at the 99th percentile") < body.index("Offer less.")
    assert body.index("Offer less.") < body.index("Output tokens/s")
    assert ("tr", "title", "INVALID: the event loop was late: by 31.0 ms at the 99th percentile") in page.attributes
    hollow = [mark for mark in marks(next(figures(render(value)))) if "hollow" in mark.get("class", "")]
    assert [mark.findtext("title", "").endswith(", INVALID") for mark in hollow] == [True]


def test_a_partial_run_says_where_it_ended() -> None:
    value = full(2, ("grpc",), partial=True)
    value["levels"][1] |= {"stopped": "too many failures"}
    words = Page(render(value)).words
    assert "Partial: the run did not come to its end." in words
    assert "Ended early at grpc, 5 in flight: too many failures." in words
    assert "Partial: the run did not come to its end." not in Page(render(full(2))).words


def test_objectives_and_the_highest_load_that_meets_them() -> None:
    value = full(4, ("grpc",))
    for number, found in enumerate(value["levels"]):
        found["slo"]["met"] = found["slo"]["objectives"][0]["met"] = number < 2
    page = render(value)
    words = Page(page).words
    assert "grpc, closed loop: all objectives are met up to 5 in flight." in words
    assert [text for text in words if text in ("met", "missed")] == ["met", "met", "missed", "missed"]
    (goodput,) = [figure for figure in figures(page) if (figure.get("aria-label") or "").startswith("Goodput")]
    assert ["hollow" in mark.get("class", "") for mark in marks(goodput)[1:]] == [False, False, True, True]
    value["levels"][1]["verdict"] = LATE
    assert "grpc, closed loop: all objectives are met up to 1 in flight." in Page(render(value)).words
    value["levels"][0]["slo"]["met"], value["levels"][2]["slo"]["met"] = False, True
    told = "grpc, closed loop: all objectives are met at 9 in flight, not at 1 in flight, 13 in flight."
    assert told in Page(render(value)).words
    # One of two repeats misses them.
    value["levels"].append({**value["levels"][2], "repeat": 1, "slo": {**value["levels"][2]["slo"], "met": False}})
    assert "grpc, closed loop: all objectives are met at no load." in Page(render(value)).words
    for found in value["levels"]:
        found["slo"]["met"] = True
    assert "grpc, closed loop: all objectives are met at every load point." in Page(render(value)).words


def test_the_pareto_front_leaves_out_what_another_load_point_beats() -> None:
    # Throughput and latency p99: the second load point is beaten by the third, the last one is not valid.
    told = [(100, 20.0, True), (200, 50.0, True), (300, 40.0, True), (400, 90.0, True), (500, 10.0, False)]
    load_points = []
    for number, (throughput, latency, valid) in enumerate(told):
        found = load_point(lines(20, seed=number), concurrency=number + 1)
        found["metrics"]["output_token_throughput"]["value"] = throughput
        found["metrics"]["request_latency"]["p99"] = latency
        found["verdict"] = {"valid": valid, "reasons": []}
        load_points.append(found)
    figure = trade_off(render(report(load_points)), "Latency")
    (band,) = [part.get("d", "") for part in figure.iter("path") if part.get("class") == "band"]
    dots = [mark.get("d", "") for mark in marks(figure) if "dot" in mark.get("class", "")]
    starts = [tuple(map(float, place.split())) for place in band.removeprefix("M").split("L")]
    assert len(dots) == 5
    across, down = zip(*starts, strict=True)
    assert len(starts) == 3  # of 400, 300 and 100 tokens/s
    assert list(across) == sorted(across, reverse=True)
    assert list(down) == sorted(down)
    # One load point beats none.
    assert "band" not in {part.get("class") for part in next(figures(render(report(load_points[:1])))).iter("path")}


def test_open_and_closed_loops_are_curves_of_their_own() -> None:
    requests = lines(20, seed=1)
    value = report(
        [load_point(requests, concurrency=4), load_point(requests, rate=10.0), load_point(requests, rate=20.0)]
    )
    figure = next(figures(render(value)))
    lines_drawn = [mark.findtext("title") for mark in marks(figure) if "line" in mark.get("class", "")]
    assert lines_drawn == ["grpc, poisson arrivals"]
    assert {part.text for part in figure.iter("text") if part.get("class") == "point"} <= {"4", "10/s", "20/s"}


def test_the_server_s_own_figures_have_units_and_are_of_the_load_point() -> None:
    page = render(full(1, ("grpc",)))
    found = Page(page)
    texts = [text for tag, text in found.texts if tag in ("th", "td")]
    at = texts.index("in queue ms")
    assert texts[at - 3 : at + 5] == [
        "Load point", "model", "requests/s", "in queue ms", "grpc, 1 in flight", "ensemble", "2.5", "0.25"
    ]  # fmt: skip
    at = texts.index("limit of requests in flight")
    assert texts[at + 1 : at + 6] == ["prompt found in cache %", "grpc, 1 in flight", "tensorrt_llm", "64", "12.5"]
    at = texts.index("peak memory GiB")
    assert texts[at + 2 : at + 6] == ["grpc, 1 in flight", "0 H100", "40", "512"]
    assert {"800", "yes", "0.5"} <= set(texts)
    # What the server counts since its start is not of the load point.
    assert not {"999", "888"} & set(texts)
    drawn = [one for one in figures(page) if one.get("aria-label") == "grpc, 1 in flight"]
    labels = [[part.text for part in one.iter("text") if part.get("class") == "label"] for one in drawn]
    # What was never known has no panel, and a moment that was not leaves a gap.
    assert labels[1:] == [["KV cache in use, %", "Seconds"], ["GPU memory, GiB", "Seconds"]]
    assert marks(drawn[1])[0].findtext("title") == "KV cache in use, %: at most 75"
    assert marks(drawn[1])[0].get("d", "").count("M") == 2


def test_errors_by_class() -> None:
    value = full(2, ("grpc",))
    value["levels"][0]["errors"].append({"kind": "Timeout", "count": 1, "messages": ["no answer in 120 s"]})
    page = render(value)
    (figure,) = [figure for figure in figures(page) if figure.get("aria-label") == "Failed requests by class"]
    assert [part.text for part in figure.iter("text") if part.get("class") == "point"] == [
        "grpc UNAVAILABLE: 6", "Timeout: 1"
    ]  # fmt: skip
    assert {"queue is full", "no answer in 120 s"} <= set(Page(page).words)
    for found in value["levels"]:
        found["errors"] = []
    assert "Errors" not in Page(render(value)).words


def test_samples_are_folded_up_and_say_where_they_are_cut() -> None:
    value = full(5, samples=[sample("Line\n  two", "x" * 3000, answer_characters=4321)])
    found = Page(render(value))
    assert "Load points: 8; requests: 8" in found.words
    assert "report.json has those of 2 more load points." in found.words
    terms = [text for tag, text in found.texts if tag == "dt"]
    assert terms.count("Answer, its first 2,000 of 4,321 characters") == 8
    assert "grpc, 1 in flight: prompt" in terms
    assert found.words.count("x" * 2000) == 8
    assert "x" * 2001 not in " ".join(found.words)
    assert "Line\n  two" in found.words
    assert "Sample prompts and answers" not in Page(render(full(samples=[]))).words


def test_every_metric_is_defined_at_the_end() -> None:
    value = full(1, ("grpc",))
    found = Page(render(value))
    terms = [text for tag, text in found.texts if tag == "dt"]
    for name, metric in value["metrics"].items():
        assert (f"{name}, {metric['unit']}" if metric["unit"] else name) in terms
        assert f"Formula of {name}. Undefined: no successful request." in found.words
    value["metrics"]["time_to_first_token"] |= {"formula": "a gap. (It has a full stop.)", "undefined": "never."}
    assert "A gap. (It has a full stop.) Undefined: never." in Page(render(value)).words


def test_a_run_without_load_points_has_a_page() -> None:
    assert "None was measured." in Page(render(report([], partial=True))).words


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_results_of_other_tools_have_a_page(path: Path) -> None:
    page = Page(render(read_report(path)))
    assert "Load points" in page.words
    assert "Throughput and latency" in page.words
    assert "0.0" not in page.words


def test_twenty_load_points_of_two_protocols_fit_in_a_megabyte() -> None:
    assert len(render(full(20, steps=2000)).encode()) < 1_000_000


# What others may put into it


def hostile(value: Any) -> Any:
    """Every text replaced by one that wants to be markup, but for those that are no free text."""
    kept = {"kind", "arrivals", "statistic", "metric", "schema"}
    if isinstance(value, dict):
        return {key: one if key in kept else hostile(one) for key, one in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return HOSTILE if isinstance(value, str) else value


def test_nothing_that_comes_from_outside_becomes_markup() -> None:
    clean = full(2)
    value = hostile(clean)
    for found in value["levels"]:
        found["errors"] = [{"kind": HOSTILE, "count": 2, "messages": [HOSTILE]}]
        found["server"] = {
            HOSTILE: 1, "models": [{"model": HOSTILE, "queue_ms": 1.0}],
            "series": {"t_s": [0.0, 1.0], HOSTILE: [1.0, 2.0]},
        }  # fmt: skip
    value["engine"] = {HOSTILE: HOSTILE}
    value["metrics"][HOSTILE] = dict.fromkeys(("unit", "formula", "undefined"), HOSTILE)
    page = render(value)
    found = Page(page)
    plain = Page(render(clean))
    assert set(found.tags) <= set(plain.tags)
    assert {name for _, name, _ in found.attributes} <= {name for _, name, _ in plain.attributes}
    assert sum(HOSTILE in text for text in found.words) > 20
    assert any(value == HOSTILE or HOSTILE in (value or "") for _, _, value in found.attributes)
    for figure in figures(page):
        assert {part.tag for part in figure.iter()} <= {"svg", "path", "text", "tspan", "title"}


def test_files_beside_the_page_are_links_that_lead_nowhere_else() -> None:
    names = ["report.json", "javascript:a #1?.csv", HOSTILE.replace("/", "")]
    found = Page(render(full(1), names))
    links = [value for tag, name, value in found.attributes if (tag, name) == ("a", "href")]
    assert links[:2] == ["report.json", "javascript%3Aa%20%231%3F.csv"]
    assert [text for tag, text in found.texts if tag == "a" and text in names] == names
    assert set(re.findall(r"[^\w.%~-]", "".join(map(str, links)))) == set()


def test_the_page_needs_nothing_but_itself() -> None:
    page = render(full())
    found = Page(page)
    assert not {name for _, name, _ in found.attributes} & {"src", "href", "srcset", "xlink:href", "onload", "onclick"}
    assert "url(" not in page
    assert "@import" not in page
    scripts = re.findall("<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = [value for tag, name, value in found.attributes if (tag, name) == ("meta", "content")]
    allowed = f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'"
    assert f"default-src 'none'; style-src 'unsafe-inline'; {allowed}" in policy
    assert len(scripts) == 2
    # dist/uPlot.iife.min.js of npm's uplot 1.6.32.
    assert hashlib.sha256(scripts[0].encode()).hexdigest() == (
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    )


# As a browser shows it


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    value = full(3, verdict=LATE, partial=True, command=["trtpipe", "bench", "--model", "x" * 300])
    value["levels"][0]["errors"] = [{"kind": "grpc UNAVAILABLE", "count": 3, "messages": ["y" * 500]}]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(value), encoding="utf-8")
    return path


# Contrast of a colour with another by the formula of WCAG.
CONTRAST = """(() => {
  const light = c => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = light(getComputedStyle(document.body).backgroundColor);
  const ratio = c => { const l = light(c); return (Math.max(l, back) + 0.05) / (Math.min(l, back) + 0.05); };
  const texts = [...document.querySelectorAll('p, dt, dd, td, th, li, figcaption, .key, summary')]
    .map(e => ratio(getComputedStyle(e).color));
  const drawn = [...document.querySelectorAll('.mark')].map(e => { const s = getComputedStyle(e);
    return ratio(s.fill === 'none' || e.classList.contains('hollow') ? s.stroke : s.fill); });
  return [Math.min(...texts), Math.min(...drawn), back];
})()"""
# Of each plot that shows: whether some mark is to be seen, and no mark or text leaves it.
PLOTS = """[...document.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width).map(svg => {
  const marks = [...svg.querySelectorAll('.mark')].map(m => m.getBBox());
  const box = svg.viewBox.baseVal;
  const inside = [...svg.querySelectorAll('.mark, text')].map(m => m.getBBox()).every(b =>
    b.x >= -1 && b.y >= -1 && b.x + b.width <= box.width + 1 && b.y + b.height <= box.height + 1);
  return [marks.some(b => b.width + b.height > 1), inside, svg.getBoundingClientRect().width];
})"""
OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
FITTING = "[...document.querySelectorAll('.uplot')].every(one => one.clientWidth <= one.closest('figure').clientWidth)"
# A drawing is made when its figure gets a width, after the page has been laid out.
LAID_OUT = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"


@pytest.mark.process
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_a_browser_shows_it(page_file: Path, tmp_path: Path) -> None:
    with Chromium(tmp_path / "profile") as browser:
        backgrounds = []
        for width in (360, 1280):
            for dark in (False, True):
                browser.open(page_file, width=width, dark=dark)
                browser.value(OPEN)
                browser.wait(LAID_OUT)
                assert browser.value("document.documentElement.scrollWidth") <= width
                # 6 curves, 6 requests' and 12 servers' timelines are drawn by uPlot; distributions and errors are not.
                assert browser.value("document.querySelectorAll('.drawn').length") == 24
                assert browser.value(FITTING)
                drawn = browser.value(PLOTS)
                assert len(drawn) == 4
                assert all(seen and inside and 250 <= wide <= width for seen, inside, wide in drawn)
                text, mark, background = browser.value(CONTRAST)
                assert text >= 4.5
                assert mark >= 3
                backgrounds.append(background)
                sizes = browser.value(
                    "[...document.querySelectorAll('body *')].filter(e => e.innerText)"
                    ".map(e => [parseFloat(getComputedStyle(e).fontSize), e.className])"
                )
                assert max(sizes)[1] == "verdict"
                assert browser.value("document.querySelector('.verdict').innerText") == "INVALID"
                methods = [event["method"] for event in browser.events]
                assert "Page.loadEventFired" in methods
                assert not {"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"} & set(methods)
                asked = [
                    event["params"]["request"]["url"]
                    for event in browser.events
                    if event["method"] == "Network.requestWillBeSent"
                ]
                assert asked == [page_file.as_uri()]
        light, night = backgrounds[0], backgrounds[1]
        assert light > 0.8
        assert night < 0.05
        # On paper it is light whatever the screen, nothing is folded up, and all drawings are the still ones.
        browser.open(page_file, width=720, dark=True, printed=True)
        assert browser.value(CONTRAST)[2] > 0.9
        assert len(browser.value(PLOTS)) == 28
        assert all(seen and inside and wide > 0 for seen, inside, wide in browser.value(PLOTS))
        assert json.loads(browser.value("JSON.stringify(document.documentElement.scrollWidth)")) <= 760


# Middle of the first chart; the words of the tooltip; the ticks of its axes are painted, so that a zoom is seen there.
MIDDLE = """(() => { const over = document.querySelector('.u-over'); over.scrollIntoView({ block: 'center' });
  const box = over.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"""
PAINTED = "document.querySelector('.uplot canvas').toDataURL()"


@pytest.mark.process
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_a_chart_has_tooltips_and_zoom_and_none_are_needed(page_file: Path, tmp_path: Path) -> None:
    with Chromium(tmp_path / "profile") as browser:

        def mouse(kind: str, x: float, y: float, **more: Any) -> None:
            browser.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

        browser.open(page_file, width=1280)
        browser.wait(LAID_OUT)
        left, top, width, height = browser.value(MIDDLE)
        browser.wait(LAID_OUT)
        whole = browser.value(PAINTED)
        for share in np.linspace(0.02, 0.98, 40).tolist():
            mouse("Moved", left + share * width, top + 0.25 * height)
            if not browser.value("document.querySelector('.tip').hidden"):
                break
        words = browser.value("document.querySelector('.tip').textContent")
        assert re.fullmatch(r"(grpc|openai), \d+ in flight: Output tokens/s: [\d,.]+; TTFT p99, ms: [\d,.]+.*", words)
        held: dict[str, Any] = {"button": "left", "buttons": 1, "clickCount": 1}
        mouse("Pressed", left + 0.3 * width, top + 0.2 * height, **held)
        mouse("Moved", left + 0.6 * width, top + 0.6 * height, **held)
        mouse("Released", left + 0.6 * width, top + 0.6 * height, **held)
        browser.wait(LAID_OUT)
        assert browser.value(PAINTED) != whole
        for count in (1, 2):
            mouse("Pressed", left + 5, top + 5, **held | {"clickCount": count})
            mouse("Released", left + 5, top + 5, **held | {"clickCount": count})
        browser.wait(LAID_OUT)
        assert browser.value(PAINTED) == whole
        # Without script the still drawings show, and nothing of the page is hidden.
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(page_file, width=1280)
        assert browser.value("document.querySelectorAll('.uplot').length") == 0
        assert len(browser.value(PLOTS)) >= 9
        assert browser.value("document.getElementById('hint').hidden")


def test_repeats_and_searches_are_shown_where_there_are_some() -> None:
    value = full()
    words = Page(render(value)).words
    assert "Over repeated runs" not in words
    assert "Search" not in words
    figure = {"mean": 12.5, "std": 1.0, "interval": [11.0, 14.0]}
    one = {"protocol": "grpc", "label": "4 in flight", "runs": 3, "valid": 2}
    value["repeats"] = [{**one, "metrics": {"time_to_first_token": {"p50": figure, "p99": None}}}]
    runs = [{"passed": True, "excess": 0.8}, {"passed": False, "excess": None}, {"passed": True, "excess": 0.91}]
    step = {"rate": 7.25, "passed": True, "runs": runs}
    found = {"rate": 7.25, "interval": [6.5, None], "ended": "every rate passes", "steps": [step]}
    value["searches"] = [{"protocol": "grpc", "goal": "max-rate", **found}]
    words = Page(render(value)).words
    assert "12.5 ±1.5" in words
    assert "grpc, max-rate: 7.25 requests/s (6.5 to open); every rate passes." in words
    assert "0.8, –, 0.91" in words
    value["searches"][0]["unit"] = "conversations/s"
    assert "grpc, max-rate: 7.25 conversations/s (6.5 to open); every rate passes." in Page(render(value)).words
