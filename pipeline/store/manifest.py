"""Manifest of an artefact: its inputs, its files, and how it was made.

The key is the digest of `Record`; a comparison of a wanted record with the last one says why a stage must run again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from trtpipe.engines.errors import kind_of
from trtpipe.engines.json_input import load_json

# Increased when the layout of artefacts or of this record changes: older artefacts then count as missing.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything an artefact's bytes depend on. Paths, times, hosts and log levels are not in it.

    inputs    artefact or source name -> content digest
    settings  the stage's slice of the plan, as plain JSON values
    tools     program or library -> version
    """

    stage: str
    stage_version: int
    inputs: dict[str, str]
    settings: dict[str, Any]
    tools: dict[str, str]

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError, since a record may be read from a file."""
        _require(self, stage=str, stage_version=int, settings=dict)
        _require_path(self.stage)
        for name in ("inputs", "tools"):
            _require_texts(self, name)

    @property
    def key(self) -> str:
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Source of an artefact that was not made here.

    source   URL of the registry, or path of the file
    content  digest of the artefact's files, as the source stated it and as it arrived
    """

    source: str
    content: str

    def __post_init__(self) -> None:
        _require(self, source=str, content=str)

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.source}\0{self.content}".encode()).hexdigest()

    def describe(self) -> str:
        return f"imported from {self.source}, not built here"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of an artefact, by its path relative to the artefact."""

    path: str
    size: int
    sha256: str
    mtime_ns: int

    def __post_init__(self) -> None:
        _require(self, path=str, size=int, sha256=str, mtime_ns=int)
        _require_path(self.path)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json.

    content  digest of all files, by which later stages know this artefact
    origin   None for an artefact that was made here
    """

    record: Record
    files: tuple[FileRecord, ...]
    content: str
    notes: dict[str, Any]
    host: dict[str, str]
    started: str
    seconds: float
    origin: Origin | None = None

    def __post_init__(self) -> None:
        _require(self, content=str, notes=dict, started=str, seconds=(int, float))
        _require_texts(self, "host")
        try:
            datetime.fromisoformat(self.started) + timedelta(seconds=self.seconds)
        except OverflowError:
            raise ValueError("it ends at no date") from None
        notices = self.notes.get("notices", [])
        if not (isinstance(notices, list) and all(type(n) is str for n in notices)):
            raise ValueError("its notices are malformed")

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def write(self, path: Path) -> None:
        value = {"format": FORMAT, "key": self.record.key, **dataclasses.asdict(self)}
        if self.origin is None:
            del value["origin"]  # earlier versions neither write nor read it
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in `path`; None when it is absent, unreadable or of another format."""
    try:
        raw = load_json(path)
        if raw.pop("format") != FORMAT:
            return None
        key = raw.pop("key")
        raw["record"] = Record(**raw["record"])
        raw["files"] = tuple(FileRecord(**file) for file in raw["files"])
        raw["origin"] = Origin(**raw["origin"]) if "origin" in raw else None
        manifest = Manifest(**raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return manifest if manifest.record.key == key else None


def _require(holder: Any, **kinds: type | tuple[type, ...]) -> None:
    """Raises TypeError unless each named attribute is of its kind."""
    for name, kind in kinds.items():
        value = getattr(holder, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"its {name} is {kind_of(value)}")


def _require_texts(holder: Any, name: str) -> None:
    _require(holder, **{name: dict})
    if not all(isinstance(text, str) for pair in getattr(holder, name).items() for text in pair):
        raise TypeError(f"its {name} is not a mapping of texts")


def _require_path(text: str) -> None:
    """Raises ValueError for a text that is not a path inside a folder."""
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in text:
        raise ValueError(f"{text[:100]!r} is not a path inside a folder")


def differences(last: Record, wanted: Record) -> list[str]:
    """Differences between `last` and `wanted`, in the order input, settings, tools, stage version; one phrase each."""
    out = [f"input: {name} changed" for name in _changed(last.inputs, wanted.inputs)]
    before, after = _flat(last.settings), _flat(wanted.settings)
    out += [f"settings: {name} {before.get(name)} -> {after.get(name)}" for name in _changed(before, after)]
    out += [
        f"tools: {name} {last.tools.get(name)} -> {wanted.tools.get(name)}"
        for name in _changed(last.tools, wanted.tools)
    ]
    if last.stage_version != wanted.stage_version:
        out.append(f"stage version: {last.stage_version} -> {wanted.stage_version}")
    return out


def _changed(last: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return sorted(name for name in last.keys() | wanted.keys() if last.get(name) != wanted.get(name))


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            out.update(_flat(inner, f"{prefix}{key}."))
        else:
            # As it is read from a file again.
            out[prefix + key] = list(inner) if isinstance(inner, tuple) else inner
    return out
