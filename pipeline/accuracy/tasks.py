"""Task scores of a model and its quantized version: multiple choice by likelihood, exact match of greedy answers.

lm-eval itself is not used: it does not read TensorRT-LLM checkpoints or most quantized folders, and needs a dozen more
packages.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.engines.accuracy.scoring import Answers, Continuation, Generation, answer
from trtpipe.engines.backends.base import longest_sequence
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.tokenizer import read_tokenizer
from trtpipe.engines.json_input import read_json
from trtpipe.engines.process import Progress
from trtpipe.pipeline.accuracy.task_files import Filter, Metric, Task, documents, read_task


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Mean of a metric over a task's documents, from 0 to 1, and its standard error, for both models.

    original  None where only the quantized model exists
    max_drop  most that `quantized` may be below `original`; None where the score is not judged
    """

    task: str
    metric: str
    documents: int
    quantized: float
    quantized_stderr: float
    original: float | None = None
    original_stderr: float | None = None
    max_drop: float | None = None

    @property
    def failure(self) -> str | None:
        # The difference of scores such as 0.8 and 0.7 is more than 0.1 in binary.
        if self.original is None or self.max_drop is None or self.original - self.quantized <= self.max_drop + 1e-9:
            return None
        drop = f"{self.original - self.quantized:.4g} below the original's {self.original:.4g}"
        return f"{self.metric} of {self.task} is {self.quantized:.4g}, {drop}, and the task allows {self.max_drop:g}"


def score_tasks(
    files: Sequence[Path], original: Path, quantized: Path | None, *, device: str = "auto", log: Path,
    progress: Progress = lambda done, total: None,
) -> list[TaskScore]:  # fmt: skip
    """Score the model in the folder `original`, and the one in `quantized`, on the tasks in `files`.

    Without `quantized` only `original` is scored, which was quantized when it came. `progress` counts documents, scaled
    to bytes of the models' weights, the unit of other accuracy jobs. Raises InputDataError for unusable tasks and data,
    and what `scoring.answer` raises.
    """
    tasks = [_Prepared.read(file, original) for file in files]
    pairs = [pair for task in tasks for pair in task.continuations]
    prompts = [prompt for task in tasks for prompt in task.generations]
    models = [original] if quantized is None else [original, quantized]
    sizes = [sum(path.stat().st_size for path in model.glob("*.safetensors")) for model in models]
    replies: list[Answers] = []
    for place, model in enumerate(models):

        def tell(done: int, total: int, place: int = place) -> None:
            progress(sum(sizes[:place]) + sizes[place] * done // total, sum(sizes))

        replies.append(
            answer(
                model, pairs, prompts, tokenizer=original, ends=_ends(original), device=device, log=log, progress=tell
            )
        )
    out: list[TaskScore] = []
    for task in tasks:
        points = [task.points(one) for one in replies]
        for metric in points[0]:
            sides = [_mean(side[metric]) for side in points]
            before = sides[0] if quantized is not None else (None, None)
            out.append(
                TaskScore(
                    task=task.task.task, metric=metric, documents=len(task.golds), quantized=sides[-1][0],
                    quantized_stderr=sides[-1][1], original=before[0], original_stderr=before[1],
                    max_drop=task.task.max_drop,
                )
            )  # fmt: skip
    return out


def check_task(file: Path) -> Task:
    """Read a task file, and render the first document of its data, which needs no model. Raises InputDataError where
    that document does not fit the task, and what `read_task` raises."""
    task = read_task(file)
    made = _Prepared(task=task)
    for where, doc in documents(task.data(file))[:1]:
        # Stands for a tokenizer: what it makes of a text is judged with the model.
        made.take(doc, lambda text: [0, *text.encode()], f"{where} does not fit {file}")
    return task


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, from the sample's standard deviation; the error is 0 for one value."""
    mean, count = sum(values) / len(values), len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, count - 1))
    return mean, deviation / math.sqrt(count)


