"""Record of a search for settings, kept beside its measurements: what was asked, every measurement, and the result."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError
from trtpipe.engines.json_input import load_json
from trtpipe.engines.short_repr import short_repr
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.report import BenchReport, LoadPointResult
from trtpipe.pipeline.store.folders import write_whole
from trtpipe.pipeline.tune.candidates import Candidate
from trtpipe.pipeline.tune.search import CLOSE, Score, Winner

SCHEMA = "trtpipe.tune/1"
# How the benchmark's search says that nothing meets the objectives; otherwise it was cut short.
NOTHING_MEETS = ("no rate down to ", "one request at a time does not meet the objectives")
JSON_NAME, HTML_NAME, RECIPE_NAME = "tune.json", "tune.html", "recipe.yaml"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One load point: what was sent and came. Times in ms, rates in 1/s; None where unknown."""

    rate: float | None
    tokens_per_s: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    met: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement of a candidate.

    round, repeat  of the search
    seconds   that it took, with the building and starting of what it measures
    start_s   of these until the server was ready, once built
    around_s  of these in which the server started and stopped
    request_s seconds of a request, the lowest median of its load points; 0 where that is not known
    tail_s    seconds of a load point after its length, the mean
    rate      requests/s, of conversations the first alone, that were answered within the objectives at the highest
              rate that met them; 0 where none met them, None where that is not known
    interval  rates between which the limit lies; None for an open side
    told      why it is less precise than asked for, or what failed; "" for neither
    report    file of the benchmark's report, relative to the study's folder
    """

    candidate: Candidate
    round: int
    repeat: int
    seconds: float
    rate: float | None
    start_s: float = 0.0
    around_s: float = 0.0
    request_s: float = 0.0
    tail_s: float = 0.0
    interval: tuple[float | None, float | None] = (None, None)
    told: str = ""
    points: tuple[Point, ...] = ()
    report: str = ""

    @property
    def score(self) -> Score:
        """The result, as the search takes it."""
        return Score(self.rate, broken=not self.report, at_least=bool(self.rate) and self.interval[1] is None)

    @property
    def best(self) -> Point | None:
        """The load point of the highest rate that met the objectives."""
        return max((point for point in self.points if point.met), key=lambda point: point.rate or 0.0, default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens/s at that rate."""
        return None if self.best is None else self.best.tokens_per_s

    def said(self, unit: str) -> str:
        """The result in a few words; `unit` of the rate."""
        if self.rate is None:
            return f"not measured: {self.told}"
        low, high = ("open" if side is None else f"{side:g}" for side in self.interval)
        return f"{self.rate:.4g} {unit} ({low} to {high})" + (f"; {self.told}" if self.told else "")

    @classmethod
    def measured(cls, bench: BenchReport, **known: Any) -> Run:
        """A run from the report of its search for a rate."""
        found = bench.searches[0].found
        passed = {step.rate for step in found.steps if step.passed}
        points = [
            Point(
                rate=result.load["rate"],
                tokens_per_s=result.metrics["output_token_throughput"]["value"],
                ttft_p99=result.metrics["time_to_first_token"]["p99"],
                tpot_p50=result.metrics["time_per_output_token"]["p50"],
                met=result.load["rate"] in passed,
            )
            for result in bench.results
            if result.load["kind"] == "open" and _counts(result)
        ]
        rate = found.rate
        if rate is None:
            rate = 0.0 if (found.ended or "").startswith(NOTHING_MEETS) else None
        else:
            # In a short load point a queue may grow whose requests still meet the objectives: what was answered counts.
            there = [
                _answered(one, records)
                for one, records in zip(bench.results, bench.records, strict=True)
                if one.load.get("rate") == rate and _counts(one)
            ]
            answered = [value for value in there if value is not None]
            rate = min(rate, sum(answered) / len(answered)) if answered else rate
        medians = (one.metrics["request_latency"]["p50"] for one in bench.results)
        request_s = min((value / 1e3 for value in medians if value is not None), default=0.0)
        told = found.ended or ""
        return cls(rate=rate, request_s=request_s, interval=found.interval, told=told, points=tuple(points), **known)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "candidate": dict(self.candidate.changes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Run:
        points = tuple(Point(**point) for point in value["points"])
        low, high = value["interval"]
        candidate = Candidate.of(value["candidate"])
        return cls(**{**value, "candidate": candidate, "points": points, "interval": (low, high)})


@dataclass(kw_only=True)
class Study:
    """A search on one machine.

    question  what decides the result: target, settings, objectives, load, time; a study with another is another study
    left      candidates that have no result, and why
    remedy    what to do where no change has a result; "" where more time does not help
    state     complete; out of time, before all candidates were measured; undecided, since the gain is within twice its
              error, or that is not known, or a highest rate was not found in time; no answer, since no candidate was
              measured; or interrupted
    price     of the target's GPUs for an hour, if known
    """

    __repr__ = short_repr("target", "state", "folder")

    target: str
    question: dict[str, Any]
    folder: Path
    runs: list[Run] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    remedy: str = ""
    winner: Winner | None = None
    state: str = "interrupted"
    price: float | None = None

    @classmethod
    def open(cls, target: str, question: dict[str, Any], folder: Path) -> Study:
        """The study in `folder` with its runs so far; an empty one where there is none, or another version wrote it."""
        runs = []
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            runs = [Run.from_json(run) for run in load_json(folder / JSON_NAME)["runs"]]
        return cls(target=target, question=question, folder=folder, runs=runs)

    @property
    def unit(self) -> str:
        """What a rate counts."""
        return "requests/s" if self.question.get("work", {}).get("sessions") is None else "conversations/s"

    @property
    def spent_s(self) -> float:
        return sum(run.seconds for run in self.runs)

    def find(self, candidate: Candidate, number: int, repeat: int) -> Run | None:
        return next(
            (one for one in self.runs if (one.candidate, one.round, one.repeat) == (candidate, number, repeat)), None
        )

    def of(self, candidate: Candidate) -> list[Run]:
        """Runs of a candidate's last round that has a result; without one, of its last."""
        every = [run for run in self.runs if run.candidate == candidate]
        runs = [run for run in every if run.rate is not None] or every
        return [run for run in runs if run.round == max(one.round for one in runs)]

    def candidates(self) -> list[Candidate]:
        """Those that were measured, the best of the latest rounds first."""

        def order(one: Candidate) -> tuple[int, float]:
            runs = self.of(one)
            return -runs[0].round, -max(run.rate or -1.0 for run in runs)

        return sorted(dict.fromkeys(run.candidate for run in self.runs), key=order)

    @property
    def decided(self) -> bool:
        """Whether the search has an answer."""
        return self.winner is not None and self.winner.proven

    @property
    def compared(self) -> list[Candidate]:
        """Changes that have a result, beside that of the target as it is."""
        return [one for one in self.candidates() if one.changes and best_run(self.of(one)).rate is not None]

    def cost(self, run: Run) -> float | None:
        """Price of a million output tokens at a run's rate."""
        tokens = run.tokens_per_s
        return None if self.price is None or not tokens else self.price / (tokens * 3600) * 1e6

    def said(self) -> str:
        """The result in one line."""
        if not self.runs:
            return "nothing was measured"
        compared = len(self.compared)
        if self.winner is None or not compared:
            return "nothing but the target as it is was measured" + (f"; {self.remedy}" if self.remedy else "")
        cut = "" if self.winner.complete else "; time was over before the last round"
        remedy = f"; {self.remedy}, or a quieter machine" if self.remedy else ""
        if not self.winner.candidate.changes and not self.winner.proven:
            return f"not decided: time was over before the highest rate of each change was found{remedy}"
        if not self.winner.candidate.changes:
            of = f"of {compared} change{'s' * (compared != 1)} measured"
            return f"the target serves best as it is: {of}, none gains more than {CLOSE:.0%}{cut}"
        rate = mean_rate(self.of(self.winner.candidate)) or 0.0
        error = "" if self.winner.error is None else f" ± {self.winner.error:.0%}"
        gain = "" if self.winner.gain is None else f", {self.winner.gain:+.0%}{error} over the target as it is"
        if not self.winner.proven:
            why = "with an unknown error" if self.winner.error is None else "less than twice its error"
            if self.winner.error is not None and (self.winner.gain or 0.0) > 2 * self.winner.error:
                why = "but time was over before the target's highest rate was found"
            return f"not decided: {self.winner.candidate.name}{gain}, {why}{remedy}"
        return f"{self.winner.candidate.name}: {rate:.4g} {self.unit} within the objectives{gain}{cut}"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "target": self.target, "question": self.question, "state": self.state,
            "price_per_hour": self.price, "said": self.said(),
            "winner": None if self.winner is None else {
                "changes": dict(self.winner.candidate.changes), "gain": self.winner.gain,
                "error": self.winner.error, "complete": self.winner.complete, "proven": self.winner.proven,
            },
            "not_measured": self.left, "runs": [run.to_json() for run in self.runs],
        }  # fmt: skip

    def write(self) -> None:
        """Raises HostError."""
        put(self.folder, {JSON_NAME: json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"})


def _counts(point: LoadPointResult) -> bool:
    """Whether a load point says what the server does: neither interrupted, nor limited by the client."""
    return not point.interrupted and bool(point.verdict["valid"])


def _answered(point: LoadPointResult, records: Records) -> float | None:
    """Requests/s that were answered within the objectives, of a conversation the first alone: those that ended within
    the load point, or all of them until the last one's end, if that is more. In a few seconds on a busy machine none
    may end."""
    inside: float | None = point.metrics["request_goodput"]["value"]
    if inside is None or point.slo is None or point.window_s is None:
        return None
    until_s = point.window_s + (point.metrics["request_latency"]["max"] or 0.0) / 1e3
    everything: float = (point.slo["attainment"] or 0.0) * point.requests["measured"] / until_s
    return max(inside, everything) * records.first_share()


def put(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files of a study. Raises HostError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise HostError(f"{folder} cannot be written", why=error.strerror or str(error)) from None


def mean_rate(runs: Sequence[Run]) -> float | None:
    """The rate of runs of a candidate, as its gain is computed; None where no run has a result."""
    rates = [run.rate for run in runs if run.rate is not None]
    return statistics.fmean(rates) if rates else None


def best_run(runs: Sequence[Run]) -> Run:
    """The run of the highest rate."""
    return max(runs, key=lambda run: -1.0 if run.rate is None else run.rate)
