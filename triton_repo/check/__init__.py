"""Check of a model repository: whether Triton and its TensorRT-LLM backends would load it and behave as configured.

The check reads files only. The C++ backend replaces values that it cannot read by defaults, Triton ignores unknown keys
of a request, and neither compares an engine's release with its own; the check reports what they silently ignore.
Unusual configurations that work are not reported: a repository may come from any author and any release since 0.9.
Facts are in configs/triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.nvidia import Gpu
from trtpipe.engines.passport import NAME as PASSPORT
from trtpipe.engines.toolchain import Toolchain
from trtpipe.triton_repo.check.core import check_core
from trtpipe.triton_repo.check.engine import check_engine, check_static
from trtpipe.triton_repo.check.engine_folder import EngineFolder, find_engine
from trtpipe.triton_repo.check.engine_host import check_gpus, check_release, check_vocabulary
from trtpipe.triton_repo.check.faults import ERROR, RULES, WARNING, Fault, Report
from trtpipe.triton_repo.check.files import check_environment, check_files
from trtpipe.triton_repo.check.graph import check_circles, check_graph
from trtpipe.triton_repo.check.llmapi import check_llmapi
from trtpipe.triton_repo.check.models import ENGINE_BACKEND, Model, read_models
from trtpipe.triton_repo.check.parameters import check_parameters
from trtpipe.triton_repo.check.release import Release
from trtpipe.triton_repo.check.scripts import Script, check_script, read_script
from trtpipe.triton_repo.check.service import check_callers, check_instances, check_sharing, check_text
from trtpipe.triton_repo.check.tensors import check_tensors, evidence
from trtpipe.triton_repo.check.tokenizer import check_tokenizers

__all__ = [
    "ERROR",
    "RULES",
    "WARNING",
    "Fault",
    "RepositoryError",
    "check_configs",
    "check_repository",
    "require_sound",
]


class RepositoryError(InputDataError):
    """A model repository that Triton would not load, or that would not behave as configured."""


def check_repository(
    folder: Path, *, toolchain: Toolchain | None = None, gpus: Sequence[Gpu] | None = None
) -> list[Fault]:
    """Find all faults of the repository in `folder`, errors first; empty for a sound one.

    toolchain  release that will serve it; by default the release of its engines, or what its configurations show
    gpus       GPUs of the machine that will serve it; without them, no GPU is checked

    Paths in it may be paths of a container: a warning says of an absolute path that does not exist here that it was not
    looked into.
    """
    report = Report(repository=folder)
    if not folder.is_dir():
        report.error("no-models", folder, "is not a folder", remedy="give a model repository")
        return report.faults
    models = read_models(folder, report)
    engines = _engines(models, report)
    release = _release(models, engines, toolchain)
    scripts = _check_models(models, release, report)
    vocabularies = check_tokenizers(folder, models, report)
    for name, engine in engines.items():
        model = models[name]
        check_engine(model, engine, release, report)
        absent = not (engine.path / PASSPORT).exists()
        if absent and any(script.own for script in scripts.values()):
            report.warning(
                "passport", engine.path / PASSPORT, "is missing", "`trtpipe serve` and `deploy` refuse the engine",
                "copy the whole folder that trtpipe built",
            )  # fmt: skip
        check_release(model, engine, release, toolchain, report)
        if len(engines) == 1 or len(vocabularies) == 1:  # of several targets, each was checked alone
            check_vocabulary(engine, vocabularies, report)
        if gpus is not None:
            check_gpus(model, engine, gpus, toolchain, report)
    for name, model in models.items():
        check_instances(model, engines.get(name), scripts[name], gpus, report)
        check_environment(model, models, report)
        if model.role == "engine":
            check_files(model, models, report)
            check_static(model, release, report)
        elif model.role == "llmapi":
            check_llmapi(model, models, release, toolchain, gpus, report)
        if toolchain is not None:
            _check_runtime(model, engines.get(name), toolchain, report)
    check_text(models, scripts, report)
    check_callers(models, scripts, report)
    check_sharing(models, report)
    _check_graphs(models, report)
    return report.sorted()


def require_sound(repository: str, faults: Sequence[Fault], *, remedy: str | None = None) -> None:
    """Raises RepositoryError for the first error among `faults`; messages name `repository`.

    remedy  replaces the fault's own remedy
    """
    errors = [fault for fault in faults if fault.severity == ERROR]
    if errors:
        first = replace(errors[0], remedy="")
        raise RepositoryError(
            f"{repository} has {len(errors)} fault(s)", why=str(first), remedy=remedy or errors[0].remedy
        )


def check_configs(repository: Path, models: Iterable[str]) -> None:
    """Check the configurations of these models and their connections, without engines and tokenizers.

    Raises RepositoryError for the first error, naming the file.
    """
    report = Report(repository=repository)
    found = read_models(repository, report)
    for name in set(models) - set(found):
        if not any(fault.path.split("/")[0] == name for fault in report.faults):
            report.error("config-missing", repository / name, "is missing")
    scripts = _check_models(found, _release(found, {}, None), report)
    check_callers(found, scripts, report)
    _check_graphs(found, report)
    for fault in report.sorted():
        if fault.severity == ERROR:
            place = f"{repository / fault.path}: {fault.where}" if fault.where else str(repository / fault.path)
            raise RepositoryError(f"{place} {fault.what}", why=fault.why, remedy=fault.remedy)


def _engines(models: dict[str, Model], report: Report) -> dict[str, EngineFolder]:
    """Decoder engine of each engine model; an encoder is checked but not returned."""
    out = {}
    for name, model in models.items():
        if model.role == "engine":
            engine = find_engine(model, "gpt_model_path", models, report)
            if not model.python_runtime:
                encoder = find_engine(model, "encoder_model_path", models, report)
                if encoder is not None and engine is not None and encoder.path.samefile(engine.path):
                    report.error(
                        "engine-folder", model.at_parameter("encoder_model_path"),
                        "is the decoder's folder too", "an encoder is an engine of its own", "name it, or leave it out",
                    )  # fmt: skip
            if engine is not None:
                out[name] = engine
    return out


def _release(models: dict[str, Model], engines: dict[str, EngineFolder], toolchain: Toolchain | None) -> Release:
    lowest = max(
        (key for model in models.values() if model.role == "engine" and (key := evidence(model))), default=None
    )
    if toolchain is not None:
        return Release(name=toolchain.name, source="as asked", lowest=lowest)
    for engine in engines.values():
        told = engine.passport.toolchain if engine.passport is not None else engine.version
        found = Release(name=told, source="which the engine was built with", lowest=lowest)
        if found.key is not None:
            return found
    return Release(lowest=lowest)


def _check_models(models: dict[str, Model], release: Release, report: Report) -> dict[str, Script]:
    scripts = {}
    for name, model in models.items():
        script = scripts[name] = read_script(model, report)
        check_core(model, report)
        check_script(model, script, report)
        check_tensors(model, script, release, report)
        check_parameters(model, script, release, report)
    return scripts


def _check_graphs(models: dict[str, Model], report: Report) -> None:
    check_circles(models.values(), report)
    for model in models.values():
        if model.role == "ensemble":
            check_graph(model, models, report)


def _check_runtime(model: Model, engine: EngineFolder | None, toolchain: Toolchain, report: Report) -> None:
    """Report a runtime that the release lacks: newer releases have no engines, older ones no LLM API."""
    backend = None if engine is None else engine.backend
    ours = backend is not None and backend.SERVED_BY is not ServedBy.TENSORRTLLM
    wanted = {"engine": "tensorrt_llm", "llmapi": "trtllm_pytorch"}.get(model.role)
    if wanted is None or wanted in toolchain.runtimes or ours:
        return
    report.error(
        "release-runtime",
        model.at_field("backend"),
        f"is served by '{ENGINE_BACKEND if model.role == 'engine' else 'the LLM API'}', which TensorRT-LLM "
        f"{toolchain.name} does not have",
        remedy=f"it has {' and '.join(toolchain.runtimes)}",
    )
