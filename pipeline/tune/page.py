"""Page of a search for settings: the frontier of each finalist, every candidate, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator

from trtpipe.pipeline.pages import plots, render
from trtpipe.pipeline.pages.parts import UNKNOWN, Card, Cell, Finding, Page, Row, Section, Table, number, sentence
from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate
from trtpipe.pipeline.tune.study import HTML_NAME, JSON_NAME, RECIPE_NAME, Run, Study, best_run, mean_rate, put

READING = (
    "Right and high is good. Numbers are the {unit} that were sent. A filled mark met all objectives, a hollow one "
    "did not."
)
# Most curves of the drawing: the target as it is, and the best others.
CURVES = 4


def write(study: Study) -> None:
    """Write the page into the study's folder. Raises HostError."""
    put(study.folder, {HTML_NAME: text(study)})


def text(study: Study) -> str:
    measured = study.candidates()
    asked = study.question
    figures = list(_figures(study, measured))
    page = Page(
        kind="Tuning", title=study.target,
        about=f"`trtpipe tune`: {asked['goal']} within {' and '.join(asked['objectives'])}, measured on this machine.",
        files=[JSON_NAME, RECIPE_NAME] if study.decided else [JSON_NAME], cards=list(_cards(study)),
        findings=list(_findings(study)),
        sections=[
            *([Section(title="Throughput against speed", figures=figures)] if figures else []),
            Section(
                title="Candidates",
                lines=[
                    "Each round measures longer than the one before, and keeps the better half; figures are those of a "
                    f"candidate's last round: {study.unit} the mean of its runs, the others of the best of them."
                ],
                tables=[_table(study, measured)],
            ),
            *([Section(
                title="Not measured",
                tables=[Table(head="Candidate", columns=["why"], rows=[
                    Row(name=name, cells=[Cell(text=sentence(why), words=True)]) for name, why in study.left.items()
                ])],
            )] if study.left else []),
        ],
    )  # fmt: skip
    return render.render(page)


def _cards(study: Study) -> Iterator[Card]:
    if study.winner is None:
        return
    runs = study.of(study.winner.candidate)
    run = best_run(runs)
    mean, best = (f"mean of {len(runs)} runs", "of the best run") if len(runs) > 1 else ("", "")
    yield Card(label=f"{study.unit.capitalize()} within the objectives", value=number(mean_rate(runs)), note=mean)
    if study.winner.gain is not None:
        error = study.winner.error
        note = "" if error is None else f"± {error:.0%}, the standard error of {len(runs)} runs"
        yield Card(label="Gain over the target as it is", value=f"{study.winner.gain:+.0%}", note=note)
    yield Card(label="Output tokens/s", value=number(run.tokens_per_s), note=best)
    if study.price is not None:
        note = "in the currency of the price" + (f", {best}" if best else "")
        yield Card(label="1M output tokens", value=number(study.cost(run)), note=note)


def _findings(study: Study) -> Iterator[Finding]:
    yield Finding(text=sentence(study.said()), good=study.decided)
    count = "1 measurement" if len(study.runs) == 1 else f"{len(study.runs)} measurements"
    yield Finding(text=f"{count} in {study.spent_s / 60:.1f} minutes; state of the search: {study.state}.")


def _table(study: Study, measured: list[Candidate]) -> Table:
    columns = ["round", "runs", study.unit, "limit between", "tokens/s", "TTFT p99 ms", "TPOT p50 ms"]
    columns += ["cost of 1M tokens"] if study.price is not None else []
    return Table(head="Settings", columns=[*columns, ""], rows=[_row(study, one) for one in measured])


def _row(study: Study, candidate: Candidate) -> Row:
    runs = study.of(candidate)
    run = best_run(runs)
    at = run.best
    between = " to ".join(map(number, run.interval)) if any(side is not None for side in run.interval) else UNKNOWN
    cells = [
        str(run.round + 1), str(len(runs)), number(mean_rate(runs)), between, number(run.tokens_per_s),
        number(None if at is None else at.ttft_p99), number(None if at is None else at.tpot_p50),
    ]  # fmt: skip
    cells += [number(study.cost(run))] if study.price is not None else []
    said = Cell(text=sentence(run.told) if run.told else "", words=True)
    return Row(name=candidate.name, cells=[*(Cell(text=cell) for cell in cells), said])


def _figures(study: Study, measured: list[Candidate]) -> Iterator[plots.Figure]:
    others = [one for one in measured if one != AS_IT_IS][: CURVES - 1]
    chosen = [one for one in (AS_IT_IS, *others) if any(map(_shown, study.of(one)))]
    if chosen:
        yield plots.curves(
            "Throughput against speed of one client",
            [_curve(one.name, style, best_run(study.of(one)), study.unit) for style, one in enumerate(chosen)],
            x="Output tokens/s of one client", y="Output tokens/s", note=READING.format(unit=study.unit),
        )  # fmt: skip


def _shown(run: Run) -> bool:
    return any(point.tpot_p50 and point.tokens_per_s for point in run.points)


def _curve(name: str, style: int, run: Run, unit: str) -> plots.Curve:
    points = sorted(
        (point for point in run.points if point.tpot_p50 and point.tokens_per_s),
        key=lambda point: point.rate or 0.0,
    )
    return plots.Curve(
        name=name, style=style,
        points=[
            plots.Point(
                x=1e3 / (point.tpot_p50 or 1.0), y=point.tokens_per_s or 0.0, label=f"{point.rate:g}",
                hollow=not point.met,
                title=f"{name}, {point.rate:g} {unit}: TTFT p99 {number(point.ttft_p99)} ms, TPOT p50 "
                f"{number(point.tpot_p50)} ms",
            )
            for point in points
        ],
    )  # fmt: skip
