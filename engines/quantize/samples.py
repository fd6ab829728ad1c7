"""Token rows for calibration and the accuracy gate, made from texts.

Texts are packed: concatenated in a shuffled order and cut into rows of equal length. There is no padding, so no
maximum is taken over a pad token, and every row has the full length.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtpipe.engines.base import CalibrationConfig
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.json_input import bounded_lines, parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Keys of the text in an object of a .jsonl file, in order of preference.
TEXT_KEYS = ("text", "prompt", "article")
# Key of a conversation in an object that has no text.
CHAT_KEY = "messages"
# Usual keys of an answer to a prompt, which is not read.
ANSWER_KEYS = ("response", "completion", "answer", "output")

# Makes the text of a conversation.
Chat = Callable[[list[dict[str, Any]]], str]

# Texts tokenized at a time: enough for the tokenizer's threads, and few more than the rows need.
BATCH = 64


def read_texts(path: Path, chat: Chat | None = None) -> Iterator[str]:
    """Read the non-blank texts of a file, in its order.

    .txt    paragraphs, separated by blank lines
    .jsonl  an object on each line, its text under one of TEXT_KEYS, or a conversation of {role, content} under CHAT_KEY
    chat    makes the text of a conversation; None refuses them

    The call raises UsageError for another kind of file. The iteration raises InputDataError naming the file and line
    that cannot be read, or naming the file when it holds no text.
    """
    readers: dict[str, Callable[[Path], Iterator[str]]] = {".txt": _paragraphs, ".jsonl": partial(_objects, chat)}
    if path.suffix not in readers:
        raise UsageError(f"{path} is not a file of texts", remedy="give a .txt file (paragraphs) or a .jsonl file")
    return _some(path, readers[path.suffix](path))


def unread_keys(path: Path) -> tuple[str, list[str]]:
    """The key that `read_texts` reads in the first object of a .jsonl file, and the others of them, and
    of ANSWER_KEYS, that it has."""
    keys = (*TEXT_KEYS, CHAT_KEY)
    for _, line in _json_lines(path):
        value = parse_json(line)
        used = next((key for key in keys if key in value), "")
        return used, [key for key in value if key != used and key in (*keys, *ANSWER_KEYS)]
    return "", []


def make_samples(
    texts: Iterable[str], tokenizer: Tokenizer, config: CalibrationConfig, *, vocab_size: int
) -> npt.NDArray[np.int32]:
    """Make token ids [config.samples, config.seq_len] int32; equal arguments give equal ids on every machine.

    Each text includes the special tokens that the tokenizer's post-processor adds, such as a <s> before it.

    Raises InputDataError for too little text, and for a token id beyond `vocab_size`.
    """
    rows, length = config.samples, config.seq_len
    parts: list[npt.NDArray[np.int32]] = []
    total = 0
    for ids in _encoded(_shuffled(list(texts), config.seed), tokenizer):
        largest = max(ids, default=0)
        if largest >= vocab_size:
            raise InputDataError(
                "the tokenizer does not match the vocabulary",
                why=f"it gives token {largest} ({tokenizer.id_to_token(largest)!r}), the model has {vocab_size}",
                remedy="take the tokenizer of the model itself",
            )
        total += len(ids)
        parts.append(np.array(ids, dtype=np.int32))
        if total >= rows * length:
            return np.concatenate(parts)[: rows * length].reshape(rows, length)
    raise InputDataError(
        f"{config.data} gives {total // length} rows of {length} tokens, not {rows}",
        remedy=f"use --set calibration.samples={total // length}, or a longer file"
        if total >= length
        else "give a longer file",
    )


def _some(path: Path, texts: Iterator[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        if text.strip():
            empty = False
            yield text
    if empty:
        raise InputDataError(f"{path} holds no text")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file with their numbers, from 1."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    yield number, raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise InputDataError(f"{path}, line {number} is not UTF-8", why=error.reason) from None
    except OSError as error:
        raise InputDataError(f"{path} cannot be read", why=error.strerror or str(error)) from None


def _paragraphs(path: Path) -> Iterator[str]:
    lines: list[str] = []
    for _, line in _lines(path):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "".join(lines).strip()
            lines.clear()
    yield "".join(lines).strip()


def _objects(chat: Chat | None, path: Path) -> Iterator[str]:
    for number, line in _json_lines(path):
        where = f"{path}, line {number}"
        try:
            value = parse_json(line)
        except UnicodeDecodeError as error:
            raise InputDataError(f"{where} is not UTF-8", why=error.reason) from None
        except ValueError as error:
            raise InputDataError(f"{where} is not JSON", why=str(error)) from None
        key = next((key for key in TEXT_KEYS if key in value), None) if isinstance(value, dict) else None
        if key is None and chat is not None and isinstance(value, dict) and CHAT_KEY in value:
            yield chat(_turns(value[CHAT_KEY], where))
            continue
        if key is None or not isinstance(value[key], str):
            keys = (*TEXT_KEYS, CHAT_KEY) if chat is not None else TEXT_KEYS
            raise InputDataError(f"{where} has no text", remedy=f"give an object with {' or '.join(keys)}")
        yield value[key]


def _turns(messages: object, where: str) -> list[dict[str, Any]]:
    def good(one: object) -> bool:
        return isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))

    turns = messages if isinstance(messages, list) else []
    faulty = next((number for number, one in enumerate(turns, start=1) if not good(one)), None)
    if not turns or faulty:
        raise InputDataError(
            f"{where} has no conversation",
            why=f"turn {faulty} has no text as its role or content" if faulty else "",
            remedy=f"give {CHAT_KEY} of texts: [{{role, content}}, ...]",
        )
    return turns


def _json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        yield from bounded_lines(path)
    except OSError as error:
        raise InputDataError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise InputDataError(f"{path} cannot be read", why=str(error)) from None


def _shuffled(texts: list[str], seed: int) -> list[str]:
    # The order comes from digests, since a library's random generator may change with its version.
    def place(index: int) -> bytes:
        return hashlib.sha256(f"{seed} {index}".encode()).digest()

    return [texts[index] for index in sorted(range(len(texts)), key=place)]


def _encoded(texts: list[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids of each text, without truncation or padding even where tokenizer.json sets them."""
    if tokenizer.padding or tokenizer.truncation:
        tokenizer = copy.deepcopy(tokenizer)  # the caller's keeps its settings
        tokenizer.no_padding()
        tokenizer.no_truncation()
    for first in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch(texts[first : first + BATCH]):
            yield encoding.ids
