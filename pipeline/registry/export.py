"""Export of a target's checkpoint as one file: written on a machine without the GPU, finished on one that has it.

A tar whose first member, trtpipe.json, is the index: the settings of the build, the passport that the engine will
have, and for each artefact its record and the digest of every file. Every file is verified; a damaged one is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trtpipe.engines.errors import ArtefactRefused, InputDataError, UsageError
from trtpipe.engines.files import naming_full_disk
from trtpipe.engines.json_input import open_regular, parse_json
from trtpipe.pipeline.registry.fetch import Counter
from trtpipe.pipeline.registry.package import (
    check_index,
    check_provenance,
    describe,
    files_of,
    link,
    planned,
    receive,
    refuse_objects,
)
from trtpipe.pipeline.run_folder import RunFolder, find_run, require_run
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import stages_of, to_finish
from trtpipe.pipeline.stages.base import Progress
from trtpipe.pipeline.store.folders import require_place, sync
from trtpipe.pipeline.store.manifest import Origin
from trtpipe.pipeline.store.store import Artefact, Store

INDEX = "trtpipe.json"
# The index of a target with 100,000 files has some 20 MB.
MAX_INDEX_BYTES = 32 << 20
_CHUNK = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An unpacked export: the spec to go on with, and the artefacts by what their stages make."""

    spec: BuildSpec
    artefacts: dict[str, Artefact]


