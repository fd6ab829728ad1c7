"""Reports of a comparison: their figures, resamples of the figures, and the load points that the reports share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.bench.compare import request_files
from trtpipe.pipeline.bench.compare.bootstrap import Resampler, repeats
from trtpipe.pipeline.bench.compare.differences import load_differences, load_point_differences
from trtpipe.pipeline.bench.compare.importers import read_records, read_report
from trtpipe.pipeline.bench.compare.rows import COST, WHOLE_RUN
from trtpipe.pipeline.bench.results.metric import VALUE
from trtpipe.pipeline.bench.results.records import Records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Rates that a cost is computed from, the better one first.
THROUGHPUTS = ("output_token_throughput", "output_token_throughput" + WHOLE_RUN)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One load, and for each report the numbers of its load points (its repeats) with that load."""

    name: str
    load_points: dict[str, list[int]]


class Side:
    """One report, its requests, and resamples of its figures."""

    def __init__(self, path: Path, price: float | None, seed: tuple[int, ...]) -> None:
        self.path = path
        self.price = price
        self.report = read_report(path)
        self._seed = seed
        self._resamplers: dict[int, Resampler] = {}
        self._draws: dict[tuple[tuple[int, ...], str, str], Floats | None] = {}
        if not self.report.get("levels"):
            raise InputDataError(f"{path} holds no load point", why="nothing was measured", remedy="measure again")

    @property
    def load_points(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.report["levels"]
        return found

    @cached_property
    def _read(self) -> tuple[dict[int, Records], dict[int, str]]:
        return request_files.by_load_point(read_records(self.path, self.report) or ())

    @property
    def too_many(self) -> dict[int, str]:
        """Why the requests of a load point are left out, by its number."""
        return self._read[1]

    @property
    def has_records(self) -> bool:
        return bool(self._read[0])

    @property
    def protocols(self) -> set[str]:
        return {point["protocol"] for point in self.load_points}

    def has(self, metric: str) -> bool:
        """Whether some load point has a figure of the metric."""
        return any(
            any(number is not None for key, number in point["metrics"].get(metric, {}).items() if key != "n")
            for point in self.load_points
        )

    def requests(self, number: int) -> Records | None:
        return self._read[0].get(number)

    def value(self, numbers: Sequence[int], metric: str, statistic: str) -> float | None:
        """Mean over repeats; None where one of them has no value."""
        if metric == COST.name:
            name = self._throughput_name(numbers)
            cost: float | None = None if name is None else self._cost(self.value(numbers, name, VALUE))
            return cost
        found = [self.load_points[number]["metrics"].get(metric, {}).get(statistic) for number in numbers]
        return None if not found or None in found else sum(found) / len(found)

    def missing(self, numbers: Sequence[int], metric: str) -> tuple[int, int, int, float]:
        """(number of measured requests, of those that failed, and of those whose values of the metric nobody tells; the
        largest share of both in a repeat); zeros in a report that does not say."""
        counts = []
        for number in numbers:
            point = self.load_points[number]
            failed, unknown = point["requests"].get("failed") or 0, point.get("unknown_requests", {}).get(metric, 0)
            counts.append((point["requests"].get("measured") or failed + unknown, failed, unknown))
        share = max(((failed + unknown) / measured for measured, failed, unknown in counts if measured), default=0.0)
        measured, failed, unknown = map(sum, zip(*counts, strict=True))
        return measured, failed, unknown, share

    def draws(self, numbers: Sequence[int], metric: str, statistic: str) -> Floats | None:
        """The value over resamples; None where it cannot be computed from the requests."""
        key = (tuple(numbers), metric, statistic)
        if key not in self._draws:
            self._draws[key] = self._drawn(numbers, metric, statistic)
        return self._draws[key]

    def _drawn(self, numbers: Sequence[int], metric: str, statistic: str) -> Floats | None:
        if metric == COST.name:
            rate = self._throughput_name(numbers)
            rates = None if rate is None else self.draws(numbers, rate, VALUE)
            return None if rates is None or not (rates > 0).all() else self._cost(rates)
        out = []
        for number in numbers:
            value, resampler = self.value([number], metric, statistic), self._resampler(number)
            drawn = None if value is None or resampler is None else resampler.draws(metric, statistic, value)
            if drawn is None:
                return None
            out.append(drawn)
        return repeats(out, self._seed) if out else None

    def _throughput_name(self, numbers: Sequence[int]) -> str | None:
        return next((name for name in THROUGHPUTS if self.value(numbers, name, VALUE)), None)

    def _cost(self, tokens_per_s: Any) -> Any:
        return (self.price or 0) / 3600 / tokens_per_s * 1e6

    def _resampler(self, number: int) -> Resampler | None:
        if number not in self._resamplers:
            found = self.requests(number)
            if found is None:
                return None
            closed = self.load_points[number]["load"]["kind"] == "closed"
            self._resamplers[number] = Resampler(found, closed=closed, seed=(*self._seed, number))
        return self._resamplers[number]


def add_whole_run_rates(sides: Sequence[Side]) -> None:
    """Add whole-run rates to reports with rates over a window, where another report has whole-run rates only."""
    theirs = {
        name: entry
        for side in sides
        for name, entry in side.report["metrics"].items()
        if name in request_files.whole_run_names()
    }
    if not theirs:
        return
    for side in sides:
        if theirs.keys() & side.report["metrics"].keys():
            continue
        for number, point in enumerate(side.load_points):
            found = side.requests(number)
            rates = request_files.whole_run_rates(found) if found is not None else {}
            point["metrics"] |= {name: {"value": rates.get(name), "interval": None} for name in theirs}
        side.report["metrics"] |= theirs


def match(sides: Mapping[str, Side]) -> tuple[list[Place], list[tuple[Place, str]], list[str]]:
    """Match the load points of the base and the other reports. Returns the shared loads, (load, letter) for each load
    that a report lacks, and warnings about all that differs."""
    base, *others = sides
    warnings = []
    # Where each report has one protocol and they differ, the protocols are what is compared.
    protocols = {letter: side.protocols for letter, side in sides.items()}
    by_protocol = any(len(mine) > 1 for mine in protocols.values()) or len(set.union(*protocols.values())) == 1
    if not by_protocol:
        told = ", ".join(f"{letter} {next(iter(mine))}" for letter, mine in protocols.items())
        warnings.append(f"protocol: {told}; load points are matched by their load alone")
    groups = {letter: _grouped(side, by_protocol=by_protocol) for letter, side in sides.items()}
    places, missing = [], list[tuple[Place, str]]()
    for key, numbers in groups[base].items():
        first = sides[base].load_points[numbers[0]]
        name = f"{first['protocol']}, {first['label']}" if by_protocol else first["label"]
        load_points = {base: numbers}
        for letter in others:
            found = _counterpart(key, groups[base], groups[letter])
            if found is None:
                warnings.append(f"{name}: not in {letter}")
                missing.append((Place(name=name, load_points={base: numbers}), letter))
                continue
            load_points[letter] = groups[letter].pop(found)
            if found != key:
                if found[0] != key[0]:
                    warnings.append(f"{name}: protocol: {base} {key[0]}, {letter} {found[0]}")
                warnings += load_differences(name, {base: json.loads(key[1]), letter: json.loads(found[1])})
        if len(load_points) > 1:
            places.append(Place(name=name, load_points=load_points))
            warnings += load_point_differences(
                name, {letter: [sides[letter].load_points[n] for n in mine] for letter, mine in load_points.items()}
            )
            if len({len(mine) for mine in load_points.values()}) > 1:
                warnings.append(f"{name}: repeats: {', '.join(f'{x} {len(mine)}' for x, mine in load_points.items())}")
    for letter in others:
        for numbers in groups[letter].values():
            point = sides[letter].load_points[numbers[0]]
            name = f"{point['protocol']}, {point['label']}"
            warnings.append(f"{name}: only in {letter}")
            missing.append((Place(name=name, load_points={letter: numbers}), base))
    if not places:
        warnings.append(
            f"no load point of {base} has the protocol and the load of another report's: nothing is compared"
        )
    return places, missing, warnings


_FAMILIES = {"chat": "openai", "completions": "openai"}
# Protocol and load, the load as JSON.
_Key = tuple[str, str]


def _grouped(side: Side, *, by_protocol: bool) -> dict[_Key, list[int]]:
    out: dict[_Key, list[int]] = {}
    for number, point in enumerate(side.load_points):
        # 16.0 equals 16, and a setting of None equals an absent one.
        load: dict[str, Any] = {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in point["load"].items()
            if value is not None
        }
        if isinstance(load.get("trace"), str):  # the same file may be in another folder; its digest is compared
            load["trace"] = PurePath(load["trace"]).name
        key = (point["protocol"] if by_protocol else "", json.dumps(load, sort_keys=True))
        out.setdefault(key, []).append(number)
    return out


def _counterpart(key: _Key, mine: Mapping[_Key, list[int]], theirs: Mapping[_Key, list[int]]) -> _Key | None:
    """The same protocol and load, else the only one that agrees in protocol family and main settings."""
    if key in theirs:
        return key
    near = [other for other in theirs if _core(other) == _core(key) and other not in mine]
    return near[0] if len(near) == 1 and sum(_core(other) == _core(key) for other in mine) == 1 else None


@lru_cache(maxsize=4096)
def _core(key: _Key) -> tuple[Any, ...]:
    """Family of a protocol, and a load without its minor settings."""
    load = json.loads(key[1])
    amount = "concurrency" if load["kind"] == "closed" else "rate"
    return (_FAMILIES.get(key[0], key[0]), *(load.get(name) for name in ("kind", amount, "arrivals", "speedup")))
