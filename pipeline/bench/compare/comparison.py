"""Comparison of two or more reports: the first is the base, load points match where protocol and load are the same.

Where the requests of both sides were kept, each ratio has an interval and is significant or not; without requests
nothing is said about significance. A condition that cannot be judged counts as fired, so that a gate never passes for
lack of data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.engines.errors import StageFailed, UsageError
from trtpipe.pipeline.bench.compare import conditions
from trtpipe.pipeline.bench.compare.bootstrap import COVERAGE, RESAMPLES
from trtpipe.pipeline.bench.compare.conditions import Condition, Kind
from trtpipe.pipeline.bench.compare.differences import (
    MEASURED_DIFFERENTLY,
    defined_alike,
    differences,
    same_prompts,
)
from trtpipe.pipeline.bench.compare.pairing import Place, Side, add_whole_run_rates, match
from trtpipe.pipeline.bench.compare.rows import COST, POINTS, better, rows
from trtpipe.pipeline.bench.results.metric import VALUE
from trtpipe.pipeline.bench.results.metrics import find
from trtpipe.pipeline.bench.results.slo import spared

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Statistics that are compared.
STATISTICS = ("mean", "p50", "p90", "p99")
# Most load points named for one condition.
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One report's figure in a row, with its ratio to the base and the interval of the ratio; None where unknown.

    better  True or False where the difference is significant and has a direction
    """

    value: float | None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    significant: bool | None = None
    better: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A statistic of a metric at one load point, by the reports' letters."""

    place: str
    metric: str
    statistic: str
    unit: str
    cells: dict[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A condition at one load point of one report. `fired` is None where it cannot be judged; `told` says why."""

    condition: str
    place: str
    letter: str
    fired: bool | None
    told: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of a comparison. `warnings` are differences between the runs, to be read before the numbers, as are
    `notes`."""

    paths: dict[str, str]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    judgements: tuple[Judgement, ...]
    from_records: dict[str, bool]
    repeated: bool

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "resamples": RESAMPLES, "coverage": COVERAGE, "failed": self.refusal() is not None}

    def refusal(self) -> StageFailed | None:
        """The error that ends the command; None if no condition fired."""
        bad = [judgement for judgement in self.judgements if judgement.fired is not False]
        if not bad:
            return None
        told = []
        for condition in dict.fromkeys(judgement.condition for judgement in bad):
            mine = [judgement.told for judgement in bad if judgement.condition == condition]
            more = f", and {len(mine) - _NAMED} more" if len(mine) > _NAMED else ""
            told.append(f"{condition} ({', '.join(mine[:_NAMED])}{more})")
        return StageFailed("the comparison fails", why="; ".join(told))

    def tables(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, list[tuple[str, ...]]]]]]:
        """(head, sections) for each report against the first; a section is (load point, rows). The first and the last
        cell of a row are words, all others numbers."""
        base = LETTERS[0]
        for letter in [letter for letter in self.paths if letter != base]:
            sections: dict[str, list[tuple[str, ...]]] = {}
            for name, row in self.shown():
                cell = row.cells[letter]
                figures = (figure(row.cells[base].value, row.unit), figure(cell.value, row.unit))
                interval = cell.interval and "{:.3f} to {:.3f}".format(*cell.interval)
                ratio = None if cell.ratio is None else f"{cell.ratio:.3f}"
                line = (*figures, ratio, interval, verdict(cell))
                sections.setdefault(row.place, []).append((name, *(part or "-" for part in line)))
            if sections:
                head = ("", base, letter, f"{letter}/{base}", "95% interval", f"{letter} is")
                yield head, list(sections.items())

    def shown(self) -> Iterator[tuple[str, Row]]:
        """(name, row) of the rows in the printed table."""
        found = {(row.place, row.metric, row.statistic): row for row in self.rows}
        for place in dict.fromkeys(row.place for row in self.rows):
            for ours, names in rows():
                statistics = ours.figures(POINTS)
                metric = next((one for one in names if any((place, one, each) in found for each in statistics)), "")
                for statistic in statistics:
                    row = found.get((place, metric, statistic))
                    if row is not None:
                        name = names[row.metric]
                        yield name if statistic == VALUE else f"{name} {statistic} {row.unit}", row

    def summary(self) -> list[str]:
        """Sentences about each report as a whole, from the intervals."""
        out = []
        for letter in self.paths:
            if letter == LETTERS[0]:
                continue
            cells = [row.cells[letter] for _, row in self.shown()]
            judged = [cell for cell in cells if cell.significant is not None]
            if not judged:
                without = [one for one in (LETTERS[0], letter) if not self.from_records[one]]
                if without:
                    why = f"from summaries, no significance: the requests of {' and '.join(without)} are not at hand"
                elif any(cell.ratio is not None for cell in cells):
                    why = "no significance: there are too few requests for intervals, or too many, or all are alike"
                else:
                    why = "nothing is measured by both"
                out.append(f"{letter} against A: {why}")
                continue
            better = sum(cell.better is True for cell in judged)
            worse = sum(cell.better is False for cell in judged)
            chance = 100 - COVERAGE[1] + COVERAGE[0]
            out.append(
                f"{letter} against A: of {len(judged)} figures {worse} significantly worse, {better} better; "
                f"by chance alone {chance:.0f} of 100 figures would differ so"
                + ("" if self.repeated else ", and more from one run to the next: --repeat tells how much")
            )
        return out