def pack(
    target: str, store: Store, out: Path, progress: Progress = lambda done, total: None, *, sign_key: Path | None = None
) -> Path:
    """Write the file `out`, or TARGET.tar in the folder `out`, from the run folder of `target`; return its path.

    Raises UsageError, also for a device, a pipe or the key, or InputDataError for a missing artefact.
    """
    if out.is_dir():
        out = out / f"{require_run(target).path.name}.tar"
    if not out.parent.is_dir():
        if out.parent.exists():
            raise UsageError(f"{out.parent} is not a folder", remedy="give another --output")
        raise UsageError(f"there is no folder {out.parent}", remedy="make it, or give another --output")
    require_place(out, sign_key)
    index, made = describe(target, store, to_finish(require_run(target).spec()), sign_key=sign_key)
    _remove_leftovers(out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    total, done = sum(artefact.manifest.size for artefact in made.values()), 0
    try:
        with naming_full_disk(out.parent), partial.open("wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            with tarfile.open(fileobj=file, mode="w") as tar:
                text = (json.dumps(index, indent=2) + "\n").encode()
                tar.addfile(_member(INDEX, len(text)), io.BytesIO(text))
                for name, artefact in made.items():
                    for one in artefact.manifest.files:
                        with (artefact.path / one.path).open("rb") as stream:
                            tar.addfile(_member(f"{name}/{one.path}", one.size), stream)
                        done += one.size
                        progress(done, total)
            file.flush()
            sync(partial)
            partial.replace(out)  # locked until here
        sync(out.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)
    return out


def _remove_leftovers(out: Path) -> None:
    """Remove what killed exports to `out` have left beside it: files that no process has locked."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
        with contextlib.suppress(OSError), left.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def unpack(
    path: Path, store: Store, progress: Progress = lambda done, total: None, *, trust_keys: Sequence[Path] = ()
) -> Bundle:
    """Verify the file `path`, put its artefacts into the store, apart from those made here, and link them from a run
    folder.

    trust_keys  public keys (PEM), one of which must have signed the provenance in the file

    Raises InputDataError for a file that is damaged or no export, ArtefactRefused for an export of another version,
    without the required signature, with files other than data, or with more than `pack` writes.
    """
    try:
        # Not compressed, as `pack` writes it: a small file could expand to any size.
        with _open(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            index = _read_index(tar, path)
            spec = planned(index, f"{path}: {INDEX}")
            check_provenance(index, str(path), trust_keys)
            if absent := to_finish(spec) - index["artefacts"].keys():
                raise InputDataError(f"{path} holds no {min(absent)}", remedy="export the target again")
            if more := index["artefacts"].keys() - to_finish(spec):
                raise ArtefactRefused(
                    f"{path} holds the {' and the '.join(sorted(more))} of {spec.target}",
                    why="an export holds what an engine is made from, and the engine is built here",
                    remedy="export the target again where it was built",
                )
            counter = Counter(sum(file["size"] for file in files_of(index)), progress)
            with store.importing(RunFolder.of(spec.target).key):
                artefacts = {
                    name: _take(tar, path, name, entry, store, counter) for name, entry in index["artefacts"].items()
                }
                link(spec, artefacts, store, index["provenance"])
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:  # tarfile raises all of these
        raise InputDataError(f"{path} is not a whole export", why=str(error), remedy="copy it again") from None
    return Bundle(spec=spec, artefacts=artefacts)


def _open(path: Path) -> BinaryIO:
    """Raises InputDataError; a later OSError may be of the store."""
    try:
        return open_regular(path)
    except OSError as error:
        raise InputDataError(f"{path} cannot be read", why=error.strerror or str(error)) from None


def imported(target: str, store: Store) -> Bundle:
    """Result of an earlier `unpack` for a target. Raises UsageError, or InputDataError if it is gone."""
    run = find_run(target)
    if run is None or not run.origins():
        raise UsageError(
            f"'{target}' is neither an export nor an imported target", remedy="name a .tar of `trtpipe export`"
        )
    spec = run.spec()
    found: dict[str, Artefact] = {}
    for stage in stages_of(spec):
        if run.origin(stage.name) is None:
            continue
        artefact = run.find(stage.name, store)
        if artefact is None:
            why = run.fault(stage.name, store) or "it is no longer in the store"
            raise InputDataError(f"the {stage.makes} of {target} cannot be used", why=why, remedy=run.again(stage.name))
        found[stage.makes] = artefact
    return Bundle(spec=spec, artefacts=found)


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A member without a date or an owner: the same target packs to the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member


def _read_index(tar: tarfile.TarFile, path: Path) -> dict[str, Any]:
    first = tar.next()
    stream = tar.extractfile(first) if first is not None and first.name == INDEX and first.isreg() else None
    if stream is None:
        raise InputDataError(f"{path} is not an export of trtpipe", why=f"it does not begin with {INDEX}")
    try:
        index = parse_json(stream.read(MAX_INDEX_BYTES + 1), max_bytes=MAX_INDEX_BYTES)
    except ValueError as error:
        raise InputDataError(f"{path}: {INDEX} is damaged", why=str(error), remedy="copy it again") from None
    return check_index(index, f"{path}: {INDEX}")


def _take(
    tar: tarfile.TarFile, path: Path, name: str, entry: dict[str, Any], store: Store, counter: Counter
) -> Artefact:
    """Put one artefact into the store, unless it is there. Raises InputDataError for a file that fails its digest."""

    def take(file: dict[str, Any], place: Path | None) -> None:
        _extract(tar, path, f"{name}/{file['path']}", place, file, counter)

    origin = Origin(source=str(path.resolve()), content=entry["content"])
    inspect = refuse_objects(str(path)) if name == "adapters" else lambda out: None
    # For an artefact that is there nothing is written, but its files in the tar must match their digests.
    return receive(entry, store.of(origin), take, lambda file: take(file, None), inspect)


def _extract(
    tar: tarfile.TarFile, path: Path, member: str, out: Path | None, file: dict[str, Any], counter: Counter
) -> None:
    """Write a member to `out`, or only check it for None. Raises InputDataError unless it matches its digest."""
    try:
        told = tar.getmember(member)
    except KeyError:
        told = None
    except OSError as error:  # by a negative size, tarfile seeks to before the file's start
        raise InputDataError(
            f"{path} is not a whole export", why=error.strerror or str(error), remedy="copy it again"
        ) from None
    stream = tar.extractfile(told) if told is not None and told.isreg() else None
    if told is None or stream is None:
        raise InputDataError(f"{path} lacks {member}", why="it is cut short, or another export", remedy="copy it again")
    if told.size != file["size"]:
        raise InputDataError(
            f"{path}: {member} has {told.size} bytes", why=f"the index says {file['size']}", remedy="copy it again"
        )
    digest, size = hashlib.sha256(), 0
    with out.open("wb") if out else contextlib.nullcontext() as target:
        while chunk := stream.read(min(_CHUNK, file["size"] - size)):
            digest.update(chunk)
            size += len(chunk)
            if target is not None:
                target.write(chunk)
            counter.add(len(chunk))
    if size != file["size"] or digest.hexdigest() != file["sha256"]:
        raise InputDataError(f"{path}: {member} is damaged", why="its digest is another", remedy="copy it again")
