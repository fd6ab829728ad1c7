"""A target on its way to another machine: what it is made of, file by file, and how it comes into a store again.

An index says all of it in plain JSON: the settings of the build, the engine's passport, and for each artefact its
record and the digest of every file. A tar (`pipeline.bundle`) and a registry (`pipeline.registry`) both carry one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from engines.errors import ArtefactRefused, InputDataError, UsageError
from engines.json_input import read_json
from engines.passport import Passport, passport_from, read_passport
from pipeline import __version__
from pipeline.manifest import Record
from pipeline.model_ref import ModelRef
from pipeline.plan import Plan, resolve
from pipeline.runner import RunFolder
from pipeline.stages import Stage, stages_of
from pipeline.stages.build import BUILD, draft_passport
from pipeline.store import Artefact, Store

FORMAT = 1

Index = dict[str, Any]


def describe(
    target: str, store: Store, wanted: Collection[str], *, verify: bool = False
) -> tuple[Index, dict[str, Artefact]]:
    """The index of a target in ./runs, and its artefacts among `wanted`, by what their stages make.

    verify  hash every file again. Raises UsageError for no such target, InputDataError for what is not made.
    """
    run = RunFolder.of(target)
    if not run.path.is_dir():
        raise UsageError(f"there is no target '{target}' in ./runs", remedy="run `trtpipe build` first")
    raw = read_json(run.path / "plan.json", "plan")
    plan = plan_of(raw)
    made = {stage.makes: _made(stage, run, store, verify) for stage in stages_of(plan) if stage.makes in wanted}
    checkpoint = made.get("checkpoint") or _made(
        next(stage for stage in stages_of(plan) if stage.makes == "checkpoint"), run, store, False
    )
    passport = read_passport(made["engine"].path) if "engine" in made else draft_passport(plan, checkpoint)
    index = {
        "format": FORMAT,
        "trtpipe": __version__,
        "target": target,
        "model": raw["model"],
        "settings": raw["settings"],
        "passport": dataclasses.asdict(passport),
        "artefacts": {name: _entry(artefact) for name, artefact in made.items()},
    }
    return index, made


def check_index(index: Any, where: str, again: str = "export") -> Index:
    """The index; `again` is how another is made.

    Raises InputDataError for what is no index, ArtefactRefused for one of another version.
    """
    from pipeline.shipment_form import index_fault

    if isinstance(index, dict) and index.get("format", FORMAT) != FORMAT:
        raise ArtefactRefused(
            f"{where} is of format {index['format']}, this trtpipe reads {FORMAT}", remedy=f"{again} it again"
        )
    fault = index_fault(index)
    if fault is not None:
        raise InputDataError(f"{where} is damaged", why=fault, remedy=f"copy it again, or {again} it again")
    return dict(index)


def planned(index: Index, where: str) -> Plan:
    """The plan of a checked index, which is of the target that it names, and whose artefacts are that plan's.

    Raises InputDataError where it is not so: from their names paths are made.
    """
    try:
        plan = plan_of(index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputDataError(f"{where} is damaged", why=f"{type(error).__name__}: {error}") from None
    if plan.target != index["target"]:
        raise InputDataError(f"{where} is damaged", why=f"it is of {plan.target}, and says {index['target']}")
    makers = {stage.makes: stage.name for stage in stages_of(plan)}
    for name, entry in index["artefacts"].items():
        if entry["record"]["stage"] != makers.get(name):
            raise InputDataError(
                f"{where} is damaged", why=f"the {name} of {plan.target} does not come from {entry['record']['stage']}"
            )
    passport, settings = passport_of(index), BUILD.settings(plan)
    for name, said, asked in (
        ("runtime", passport.runtime, settings.runtime),
        ("gpu", passport.gpu, settings.target.gpu.name),
        ("sms", passport.sms, settings.sms),
        ("tp_size", passport.tp_size, settings.target.mapping.tp_size),
        ("pp_size", passport.pp_size, settings.target.mapping.pp_size),
    ):
        if said != asked:
            raise InputDataError(f"{where} is damaged", why=f"{name}: its passport says {said}, its settings {asked}")
    return plan


def passport_of(index: Index) -> Passport:
    """The passport in a checked index."""
    return passport_from(index["passport"])


def plan_of(index: Mapping[str, Any]) -> Plan:
    return resolve([("export", index["settings"])], model=ModelRef.from_json(index["model"]))


def files_of(index: Index) -> list[dict[str, Any]]:
    """Every file of every artefact: path, size, sha256."""
    return [file for entry in index["artefacts"].values() for file in entry["files"]]


def receive(
    name: str, entry: dict[str, Any], store: Store, where: str, take: Callable[[dict[str, Any], Path], None],
    again: Callable[[dict[str, Any]], None] = lambda file: None,
) -> Artefact:  # fmt: skip
    """The artefact `name` into the store, each file by `take(file, place)`; of files that are there `again(file)`.

    Raises InputDataError for a name that leads out of its folder, or when the whole is not what the index says.
    """
    record = Record(**entry["record"])

    def work(out: Path) -> dict[str, Any]:
        for file in entry["files"]:
            relative = PurePosixPath(file["path"])
            if relative.is_absolute() or ".." in relative.parts:
                raise InputDataError(f"{where} holds the file name {relative}", why="it leads out of its folder")
            (out / relative).parent.mkdir(parents=True, exist_ok=True)
            take(file, out / relative)
        return {"imported": where}

    with store.locked(record):
        found = store.find(record)
        if found is not None and found.manifest.content == entry["content"]:
            for file in entry["files"]:
                again(file)
            return found
        store.set_aside(record)
        artefact = store.make(record, work)
    if artefact.manifest.content != entry["content"]:
        raise InputDataError(f"{where}: the {name} is not what its digest says", remedy="copy it again")
    return artefact


def link(plan: Plan, artefacts: Mapping[str, Artefact], store: Store) -> RunFolder:
    """The run folder of the plan's target, with links to these artefacts."""
    run = RunFolder.of(plan.target)
    run.start(plan, store)
    for stage in stages_of(plan):
        if stage.makes in artefacts:
            run.update(stage, artefacts[stage.makes])
    return run


def _made(stage: Stage, run: RunFolder, store: Store, verify: bool) -> Artefact:
    record = run.last(stage.name)
    if record is None:
        raise InputDataError(
            f"{run.path} has no {stage.makes}",
            why=f"its {stage.name} stage has not run to its end",
            remedy="run `trtpipe build` again",
        )
    artefact = store.find(record, verify=verify)
    if artefact is None:
        why = store.fault(record, verify=verify) or f"{store.home} has it no longer"
        raise InputDataError(f"{run.path} has lost its {stage.makes}", why=why, remedy="run `trtpipe build` again")
    return artefact


def _entry(artefact: Artefact) -> dict[str, Any]:
    manifest = artefact.manifest
    files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in manifest.files]
    return {"record": dataclasses.asdict(manifest.record), "content": manifest.content, "files": files}