def compare(
    paths: Sequence[Path],
    *,
    fail_if: Sequence[str] = (),
    price_per_hour: Sequence[float] = (),
    own_price: Callable[[Mapping[str, Any]], float | None] = lambda report: None,
    seed: int = 0,
) -> Comparison:
    """Compare reports, the first being the base. Raises UsageError and InputDataError.

    fail_if         expressions of `conditions`
    price_per_hour  price of the measured deployment: one for all, or one for each report
    own_price       price of the deployment that a report describes, where none is given
    """
    if not 2 <= len(paths) <= len(LETTERS):
        told = "one report is given" if len(paths) == 1 else f"{len(paths)} reports are given"
        raise UsageError(told, remedy=f"give from 2 to {len(LETTERS)}, the base first")
    if len(price_per_hour) not in (0, 1, len(paths)):
        raise UsageError(
            f"{len(price_per_hour)} prices for {len(paths)} reports", remedy="give one price, or one for each report"
        )
    if any(not 0 < price < math.inf for price in price_per_hour):
        raise UsageError("a price is not a positive number", remedy="give what an hour costs")
    prices: list[float | None] = [*price_per_hour] or [None]
    prices *= len(paths) // len(prices)
    sides = {
        letter: Side(path, price, (seed, number))
        for number, (letter, path, price) in enumerate(zip(LETTERS, paths, prices, strict=False))
    }
    for side in sides.values():
        side.price = side.price or own_price(side.report)
    add_whole_run_rates(list(sides.values()))
    known, unlike = _known(sides)
    parsed = [conditions.parse(text, known) for text in fail_if]
    places, missing, warnings = match(sides)
    compared = [row for place in places for row in _rows(place, sides, known)]
    judgements = [judgement for condition in parsed for judgement in _judge(condition, places, sides, known)]
    for condition in parsed if places else ():
        for place, lacks in missing:  # a server that died has not passed
            if lacks == LETTERS[0] and not condition.relative:  # which needs no base
                judgements += _judge(condition, [place], sides, known)
                continue
            told = f"{lacks} at {place.name} cannot be judged: it was not measured"
            judgement = Judgement(condition=condition.text, place=place.name, letter=lacks, fired=None, told=told)
            judgements += [] if judgement in judgements else [judgement]
    from_records = {letter: side.has_records for letter, side in sides.items()}
    left_out = [
        f"{side.load_points[number]['protocol']}, {side.load_points[number]['label']}: only the summary of {letter} is "
        f"compared: {why}"
        for letter, side in sides.items()
        for number, why in side.too_many.items()
        if number < len(side.load_points)
    ]
    shared = {letter: {one for place in places for one in place.load_points.get(letter, ())} for letter in sides}
    reports = {letter: side.report for letter, side in sides.items()}
    return Comparison(
        paths={letter: str(side.path) for letter, side in sides.items()},
        warnings=(
            *differences(reports, shared),
            *dict.fromkeys(left_out),
            *unlike,
            *warnings,
        ),
        notes=tuple(same_prompts(reports)),
        rows=tuple(compared),
        judgements=tuple(judgements),
        from_records=from_records,
        repeated=all(len(load_points) > 1 for place in places for load_points in place.load_points.values()),
    )


