"""Parser of config.pbtxt with Triton's own protobuf definition; a fault has its position and a remedy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from trtpipe.engines.json_input import read_bounded
from trtpipe.triton_repo.check.faults import Report, did_you_mean, nearest

PLACEHOLDER = re.compile(r"\$\{[^}\s\"]*\}?")
# Bound of a config.pbtxt: NVIDIA's largest has 30 kB.
MAX_BYTES = 1 << 20
MAX_SEARCHED = 1 << 16
# Bound for consecutive backslashes: protobuf's parser takes quadratic time for them.
MAX_BACKSLASHES = 1000
# Most placeholders that one message names.
NAMED = 4
_QUOTED = re.compile(r"\b(key|name|value|model_name)\s*:\s*\"([^\"]*)\"")
_PARAMETER = re.compile(
    r"\bparameters\s*:?\s*\{\s*key\s*:\s*\"([^\"]*)\"[\s,;]*value\s*:?\s*\{\s*string_value\s*:\s*\"([^\"]*)\""
)


def read_text(path: Path) -> str:
    """Read a config.pbtxt within limits. Raises OSError, or ValueError for a text beyond them or not in UTF-8."""
    text = read_bounded(path, MAX_BYTES).decode("utf-8")
    if "\\" * MAX_BACKSLASHES in text:
        raise ValueError(f"it has {MAX_BACKSLASHES:,} backslashes in a row")
    return text


def parse(path: Path, report: Report) -> tuple[str, Any | None]:
    """Parse to (text of the file, ModelConfig); report a fault and return None when Triton could not read it."""
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        report.error("config-unreadable", path, "is not UTF-8", why=str(error))
        return "", None
    except ValueError as error:
        report.error("config-unreadable", path, "cannot be read", why=str(error))
        return "", None
    except OSError as error:
        report.error("config-unreadable", path, "cannot be read", why=error.strerror or str(error))
        return "", None
    if not text.strip():
        report.error("config-unreadable", path, "is empty", remedy="copy it from its template again")
        return text, None
    if text.startswith("\ufeff"):
        report.error(
            "config-unreadable",
            path,
            "begins with a byte order mark",
            why="Triton's parser knows none",
            remedy="save it as UTF-8 without one",
        )
        return text, None
    bare = [(offset, found) for offset, code in _code(text) for found in PLACEHOLDER.finditer(code)]
    if bare:
        names = list(dict.fromkeys(found.group() for _, found in bare))
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        offset, first = bare[0]
        report.error(
            "placeholder",
            (path, _place(text, offset + first.start())),
            f"still holds the placeholder {', '.join(names[:NAMED])}{more}",
            why="it stands without quotes, so the file is not a model configuration",
            remedy="fill it in (fill_template.py passes over names it does not know)",
        )
        return text, None
    # Imported here: protobuf and its generated module take 0.2 s, which `trtpipe --help` must not spend.
    from google.protobuf import text_format

    try:
        config = definitions().ModelConfig()
        # A repository is read several times: before and after it is placed, and once more when it is served.
        config.CopyFrom(_small_message(text) if len(text) <= MAX_SEARCHED else _message(text))
        return text, config
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        what = re.sub(r"^\d+:\d+ : (?:'.*?': )?", "", str(error), flags=re.DOTALL).rstrip(".")
        report.error(
            "syntax",
            (path, f"line {line}, column {column}" if line is not None else ""),
            "is not a model configuration",
            why=what,
            remedy=_remedy(what),
        )
    except (DeprecationWarning, SyntaxWarning) as error:
        report.error("syntax", path, "is not a model configuration", why=str(error), remedy="write a backslash as \\\\")
    except (RecursionError, ValueError, TypeError) as error:
        report.error("syntax", path, "is not a model configuration", why=type(error).__name__)
    return text, None


def _message(text: str) -> Any:
    """ModelConfig of a text. Raises ParseError, and others for texts that Python's parser does not bear."""
    from google.protobuf import text_format

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "invalid escape sequence")  # Python accepts it, Triton does not
        return text_format.Parse(text, definitions().ModelConfig())


_small_message = lru_cache(maxsize=32)(_message)


def definitions() -> Any:
    """The generated module of Triton's ModelConfig."""
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2


def type_name(value: int) -> str:
    """Triton's name of a tensor's type; the number where it has no name, which protobuf accepts."""
    types = definitions().DataType
    return str(types.Name(value)) if value in types.values() else str(value)


def line_of_word(text: str, field: str, word: str) -> str:
    """`, line N` of the first `field: "word"`; empty when there is none."""
    number = _words(text).get((field, word))
    return f", line {number}" if number else ""


@lru_cache(maxsize=64)
def _words(text: str) -> dict[tuple[str, str], int]:
    out: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.lstrip().startswith("#"):
            for found in _QUOTED.finditer(line):
                out.setdefault((found[1], found[2]), number)
    return out


@lru_cache(maxsize=256)
def line_of(text: str, pattern: str) -> str:
    """`, line N` of the first line of code that matches; empty when none matches, or when the text is too long to be
    searched for each fault."""
    if len(text) > MAX_SEARCHED:
        return ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.lstrip().startswith("#") and re.search(pattern, line):
            return f", line {number}"
    return ""


def repeated_parameters(text: str) -> dict[str, tuple[str, str]]:
    """Parameters that the text has twice, with both values; protobuf silently keeps the last one."""
    code = "".join(line if not line.lstrip().startswith("#") else "" for line in text.splitlines(keepends=True))
    seen: dict[str, str] = {}
    out = {}
    for key, value in _PARAMETER.findall(code):
        if key in seen and seen[key] != value:
            out[key] = (seen[key], value)
        seen[key] = value
    return out


def _code(text: str) -> Iterator[tuple[int, str]]:
    """Parts of `text` outside comments and strings, each with its offset."""
    at = 0
    for found in re.finditer(r"#[^\n]*|\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?", text):
        yield at, text[at : found.start()]
        at = found.end()
    yield at, text[at:]


def _place(text: str, offset: int) -> str:
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}"


def _remedy(what: str) -> str:
    """Remedy for an unknown field or value: the nearest name in the definition."""
    from google.protobuf import descriptor_pool
    from google.protobuf.internal import enum_type_wrapper

    pool = descriptor_pool.Default()
    known: list[str] = []
    word = ""
    field = re.search(r'Message type "([\w.]+)" has no field named "(\w+)"', what)
    value = re.search(r'Enum type "([\w.]+)" has no value named ([\w.]+?)\.?$', what)
    try:
        if field:
            word = field[2]
            known = [one.name for one in pool.FindMessageTypeByName(field[1]).fields]
        elif value:
            word = value[2]
            known = enum_type_wrapper.EnumTypeWrapper(pool.FindEnumTypeByName(value[1])).keys()
    except KeyError:
        return ""
    return did_you_mean(nearest(word, known, 0.6))