def _ends(folder: Path) -> list[int]:
    """Token ids that end an answer of the model in a Hugging Face folder."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name, "config").get("eos_token_id")
            ids: list[Any] = found if isinstance(found, list) else [found]
            if all(isinstance(one, int) for one in ids):
                return ids
    return []


@dataclass(kw_only=True)
class _Prepared:
    """A task's documents as requests, and the right answers.

    golds    for each document the index of the right choice, or the right texts, any of which will do
    choices  for each document of multiple choice its choices; empty for other tasks
    listed   whether texts that a template makes are lists of right texts where they read as lists: the first document
             decides, as in lm-eval
    """

    task: Task
    golds: list[Any] = field(default_factory=list)
    choices: list[list[str]] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    listed: bool = False

    @classmethod
    def read(cls, file: Path, model: Path) -> _Prepared:
        task = read_task(file)
        # The reference runtime's layers answer.
        limit = longest_sequence(read_model_config(model, quantized=True), "reference")
        tokenizer = read_tokenizer(model)
        tokenizer.no_padding()
        tokenizer.no_truncation()

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text).ids
            return ids

        made = cls(task=task)
        for where, doc in documents(task.data(file)):
            longest = made.take(doc, encode, f"{where} does not fit {file}")
            if longest > limit:
                raise InputDataError(
                    f"{where} makes {longest} tokens", why=f"the model takes {limit}",
                    remedy="shorten it, or lower generation_kwargs.max_gen_toks",
                )  # fmt: skip
        return made

    def take(self, doc: dict[str, Any], encode: Callable[[str], list[int]], unfit: str) -> int:
        """Add the requests of a document; return the length of the longest in tokens. Raises InputDataError, beginning
        with `unfit`, for a document that does not fit the task."""
        try:
            return self._add(doc, encode)
        except (ValueError, TypeError, KeyError, SyntaxError) as error:
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise InputDataError(unfit, why=why) from None

    def _add(self, doc: dict[str, Any], encode: Callable[[str], list[int]]) -> int:
        """Add the requests of a document; return the length of the longest in tokens.

        Raises ValueError, TypeError, KeyError or SyntaxError for a document that does not fit the task.
        """
        task = self.task
        prompt = str(_field(doc, task.description)) + str(_field(doc, task.doc_to_text))
        if task.output_type == "generate_until":
            ids = encode(prompt)
            if not ids:
                raise ValueError("the prompt is empty")
            kwargs = task.generation_kwargs
            until = [kwargs.until] if isinstance(kwargs.until, str) else kwargs.until
            target = str(task.doc_to_target)
            found = _right(doc, target)
            if not self.golds:
                self.listed = isinstance(found, list)
            several = isinstance(found, list) and (self.listed or target in doc)
            self.golds.append([str(one) for one in (found if several else [found])])
            self.generations.append(Generation(prompt=ids, max_tokens=kwargs.max_gen_toks, until=until))
            return len(ids) + kwargs.max_gen_toks
        choices = task.doc_to_choice if isinstance(task.doc_to_choice, list) else _choices(doc, task.doc_to_choice)
        if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
            raise ValueError(f"{choices} are not two or more choices")
        gold = task.doc_to_target if isinstance(task.doc_to_target, int) else _field(doc, task.doc_to_target)
        if isinstance(gold, str):
            # Digits that a template made are an index, as in lm-eval; those of a field are a choice.
            index = gold.isdigit() and task.doc_to_target not in doc
            if not index and gold not in choices:
                raise ValueError(f"{gold!r} is none of the choices")
            gold = int(gold) if index else choices.index(gold)
        if not isinstance(gold, int) or not 0 <= gold < len(choices):
            raise ValueError(f"{gold!r} is not the index of a choice")
        longest = 0
        for choice in choices:
            context, tokens = _pair(prompt, task.target_delimiter + choice, encode)
            self.continuations.append(Continuation(context=context, tokens=tokens))
            longest = max(longest, len(context) + len(tokens))
        self.golds.append(gold)
        self.choices.append(choices)
        return longest

    def points(self, replies: Answers) -> dict[str, list[float]]:
        """Metric -> 1 for each document that was answered right, else 0. Removes this task's replies from `replies`."""
        out: dict[str, list[float]] = {metric.metric: [] for metric in self.task.metrics}
        for place, gold in enumerate(self.golds):
            if self.choices:
                sums = [replies.likelihoods.pop(0) for _ in self.choices[place]]
                lengths = {"acc": [1] * len(sums), "acc_norm": [len(choice) for choice in self.choices[place]]}
                for name, values in out.items():
                    each = [value / length for value, length in zip(sums, lengths[name], strict=True)]
                    values.append(float(each.index(max(each)) == gold))
            else:
                text = _filtered(replies.texts.pop(0), self.task.filters)
                for metric in self.task.metrics:
                    right = any(_plain(text, metric) == _plain(one, metric) for one in gold)
                    out[metric.metric].append(float(right))
        return out


def _field(doc: dict[str, Any], template: str) -> Any:
    """The document's value of the key `template`; without such a key, the Jinja template rendered with the document."""
    if template in doc:
        return doc[template]
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(template).render(**doc)
    except TemplateError as error:
        raise ValueError(str(error)) from None


def _right(doc: dict[str, Any], template: str) -> Any:
    """The right text or number of a document, or a list of several; what a template makes reads as a list, as in
    lm-eval, or is text. Raises ValueError for another field."""
    found = _field(doc, template)
    if template not in doc and found.startswith("[") and found.endswith("]"):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            read = ast.literal_eval(found)
            return read if isinstance(read, list) and _are_texts(read) else found
    if not _are_texts(found if isinstance(found, list) else [found]):
        raise ValueError(f"{found!r} is no text or number, and no list of these")
    return found


def _are_texts(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(one, str | int | float) for one in values)


def _choices(doc: dict[str, Any], template: str | None) -> list[str]:
    found = _field(doc, template or "")
    if isinstance(found, str):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found = ast.literal_eval(found)
    if not isinstance(found, list | tuple):
        raise ValueError(f"doc_to_choice gives {found!r}, which is not a list of choices")
    return list(found)


def _pair(context: str, continuation: str, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """Token ids of context and continuation. As in lm-eval, spaces at the end of the context go to the continuation."""
    kept = context.rstrip()
    both, alone = encode(context + continuation), encode(kept)
    if not alone or len(both) <= len(alone):
        raise ValueError("the prompt is empty, or a choice is part of its last token")
    return alone, both[len(alone) :]


def _filtered(text: str, filters: Sequence[Filter]) -> str:
    for one in filters:
        if one.function == "remove_whitespace":
            text = text.strip()
        elif one.function == "regex":
            found = re.findall(one.regex_pattern, text)
            groups = found[one.group_select] if -len(found) <= one.group_select < len(found) else one.fallback
            chosen = groups if isinstance(groups, str) else next((group for group in groups if group), one.fallback)
            text = chosen.strip()
    return text


def _plain(text: str, metric: Metric) -> str:
    for pattern in metric.regexes_to_ignore:
        text = re.sub(pattern, "", text)
    text = text.lower() if metric.ignore_case else text
    ignored = (string.punctuation if metric.ignore_punctuation else "") + (
        string.digits if metric.ignore_numbers else ""
    )
    return text.translate(str.maketrans("", "", ignored))