def _known(sides: Mapping[str, Side]) -> tuple[dict[str, Kind], list[str]]:
    """(metrics of all reports, warnings about metrics that do not mean the same in each)."""
    out: dict[str, Kind] = {}
    unlike: dict[str, None] = {}
    for side in sides.values():
        for point in side.load_points:
            for name, entry in point["metrics"].items():
                unit = side.report["metrics"].get(name, {}).get("unit", "")
                kind = Kind(unit=unit, is_rate=VALUE in entry)
                if out.setdefault(name, kind) != kind:
                    unlike[name] = None
    if all(side.price is not None for side in sides.values()):
        out[COST.name] = Kind(unit=COST.unit, is_rate=True)
    warnings = [f"{name}: not compared, since its unit differs" for name in unlike]
    return {name: kind for name, kind in out.items() if name not in unlike}, [*warnings, *_only_alike(sides)]


def _only_alike(sides: Mapping[str, Side]) -> Iterator[str]:
    """Kinds of metric that every report has, but no two reports under the same name."""
    for _, names in rows():
        mine = {letter: [metric for metric in names if side.has(metric)] for letter, side in sides.items()}
        if all(mine.values()) and not set.intersection(*map(set, mine.values())):
            told = ", ".join(f"{letter} has {found[0]}" for letter, found in mine.items())
            yield f"{next(iter(names.values()))}: not compared, since the tools do not mean the same: {told}"


def _rows(place: Place, sides: Mapping[str, Side], known: Mapping[str, Kind]) -> Iterator[Row]:
    for metric, kind in known.items():
        for statistic in (VALUE,) if kind.is_rate else STATISTICS:
            cells = dict(_cells(place, sides, metric, statistic, kind.unit))
            if sum(cell.value is not None for cell in cells.values()) > 1:
                yield Row(place=place.name, metric=metric, statistic=statistic, unit=kind.unit, cells=cells)


def _cells(
    place: Place, sides: Mapping[str, Side], metric: str, statistic: str, unit: str
) -> Iterator[tuple[str, Cell]]:
    base = LETTERS[0]
    numbers = place.load_points[base]
    reference = sides[base].value(numbers, metric, statistic)
    yield base, Cell(value=reference)
    for letter in [letter for letter in sides if letter != base]:
        mine = place.load_points.get(letter)
        value = sides[letter].value(mine, metric, statistic) if mine else None
        if mine is None or value is None or reference is None:
            yield letter, Cell(value=value)
            continue
        ours, theirs = (sides[x].draws(place.load_points[x], metric, statistic) for x in (base, letter))
        interval, significant = _significance(ours, theirs)
        yield (
            letter,
            Cell(
                value=value,
                ratio=value / reference if reference else None,
                interval=interval,
                significant=significant,
                better=_direction(metric, unit, value - reference) if significant else None,
            ),
        )


