"""Files of a report: report.json, every request, a table for spreadsheets and a page; also reads the options back for a
repetition."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.engines.files import file_in
from trtpipe.engines.json_input import load_json
from trtpipe.pipeline.bench.options import BenchOptions
from trtpipe.pipeline.bench.results.digest import digest
from trtpipe.pipeline.bench.results.folders import FILE, beside
from trtpipe.pipeline.bench.results.metrics import definitions
from trtpipe.pipeline.bench.results.page import render
from trtpipe.pipeline.bench.results.report import SCHEMA, BenchReport
from trtpipe.pipeline.bench.results.statistics import PERCENTILES, percentile_name
from trtpipe.pipeline.store.folders import write_together


def write_report(report: BenchReport, path: Path) -> list[Path]:
    """Write report.json and its companions (.requests.jsonl, .csv, .html). Where the disk has no room for all of them,
    all stay as they were. Raises HostError.
    """
    requests = beside(path, ".requests.jsonl")
    lines = "".join(f"{line}\n" for line in _lines(report))
    value = report.to_json(requests.name, hashlib.sha256(lines.encode()).hexdigest())
    table = beside(path, ".csv")
    texts = {
        requests: lines,
        table: _table(report),
        beside(path, ".html"): render(value, [path.name, table.name, requests.name]),
        path: json.dumps(value, indent=1, allow_nan=False) + "\n",
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_together(texts)
    except OSError as error:
        raise HostError(
            f"report {path} cannot be written", why=error.strerror or str(error), remedy="give another place for it"
        ) from None
    return list(texts)


def read_again(path: Path, tokenizer: Path | None = None, others: Iterable[Path] = ()) -> BenchOptions:
    """The options of a report.json, or of a folder with one, to repeat its run; `tokenizer`, likewise a file or a
    folder, replaces one that is stored elsewhere now. Without it, where the report's is gone, the same file among
    `others` does.

    Raises InputDataError for a file that is not a report, and for one whose input files have changed: another run.
    """
    path = file_in(path, FILE)
    try:
        report = load_json(path)
    except (OSError, ValueError) as error:
        raise InputDataError(f"{path} cannot be read", why=str(error), remedy="name a report.json") from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        found = json.dumps(report.get("schema") if isinstance(report, dict) else None)[:40]
        raise InputDataError(f"{path} is not a report of this kind", why=f"schema {found}, not {SCHEMA}")
    options = BenchOptions.from_json(report.get("options"), str(path))
    digests = report.get("work_sha256", {})
    if not isinstance(digests, dict):
        raise InputDataError(f"{path} is damaged", why="work_sha256 is not a mapping", remedy="measure anew")
    if tokenizer is not None:
        options = replace(options, tokenizer=file_in(tokenizer, "tokenizer.json"))
    elif not options.tokenizer.is_file():
        same = [file for file in others if file.is_file() and digest(file) == report.get("tokenizer_sha256")]
        if not same:
            raise InputDataError(
                f"the tokenizer of {path} is gone", why=f"it was {options.tokenizer}",
                remedy="give --tokenizer, the model's tokenizer.json or its folder",
            )  # fmt: skip
        options = replace(options, tokenizer=same[0])
    then = {str(options.tokenizer): report.get("tokenizer_sha256"), **digests}
    for file, sha256 in then.items():
        remedy = "bring it back, or measure anew"
        try:
            same = digest(Path(file)) == sha256
        except InputDataError as error:
            raise InputDataError(error.what, why=error.why, remedy=remedy) from None
        if not same:
            raise InputDataError(f"{file} is not what it was in {path}", remedy=remedy)
    return options


def _lines(report: BenchReport) -> Iterator[str]:
    for number, records in enumerate(report.records):
        for request in records.objects():
            yield json.dumps({"level": number, **request}, separators=(",", ":"))


def _table(report: BenchReport) -> str:
    """A CSV row for each metric of each load point; empty where undefined."""
    statistics = ("value", "n", "mean", "std", "min", *map(percentile_name, PERCENTILES), "max")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("protocol", "load", "repeat", "metric", "unit", *statistics))
    units = {name: entry["unit"] for name, entry in definitions().items()}
    for result in report.results:
        for name, summary in result.metrics.items():
            cells: list[Any] = [summary.get(statistic) for statistic in statistics]
            writer.writerow((result.protocol, result.label, result.repeat, name, units[name], *cells))
    return out.getvalue()
