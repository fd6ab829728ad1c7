"""A metric is added in one place, and appears wherever metrics do."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.support.bench_records import MS, Row, made
from trtpipe.pipeline.bench.compare.comparison import Comparison, compare
from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.options import BenchOptions, Target
from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.bench.results.files import write_report
from trtpipe.pipeline.bench.results.metric import Distribution, Rate, Values
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.report import BenchReport, load_point_result
from trtpipe.pipeline.bench.results.slo import parse_objective
from trtpipe.pipeline.bench.results.verdict import SelfCheck
from trtpipe.pipeline.bench.results.window import Window
from trtpipe.pipeline.cli import console_bench


def second_response(records: Records) -> Values:
    owners = np.flatnonzero(records.good() & (np.diff(records.offsets) > 1))
    times = (records.stamps[records.offsets[owners] + 1] - records.sent[owners]) / 1e6
    return Values(values=times, owners=owners)


ADDED = (
    Distribution(
        name="time_to_second_response", unit="ms", short="second", better="lower", aliases=("tt2r",), tabled=True,
        drawn=True, formula="second response - request sent", undefined="no request with two", values=second_response,
    ),
    Rate(
        name="prompt_token_throughput", unit="tokens/s", short="prompt tokens/s", better="higher",
        aliases=("prompts",), tabled=True, formula="prompt tokens / seconds", undefined="no window",
        value=lambda records, window: float(records.input_tokens.sum()) / window.seconds,
        counted=lambda records: records.input_tokens.astype("float64"),
    ),
)  # fmt: skip


def report(path: Path, *, second_ms: int, prompt: int) -> BenchReport:
    """Of 20 requests, one after the other, 100 ms each."""
    records = made(
        *(
            Row(
                due=at,
                sent=at,
                stamps=(at + 10, at + second_ms),
                tokens=(1, 1),
                end=at + 100,
                slot=0,
                input_tokens=prompt,
            )
            for at in range(0, 2000, 100)
        )
    )
    result = load_point_result(
        records, Window(start_ns=0, stop_ns=2000 * MS), SelfCheck(figures={}, reasons=[]), protocol="grpc",
        label="1 in flight", load={"kind": "closed", "concurrency": 1},
        objectives=[parse_objective("tt2r:p50<50ms")],
    )  # fmt: skip
    options = BenchOptions(
        targets=(Target(protocol="grpc", url="127.0.0.1:1", model="m"),),
        tokenizer=path,
        loads=(Closed(concurrency=1, requests=20),),
        work=Work(),
    )
    made_report = BenchReport(
        options=options.to_json(), command=[], started="", tokenizer_sha256="", results=[result], records=[records]
    )
    write_report(made_report, path)
    return made_report


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, BenchReport, Comparison]:
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, *ADDED))
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    report(a, second_ms=40, prompt=100)
    second = report(b, second_ms=60, prompt=50)
    conditions = ["p50_tt2r > 1.4x", "prompts < 0.6x", "prompt_token_throughput < 100tok/s"]
    return a, second, compare([a, b], fail_if=conditions)


def test_a_metric_is_in_the_csv_and_on_the_page(compared: tuple[Path, BenchReport, Comparison]) -> None:
    path, _, _ = compared
    table = {row["metric"]: row for row in csv.DictReader(path.with_suffix(".csv").read_text().splitlines())}
    assert (table["time_to_second_response"]["unit"], table["time_to_second_response"]["p50"]) == ("ms", "40.0")
    assert table["prompt_token_throughput"]["value"] == "1000.0"
    page = path.with_suffix(".html").read_text()
    for told in ("second ms", "prompt tokens/s", "Second p99 against throughput", "Second of each load point"):
        assert told in page


def test_a_metric_is_a_row_of_the_terminal(
    compared: tuple[Path, BenchReport, Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    _, second, _ = compared
    console_bench.report(second)
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["second", "p99", "ms", "60.0"] in told
    assert ["prompt", "tokens/s", "500.0"] in told


def test_a_metric_can_be_an_objective(compared: tuple[Path, BenchReport, Comparison]) -> None:
    _, second, _ = compared
    assert second.results[0].slo is not None
    (objective,) = second.results[0].slo["objectives"]
    assert (objective["metric"], objective["value"], objective["met"]) == ("time_to_second_response", 60.0, False)


def test_a_metric_is_compared_and_can_fail_a_comparison(compared: tuple[Path, BenchReport, Comparison]) -> None:
    _, _, found = compared
    ((_, ((_, rows),)),) = found.tables()
    shown = {row[0]: row[1:] for row in rows}
    assert shown["second p50 ms"][:3] == ("40", "60", "1.500")
    assert shown["second p50 ms"][-1] == "worse"
    assert shown["prompt tokens/s"][:3] == ("1,000", "500", "0.500")
    assert shown["prompt tokens/s"][-1] == "worse"
    assert [judgement.fired for judgement in found.judgements] == [True, True, False]
