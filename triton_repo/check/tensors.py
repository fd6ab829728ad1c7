"""Check of the tensors that models declare against those that the backend and the templates' scripts read."""

from __future__ import annotations

from typing import Any

from trtpipe.triton_repo.check import facts
from trtpipe.triton_repo.check.core import ANY
from trtpipe.triton_repo.check.facts import Tensor
from trtpipe.triton_repo.check.faults import Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.release import Key, Release, release_key
from trtpipe.triton_repo.check.scripts import Script
from trtpipe.triton_repo.check.text import type_name
from trtpipe.triton_repo.tensors import OWN_INPUTS, OWN_OUTPUTS

LOGITS = ("context_logits", "generation_logits", "draft_logits")
# The C++ backend maps unsigned types to signed types of the same width; early templates used unsigned types.
_ALIKE = {"INT32": "UINT32", "UINT64": "INT64", "INT64": "UINT64"}
# Of the Python-based backend in the C++ backend's place.
_OWN = {tensor.name for tensor in (*OWN_INPUTS, *OWN_OUTPUTS)}
# Number of tensors of another release from which on the template counts as one of that release.
_MANY = 2


def evidence(engine: Model) -> Key | None:
    """The oldest release whose backend has all tensors and parameters of an engine model's configuration."""
    known = facts.tensors()["engine"]
    rows: list[str | None] = [
        fact.since
        for declared, side in ((engine.inputs(), known.inputs), (engine.outputs(), known.outputs))
        for name, fact in side.items()
        if name in declared
    ]
    parameters = facts.parameters()["engine"]
    rows += [parameters[name].since for name in engine.parameters if name in parameters]
    keys = [key for since in rows if (key := release_key(since)) is not None]
    return max(keys, default=None)


def check_tensors(model: Model, script: Script, release: Release, report: Report) -> None:
    known = facts.tensors().get(model.role)
    if model.config is None or known is None:
        return
    for kind, declared, side in (
        ("input", model.inputs(), known.inputs),
        ("output", model.outputs(), known.outputs),
    ):
        _check_names(model, kind, declared, side, report)
        for name, tensor in declared.items():
            if name in side and not report.blames(model.name, name):
                _check_form(model, kind, tensor, side[name], report)
    if model.role == "engine":
        _check_release(model, known, release, report)
        _check_logits(model, report)
    elif model.role == "bls":
        _check_client_names(model, known.inputs, script, report)


def _check_names(model: Model, kind: str, declared: dict[str, Any], side: dict[str, Tensor], report: Report) -> None:
    strange = [name for name in declared if name not in side]
    absent = [name for name in side if name not in declared]
    whole = model.role in ("engine", "llmapi")
    for name in strange:
        near = nearest(name, absent, 0.82)
        where = model.at_tensor(kind, name)
        if near:
            absent.remove(near)
            what = "the backend passes it over" if kind == "input" else "the backend never writes it"
            report.error("unknown-tensor", where, "is none that the model knows", what, did_you_mean(near))
            report.blame(model.name, name, near)
        elif model.role == "engine" and not model.python_runtime and name not in _OWN:
            report.warning(
                "unknown-tensor",
                where,
                "is none that the backend knows",
                why="it is passed over" if kind == "input" else "it is never written",
                remedy="drop it",
            )
    for name in absent:
        if side[name].must and whole and not report.blames(model.name, name):
            report.error(
                "missing-tensor",
                (model.path, f"{kind} {name}"),
                "is missing",
                why="the model cannot answer without it",
                remedy="declare it",
            )
            report.blame(model.name, name)


def _check_form(model: Model, kind: str, tensor: Any, fact: Tensor, report: Report) -> None:
    where = model.at_tensor(kind, tensor.name)
    declared = type_name(tensor.data_type).removeprefix("TYPE_")
    if declared not in fact.type and not any(declared == _ALIKE.get(one) for one in fact.type):
        report.error(
            "tensor-type",
            where,
            f"has the type TYPE_{declared}",
            why="the backend reads it as another" if kind == "input" else "the backend writes another",
            remedy=f"give {' or '.join('TYPE_' + one for one in fact.type)}",
        )
        report.blame(model.name, tensor.name)
    elif not any(_fits(tuple(tensor.dims), dims) for dims in fact.dims):
        report.error(
            "tensor-shape",
            where,
            f"has the dims {list(tensor.dims)}",
            why="the backend reads it in another shape" if kind == "input" else "the backend writes another shape",
            remedy=f"give {list(fact.dims[0])}",
        )
        report.blame(model.name, tensor.name)
    if kind == "input" and not tensor.optional and not fact.required:
        report.warning(
            "required-input",
            where,
            "is not optional",
            why="Triton then refuses every request without it",
            remedy="add optional: true",
        )


