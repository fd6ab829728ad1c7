"""Strict reader of YAML files: an unknown key is an error, whose message suggests the nearest spelling."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from trtpipe.engines.errors import InputDataError, TrtpipeError, UsageError, kind_of, suggestion
from trtpipe.engines.yaml_input import YamlError, load_yaml, parse_yaml

_T = TypeVar("_T")


class ConfigError(InputDataError):
    """A YAML file with a syntax error, an unknown key, or a value of the wrong type."""


def read_yaml(path: Path, *, repeats: bool = False) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises ConfigError, also for an empty file.

    repeats  accept a key that a mapping has twice, with the last value
    """
    try:
        value = load_yaml(path, repeats=repeats)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML", why=str(error)) from None
    if value is None:
        raise ConfigError(f"{path} is empty")
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {kind_of(value)}, not a mapping", remedy="write it as lines of `name: value`")
    return value


def named_values(words: Iterable[str], option: str, *, example: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """Texts by name, of an option that is repeated with NAME=VALUE. Raises UsageError, also for a name given twice."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UsageError(f"{option}{word} is not {form}", remedy=f"write for example {example}")
        if name in values:
            raise UsageError(f"{option}{name} is given more than once", remedy="give it once")
        values[name] = text
    return values


def parse_yaml_value(text: str, what: str) -> Any:
    """Parse one value in YAML syntax, as in `--set key=value`. Raises UsageError."""
    try:
        return parse_yaml(text)
    except YamlError as error:
        raise UsageError(f"{what} is not a YAML value", why=str(error)) from None


def build(cls: type[_T], data: dict[str, Any], where: str, error: type[TrtpipeError] = ConfigError) -> _T:
    """Validate `data` into the frozen dataclass `cls`; `where` names the file and the key for messages.

    Raises `error` for an unknown key (with the nearest spelling), a missing one, or a wrong type.
    """
    # Imported here: importing pydantic takes more than 0.1 s, which `trtpipe --help` must not spend.
    import pydantic

    check_keys(data, [field.name for field in dataclasses.fields(typing.cast(Any, cls))], where, error)
    try:
        plain = json.dumps(data, default=_path, allow_nan=False)
        # JSON mode is strict about types but accepts a list for a tuple and a string for an enum.
        return typing.cast(_T, _adapter(typing.cast(Any, cls)).validate_json(plain, strict=True))
    except pydantic.ValidationError as invalid:
        first = invalid.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        # Of a field that is missing, the input is the whole mapping.
        got = "" if isinstance(first["input"], (dict, list)) else f", got {json.dumps(first['input'])}"
        raise error(f"{where}: {key or 'value'}", why=first["msg"] + got) from None
    except (TypeError, ValueError) as unsaid:  # valid YAML that is not JSON: a date, a set, .nan, or a recursive anchor
        remedy = "quote it, or give a finite number"
        raise error(f"{where}: a value is not plain", why=str(unsaid), remedy=remedy) from None


def _path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


@functools.cache
def _adapter(cls: type[Any]) -> Any:
    import pydantic

    return pydantic.TypeAdapter(cls)


def check_keys(
    data: dict[str, Any], known: typing.Iterable[str], where: str, error: type[TrtpipeError] = ConfigError
) -> None:
    names = list(known)
    for key in data:
        if key not in names:
            raise error(f"{where}: unknown key '{key}'", remedy=suggestion(str(key), names))
