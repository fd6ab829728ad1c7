"""Check of the consistency between the models of a repository: calls, streaming, batch sizes, GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.nvidia import Gpu
from trtpipe.triton_repo.check import values
from trtpipe.triton_repo.check.core import of_gpu
from trtpipe.triton_repo.check.engine_folder import EngineFolder
from trtpipe.triton_repo.check.faults import Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.scripts import Script

DEFAULT_ENGINE = "tensorrt_llm"
# Roles of models whose scripts may return their responses; "" is that of a model of no template.
_RETURNING = ("preprocessing", "postprocessing", "")
# The whole memory of a GPU; the share that a backend takes by default.
_WHOLE, DEFAULT_SHARE = 1.0, 0.9


def check_text(models: dict[str, Model], scripts: dict[str, Script], report: Report) -> None:
    """Report decoupled models whose scripts return their responses."""
    for model in models.values():
        script = scripts.get(model.name, Script())
        if model.role in _RETURNING and model.decoupled and script.real and not script.sends:
            report.error(
                "decoupled",
                model.at_field("decoupled"),
                "is true, and the model's script returns its responses",
                why="the Python backend then fails every request",
                remedy="leave it out",
            )
            report.returning.add(model.name)


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
        others = models.keys() - {model.name, model.value("tensorrt_llm_model_name") or DEFAULT_ENGINE}
        report.error(
            "model-missing",
            model.at_parameter(key),
            f"names the model '{name}', which is not in the repository",
            remedy=did_you_mean(nearest(name, others, 0.6)),
        )
    found = models.get(name)
    return found if found is not None and found.config is not None else None


def _check_called(caller: Model, engine: Model | None, called: Sequence[Model | None], report: Report) -> None:
    if engine is not None and engine.decoupled != caller.decoupled:
        report.error(
            "decoupled",
            caller.at_field("decoupled"),
            f"is {_word(caller.decoupled)}, and that of {engine.name} is {_word(engine.decoupled)}",
            why="streaming requests fail when they differ",
            remedy="give both the same",
        )
    small = [model for model in called if model is not None and model.config is not None and model.batch < caller.batch]
    if small:
        report.error(
            "batch-size",
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
                    (target.path, f"output {name}"),
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
    if gpus is not None:
        _check_group_gpus(model, len(gpus), report)
    if model.role == "postprocessing" and script.own:
        why, remedy = "the parts of a stream would meet different instances", "give one instance, of KIND_CPU"
        if model.instances > 1:
            told = f"is {model.instances}, and the model keeps the text of streams so far"
            report.error("instances", model.at_field("count"), told, why, remedy)
        elif any(of_gpu(group) and len(group.gpus) != 1 for group in model.config.instance_group):
            told = "is of KIND_GPU, which makes an instance on each GPU"
            report.warning("instances", model.at_field("instance_group"), told, why, remedy)
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
            model.at_field("count"),
            f"is {model.instances}, and gpu_device_ids has no value",
            why="every instance would load the engine on the same GPUs",
            remedy="list the GPUs of each instance, as in 0;1",
        )
    if not read or any(len(set(group)) < len(group) for group in groups):  # reported already
        groups = []
    lists = (("gpu_device_ids", groups), ("participant_ids", _participants(model)))
    for name, numbers in lists:
        if numbers and len(numbers) != model.instances:
            report.error(
                "gpu-ids",
                model.at_parameter(name),
                f"has {len(numbers)} list(s), and the model {model.instances} instance(s)",
                why="instances would share some, or leave some unused",
                remedy="give one list for each instance, with semicolons between",
            )
    check_apart(model, groups, report)
    nodes = values.read_int(model.value("num_nodes") or "").value
    if nodes is not None and world is not None and nodes > world and not model.python_runtime:
        report.error(
            "gpu-ids",
            model.at_parameter("num_nodes"),
            f"is {nodes:g}, and the engine has {world} rank(s)",
            why="each node needs a rank",
            remedy="give 1",
        )
    for name, numbers in lists:
        wrong = next((group for group in numbers if world is not None and len(group) != world), None)
        if wrong is not None:
            report.error(
                "gpu-ids",
                model.at_parameter(name),
                f"lists {len(wrong)} of them, and the engine has {world} rank(s)",
                why="each rank needs one",
                remedy=f"list {world}",
            )
    if gpus is not None:
        check_present(model, groups, len(gpus), report)


def check_present(model: Model, groups: Sequence[Sequence[int]], here: int, report: Report) -> None:
    """Report a GPU of gpu_device_ids that this machine, which has `here` GPUs, lacks."""
    beyond = next((number for group in groups for number in group if number >= here), None)
    if beyond is not None:
        report.error(
            "gpu-ids",
            model.at_parameter("gpu_device_ids"),
            f"names GPU {beyond}, and this machine has {here}",
            remedy=f"name {', '.join(map(str, range(here)))}" if here else "serve it elsewhere",
        )


def check_apart(model: Model, groups: Sequence[Sequence[int]], report: Report) -> None:
    """Report a GPU that several instances of an engine share."""
    ids = [number for group in groups for number in set(group)]
    twice = next((number for number in ids if ids.count(number) > 1), None)
    if twice is not None and model.instances == len(groups):
        report.warning(
            "gpu-ids",
            model.at_parameter("gpu_device_ids"),
            f"names GPU {twice} for several instances",
            why="each instance loads the engine into its memory",
            remedy="give each instance its own GPUs",
        )


def _check_group_gpus(model: Model, here: int, report: Report) -> None:
    """Check that the GPUs of instance groups are on this machine: Triton looks for them before it loads the model."""
    assert model.config is not None
    for group in model.config.instance_group:
        beyond = [number for number in group.gpus if number >= here]
        told = f"names GPU {beyond[0]}, and this machine has {here}" if beyond and here else ""
        if of_gpu(group) and not here:
            told = "asks for a GPU, and this machine has none"
        if told and (of_gpu(group) or beyond):
            report.error(
                "instance-group",
                model.at_field("instance_group"),
                told,
                why="Triton refuses the model",
                remedy="name those that are there" if here else "say KIND_CPU, or serve it elsewhere",
            )
            return


def _participants(model: Model) -> list[list[int]]:
    text = model.value("participant_ids")
    groups, read = values.read_groups(text) if text else ([], False)
    return groups if read else []


def check_sharing(models: dict[str, Model], report: Report) -> None:
    """Report engines on one GPU whose memory shares exceed it: each takes a share of what the previous one left."""
    engines = [model for model in models.values() if model.role == "engine" and model.config is not None]
    for position, model in enumerate(engines):
        for other in engines[:position]:
            ours, theirs = gpus_of(model), gpus_of(other)
            if ours is not None and theirs is not None and not ours & theirs:
                continue
            total = memory_share(model) + memory_share(other)
            capped = model.value("max_tokens_in_paged_kv_cache") or other.value("max_tokens_in_paged_kv_cache")
            if total > _WHOLE and not capped:
                report.warning(
                    "shared-gpu",
                    model.at_parameter("kv_cache_free_gpu_mem_fraction"),
                    f"is {memory_share(model):g}, and {other.name} takes {memory_share(other):g} on the same GPU",
                    why="whichever loads last finds too little memory",
                    remedy="lower both, or give each its own gpu_device_ids",
                )
                return


def gpus_of(model: Model) -> set[int] | None:
    """Indices of the GPUs of an engine's instances; None where gpu_device_ids names none."""
    text = model.value("gpu_device_ids")
    return {number for group in values.read_groups(text)[0] for number in group} if text else None


def memory_share(model: Model) -> float:
    """Share of a GPU's memory that an engine takes, by its configuration."""
    value = values.read_float(model.value("kv_cache_free_gpu_mem_fraction") or "").value
    return DEFAULT_SHARE if value is None else value
