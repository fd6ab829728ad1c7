"""A target's checkpoint in one file: made on a machine without the GPU, finished on one that has it.

A tar whose first member, trtpipe.json, says what is in it: the settings of the build, the passport the engine will
have, and for each artefact its record and the digest of every file. What arrives damaged is refused, file by file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from engines.errors import ArtefactRefused, InputDataError, UsageError
from engines.files import read_json
from pipeline import __version__
from pipeline.folders import write_whole
from pipeline.manifest import Record
from pipeline.model_ref import ModelRef
from pipeline.plan import Plan, resolve
from pipeline.runner import RunFolder
from pipeline.stages import Stage, stages_of
from pipeline.stages.build import draft_passport
from pipeline.store import Artefact, Store

FORMAT = 1
INDEX = "trtpipe.json"
# What finishing a target needs; the last is there for quantized ones alone.
CARRIED = ("checkpoint", "tokenizer", "accuracy")
_CHUNK = 8 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What has arrived: the plan to go on with, and the artefacts under the names of what their stages make."""

    plan: Plan
    artefacts: dict[str, Artefact]


def pack(target: str, store: Store, out: Path, progress: Progress = lambda done, total: None) -> Path:
    """Write `out` from the run folder of `target`. Raises UsageError, or InputDataError when something is not made."""
    run = RunFolder.of(target)
    if not run.path.is_dir():
        raise UsageError(f"there is no target '{target}' in ./runs", remedy="run `trtpipe build` first")
    raw = read_json(run.path / "plan.json", "plan")
    plan = _plan(raw["settings"], raw["model"])
    made = {stage.makes: _made(stage, run, store) for stage in stages_of(plan) if stage.makes in CARRIED}
    index = {
        "format": FORMAT,
        "trtpipe": __version__,
        "target": target,
        "model": raw["model"],
        "settings": raw["settings"],
        "passport": dataclasses.asdict(draft_passport(plan, made["checkpoint"])),
        "artefacts": {name: _entry(artefact) for name, artefact in made.items()},
    }
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    total, done = sum(artefact.manifest.size for artefact in made.values()), 0
    try:
        with tarfile.open(partial, "w") as tar:
            text = (json.dumps(index, indent=2) + "\n").encode()
            tar.addfile(_member(INDEX, len(text)), io.BytesIO(text))
            for name, artefact in made.items():
                for file in artefact.manifest.files:
                    with (artefact.path / file.path).open("rb") as stream:
                        tar.addfile(_member(f"{name}/{file.path}", file.size), stream)
                    done += file.size
                    progress(done, total)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return out


def unpack(path: Path, store: Store, progress: Progress = lambda done, total: None) -> Bundle:
    """Verify the file `path`, put what it holds into the store, and link it from a run folder.

    Raises InputDataError for a file that is damaged or no export, ArtefactRefused for one of another version.
    """
    try:
        with tarfile.open(path) as tar:
            index = _read_index(tar, path)
            plan = _plan(index["settings"], index["model"])
            total = sum(file["size"] for entry in index["artefacts"].values() for file in entry["files"])
            counter = _Counter(total, progress)
            artefacts = {
                name: _take(tar, path, name, entry, store, counter) for name, entry in index["artefacts"].items()
            }
    except (tarfile.TarError, EOFError) as error:
        raise InputDataError(f"{path} is no whole export", why=str(error), remedy="copy it again") from None
    except OSError as error:
        raise InputDataError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    run = RunFolder.of(plan.target)
    run.start(plan, store)
    for stage in stages_of(plan):
        if stage.makes in artefacts:
            run.update(stage, artefacts[stage.makes])
    write_whole(run.path / "import.json", json.dumps(index, indent=2) + "\n")
    return Bundle(plan=plan, artefacts=artefacts)


