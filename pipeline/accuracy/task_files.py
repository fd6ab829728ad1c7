"""Reader of task files: a subset of lm-eval's YAML format with local data, for multiple choice and exact match.

The keys have lm-eval's meanings, so lm-eval can run the same file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.configs import read
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.json_input import bounded_lines, parse_json

METRICS = {"multiple_choice": ("acc", "acc_norm"), "generate_until": ("exact_match",)}
FILTERS = ("regex", "remove_whitespace", "take_first")
SPLITS = ("test_split", "validation_split")
# lm-eval's defaults.
MAX_GEN_TOKS, UNTIL = 256, ["\n\n"]


class _Strict:
    """Base class that refuses unknown keys."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True, kw_only=True)
class Metric(_Strict):
    """A metric of a task. The `ignore` options are for exact_match."""

    metric: str
    aggregation: str = "mean"
    higher_is_better: bool = True
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerationKwargs(_Strict):
    """Options of generation. Only greedy generation is scored, so others are refused."""

    until: str | list[str] = field(default_factory=lambda: UNTIL)
    max_gen_toks: int = MAX_GEN_TOKS
    do_sample: bool = False
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Filter(_Strict):
    """One step that extracts the answer from the generated text."""

    function: str
    regex_pattern: str = r"#### (\-?[0-9\.\,]+)"
    group_select: int = 0
    fallback: str = "[invalid]"


@dataclass(frozen=True, kw_only=True)
class Filters(_Strict):
    """Filters that are applied to an answer one after the other."""

    name: str = "none"
    filter: tuple[Filter, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """Content of a task file; the names of the keys are lm-eval's.

    dataset_kwargs  data_files: a .jsonl file, or such a file for each split, relative to the task's file
    metadata        max_drop: most that a score of the quantized model may be below the original's, from 0 to 1;
                    without it scores are not judged
    """

    task: str
    dataset_path: str
    dataset_kwargs: dict[str, str | dict[str, str]]
    doc_to_text: str
    doc_to_target: str | int
    doc_to_choice: str | list[str] | None = None
    output_type: str = "generate_until"
    test_split: str | None = None
    validation_split: str | None = None
    description: str = ""
    target_delimiter: str = " "
    num_fewshot: int = 0
    metric_list: tuple[Metric, ...] = ()
    generation_kwargs: GenerationKwargs = field(default_factory=GenerationKwargs)
    filter_list: tuple[Filters, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.metric_list or tuple(Metric(metric=name) for name in METRICS[self.output_type])

    @property
    def filters(self) -> tuple[Filter, ...]:
        return self.filter_list[0].filter if self.filter_list else ()

    @property
    def max_drop(self) -> float | None:
        given = self.metadata.get("max_drop")
        return None if given is None else float(given)

    def data(self, file: Path) -> Path:
        """Path of the data file of the task whose task file is `file`."""
        named = self.dataset_kwargs["data_files"]
        split = self.test_split or self.validation_split or ""
        return file.parent / (named if isinstance(named, str) else named[split])


def read_task(path: Path) -> Task:
    """Read a task file. Raises InputDataError for another file, for keys of lm-eval that are not supported here, and
    where its data file is missing."""
    task = read.build(Task, read.read_yaml(path), str(path))

    def refuse(what: str, remedy: str) -> InputDataError:
        return InputDataError(f"{path}: {what}", remedy=remedy)

    if task.output_type not in METRICS:
        raise refuse(f"output_type {task.output_type} is not scored here", f"give {' or '.join(METRICS)}")
    if task.dataset_path != "json" or list(task.dataset_kwargs) != ["data_files"]:
        raise refuse("the data is not local", "give dataset_path: json and dataset_kwargs: {data_files: FILE.jsonl}")
    named, split = task.dataset_kwargs["data_files"], task.test_split or task.validation_split
    if isinstance(named, dict) and split not in named:
        raise refuse(f"data_files has no split '{split}'", f"name one of {', '.join(named)} as test_split")
    known = METRICS[task.output_type]
    for metric in task.metrics:
        if metric.metric not in known or metric.aggregation != "mean" or not metric.higher_is_better:
            raise refuse(f"the metric {metric.metric} is not scored here", f"give the mean of {' or '.join(known)}")
    if task.output_type == "multiple_choice" and task.doc_to_choice is None:
        raise refuse("multiple_choice has no doc_to_choice", "give the choices")
    if task.output_type == "generate_until" and task.doc_to_choice is not None:
        raise refuse("generate_until has no choices", "leave doc_to_choice out")
    if task.num_fewshot:
        raise refuse("num_fewshot is not 0", "write the examples into description or doc_to_text")
    if (
        task.generation_kwargs.do_sample
        or task.generation_kwargs.temperature
        or task.generation_kwargs.max_gen_toks < 1
    ):
        raise refuse("answers are generated greedily, of 1 token or more", "leave out do_sample and temperature")
    if len(task.filter_list) > 1 or any(one.function not in FILTERS for one in task.filters):
        raise refuse("filter_list has several lists or an unknown filter", f"known: {', '.join(FILTERS)}")
    try:
        for pattern in (
            *(one.regex_pattern for one in task.filters),
            *(pattern for metric in task.metrics for pattern in metric.regexes_to_ignore),
        ):
            re.compile(pattern)
        drop = task.max_drop
    except (re.error, TypeError, ValueError) as error:
        raise refuse(f"a regular expression or max_drop is invalid: {error}", "correct it") from None
    if drop is not None and not 0 <= drop <= 1:
        raise refuse(f"max_drop is {drop:g}", "give a share of the documents, from 0 to 1")
    if not task.data(path).is_file():
        raise refuse(f"there is no data file {task.data(path)}", "put it there, or correct data_files")
    return task


def documents(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(path and line number, document) of each line of a .jsonl file. Raises InputDataError."""
    out = []
    try:
        for number, line in bounded_lines(path):
            if line.strip():
                doc = parse_json(line)
                if not isinstance(doc, dict):
                    raise ValueError(f"line {number} is not an object")
                out.append((f"{path}, line {number}", doc))
    except OSError as error:
        raise InputDataError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise InputDataError(f"{path} does not have a JSON object on each line", why=str(error)) from None
    if not out:
        raise InputDataError(f"{path} holds no document")
    return out
