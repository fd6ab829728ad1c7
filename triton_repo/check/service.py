"""Check of the consistency between the models of a repository: calls, streaming, batch sizes, GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.nvidia import Gpu
from trtpipe.triton_repo.check import values
from trtpipe.triton_repo.check.engine import EngineFolder
from trtpipe.triton_repo.check.faults import Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.scripts import Script

DEFAULT_ENGINE = "tensorrt_llm"
# The whole memory of a GPU; the share that a backend takes by default.
_WHOLE, _DEFAULT_SHARE = 1.0, 0.9


def check_callers(models: dict[str, Model], scripts: dict[str, Script], report: Report) -> None:
    """Check models whose scripts call other models: those must exist, be decoupled alike and take the same batches."""
    for model in models.values():
        if model.config is None:
            continue
        if model.role == "bls":
            engine = _find(model, "tensorrt_llm_model_name", DEFAULT_ENGINE, models, report)
            _find(model, "tensorrt_llm_draft_model_name", None, models, report)
            _find(model, "multimodal_encoders_name", None, models, report)
            texts = [
                _find(model, f"{name}_model_name", None, models, report) or models.get(name)
                for name in ("preprocessing", "postprocessing")
            ]
            called = [engine, *texts]
            _check_called(model, engine, called, report)
            _check_asked(model, engine, models, scripts.get(model.name, Script()), report)
        elif model.role == "disaggregated":
            for key in ("context_model_name", "generation_model_name"):
                _check_called(model, _find(model, key, None, models, report), [], report)


def _find(model: Model, key: str, default: str | None, models: dict[str, Model], report: Report) -> Model | None:
    name = model.value(key) or default
    if name is None:
        return None
    if name not in models and not (report.repository / name).is_dir():
        report.error(
            "model-missing",
            model.path,
            model.at_parameter(key),
            f"names the model '{name}', which is not in the repository",
            remedy=did_you_mean(nearest(name, models, 0.6)),
        )
    found = models.get(name)
    return found if found is not None and found.config is not None else None


def _check_called(caller: Model, engine: Model | None, called: Sequence[Model | None], report: Report) -> None:
    if engine is not None and engine.decoupled != caller.decoupled:
        report.error(
            "decoupled",
            caller.path,
            caller.at_field("decoupled"),
            f"is {_word(caller.decoupled)}, and that of {engine.name} is {_word(engine.decoupled)}",
            why="streaming requests fail when they differ",
            remedy="give both the same",
        )
    small = [model for model in called if model is not None and model.config is not None and model.batch < caller.batch]
    if small:
        report.error(
            "batch-size",
            caller.path,
            caller.at_field("max_batch_size"),
            f"is {caller.batch}, and {small[0].name}, which it calls, takes {small[0].batch}",
            why="larger batches are refused there",
            remedy="give both the same number",
        )


def _word(decoupled: bool) -> str:
    return "true" if decoupled else "false"


def _check_asked(caller: Model, engine: Model | None, models: dict[str, Model], script: Script, report: Report) -> None:
    """Report outputs that the caller's script requests and no model declares: Triton refuses such a request."""
    targets = {
        "engine": engine,
        "preprocessing": models.get("preprocessing"),
        "postprocessing": models.get("postprocessing"),
    }
    for role, names in script.asked.items():
        target = targets.get(role)
        if target is None or target.config is None:
            continue
        for name in names:
            if name not in target.outputs() and not report.blames(target.name, name):
                report.error(
                    "missing-tensor",
                    target.path,
                    f"output {name}",
                    "is missing",
                    why=f"the script of {caller.name} asks for it, and Triton refuses the request",
                    remedy="take configuration and scripts of one release",
                )
                report.blame(target.name, name)


def check_instances(
    model: Model, engine: EngineFolder | None, script: Script, gpus: Sequence[Gpu] | None, report: Report
) -> None:
    """Check the instances, and the lists of GPUs and ranks that separate them."""
    if model.config is None:
        return
    if model.role == "postprocessing" and script.own and model.instances > 1:
        report.error(
            "instances",
            model.path,
            model.at_field("count"),
            f"is {model.instances}, and the model keeps the text of streams so far",
            why="the parts of a stream would meet different instances",
            remedy="give 1",
        )
    if model.role != "engine":
        return
    world = engine.world_size if engine is not None else None
    text = model.value("gpu_device_ids")
    groups, read = values.read_groups(text) if text else ([], False)
    backend = None if engine is None else engine.backend
    shared = backend is not None and backend.SERVED_BY is ServedBy.ENGINE_PROCESS
    if model.instances > 1 and not text and not shared:
        report.error(
            "instances",
            model.path,
            model.at_field("count"),
            f"is {model.instances}, and gpu_device_ids has no value",
            why="every instance would load the engine on the same GPUs",
            remedy="list the GPUs of each instance, as in 0;1",
        )
    if not read or any(len(set(group)) < len(group) for group in groups):  # reported already
        groups = []
    if groups and model.instances > 1 and len(groups) != model.instances:
        report.error(
            "gpu-ids",
            model.path,
            model.at_parameter("gpu_device_ids"),
            f"has {len(groups)} list(s), and the model {model.instances} instances",
            why="instances would share GPUs, or leave some unused",
            remedy="give one list for each instance, with semicolons between",
        )
    for name, numbers in (("gpu_device_ids", groups), ("participant_ids", _participants(model))):
        wrong = next((group for group in numbers if world is not None and len(group) != world), None)
        if wrong is not None:
            report.error(
                "gpu-ids",
                model.path,
                model.at_parameter(name),
                f"lists {len(wrong)} of them, and the engine has {world} rank(s)",
                why="each rank needs one",
                remedy=f"list {world}",
            )
    if gpus is not None:
        here = len(gpus)
        beyond = next((number for group in groups for number in group if number >= here), None)
        if beyond is not None:
            report.error(
                "gpu-ids",
                model.path,
                model.at_parameter("gpu_device_ids"),
                f"names GPU {beyond}, and this machine has {here}",
                remedy=f"name {', '.join(map(str, range(here)))}" if here else "serve it elsewhere",
            )


def _participants(model: Model) -> list[list[int]]:
    text = model.value("participant_ids")
    groups, read = values.read_groups(text) if text else ([], False)
    return groups if read else []


def check_sharing(models: dict[str, Model], report: Report) -> None:
    """Report engines on one GPU whose memory shares exceed it: each takes a share of what the previous one left."""
    engines = [model for model in models.values() if model.role == "engine" and model.config is not None]
    for position, model in enumerate(engines):
        for other in engines[:position]:
            ours, theirs = _gpus(model), _gpus(other)
            if ours is not None and theirs is not None and not ours & theirs:
                continue
            total = _share(model) + _share(other)
            capped = model.value("max_tokens_in_paged_kv_cache") or other.value("max_tokens_in_paged_kv_cache")
            if total > _WHOLE and not capped:
                report.warning(
                    "shared-gpu",
                    model.path,
                    model.at_parameter("kv_cache_free_gpu_mem_fraction"),
                    f"is {_share(model):g}, and {other.name} takes {_share(other):g} on the same GPU",
                    why="whichever loads last finds too little memory",
                    remedy="lower both, or give each its own gpu_device_ids",
                )
                return


def _gpus(model: Model) -> set[int] | None:
    text = model.value("gpu_device_ids")
    return {number for group in values.read_groups(text)[0] for number in group} if text else None


def _share(model: Model) -> float:
    value = values.read_float(model.value("kv_cache_free_gpu_mem_fraction") or "").value
    return _DEFAULT_SHARE if value is None else value
