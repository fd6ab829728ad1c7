"""Checks before an engine is served: this machine can run it, and its code is trusted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trtpipe.configs import facts
from trtpipe.engines.errors import ArtefactRefused, HostError, InputDataError, UsageError
from trtpipe.engines.passport import NAME, Passport, objections, read_passport, remarks
from trtpipe.pipeline.execution import hardware
from trtpipe.pipeline.run_folder import SEE_TARGETS, find_run
from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.check.code import foreign_code
from trtpipe.triton_repo.layout import ENGINE_FOLDER


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether this machine can run an engine: the objections, a phrase each, and further notes."""

    passport: Passport
    objections: list[str]
    remarks: list[str]

    def require(self, place: str | Path) -> None:
        """Raise ArtefactRefused, with the command that builds for this machine, when there is an objection."""
        if self.objections:
            raise ArtefactRefused(
                f"the engine in {place} does not run on this machine",
                why="; ".join(self.objections),
                remedy=f"serve it on {self.passport.target()}, or build for the GPU here with `trtpipe build --gpu`",
            )


def find_passport(folder: Path) -> Passport:
    """The passport of an engine folder, a model repository or a target. Raises UsageError or ArtefactRefused."""
    run = find_run(str(folder))
    if run is not None:
        return read_passport(run.linked("engine"))
    for place in (folder, folder / ENGINE_FOLDER, folder / "engine"):
        if (place / NAME).is_file():
            return read_passport(place)
    if not folder.exists():
        raise UsageError(f"there is no folder or target '{folder}'", remedy=SEE_TARGETS)
    return read_passport(folder)


def examine(passport: Passport, chosen: Collection[int] | None = None) -> Verdict:
    """Compare a passport with this machine, or with the GPUs of it of the indices `chosen`. A driver that does not
    answer is an objection to an engine for GPUs."""
    floor: str | None = None
    against: list[str] = []
    try:
        gpus = hardware.installed_gpus() if passport.sms is not None else ()
    except HostError as error:
        return Verdict(passport=passport, objections=[str(error)], remarks=[])
    if chosen is not None and gpus:
        absent = sorted(set(chosen) - {gpu.index for gpu in gpus})
        if absent:
            against.append(f"GPU {', '.join(map(str, absent))} is not one of those that are visible here")
        gpus = tuple(gpu for gpu in gpus if gpu.index in chosen)
        if not gpus:
            return Verdict(passport=passport, objections=against, remarks=[])
    if passport.toolchain is not None:
        known = facts.load_toolchains().get(passport.toolchain)
        if known is None:
            against.append(f"it was built by TensorRT-LLM {passport.toolchain}, which this release does not know")
        else:
            floor = known.driver
    against += objections(passport, gpus, floor=floor)
    return Verdict(passport=passport, objections=against, remarks=remarks(passport, gpus))


def judge_stored(repository: Path, store: Store) -> tuple[bool, str | None]:
    """Whether a repository is one that this store made, and what has changed in it since, its engine included."""
    folder = repository.resolve().parent
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None or store.folder(manifest.record).resolve() != folder:
        return False, None
    fault = store.fault(manifest.record)
    store.digests.save()
    return True, fault


def whole_again(name: str, store: Store) -> str:
    """The remedy for the damaged repository of a target, or of a folder of that name: a build makes the repository
    again, but no engine that came from elsewhere."""
    run = find_run(name)
    if run is None:
        return "build it again"
    broken = next((stage for stage in run.stages() if run.origin(stage) and run.find(stage, store) is None), None)
    return run.finish if broken is None else run.again(broken)


def require_trusted(name: str, repository: Path, store: Store, *, allow_code: bool) -> None:
    """Refuse a repository with untrusted code: it is neither whole in this store nor made of known templates.

    allow_code  whether the user has allowed the repository's code to run

    Raises ArtefactRefused naming the first file, InputDataError for a repository of this store that has changed.
    """
    known, fault = judge_stored(repository, store)
    if fault is not None:
        raise InputDataError(f"the repository of {name} is damaged", why=fault, remedy=whole_again(name, store))
    if known:
        return
    found = [] if allow_code else foreign_code(repository)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise ArtefactRefused(
            f"{name} holds code that is of no known template",
            why=f"{found[0].path} {found[0].what}{more}",
            remedy=f"read it (`trtpipe check {name}` lists all), then pass --allow-model-code; or build it again, if "
            "another version of trtpipe made it",
        )