def _fits(dims: tuple[int, ...], known: tuple[int, ...]) -> bool:
    return len(dims) == len(known) and all(
        ANY in (one, other) or one == other for one, other in zip(dims, known, strict=True)
    )


def _check_release(model: Model, known: facts.Tensors, release: Release, report: Report) -> None:
    """Report tensors that have another name in the serving release, or that it does not have yet."""
    sides = (("input", model.inputs(), known.inputs), ("output", model.outputs(), known.outputs))
    gone = [
        (kind, name, side[name])
        for kind, declared, side in sides
        for name in declared
        if name in side and side[name].renamed and release.has_left(side[name].until)
    ]
    early = [
        (kind, name, side[name])
        for kind, declared, side in sides
        for name in declared
        if name in side and release.lacks(side[name].since)
    ]
    if len(early) >= _MANY:
        newest = max(release_key(fact.since) or (0, 0, 0) for _, _, fact in early)
        names = ", ".join(name for _, name, _ in early[:3])
        report.error(
            "template-release",
            model.at_tensor(early[0][0], early[0][1]),
            f"is of TensorRT-LLM {newest[0]}.{newest[1]} or newer, and the repository is served by {release.told()}",
            why=f"its backend does not know {names}",
            remedy="take the template of that release",
        )
        report.blame(model.name, *(name for _, name, _ in early))
        return
    for kind, name, fact in early:
        old = next((one for one, other in known.inputs.items() if other.renamed == name), None)
        report.error(
            "renamed-tensor" if old else "template-release",
            model.at_tensor(kind, name),
            f"is unknown to {release.told()}",
            why=f"it came with {fact.since}, and the backend passes it over",
            remedy=did_you_mean(old) or "drop it, or serve with a newer release",
        )
    if len(gone) >= _MANY and release.name is not None:
        names = " and ".join(f"{name} is {fact.renamed} now" for _, name, fact in gone)
        report.error(
            "template-release",
            model.at_tensor(gone[0][0], gone[0][1]),
            f"is of TensorRT-LLM 0.19 or older, and the repository is served by {release.told()}",
            why=f"{names}, and the backend passes the old ones over",
            remedy="take the template of that release",
        )
        report.outdated.add(model.name)
        return
    for kind, name, fact in gone:
        report.error(
            "renamed-tensor",
            model.at_tensor(kind, name),
            f"has another name in {release.told()}",
            why="the backend passes it over without a word",
            remedy=f"call it {fact.renamed}",
        )
        report.blame(model.name, name, fact.renamed or "")


def _check_logits(model: Model, report: Report) -> None:
    tensors = {**model.inputs(), **model.outputs()}
    found = {one: type_name(tensors[one].data_type) for one in LOGITS if one in tensors}
    found = {one: word for one, word in found.items() if not report.blames(model.name, one)}
    if len(set(found.values())) > 1:
        told = " and ".join(f"{one} is {word}" for one, word in found.items())
        report.error(
            "logits-type",
            model.at_tensor("output", "context_logits"),
            "is of another type than other logits",
            why=told,
            remedy="give all of them the engine's logits type",
        )
        report.blame(model.name, *found)


def _check_client_names(model: Model, known: dict[str, Tensor], script: Script, report: Report) -> None:
    """Check input names of NVIDIA's BLS script, which reads inputs by the names of its own release."""
    for name, fact in known.items():
        if fact.renamed is None or fact.renamed not in known:
            continue
        for wrong, right in ((name, fact.renamed), (fact.renamed, name)):
            if wrong in model.inputs() and wrong not in script.words and right in script.words:
                report.error(
                    "renamed-tensor",
                    model.at_tensor("input", wrong),
                    "is not read by the model's script",
                    why="it is of another release's template",
                    remedy=f"call it {right}",
                )
