"""Check of an ensemble's graph by the rules of Triton's core: names, types, shapes, batches, decoupled models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trtpipe.triton_repo.check.core import ANY
from trtpipe.triton_repo.check.faults import Location, Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.text import line_of_word, type_name


@dataclass
class _Tensor:
    """One tensor name of the graph: its producers and consumers, and the type and shape that its first user states."""

    name: str
    makers: list[str] = field(default_factory=list)
    takers: list[str] = field(default_factory=list)
    type: int | None = None
    dims: tuple[int, ...] = ()
    batching: bool = False
    owner: str = ""
    called: str = ""  # name of the tensor in the owner's configuration


def check_graph(ensemble: Model, models: dict[str, Model], report: Report) -> None:
    config = ensemble.config
    if config is None:
        return
    if not config.HasField("ensemble_scheduling") or not config.ensemble_scheduling.step:
        report.error("ensemble", (ensemble.path, "ensemble_scheduling"), "has no step", why="Triton refuses the model")
        return
    tensors: dict[str, _Tensor] = {}
    for tensor in config.input:
        _enter(tensors, ensemble, tensor).makers.append("the client")
    for tensor in config.output:
        _enter(tensors, ensemble, tensor).takers.append("the client")
    unfed: list[tuple[int, Model, str]] = []
    for number, step in enumerate(config.ensemble_scheduling.step, start=1):
        unfed += _check_step(number, step, ensemble, models, tensors, report)
    _check_flow(ensemble, tensors, unfed, report)
    _check_decoupled(ensemble, models, report)


def _enter(tensors: dict[str, _Tensor], ensemble: Model, tensor: Any) -> _Tensor:
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    made = _Tensor(
        name=tensor.name,
        type=tensor.data_type,
        dims=tuple(dims),
        batching=ensemble.batch > 0,
        owner=ensemble.name,
        called=tensor.name,
    )
    return tensors.setdefault(tensor.name, made)


def _check_step(
    number: int, step: Any, ensemble: Model, models: dict[str, Model], tensors: dict[str, _Tensor], report: Report
) -> list[tuple[int, Model, str]]:
    """Add a step to `tensors`; return its required inputs that have no source."""
    line = line_of_word(ensemble.text, "model_name", step.model_name)
    where = ensemble.path, f"step {number} ({step.model_name})" + line
    for name in ("model_name", "input_map", "output_map"):
        if not getattr(step, name):
            report.error("ensemble", where, f"has no {name}", why="Triton refuses the model")
    model = models.get(step.model_name)
    if step.model_name and model is None and (ensemble.folder.parent / step.model_name).is_dir():
        model = Model(name=step.model_name, folder=ensemble.folder.parent / step.model_name, text="", config=None)
    if step.model_name and model is None:
        report.error(
            "ensemble-model",
            where,
            f"uses the model '{step.model_name}', which is not in the repository",
            remedy=did_you_mean(nearest(step.model_name, models, 0.6)),
        )
    # An ensemble that is its own step is reported as a circle.
    readable = model if model is not None and model.config is not None and model is not ensemble else None
    if readable is not None:
        _check_model(step, readable, ensemble, where, report)
    unfed = _take(number, step, readable, ensemble, where, tensors, report)
    _make(step, readable, ensemble, where, tensors, report)
    return unfed


def _check_model(step: Any, model: Model, ensemble: Model, where: Location, report: Report) -> None:
    if model.versions and step.model_version not in (-1, *model.versions):
        report.error(
            "ensemble-model",
            where,
            f"asks for version {step.model_version} of {model.name}, which is not loaded"
            if step.model_version
            else f"names no version of {model.name}, which stands for version 0",
            why="Triton refuses the ensemble",
            remedy="write model_version: -1 for the newest",
        )
    if 0 < model.batch < ensemble.batch:
        report.error(
            "batch-size",
            ensemble.at_field("max_batch_size"),
            f"is {ensemble.batch}, and its model {model.name} takes {model.batch}",
            why="Triton refuses the ensemble",
            remedy=f"give {model.name} the same number",
        )


def _take(
    number: int, step: Any, model: Model | None, ensemble: Model, where: Location, tensors: dict[str, _Tensor],
    report: Report,
) -> list[tuple[int, Model, str]]:  # fmt: skip
    declared = model.inputs() if model is not None else {}
    unknown = []
    for theirs, ours in sorted(step.input_map.items()):
        entry = tensors.setdefault(ours, _Tensor(name=ours))
        entry.takers.append(step.model_name)
        if model is None:
            continue
        if theirs in declared:
            _match(entry, model, declared[theirs], ensemble, where, report)
        else:
            unknown.append(theirs)
    if model is None:
        return []
    unfed = [name for name, tensor in declared.items() if not tensor.optional and name not in step.input_map and name]
    for theirs in unknown:
        near = nearest(theirs, unfed, 0.6) or nearest(theirs, set(declared) - set(step.input_map), 0.6)
        unfed = [name for name in unfed if name != near]
        if not report.blames(model.name, theirs):
            report.error(
                "ensemble-input",
                where,
                f"feeds '{theirs}', which is not an input of {model.name}",
                why="Triton refuses the ensemble",
                remedy=did_you_mean(near),
            )
    return [(number, model, name) for name in unfed if not report.blames(model.name, name)]


def _make(
    step: Any, model: Model | None, ensemble: Model, where: Location, tensors: dict[str, _Tensor], report: Report
) -> None:
    declared = model.outputs() if model is not None else {}
    for theirs, ours in sorted(step.output_map.items()):
        entry = tensors.setdefault(ours, _Tensor(name=ours))
        steps = [maker for maker in entry.makers if maker != "the client"]
        if steps:
            report.error(
                "ensemble-output",
                where,
                f"makes '{ours}', which {steps[0]} makes too",
                why="a name may stand in one output_map only",
                remedy="give one of them another name",
            )
        entry.makers.append(step.model_name)
        if model is None:
            continue
        if sum(tensor.name == theirs for tensor in model.config.output) > 1:  # type: ignore[union-attr]
            report.error(
                "ensemble-output",
                model.at_tensor("output", theirs),
                "is declared twice, and an ensemble takes it",
                why="Triton refuses the ensemble",
                remedy="drop one",
            )
        elif theirs in declared:
            _match(entry, model, declared[theirs], ensemble, where, report)
        elif not report.blames(model.name, theirs):
            report.error(
                "ensemble-output",
                where,
                f"reads '{theirs}', which is not an output of {model.name}",
                why="Triton refuses the ensemble",
                remedy=did_you_mean(nearest(theirs, set(declared) - set(step.output_map), 0.6)),
            )


def _match(entry: _Tensor, model: Model, tensor: Any, ensemble: Model, where: Location, report: Report) -> None:
    """Compare a step's tensor with the graph's tensor of that name. Reshapes of the steps' models are ignored."""
    dims, batching = tuple(tensor.dims), model.batch > 0
    if entry.type is None:
        entry.type, entry.dims, entry.batching = tensor.data_type, dims, batching
        entry.owner, entry.called = model.name, tensor.name
        return
    blamed = report.blames(model.name, tensor.name) or report.blames(entry.owner, entry.called)
    if blamed or report.blames(ensemble.name, entry.name):
        return
    if entry.type != tensor.data_type:
        report.error(
            "ensemble-type",
            where,
            f"'{entry.name}' is {type_name(entry.type)} in {entry.owner}, and {tensor.name} is "
            f"{type_name(tensor.data_type)} in {model.name}",
            why="Triton refuses the ensemble",
            remedy="give both the same data_type",
        )
    elif not _fits(entry.dims, dims) and not _fits(_full(entry.dims, entry.batching), _full(dims, batching)):
        report.error(
            "ensemble-shape",
            where,
            f"'{entry.name}' has the dims {list(entry.dims)} in {entry.owner}, and {tensor.name} has {list(dims)} in "
            f"{model.name}",
            why="Triton refuses the ensemble",
            remedy="give both the same dims",
        )
    else:
        return
    report.blame(ensemble.name, entry.name)


