"""The page of a search for settings: which run a figure is of, and what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.bench.results.test_page import Page
from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate
from trtpipe.pipeline.tune.page import text
from trtpipe.pipeline.tune.search import Winner
from trtpipe.pipeline.tune.study import Point, Run, Study

MET = Point(rate=4.0, tokens_per_s=64.0, ttft_p99=90.0, tpot_p50=11.0, met=True)


def run(candidate: Candidate, repeat: int = 0, **changes: Any) -> Run:
    known: dict[str, Any] = {"rate": 4.0, "interval": (4.0, 8.0), "points": (MET,)}
    return Run(candidate=candidate, round=0, repeat=repeat, seconds=60.0, **known | changes)


def study(*runs: Run, **changes: Any) -> Study:
    question = {"goal": "requests/s", "objectives": ["ttft:p99<200ms"]}
    return Study(target="m.h100.fp8", question=question, folder=Path(), runs=list(runs), **changes)


def test_a_card_says_which_runs_its_figure_is_of() -> None:
    better = Candidate.of({"build.max_batch_size": 128})
    winner = Winner(candidate=better, gain=0.5, complete=True)
    twice = [run(better), run(better, 1, rate=3.0)]
    texts = [words for _, words in Page(text(study(run(AS_IT_IS), *twice, winner=winner, price=3.6))).texts]
    at = texts.index("Requests/s within the objectives")
    assert texts[at : at + 3] == ["Requests/s within the objectives", "3.5", "mean of 2 runs"]
    at = texts.index("Output tokens/s")
    assert texts[at : at + 6] == [
        "Output tokens/s", "64", "of the best run", "1M output tokens", "15.62",
        "in the currency of the price, of the best run",
    ]  # fmt: skip
    once = Page(text(study(run(AS_IT_IS), run(better), winner=winner))).words
    assert not {"mean of 1 runs", "of the best run"} & set(once)


def test_where_nothing_met_the_objectives_there_is_no_chart_and_no_limit() -> None:
    page = Page(text(study(run(AS_IT_IS, rate=0.0, interval=(None, None), points=()))))
    assert "Throughput against speed" not in page.words
    assert any(words.startswith("1 measurement in 1.0 minutes; ") for words in page.words)
    cells = [words for tag, words in page.texts if tag in ("th", "td")]
    assert cells[cells.index("as it is") + 1 :][:4] == ["1", "1", "0", "–"]
