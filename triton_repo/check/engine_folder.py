"""The engine folder that a configuration names: where it is, of which kind, and the facts in its config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.engines import find_backend
from trtpipe.engines.backends.base import EngineBackend
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.json_input import read_json
from trtpipe.engines.passport import NAME as PASSPORT
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.triton_repo.check.engine_files import check_agreement, check_mapping, check_rank_files, check_weights
from trtpipe.triton_repo.check.faults import Location, Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.paths import locate, tell_not_here
from trtpipe.triton_repo.check.text import PLACEHOLDER


@dataclass(frozen=True, kw_only=True)
class EngineFolder:
    """Facts of an engine folder on this machine, from its config.json; `hf` is that of a Hugging Face folder."""

    path: Path
    version: str | None
    pretrained: dict[str, Any]
    build: dict[str, Any]
    passport: Passport | None = None
    plugins: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def backend(self) -> EngineBackend | None:
        """The backend of the passport's runtime; None without a passport, and for a runtime that is not known."""
        return None if self.passport is None else find_backend(self.passport.runtime)

    def size(self, name: str) -> int | None:
        return positive(self.build.get(name))

    @property
    def compiles(self) -> bool:
        """Whether the folder is a TensorRT-LLM checkpoint or engine, whose config.json names the release."""
        return self.passport is None or (self.backend is not None and self.backend.FORM == "trtllm")

    @property
    def mapping(self) -> dict[str, Any]:
        return as_mapping(self.pretrained.get("mapping"))

    @property
    def world_size(self) -> int | None:
        mapping = self.mapping
        sizes = [positive(mapping.get(name, 1)) for name in ("tp_size", "pp_size", "cp_size")]
        if any(size is None for size in sizes) or not {"tp_size", "world_size"} & set(mapping):
            return None
        out = 1
        for size in sizes:
            out *= size or 1
        return out


def find_engine(model: Model, name: str, models: dict[str, Model], report: Report) -> EngineFolder | None:
    """Find the engine that a path parameter names, if it is on this machine; report its faults."""
    text = model.value(name)
    if text is None or PLACEHOLDER.search(text):
        return None
    where = model.at_parameter(name)
    place = locate(text, report.repository, models)
    if place.absent:
        report.error(
            "engine-folder",
            where,
            f"is '{text}', which is not there",
            why=place.why,
            remedy="name the folder of config.json and the rank files",
        )
        return None
    if place.path is None:
        tell_not_here(where, text, report)
        return None
    return read_engine(place.path, where, text, report, mapped=place.mapped)


def read_engine(
    folder: Path, where: Location, text: str, report: Report, *, mapped: bool = False
) -> EngineFolder | None:
    """Read an engine folder that `text` names at `where`; report its faults.

    mapped  whether a path of the container was found in the repository, whose engine may be elsewhere
    """
    if not folder.is_dir():
        report.error("engine-folder", where, f"is '{text}', which is not a folder", remedy="name the folder it is in")
        return None
    passport = passport_in(folder, report)
    files = {path.name for path in folder.iterdir() if path.is_file()}
    ranks = any(re.fullmatch(r"rank\d+\.(engine|safetensors)", file) for file in files)
    if mapped and "config.json" not in files and not ranks:
        tell_not_here(where, text, report)
        return None
    if "config.json" not in files:
        inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
        report.error(
            "engine-folder",
            where,
            f"is '{text}', which has no config.json",
            why="the backend reads the engine's sizes from it",
            remedy=f"name {text.rstrip('/')}/{inner[0]}"
            if len(inner) == 1
            else "copy the whole folder that trtllm-build wrote",
        )
        return None
    return _read(folder, where, text, passport, report)


def _read(folder: Path, where: Location, text: str, passport: Passport | None, report: Report) -> EngineFolder | None:
    try:
        raw = read_json(folder / "config.json", "engine config")
    except TrtpipeError as error:
        report.error(
            "engine-config", folder / "config.json", "cannot be read", why=error.why or error.what,
            remedy="copy it from the build again",
        )  # fmt: skip
        return None
    backend = None if passport is None else find_backend(passport.runtime)
    if passport is not None and backend is None:
        report.warning(
            "passport", (folder / PASSPORT, "runtime"), f"is {passport.runtime}, which this version does not know",
            why="the engine is not checked", remedy="check it with the version that built it",
        )  # fmt: skip
        return EngineFolder(path=folder, version=None, pretrained={}, build={}, passport=passport)
    folder_of_hf = backend is not None and backend.FORM == "hf"
    kind = None
    if folder_of_hf and "build_config" in raw:
        kind = "an engine of TensorRT-LLM, not a Hugging Face model folder, as its passport says"
    elif not folder_of_hf and not any(isinstance(raw.get(f"{word}_config"), dict) for word in ("build", "builder")):
        kind = "a Hugging Face model folder, not an engine" if "architectures" in raw else None
        kind = "a TensorRT-LLM checkpoint, not an engine" if "architecture" in raw else kind
        if kind is None:
            report.error(
                "engine-config", where, f"is '{text}', which has a config.json without sizes",
                "it has no build_config", "build the engine with trtllm-build, and name its folder",
            )  # fmt: skip
            return None
    elif folder_of_hf and not raw.get("architectures"):
        kind = "no Hugging Face model folder: its config.json names no architecture"
    if kind is not None:
        remedy = "build the engine again, and name its folder"
        report.error("engine-folder", where, f"is '{text}', which is {kind}", remedy=remedy)
        return None
    if folder_of_hf:
        check_weights(folder, report)
        engine = EngineFolder(path=folder, version=None, pretrained={}, build={}, passport=passport, hf=raw)
        check_agreement(engine, report)
        return engine
    plugins = as_mapping(as_mapping(raw.get("build_config")).get("plugin_config"))
    engine = EngineFolder(
        path=folder,
        version=raw["version"] if isinstance(raw.get("version"), str) else None,
        pretrained=as_mapping(raw.get("pretrained_config")),
        build=as_mapping(raw.get("build_config")),
        passport=passport,
        plugins=plugins or as_mapping(raw.get("plugin_config")),
    )
    check_mapping(engine, report)
    check_rank_files(engine, where, report)
    check_agreement(engine, report)
    return engine


def passport_in(folder: Path, report: Report) -> Passport | None:
    """Read the passport of a folder, None where it has none; report one that cannot be read."""
    if not (folder / PASSPORT).is_file():
        return None
    try:
        return read_passport(folder)
    except TrtpipeError as error:
        report.error("passport", folder / PASSPORT, "cannot be read", why=error.why or error.what, remedy=error.remedy)
        return None


def positive(value: Any) -> int | None:
    """The value if it is a positive whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def as_mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}
