"""A TensorRT-LLM deployment: an engine, and the model repository that serves it.

The repository may be of any release that the check knows, ours or NVIDIA's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.base import Mapping
from trtpipe.engines.errors import ArtefactRefused, InputDataError, UsageError
from trtpipe.engines.hf.adapter import CONFIG as ADAPTER_CONFIG
from trtpipe.triton_repo.check.code import foreign_code
from trtpipe.triton_repo.check.engine_folder import EngineFolder, find_engine, read_engine
from trtpipe.triton_repo.check.faults import ERROR, Report
from trtpipe.triton_repo.check.models import CONFIG, Model, read_models
from trtpipe.triton_repo.check.paths import locate
from trtpipe.triton_repo.deployment_settings import Setting, engine_settings, is_size, model_settings, request_settings

# Faults with which settings cannot be read. Rank files are not looked at: no weights come from an engine.
_UNUSABLE = ("engine-folder", "engine-config", "passport", "syntax", "config-unreadable", "placeholder")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """An engine and the settings of it and around it.

    adapters       name -> folder of each adapter in `lora_prefetch_dir` that is as PEFT saves it
    adapter_count  number of all adapters there; None where that folder is not on this machine
    """

    engine: EngineFolder
    mapping: Mapping
    settings: tuple[Setting, ...]
    adapters: dict[str, Path]
    adapter_count: int | None

    @property
    def quantization(self) -> tuple[str | None, str | None]:
        """Algorithms of the weights and of the KV cache, by TensorRT-LLM's names."""
        found = [self._quantization.get(name) for name in ("quant_algo", "kv_cache_quant_algo")]
        algo, cache = (None if one is None else str(one) for one in found)
        return algo, cache

    @property
    def group_size(self) -> int | None:
        size = self._quantization.get("group_size")
        return size if is_size(size) else None

    @property
    def _quantization(self) -> dict[str, Any]:
        found = self.engine.pretrained.get("quantization")
        return found if isinstance(found, dict) else {}


def read_deployment(folder: Path, engine: Path | None = None) -> Deployment:
    """Read an engine folder, or a model repository and the engine that it names; `engine` says where that one is, where
    the repository names a path of a container.

    Raises UsageError, InputDataError or ArtefactRefused for what holds no engine of TensorRT-LLM.
    """
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder or target '{folder}'", remedy="name an engine folder or a model repository"
        )
    report = Report(repository=folder)
    if (folder / "config.json").is_file() or not any(folder.glob(f"*/{CONFIG}")):
        if engine is not None:
            raise UsageError(f"--engine is for a model repository, and {folder} is none", remedy="leave it out")
        if not (folder / "config.json").is_file():
            raise InputDataError(
                f"{folder} holds no engine and no model repository",
                why=f"it has neither config.json nor models with a {CONFIG}",
                remedy="name the folder that trtllm-build wrote, or the one that tritonserver gets",
            )  # fmt: skip
        found = read_engine(folder, folder, str(folder), report)
        _refuse(report, folder)
        return _deployment(found, folder, {}, "")
    models = read_models(folder, report)
    _refuse(report, folder)
    name = _engine_model(models, folder)
    if engine is not None:
        elsewhere = Report(repository=engine)
        found = read_engine(engine, engine, str(engine), elsewhere)
        _refuse(elsewhere, engine)
    else:
        found = find_engine(models[name], "gpt_model_path", models, report)
    _refuse(report, folder)
    if found is None:
        text = models[name].parameters.get("gpt_model_path", "")
        raise InputDataError(
            f"{folder}: {name} names the engine '{text}', which is not on this machine",
            remedy="give its folder with --engine",
        )
    return _deployment(found, folder, models, name)


def _refuse(report: Report, folder: Path) -> None:
    """Raise InputDataError for the first fault with which nothing can be read."""
    wrong = [fault for fault in report.sorted() if fault.severity == ERROR and fault.rule in _UNUSABLE]
    if wrong:
        first = wrong[0]
        place = folder / first.path if first.path != "." else folder
        at = f"{place}: {first.where}" if first.where else str(place)
        what = first.what.removeprefix(f"is '{place}', which ")  # an engine that is given itself
        raise InputDataError(f"{at} {what}", why=first.why, remedy=first.remedy)


def _engine_model(models: dict[str, Model], folder: Path) -> str:
    """Name of the model that holds the engine. Raises InputDataError or ArtefactRefused."""
    engines = [name for name, model in models.items() if model.role == "engine"]
    if not engines and any(model.role == "llmapi" for model in models.values()):
        raise ArtefactRefused(
            f"{folder} is served by the LLM API already", why="it holds no engine to migrate from",
            remedy="build the model for another runtime with `trtpipe build --runtime`",
        )  # fmt: skip
    if not engines:
        raise InputDataError(
            f"{folder} names no engine", why="none of its models has the backend tensorrtllm",
            remedy="`trtpipe check` says what its models lack",
        )  # fmt: skip
    if len(engines) > 1 and "tensorrt_llm" not in engines:
        raise UsageError(
            f"{folder} has {len(engines)} engines: {', '.join(engines)}", why="a new target has one",
            remedy="give the folder of the engine itself",
        )  # fmt: skip
    return engines[0] if len(engines) == 1 else "tensorrt_llm"


def _deployment(engine: EngineFolder | None, folder: Path, models: dict[str, Model], name: str) -> Deployment:
    assert engine is not None, "its faults were raised"
    if engine.passport is not None and load_backend(engine.passport.runtime).FORM != "trtllm":
        raise ArtefactRefused(
            f"{folder} is served by {engine.passport.runtime}", why="it holds no engine to migrate from",
            remedy="build the model for another runtime with `trtpipe build --runtime`",
        )  # fmt: skip
    sizes = [engine.mapping.get(size, 1) for size in ("tp_size", "pp_size", "moe_ep_size")]
    if not all(map(is_size, sizes)):
        raise InputDataError(f"{engine.config}: mapping has no numbers of ranks", remedy="copy it from the build again")
    settings = [*engine_settings(engine)]
    # The scripts of an engine with a passport are ours.
    foreign = [fault.path for fault in foreign_code(folder)] if models and engine.passport is None else []
    for model in models.values():
        settings += model_settings(model, name, scripted="ensemble" in models and models["ensemble"].role == "bls")
        code = sorted(path for path in foreign if path.split("/")[0] == model.name)
        settings += [
            Setting(place=model.name, role=model.role, kind="model", name="code", value=path.partition("/")[2])
            for path in code
        ]
    settings += request_settings(models.values())
    adapters, count = _adapters(models[name].value("lora_prefetch_dir"), folder, models) if models else ({}, 0)
    return Deployment(
        engine=engine,
        mapping=Mapping.of(sizes[0], sizes[1], moe_ep=sizes[2]),
        settings=tuple(settings),
        adapters=adapters,
        adapter_count=count,
    )


def _adapters(text: str | None, repository: Path, models: dict[str, Model]) -> tuple[dict[str, Path], int | None]:
    """`adapters` and `adapter_count` of a `Deployment` whose adapters are in the folder `text`."""
    if text is None:
        return {}, 0
    place = locate(text, repository, models).path
    if place is None or not place.is_dir():
        return {}, None
    names = {one.path.name: one.name for one in AdapterFolder(place).all()}
    folders = sorted(path for path in place.iterdir() if path.is_dir())
    found = {names.get(path.name, path.name): path.absolute() for path in folders if (path / ADAPTER_CONFIG).is_file()}
    return found, len(folders)
