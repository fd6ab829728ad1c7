"""Accuracy report as files: JSON, and one self-contained HTML page that can be read without network or script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from trtpipe.engines.accuracy.job import LayerError
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.accuracy.gate import HTML_NAME, JSON_NAME, AloneReport, Report, number, percent
from trtpipe.pipeline.pages import plots
from trtpipe.pipeline.pages import render as pages
from trtpipe.pipeline.pages.parts import Card, Cell, Finding, Page, Row, Section, Table, sentence
from trtpipe.pipeline.pages.plots import Curve, Figure, Point
from trtpipe.pipeline.store.folders import write_whole

# Errors of a layer: attribute, and meaning.
ERRORS = (
    (
        "local",
        "The quantized layer is given the original's input. The length of the difference of the two outputs, as a "
        "share of the length of what the original layer adds to its input; mean over all tokens.",
    ),
    (
        "accumulated",
        "The quantized layer is given what the quantized layers before it made. The length of the difference of the "
        "two outputs, as a share of the length of the original's output; mean over all tokens.",
    ),
)


def write(report: Report | AloneReport, folder: Path, text: str = "held-out text") -> None:
    """Write accuracy.json and accuracy.html into `folder`, which is made if need be. Raises HostError.

    text  what the model was run on, in words
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / JSON_NAME, json.dumps(report.to_dict(), indent=4, allow_nan=False) + "\n")
        write_whole(folder / HTML_NAME, render(report, text))
    except OSError as error:
        raise HostError(
            f"the accuracy report cannot be written to {folder}",
            why=error.strerror or str(error),
            remedy="give another place for it",
        ) from None


def render(report: Report | AloneReport, text: str = "held-out text") -> str:
    """The page for a report."""
    return pages.render(_alone(report, text) if isinstance(report, AloneReport) else _comparison(report, text))


def _alone(report: AloneReport, text: str) -> Page:
    found, rows = report.measured, [Row(name=what, cells=[Cell(text=value)]) for what, value in report.summary()]
    model = f"The model is not quantized, and computes in {found.quantized_dtype}; nothing was compared with it."
    if not report.plain:
        model = (
            f"The model came quantized with {found.quant_algo or 'no weight algorithm'}, KV cache "
            f"{found.kv_cache_quant_algo or 'as it is'}, the rest in {found.quantized_dtype}; its original was not "
            "compared with it."
        )
    about = (
        f"{found.positions:,} next tokens of {text}, {found.rows} rows of {found.seq_len} tokens, on "
        f"{found.device}. {model}"
    )
    note, name = f"of the {report.kind} model alone", "the model" if report.plain else report.recipe
    card = Card(label="Perplexity", value=number(found.quantized_perplexity), note=note)
    return Page(
        kind="Accuracy", title=f"Accuracy of {name}", about=about, cards=[card],
        findings=list(_findings(report)),
        sections=[
            Section(title="Figures", tables=[Table(head="Figure", columns=[report.kind], rows=rows)]), _clipped(report),
        ],
    )  # fmt: skip


def _comparison(report: Report, text: str) -> Page:
    found = report.measured
    about = (
        f"{found.positions:,} next tokens of {text}, {found.rows} rows of {found.seq_len} tokens, on "
        f"{found.device}. The original in {found.original_dtype}; quantized with "
        f"{found.quant_algo or 'no weight algorithm'}, KV cache {found.kv_cache_quant_algo or 'as it is'}, the rest in "
        f"{found.quantized_dtype}."
    )
    summary = [
        Row(name=what, cells=[Cell(text=one or "") for one in (original, quantized, limit)])
        for what, original, quantized, limit in report.summary()
    ]
    return Page(
        kind="Accuracy", title=f"Accuracy of {report.recipe}", about=about, cards=_cards(report),
        findings=list(_findings(report)),
        sections=[
            Section(title="Error of each layer", figures=[chart(found.layers)], facts=ERRORS),
            Section(
                title="Against the limits",
                tables=[Table(head="Figure", columns=["original", "quantized", "limit"], rows=summary)],
            ),
            Section(title="Worst layers", tables=[_layers(report.worst)]),
            _clipped(report),
            Section(title="All layers", folded=f"{len(found.layers)} layers", tables=[_layers(found.layers)]),
        ],
    )  # fmt: skip


def _cards(report: Report) -> list[Card]:
    found, allowed = report.measured, report.thresholds
    return [
        Card(
            label="Perplexity", value=number(found.quantized_perplexity),
            note=f"original {number(found.original_perplexity)}",
        ),
        Card(
            label="Perplexity ratio", value=number(found.perplexity_ratio),
            note=f"at most {allowed.perplexity_ratio:g}",
        ),
        Card(
            label="Mean KL divergence", value=number(found.mean_kl), unit="nats", note=f"at most {allowed.mean_kl:g}"
        ),
        Card(
            label="Same first choice", value=percent(found.top1_agreement),
            note=f"at least {percent(allowed.top1_agreement)}",
        ),
    ]  # fmt: skip


def _findings(report: Report | AloneReport) -> Iterator[Finding]:
    failures = report.failures
    yield Finding(text=f"The accuracy gate {'failed' if failures else 'passed'}.", good=not failures)
    for failure in failures:
        yield Finding(text=sentence(failure), good=False)


def chart(layers: Sequence[LayerError]) -> Figure:
    """Both errors of each layer, in percent, on one scale."""
    curves = [
        Curve(
            name=name,
            style=style,
            points=[
                Point(
                    x=layer.layer, y=100 * getattr(layer, name), label="",
                    title=f"layer {layer.layer}: {name} {percent(getattr(layer, name))}",
                )
                for layer in layers
            ],
        )
        for style, (name, _) in enumerate(ERRORS)
    ]  # fmt: skip
    return plots.curves("Local and accumulated error of each layer", curves, x="Layer", y="Error, %", linear=True)


def _layers(layers: Sequence[LayerError]) -> Table:
    rows = [
        Row(name=str(layer.layer), cells=[Cell(text=percent(layer.local)), Cell(text=percent(layer.accumulated))])
        for layer in layers
    ]
    return Table(head="Layer", columns=[name for name, _ in ERRORS], rows=rows)


def _clipped(report: Report | AloneReport) -> Section:
    title = "Clipped inputs"
    if not report.saturated:
        fits = "every number fits the scale that calibration found for it"
        why = fits if report.measured.saturation else "no scale is fixed before the model runs"
        return Section(title=title, lines=[f"None: {why}."])
    rows = [
        Row(
            name=str(one.layer),
            cells=[
                Cell(text=one.linear, words=True), Cell(text=f"{one.beyond:,}"), Cell(text=f"{one.inputs:,}"),
                Cell(text=percent(one.share)),
            ],
        )
        for one in report.saturated
    ]  # fmt: skip
    told = "Numbers that the scale found by calibration cannot hold. The matrices without any are left out."
    columns = ["matrix", "clipped", "of", "share"]
    return Section(title=title, lines=[told], tables=[Table(head="Layer", columns=columns, rows=rows)])