def _significance(ours: Floats | None, theirs: Floats | None) -> tuple[tuple[float, float] | None, bool | None]:
    """(interval of the ratio, whether the difference is significant)."""
    import numpy as np

    if ours is None or theirs is None:
        return None, None
    low, high = np.percentile(theirs - ours, COVERAGE)
    significant = bool(low > 0 or high < 0)
    if not (ours > 0).all():
        return None, significant
    interval = np.percentile(theirs / ours, COVERAGE)
    return (float(interval[0]), float(interval[1])), significant


def _direction(metric: str, unit: str, difference: float) -> bool | None:
    direction = better(metric, unit)
    return (difference > 0) == (direction == "higher") if direction else None


def _judge(
    condition: Condition, places: Sequence[Place], sides: Mapping[str, Side], known: Mapping[str, Kind]
) -> Iterator[Judgement]:
    if not places:
        yield Judgement(condition=condition.text, place="", letter="", fired=None, told="no load point in common")
    for place in places:
        for letter in [letter for letter in place.load_points if letter != LETTERS[0]]:
            fired, told = _outcome(condition, place, letter, sides, known)
            where = f"{letter} at {place.name} {told}"
            yield Judgement(condition=condition.text, place=place.name, letter=letter, fired=fired, told=where)


def _outcome(
    condition: Condition, place: Place, letter: str, sides: Mapping[str, Side], known: Mapping[str, Kind]
) -> tuple[bool | None, str]:
    needed = (LETTERS[0], letter) if condition.relative else (letter,)
    for one in needed:
        if _invalid(sides[one], place.load_points[one]):
            return None, f"cannot be judged: {one} is INVALID"
        load_points = [sides[one].load_points[number] for number in place.load_points[one]]
        if any(point["stopped"] or point["interrupted"] for point in load_points):
            return None, f"cannot be judged: {one} ended early"
    for metric in condition.metrics:
        if not defined_alike(metric, [sides[one].report for one in needed]):
            return None, f"cannot be judged: {MEASURED_DIFFERENTLY}"
        for one in needed:
            measured, failed, unknown, share = sides[one].missing(place.load_points[one], metric)
            kind = find(metric)
            if kind is not None and share > spared(condition.statistic, kind):
                why = [f"{failed} of {measured} requests of {one} failed"] if failed else []
                why += [f"the {kind.short} of {unknown} requests of {one} is unknown"] if unknown else []
                return None, f"cannot be judged: {' and '.join(why)}"
        values = [sides[x].value(place.load_points[x], metric, condition.statistic) for x in needed]
        base, value = values[0], values[-1]
        if not condition.relative and value is not None:
            return condition.fires(value), f"has {_with_unit(value, known[metric].unit)}"
        if condition.relative and value is not None and base:
            drawn = [sides[x].draws(place.load_points[x], metric, condition.statistic) for x in needed]
            interval, _ = _significance(drawn[0], drawn[1])
            within = " ({:.3f} to {:.3f})".format(*interval) if interval else ""
            return condition.fires(value / base), f"has {value / base:.3f}x{within}"
        if condition.relative and value is not None and base == 0:
            return None, f"cannot be judged: {LETTERS[0]} has 0 {metric}, which nothing is a multiple of"
    of = "" if condition.statistic == VALUE else f"{condition.statistic} of "
    return None, f"cannot be judged: no {of}{condition.metrics[0]}"


def _invalid(side: Side, numbers: Sequence[int]) -> bool:
    if any(side.load_points[number]["verdict"]["valid"] is False for number in numbers):
        return True
    # A run that is INVALID as a whole has no valid load point.
    whole: bool = side.report["verdict"]["valid"] is False
    return whole and not any(point["verdict"]["valid"] is False for point in side.load_points)


def figure(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    return f"{100 * value:.2f}" if unit == "" else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _with_unit(value: float, unit: str) -> str:
    told = figure(value, unit)
    return f"{told}%" if unit == "" else f"{told} {unit}"


def verdict(cell: Cell) -> str | None:
    if cell.significant is None:
        return None
    if not cell.significant:
        return "within chance"
    return {True: "better", False: "worse", None: "different"}[cell.better]
