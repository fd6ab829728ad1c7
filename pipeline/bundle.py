"""A target's checkpoint in one file: made on a machine without the GPU, finished on one that has it.

A tar whose first member, trtpipe.json, says what is in it: the settings of the build, the passport the engine will
have, and for each artefact its record and the digest of every file. What arrives damaged is refused, file by file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engines.errors import InputDataError, UsageError
from engines.json_input import read_json
from pipeline.folders import write_whole
from pipeline.manifest import Record
from pipeline.plan import Plan
from pipeline.runner import RunFolder
from pipeline.shipment import check_index, describe, files_of, link, plan_of, planned, receive
from pipeline.store import Artefact, Store

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
    index, made = describe(target, store, CARRIED)
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
            plan = planned(index, f"{path}: {INDEX}")
            counter = _Counter(sum(file["size"] for file in files_of(index)), progress)
            artefacts = {
                name: _take(tar, path, name, entry, store, counter) for name, entry in index["artefacts"].items()
            }
    except (tarfile.TarError, EOFError) as error:
        raise InputDataError(f"{path} is no whole export", why=str(error), remedy="copy it again") from None
    except OSError as error:
        raise InputDataError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    run = link(plan, artefacts, store)
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
    return Bundle(plan=plan_of(index), artefacts=found)


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
        index = json.load(stream)
    except ValueError as error:
        raise InputDataError(f"{path}: {INDEX} is damaged", why=str(error), remedy="copy it again") from None
    return check_index(index, f"{path}: {INDEX}")


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

    def take(file: dict[str, Any], place: Path | None) -> None:
        _extract(tar, path, f"{name}/{file['path']}", place, file, counter)

    # Of one that is there nothing is taken, and the file's word is to be good all the same.
    return receive(name, entry, store, str(path), take, lambda file: take(file, None))


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