def _fits(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return len(left) == len(right) and all(
        ANY in (one, other) or one == other for one, other in zip(left, right, strict=True)
    )


def _full(dims: tuple[int, ...], batching: bool) -> tuple[int, ...]:
    return (ANY, *dims) if batching else dims


def _check_flow(
    ensemble: Model, tensors: dict[str, _Tensor], unfed: list[tuple[int, Model, str]], report: Report
) -> None:
    """Check that each consumed tensor is produced, and vice versa; a misspelt name causes both and is reported once."""
    made = {name for name, tensor in tensors.items() if tensor.makers and not tensor.takers}
    missing = [tensor for tensor in tensors.values() if tensor.takers and not tensor.makers]
    for tensor in missing:
        near = nearest(tensor.name, made, 0.5) or (next(iter(made)) if len(made) == len(missing) == 1 else None)
        made -= {near} if near else set()
        by_client = "the client" in tensor.takers
        taker = next((one for one in tensor.takers if one != "the client"), "")
        report.error(
            "ensemble-flow",
            ensemble.at_tensor("output", tensor.name) if by_client else _at_value(ensemble, tensor.name),
            f"promises the output '{tensor.name}', which no step produces"
            if by_client
            else f"nothing produces '{tensor.name}' for {taker}",
            why="Triton refuses the ensemble",
            remedy=did_you_mean(near) or "map an output of a step to it",
        )
    for number, model, name in unfed:
        near = nearest(name, made, 0.6) or (next(iter(made)) if len(made) == len(unfed) == 1 else None)
        made -= {near} if near else set()
        report.error(
            "ensemble-input",
            (ensemble.path, f"step {number} ({model.name})"),
            f"leaves the input '{name}' of {model.name} unfed",
            why="it is not optional there",
            remedy=f"map {near or 'a tensor'} to it" if near else "map a tensor to it",
        )
    for name in sorted(made):
        by_client = "the client" in tensors[name].makers
        report.error(
            "ensemble-flow",
            ensemble.at_tensor("input", name) if by_client else _at_value(ensemble, name),
            f"takes the input '{name}', which no step is fed"
            if by_client
            else f"'{name}' of {tensors[name].makers[0]} is made, and nobody takes it",
            why="Triton refuses an ensemble with unused tensors",
            remedy="map it to an input, or drop it",
        )
    if not missing:
        _check_cycles(ensemble, report)


def _at_value(ensemble: Model, name: str) -> Location:
    return ensemble.path, f"tensor {name}" + line_of_word(ensemble.text, "value", name)


def _check_cycles(ensemble: Model, report: Report) -> None:
    assert ensemble.config is not None
    ready = {tensor.name for tensor in ensemble.config.input}
    steps = list(ensemble.config.ensemble_scheduling.step)
    while steps:
        able = [step for step in steps if set(step.input_map.values()) <= ready]
        if not able:
            names = ", ".join(step.model_name for step in steps)
            report.error(
                "ensemble-flow",
                (ensemble.path, "ensemble_scheduling"),
                f"goes in a circle: {names} wait for each other",
            )
            return
        for step in able:
            ready |= set(step.output_map.values())
        steps = [step for step in steps if not any(step is one for one in able)]


def _check_decoupled(ensemble: Model, models: dict[str, Model], report: Report) -> None:
    """Check that each step, and the response, combines tensors of one decoupled model only: not of several decoupled
    models, and not with tensors from before that model."""
    assert ensemble.config is not None
    labels = {tensor.name: 0 for tensor in ensemble.config.input}
    steps = list(ensemble.config.ensemble_scheduling.step)
    count = 0
    while steps:
        able = [step for step in steps if set(step.input_map.values()) <= set(labels)]
        if not able:
            return
        for step in able:
            found = {labels[name] for name in step.input_map.values()}
            if len(found) > 1:
                _tell_mixed(ensemble, step.model_name, report)
                return
            model = models.get(step.model_name)
            if model is not None and model.decoupled and model.name not in report.returning:
                count += 1
                label = count
            else:
                label = max(found, default=0)
            labels.update(dict.fromkeys(step.output_map.values(), label))
        steps = [step for step in steps if not any(step is one for one in able)]
    if len({labels[tensor.name] for tensor in ensemble.config.output if tensor.name in labels}) > 1:
        _tell_mixed(ensemble, "", report)


def _tell_mixed(ensemble: Model, taker: str, report: Report) -> None:
    report.error(
        "ensemble-decoupled",
        (ensemble.path, f"step {taker}" if taker else "output"),
        "joins tensors from before and behind a decoupled model",
        why="one has many responses and the other one",
        remedy="take both from the same side",
    )


def check_circles(models: Iterable[Model], report: Report) -> None:
    """Report an ensemble that is directly or indirectly its own step."""
    uses = {
        model.name: {step.model_name for step in model.config.ensemble_scheduling.step}
        for model in models
        if model.config is not None and model.role == "ensemble"
    }
    for name in uses:
        seen: set[str] = set()
        todo = set(uses[name])
        while todo:
            seen |= todo
            todo = {inner for one in todo for inner in uses.get(one, set())} - seen
        if name in seen:
            path = report.repository / name / "config.pbtxt"
            report.error("ensemble-flow", (path, "ensemble_scheduling"), f"'{name}' is a step of itself")
