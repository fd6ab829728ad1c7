"""Schema of an index, checked before the index is used, because names in it become paths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, with_config

from trtpipe.engines.passport import Passport

# Name of one folder on any file system; without '+' also a tag of an OCI registry.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}$"

_Name = Annotated[str, Field(pattern=NAME)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _File(_Form):
    path: Annotated[str, Field(min_length=1)]
    size: NonNegativeInt
    sha256: _Digest


class _Record(_Form):
    """A manifest's Record without further fields: an additional field would change its key."""

    model_config = ConfigDict(strict=True, extra="forbid")

    stage: _Name
    stage_version: int
    inputs: dict[str, str]
    settings: dict[str, Any]
    tools: dict[str, str]


class _Entry(_Form):
    record: _Record
    content: _Digest
    files: list[_File]


class _Model(_Form):
    name: _Name
    source: dict[str, Any]


@with_config(ConfigDict(strict=True, extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class _Passport(Passport):
    """A Passport with checked values."""


class _Index(_Form):
    target: _Name
    model: _Model
    passport: _Passport
    artefacts: dict[_Name, _Entry]


def index_fault(index: Any) -> str | None:
    """The first fault of an index; None for a valid one."""
    return _fault(_Index, index)


def entry_fault(entry: Any) -> str | None:
    """The first fault of an index's entry of one artefact; None for a valid one."""
    return _fault(_Entry, entry)


def _fault(form: type[BaseModel], value: Any) -> str | None:
    try:
        form.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return None
