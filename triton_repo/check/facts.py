"""Strict reader of the facts in configs/triton: parameters, tensors, LLM API arguments, and their successors."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trtpipe import configs
from trtpipe.engines.errors import InputDataError, suggestion
from trtpipe.engines.yaml_input import load_yaml

FOLDER = Path(configs.__file__).parent / "triton"
KINDS = ("bool", "int", "size", "float", "enum", "path", "text", "model", "ids", "windows", "tree")
TYPES = ("bool", "int", "float", "text", "mapping", "list", "any")

_T = TypeVar("_T")


class FactsError(InputDataError):
    """A file of configs/triton has content that this version does not understand."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A row of parameters.yaml; the file explains the columns."""

    kind: str
    choices: tuple[str, ...] = ()
    default: Any = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    required: bool = False
    exists: str | None = None
    since: str | None = None
    until: str | None = None
    python: bool = True
    dead: str = ""
    limit: bool = False

    @property
    def default_text(self) -> str:
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A row of tensors.yaml."""

    type: tuple[str, ...]
    dims: tuple[tuple[int, ...], ...]
    must: bool = False
    required: bool = False
    since: str | None = None
    until: str | None = None
    renamed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Inputs and outputs of one role."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A row of llm_arguments.yaml."""

    type: str
    choices: tuple[str, ...] = ()
    required: bool = False
    least: float | None = None
    most: float | None = None
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, kw_only=True)
class LlmArguments:
    """llm_arguments.yaml as a whole."""

    backends: tuple[str, ...]
    tensorrt_until: str
    arguments: dict[str, Argument]
    nested: dict[str, dict[str, Argument]]
    triton: dict[str, Argument]


@dataclass(frozen=True, kw_only=True)
class Successor:
    """A row of migration.yaml: what becomes of a setting. The file explains the columns; one of the first three is
    given."""

    becomes: str = ""
    instead: str = ""
    lost: str = ""
    values: dict[str, str] = field(default_factory=dict)
    there: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if [self.becomes, self.instead, self.lost].count("") != 2:
            raise ValueError("needs one of becomes, instead and lost")


@dataclass(frozen=True, kw_only=True)
class Successors:
    """migration.yaml as a whole: by name, for models by role and name; the reason for each refused input."""

    build: dict[str, Successor]
    parameters: dict[str, dict[str, Successor]]
    fields: dict[str, dict[str, Successor]]
    refused: dict[str, str]


@cache
def parameters() -> dict[str, dict[str, Parameter]]:
    """Read the parameters by role and name. Raises FactsError."""
    return {role: _rows(Parameter, rows, f"parameters.yaml: {role}") for role, rows in _read("parameters.yaml").items()}


@cache
def tensors() -> dict[str, Tensors]:
    """Read the tensors by role. Raises FactsError."""
    out = {}
    for role, sides in _read("tensors.yaml").items():
        where = f"tensors.yaml: {role}"
        _known(sides, ("inputs", "outputs"), where)
        out[role] = Tensors(
            inputs=_rows(Tensor, sides["inputs"], where), outputs=_rows(Tensor, sides["outputs"], where)
        )
    return out


@cache
def llm_arguments() -> LlmArguments:
    """Read the arguments of the LLM API. Raises FactsError."""
    raw = _read("llm_arguments.yaml")
    _known(raw, [one.name for one in fields(LlmArguments)], "llm_arguments.yaml")
    return LlmArguments(
        backends=tuple(raw["backends"]),
        tensorrt_until=raw["tensorrt_until"],
        arguments=_rows(Argument, raw["arguments"], "llm_arguments.yaml: arguments"),
        nested={name: _rows(Argument, rows, f"llm_arguments.yaml: {name}") for name, rows in raw["nested"].items()},
        triton=_rows(Argument, raw["triton"], "llm_arguments.yaml: triton"),
    )


@cache
def successors() -> Successors:
    """Read what becomes of settings under a runtime without engines. Raises FactsError."""
    raw = _read("migration.yaml")
    _known(raw, [one.name for one in fields(Successors)], "migration.yaml")
    return Successors(
        build=_rows(Successor, raw["build"], "migration.yaml: build"),
        parameters={
            role: _rows(Successor, rows, f"migration.yaml: {role}") for role, rows in raw["parameters"].items()
        },
        fields={role: _rows(Successor, rows, f"migration.yaml: {role}") for role, rows in raw["fields"].items()},
        refused=dict(raw["refused"]),
    )


def _read(name: str) -> dict[str, Any]:
    value = load_yaml(FOLDER / name)
    if not isinstance(value, dict) or not all(isinstance(section, (dict, list, str)) for section in value.values()):
        raise FactsError(f"configs/triton/{name} holds no sections")
    return value


def _rows(cls: type[_T], rows: Any, where: str) -> dict[str, _T]:
    if not isinstance(rows, dict):
        raise FactsError(f"{where} holds no rows")
    out = {}
    for name, row in rows.items():
        if not isinstance(row, dict):
            raise FactsError(f"{where}: {name} is not a mapping")
        _known(row, [one.name for one in fields(cls)], f"{where}: {name}")  # type: ignore[arg-type]
        try:
            out[str(name)] = cls(**_plain(cls, row))
        except (TypeError, ValueError) as error:
            raise FactsError(f"{where}: {name}", why=str(error)) from None
    return out


def _plain(cls: type[Any], row: dict[str, Any]) -> dict[str, Any]:
    out = dict(row)
    if "choices" in out:
        out["choices"] = tuple(out["choices"])
    if cls is Tensor:
        out["type"] = (out["type"],) if isinstance(out["type"], str) else tuple(out["type"])
        shapes = out["dims"] if isinstance(out["dims"][0], list) else [out["dims"]]
        out["dims"] = tuple(tuple(shape) for shape in shapes)
    kinds = {Parameter: ("kind", KINDS), Argument: ("type", TYPES)}
    if cls in kinds:
        column, words = kinds[cls]
        if out.get(column) not in words:
            raise ValueError(f"unknown {column} {out.get(column)!r}")
    return out


def _known(row: Any, names: Any, where: str) -> None:
    for key in row:
        if key not in names:
            raise FactsError(f"{where}: unknown key '{key}'", remedy=suggestion(str(key), names))