def imported(target: str, store: Store) -> Bundle:
    """What `unpack` has put into the store for a target before. Raises UsageError, or InputDataError if it is gone."""
    run = RunFolder.of(target)
    if not (run.path / "import.json").is_file():
        raise UsageError(
            f"'{target}' is neither an export nor an imported target", remedy="name a .tar of `trtpipe export`"
        )
    index = read_json(run.path / "import.json", "import record")
    found: dict[str, Artefact] = {}
    for name, entry in index["artefacts"].items():
        artefact = store.find(Record(**entry["record"]))
        if artefact is None:
            raise InputDataError(f"the {name} of {target} is no longer in the store", remedy="import it again")
        found[name] = artefact
    return Bundle(plan=_plan(index["settings"], index["model"]), artefacts=found)


def _made(stage: Stage, run: RunFolder, store: Store) -> Artefact:
    record = run.last(stage.name)
    artefact = record and store.find(record, verify=False)
    if not artefact:
        raise InputDataError(
            f"{run.path} has no {stage.makes}",
            why=f"its {stage.name} stage has not run to its end",
            remedy="run `trtpipe build` again",
        )
    return artefact


def _entry(artefact: Artefact) -> dict[str, Any]:
    manifest = artefact.manifest
    files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in manifest.files]
    return {"record": dataclasses.asdict(manifest.record), "content": manifest.content, "files": files}


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A member without a date or an owner: the same target packs to the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member


def _read_index(tar: tarfile.TarFile, path: Path) -> dict[str, Any]:
    first = tar.next()
    stream = tar.extractfile(first) if first is not None and first.name == INDEX else None
    if stream is None:
        raise InputDataError(f"{path} is no export of trtpipe", why=f"it does not begin with {INDEX}")
    try:
        index: dict[str, Any] = json.load(stream)
        version = index["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputDataError(f"{path}: {INDEX} is damaged", why=str(error), remedy="copy it again") from None
    if version != FORMAT:
        raise ArtefactRefused(f"{path} is of format {version}, this trtpipe reads {FORMAT}", remedy="export it again")
    return index


def _plan(settings: dict[str, Any], model: dict[str, Any]) -> Plan:
    return resolve([("export", settings)], model=ModelRef.from_json(model))


class _Counter:
    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)


def _take(
    tar: tarfile.TarFile, path: Path, name: str, entry: dict[str, Any], store: Store, counter: _Counter
) -> Artefact:
    """One artefact into the store, unless it is there. Raises InputDataError for a file that is not what it was."""
    record = Record(**entry["record"])

    def work(out: Path) -> dict[str, Any]:
        for file in entry["files"]:
            relative = PurePosixPath(file["path"])
            if relative.is_absolute() or ".." in relative.parts:
                raise InputDataError(f"{path} holds the file name {relative}", why="it leads out of its folder")
            (out / relative).parent.mkdir(parents=True, exist_ok=True)
            _extract(tar, path, f"{name}/{file['path']}", out / relative, file, counter)
        return {"imported": path.name}

    with store.locked(record):
        found = store.find(record)
        if found is not None and found.manifest.content == entry["content"]:
            for file in entry["files"]:  # nothing is taken from it, and its word is to be good all the same
                _extract(tar, path, f"{name}/{file['path']}", None, file, counter)
            return found
        store.set_aside(record)
        artefact = store.make(record, work)
    if artefact.manifest.content != entry["content"]:
        raise InputDataError(f"{path}: the {name} is not what its digest says", remedy="copy it again")
    return artefact


def _extract(
    tar: tarfile.TarFile, path: Path, member: str, out: Path | None, file: dict[str, Any], counter: _Counter
) -> None:
    """Write a member to `out`, or nowhere. Raises InputDataError unless it is what its digest says."""
    try:
        stream: IO[bytes] | None = tar.extractfile(member)
    except KeyError:
        stream = None
    if stream is None:
        raise InputDataError(f"{path} lacks {member}", why="it is cut short, or another export", remedy="copy it again")
    digest, size = hashlib.sha256(), 0
    with out.open("wb") if out else contextlib.nullcontext() as target:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if target is not None:
                target.write(chunk)
            counter.add(len(chunk))
    if size != file["size"] or digest.hexdigest() != file["sha256"]:
        raise InputDataError(f"{path}: {member} is damaged", why="its digest is another", remedy="copy it again")
