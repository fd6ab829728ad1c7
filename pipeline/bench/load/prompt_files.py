"""Reader of prompt files, and of conversations in ShareGPT's format.

A prompt file is text with a prompt per line, or JSONL (`.jsonl`) with an object per line: `prompt`, or `text_input`, or
`messages` ({role, content} each); `max_tokens` or `output_tokens`; and sampling options under their usual names.
ShareGPT's format is a JSON list, or JSONL, of objects with `conversations`: the first turn of a human is the prompt,
and the length of the answer that follows is the length to ask for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError, TrtpipeError, suggestion
from trtpipe.engines.json_input import open_regular, parse_json, read_bounded
from trtpipe.engines.sampling import TEMPERATURES, TOP_P
from trtpipe.pipeline.bench.load.lengths import MOST_TOKENS
from trtpipe.pipeline.bench.load.lines import MOST_LINES, numbered, read_object, shown

Message = dict[str, str]

# Sampling options of a request, as servers of the OpenAI API and NVIDIA's models know them, and their types.
SAMPLING: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "seed": (int,),
    "min_tokens": (int,),
    "ignore_eos": (bool,),
    "stop": (str, list),
}
_KINDS: dict[tuple[type, ...], str] = {
    (int,): "a whole number",
    (int, float): "a number",
    (bool,): "true or false",
    (str, list): "text or a list of texts",
}
# Servers differ in the highest temperature that they take, and judge it themselves.
_BOUNDS: dict[str, tuple[float, float]] = {"temperature": (TEMPERATURES[0], math.inf), "top_p": TOP_P}
PROMPTS = ("prompt", "text_input", "messages")
LENGTHS = ("max_tokens", "output_tokens")
# Limit of a file that is one JSON list: ShareGPT's own, which most benchmarks use, has 673 MB, and some 30 million of
# the items that `parse_json` counts, most of them commas in text. The user has chosen the file.
MAX_BYTES = 2 << 30
MAX_VALUES = 64_000_000
HUMAN = ("human", "user")
ASSISTANT = ("gpt", "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One request of a file: a prompt or messages, and what else the file specifies for it.

    answer  text whose length the answer should have, where the file gives no number
    """

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    output_tokens: int | None = None
    answer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def check_options(options: Mapping[str, Any], where: str, error: type[TrtpipeError] = InputDataError) -> None:
    """Raise `error` for an unknown sampling option, or for one of the wrong type or out of bounds."""
    for name, value in options.items():
        if name not in SAMPLING:
            raise error(f"{where}: unknown sampling option '{name}'", remedy=suggestion(str(name), SAMPLING))
        words = isinstance(value, list) and not all(isinstance(word, str) for word in value)
        endless = isinstance(value, float) and not math.isfinite(value)
        if type(value) not in SAMPLING[name] or words or endless:
            raise error(f"{where}: {name} is {shown(value)}, not {_KINDS[SAMPLING[name]]}")
        if name in _BOUNDS and not _BOUNDS[name][0] <= value <= _BOUNDS[name][1]:
            least, most = _BOUNDS[name]
            remedy = f"give {least} or more" if most == math.inf else f"give {least} to {most}"
            raise error(f"{where}: {name} is {shown(value)}", remedy=remedy)


def read_prompts(file: Path) -> list[Entry]:
    """The requests of a prompt file, in its order. Raises InputDataError naming the line."""
    with closing(numbered(file, "prompt file")) as lines:
        if file.suffix == ".jsonl":
            entries = [_entry(read_object(where, line), where) for where, line in lines]
        else:
            entries = [Entry(prompt=line) for _, line in lines]
    return _some(entries, file, "prompt")


def read_conversations(file: Path) -> list[Entry]:
    """The first question and answer of each conversation of a ShareGPT file; conversations without one are left out."""
    entries = []
    for where, item in _items(file):
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise InputDataError(f"{where} has no list of conversations", remedy="give a file in ShareGPT's form")
        pair = _first_pair(turns)
        if pair is not None:
            entries.append(Entry(prompt=pair[0], answer=pair[1]))
    return _some(entries, file, "question with an answer")


