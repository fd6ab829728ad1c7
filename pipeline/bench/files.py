"""A report on disk: report.json, and beside it every request, a table for spreadsheets and a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines.errors import HostError
from pipeline.bench.metrics import PERCENTILES, definitions, percentile_name
from pipeline.bench.page.page import render
from pipeline.bench.report import BenchReport
from pipeline.bench.slo import GOODPUT
from pipeline.folders import write_whole


def write_report(report: BenchReport, path: Path) -> list[Path]:
    """Write report.json and companions (.requests.jsonl, .csv, .html); each whole or as it was. Raises HostError."""
    requests = path.with_suffix(".requests.jsonl")
    value = report.to_json(requests.name)
    texts = {
        requests: "".join(f"{line}\n" for line in _lines(report)),
        path.with_suffix(".csv"): _table(report),
        path.with_suffix(".html"): render(value),
        path: json.dumps(value, indent=1, allow_nan=False) + "\n",
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for place, text in texts.items():
            write_whole(place, text)
    except OSError as error:
        raise HostError(
            f"report {path} cannot be written", why=error.strerror or str(error), remedy="give another place for it"
        ) from None
    return list(texts)


def _lines(report: BenchReport) -> Iterator[str]:
    for level, records in enumerate(report.records):
        for request in records.objects():
            yield json.dumps({"level": level, **request}, separators=(",", ":"))


def _table(report: BenchReport) -> str:
    """A row for each metric of each level; empty where undefined."""
    statistics = ("value", "n", "mean", "std", "min", *map(percentile_name, PERCENTILES), "max")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("protocol", "load", "repeat", "metric", "unit", *statistics))
    units = {name: entry["unit"] for name, entry in {**definitions(), **GOODPUT}.items()}
    for result in report.results:
        for name, summary in result.metrics.items():
            cells: list[Any] = [summary.get(statistic) for statistic in statistics]
            writer.writerow((result.protocol, result.label, result.repeat, name, units[name], *cells))
    return out.getvalue()
