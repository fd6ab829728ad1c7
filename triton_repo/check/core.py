"""Check of a model's configuration against the rules of Triton's core, which hold for every backend."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from trtpipe.triton_repo.check.faults import Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.text import definitions, type_name

ANY = -1
# Delay of a batch, in microseconds, that nobody means.
_LONG_DELAY = 1_000_000
# Number of instances given as 0; the parsed value is 0 also where none is given.
_ZERO = re.compile(r"^\s*[^#]*\bcount\s*:\s*0+\b", re.MULTILINE)


def check_core(model: Model, report: Report) -> None:
    config = model.config
    if config is None:
        return
    if config.max_batch_size < 0:
        report.error("batch-size", model.at_field("max_batch_size"), "is negative", remedy="give 0 or more")
    scalars = [tensor.name for tensor in config.input if tensor.HasField("reshape") and not tensor.reshape.shape]
    if scalars and config.max_batch_size == 0:
        report.error(
            "tensor",
            model.at_tensor("input", scalars[0]),
            "is reshaped to a scalar, and the model takes no batches",
            why="Triton refuses the model",
            remedy="give max_batch_size 1 or more",
        )
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            _check_tensor(model, kind, tensor, report)
    if model.role != "ensemble":
        # Not for an ensemble: it counts its inputs differently and may declare an output twice.
        _check_duplicates(model, report)
    _check_batching(model, report)
    _check_instances(model, report)
    _check_warmup(model, report)
    if config.model_transaction_policy.decoupled and config.response_cache.enable:
        report.error(
            "response-cache",
            model.at_field("response_cache"),
            "is on for a decoupled model",
            why="Triton caches single responses only",
            remedy="turn it off",
        )
    if model.role == "engine" and config.HasField("sequence_batching"):
        report.warning(
            "queue-policy",
            model.at_field("sequence_batching"),
            "batches sequences of requests",
            why="the backend batches by itself",
            remedy="use dynamic_batching",
        )


def _check_tensor(model: Model, kind: str, tensor: Any, report: Report) -> None:
    where = model.at_tensor(kind, tensor.name) if tensor.name else (model.path, kind)
    told = None
    if not tensor.name:
        told = "has no name"
    elif not tensor.data_type:
        told = "has no data_type"
    elif tensor.data_type not in definitions().DataType.values():
        told = f"has the data_type {tensor.data_type}, which Triton does not know"
    elif not tensor.dims:
        told = "has no dims"
    elif any(size < 1 and size != ANY for size in tensor.dims):
        told = f"has the dims {list(tensor.dims)}, a size is at least 1, or -1 for any"
    elif tensor.HasField("reshape"):
        shape = tensor.reshape.shape
        if not shape and model.batch == 0:
            return  # reported once for the model
        if any(size < 1 and size != ANY for size in shape):
            told = f"is reshaped to {list(shape)}, a size is at least 1, or -1 for any"
        elif not _same_size(list(tensor.dims), list(shape)):
            told = f"has the dims {list(tensor.dims)} and is reshaped to {list(shape)}, of another size"
    if told:
        report.error("tensor", where, told, why="Triton refuses the model")
        report.blame(model.name, tensor.name)


def _same_size(dims: list[int], shape: list[int]) -> bool:
    """Whether both have equal numbers of elements in each stretch between variable sizes."""

    def stretches(sizes: list[int]) -> list[int]:
        out: list[list[int]] = [[]]
        for size in sizes:
            if size == ANY:
                out.append([])
            else:
                out[-1].append(size)
        return [prod(stretch) for stretch in out]

    return stretches(dims) == stretches(shape)


def _check_duplicates(model: Model, report: Report) -> None:
    assert model.config is not None
    seen: dict[str, Any] = {}
    for tensor in model.config.input:
        first = seen.setdefault(tensor.name, tensor)
        if first is tensor:
            continue
        if not tensor.optional:
            why = "Triton counts both, and refuses requests that bring one"
        elif tensor != first:
            why = "Triton takes the first, and they differ"
        else:
            continue
        report.error("duplicate-tensor", model.at_tensor("input", tensor.name), "is declared twice", why, "drop one")
        report.blame(model.name, tensor.name)


def _check_batching(model: Model, report: Report) -> None:
    config = model.config
    assert config is not None
    if not config.HasField("dynamic_batching"):
        return
    batching, where = config.dynamic_batching, model.at_field("preferred_batch_size")
    for size in batching.preferred_batch_size:
        if size <= 0:
            report.error("batch-size", where, f"is {size}", why="Triton refuses it", remedy="give 1 or more")
        elif size > config.max_batch_size:
            report.error(
                "batch-size",
                where,
                f"is {size}, above the max_batch_size {config.max_batch_size}",
                why="Triton refuses the model",
                remedy="give both the same number",
            )
    if batching.max_queue_delay_microseconds >= _LONG_DELAY:
        report.warning(
            "queue-policy",
            model.at_field("max_queue_delay_microseconds"),
            f"is {batching.max_queue_delay_microseconds / 1e6:g} s",
            why="a request waits that long for others to fill its batch",
            remedy="give microseconds, such as 1000",
        )
    levels, default = batching.priority_levels, batching.default_priority_level
    beyond = [level for level in batching.priority_queue_policy if not 0 < level <= levels]
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    delay = definitions().ModelQueuePolicy.TimeoutAction.Value("DELAY")
    told = None
    if levels and not 0 < default <= levels:
        told = f"default_priority_level is {default} of {levels} levels"
    elif levels and beyond:
        told = f"priority_queue_policy names the level {beyond[0]} of {levels}"
    elif batching.preserve_ordering and levels > 1:
        told = "preserve_ordering goes with one priority level only"
    elif batching.preserve_ordering and any(
        policy.default_timeout_microseconds and policy.timeout_action == delay for policy in policies
    ):
        told = "preserve_ordering does not go with the timeout action DELAY"
    if told:
        report.error("queue-policy", model.at_field("dynamic_batching"), told, why="Triton refuses it")


def _check_instances(model: Model, report: Report) -> None:
    config = model.config
    assert config is not None
    where = model.at_field("instance_group")
    groups = definitions().ModelInstanceGroup
    if model.role == "ensemble":
        for name in ("instance_group", "optimization", "model_warmup"):
            given = config.HasField(name) if name == "optimization" else len(getattr(config, name)) > 0
            if given:
                report.error("ensemble", model.at_field(name), "stands in an ensemble", why="Triton refuses the model")
        return
    if model.role == "engine" and not config.instance_group and not model.python_runtime:
        report.warning(
            "instance-group",
            (model.path, "instance_group"),
            "is missing",
            why="Triton then makes one engine for each GPU, and the backend chooses GPUs by itself",
            remedy="add instance_group [ { count: 1 kind: KIND_CPU } ]",
        )
    if config.instance_group and all(group.passive for group in config.instance_group):
        report.error("instance-group", where, "is passive", "no instance takes requests", "leave passive out")
    for group in config.instance_group:
        if group.count < 0 or (group.count == 0 and _ZERO.search(model.text)):
            report.warning(
                "instance-group", model.at_field("count"), f"is {group.count}", "Triton makes one instance",
                "give the number you mean",
            )  # fmt: skip
        if len(set(group.gpus)) < len(group.gpus):
            report.warning(
                "instance-group", where, "names a GPU twice", "Triton makes its instances there twice",
                "name each once, and raise count",
            )  # fmt: skip
        if any(number < 0 for number in group.gpus):
            report.error("instance-group", where, "names a negative GPU", "Triton refuses the model")
        if group.kind not in groups.Kind.values():
            report.error("instance-group", where, f"has the kind {group.kind}", why="Triton knows none")
            continue
        kind = groups.Kind.Name(group.kind)
        if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
            report.error(
                "instance-group",
                where,
                f"names GPUs for {kind}",
                why="Triton refuses the model",
                remedy="say KIND_GPU, or leave gpus out"
                if model.role != "engine"
                else "leave gpus out, and give the parameter gpu_device_ids",
            )
        elif group.profile:
            report.error("instance-group", where, "names a profile", why="only TensorRT plans have profiles")
        if model.role == "engine" and kind in ("KIND_GPU", "KIND_AUTO") and not model.python_runtime:
            report.warning(
                "instance-group",
                where,
                f"is of {kind}",
                why="Triton then makes one engine for each GPU, and the backend chooses GPUs by itself",
                remedy="say KIND_CPU, and give the parameter gpu_device_ids",
            )


def of_gpu(group: Any) -> bool:
    """Whether Triton makes the instances of a group on GPUs."""
    kinds = definitions().ModelInstanceGroup.Kind
    return group.kind == kinds.Value("KIND_GPU") or (group.kind == kinds.Value("KIND_AUTO") and len(group.gpus) > 0)


def _check_warmup(model: Model, report: Report) -> None:
    """Check the requests that Triton sends to a model before it counts as loaded."""
    assert model.config is not None
    declared, where = model.inputs(), model.at_field("model_warmup")
    for name, tensor in (pair for sample in model.config.model_warmup for pair in sorted(sample.inputs.items())):
        told = None
        if name not in declared:
            told = f"feeds '{name}', which is not an input"
        elif tensor.data_type != declared[name].data_type:
            told = f"feeds '{name}' as {type_name(tensor.data_type)}, its type is "
            told += type_name(declared[name].data_type)
        elif tensor.input_data_file and not (model.folder / "warmup" / tensor.input_data_file).is_file():
            told = f"names '{tensor.input_data_file}', which is not in the model's folder warmup"
        if told:
            remedy = "mend the sample, or leave it out"
            report.error("warmup", where, told, "Triton does not load the model", remedy)
            return