def _items(file: Path) -> Iterator[tuple[str, Any]]:
    """(name in error messages, value) of each conversation of a file. Raises InputDataError."""
    if _is_list(file):
        for number, item in enumerate(_list(file), 1):
            yield f"{file}: entry {number}", item
    else:
        for where, line in numbered(file, "conversations"):
            yield where, read_object(where, line)


def _is_list(file: Path) -> bool:
    """Whether a file is one JSON list. Raises InputDataError."""
    try:
        with open_regular(file) as opened:
            return opened.read(4096).lstrip().startswith(b"[")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputDataError(f"conversations {file} cannot be read", why=why) from None


def _list(file: Path) -> list[Any]:
    """Items of a file that is one JSON list. Raises InputDataError."""
    try:
        data = read_bounded(file, MAX_BYTES)
        found: list[Any] = parse_json(data, max_bytes=MAX_BYTES, max_wide_bytes=MAX_BYTES, max_values=MAX_VALUES)
    except OSError as error:
        raise InputDataError(f"conversations {file} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise InputDataError(f"{file} is not JSON", why=str(error)) from None
    if len(found) > MOST_LINES:
        raise InputDataError(f"{file} has more than {MOST_LINES:,} conversations", remedy="give a part of it")
    return found


def _first_pair(turns: list[Any]) -> tuple[str, str] | None:
    """The first human turn, if an answer follows it and neither is empty."""
    known = [turn for turn in turns if isinstance(turn, dict)]
    for turn, after in pairwise(known):
        if turn.get("from") in HUMAN:
            question, answer = turn.get("value"), after.get("value")
            if after.get("from") in ASSISTANT and isinstance(question, str) and isinstance(answer, str):
                return (question, answer) if question.strip() and answer.strip() else None
            return None
    return None


def _entry(item: dict[str, Any], where: str) -> Entry:
    asked = [name for name in PROMPTS if name in item]
    if len(asked) != 1:
        found = " and ".join(asked) if asked else "none"
        raise InputDataError(f"{where}: a request has one of {', '.join(PROMPTS)}", why=f"there is {found}")
    lengths = [name for name in LENGTHS if name in item]
    if len(lengths) > 1:
        raise InputDataError(f"{where}: both {' and '.join(lengths)} are given", remedy="give one of them")
    options = {name: value for name, value in item.items() if name not in (*PROMPTS, *LENGTHS)}
    for name in options:
        if name not in SAMPLING:
            known = (*PROMPTS, *LENGTHS, *SAMPLING)
            raise InputDataError(f"{where}: unknown key '{name}'", remedy=suggestion(name, known))
    check_options(options, where)
    output = item[lengths[0]] if lengths else None
    if output is not None and (type(output) is not int or output < 1):
        raise InputDataError(f"{where}: {lengths[0]} is {shown(output)}, not a positive number")
    if output is not None and output > MOST_TOKENS:
        raise InputDataError(f"{where}: {lengths[0]} is {output}", remedy=f"give at most {MOST_TOKENS:,}")
    text = item[asked[0]]
    if asked == ["messages"]:
        return Entry(messages=_messages(text, where), output_tokens=output, options=options)
    if not isinstance(text, str) or not text:
        raise InputDataError(f"{where}: {asked[0]} is {shown(text)}, not a text")
    return Entry(prompt=text, output_tokens=output, options=options)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    plain = isinstance(value, list) and all(
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in value
    )
    if not plain or not value:
        raise InputDataError(f"{where}: messages is not a list of objects with role and content, both text")
    return tuple(value)


def _some(entries: list[Entry], file: Path, what: str) -> list[Entry]:
    if not entries:
        raise InputDataError(f"{file} holds no {what}")
    return entries
