"""Targets in ./runs: what is made of each, and their removal."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError, UsageError
from trtpipe.pipeline.run_folder import RUNS, RunFolder, require_run
from trtpipe.pipeline.serving.servers import Server, running
from trtpipe.pipeline.stages import stages_of
from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target in ./runs.

    state    in words
    model, gpu, dtype, runtime  None where another version of trtpipe wrote its settings, or they are damaged
    done, missing  names of its stages with and without an artefact
    size     bytes of its artefacts, equal files counted once
    updated  time of its last change, in seconds since 1970
    servers  names of the running servers that have it
    """

    name: str
    state: str
    model: str | None
    gpu: str | None
    dtype: str | None
    runtime: str | None
    done: tuple[str, ...]
    missing: tuple[str, ...]
    size: int
    updated: float
    servers: tuple[str, ...]


def list_targets(store: Store) -> list[Target]:
    """The targets in ./runs by name."""
    servers = running(store)
    runs = [RunFolder(plan.parent) for plan in sorted(RUNS.glob("*/plan.json"))]
    return [_describe(run, store, servers_of(run.path, servers)) for run in runs]


def servers_of(run: Path, servers: Sequence[Server]) -> list[Server]:
    """The servers that have what is in a run folder: several where links name it."""
    return [server for server in servers if any(served.comes_from(run) for served in server.served)]


def _describe(run: RunFolder, store: Store, servers: Sequence[Server]) -> Target:
    spec, folders = None, list[Path]()
    with contextlib.suppress(TrtpipeError):
        spec = run.spec()
    with contextlib.suppress(OSError, ValueError):
        folders = run.folders(store)
    manifests = [found for folder in folders if (found := read_manifest(folder / "manifest.json")) is not None]
    made = {manifest.record.stage for manifest in manifests}
    stages = [] if spec is None else [stage.name for stage in stages_of(spec)]
    # What was made elsewhere comes without the artefacts that it was made of.
    last = max((place for place, stage in enumerate(stages) if stage in made), default=-1)
    missing = tuple(stages[last + 1 :])
    if spec is None:
        state = "unreadable"
    elif made and any(run.broken(stage.makes) for stage in stages_of(spec)):
        state = "incomplete: its links are broken"
    elif made:
        state = f"{missing[0]} is next" if missing else "complete"
    else:
        state = "its artefacts are gone" if run.stages() else "nothing is made"
    return Target(
        name=run.path.name,
        state=state,
        model=None if spec is None else spec.model.name,
        gpu=None if spec is None else spec.gpu.name,
        dtype=None if spec is None else spec.precision.name,
        runtime=None if spec is None else spec.runtime,
        done=tuple(stage for stage in stages if stage in made),
        missing=missing,
        size=sum({file.sha256: file.size for manifest in manifests for file in manifest.files}.values()),
        updated=max(path.stat().st_mtime for path in run.path.glob("*.json")),
        servers=tuple(server.name for server in servers),
    )


def remove_targets(names: Sequence[str], store: Store, *, studies: bool = False) -> list[str]:
    """Delete run folders; `trtpipe gc` then drops what only they referred to. Of a link to one the link alone goes.
    Those that hold what `tune` measured are deleted with `studies` only: there is no other copy of it.
    Returns the names of the targets, and the paths of those outside ./runs.

    Raises UsageError, before anything is deleted, for an unknown target, for one that is served, tuned or holds
    studies, and for a folder that trtpipe did not make.
    """
    paths = list(dict.fromkeys(_path(name) for name in names))
    servers = running(store)
    for path in paths:
        if path.is_symlink():
            continue
        if not RunFolder(path).started(store) and (path.parent != RUNS or not _planned(path)):
            raise UsageError(
                f"{path} is no run folder of {store.home}", remedy="give a name of `trtpipe ls`, or remove it yourself"
            )
        if serving := servers_of(path, servers):
            stops = " and ".join(f"`trtpipe stop {server.name}`" for server in serving)
            raise UsageError(f"{path.name} is served", remedy=f"run {stops} first")
        RunFolder(path).require_untuned(store)
        if not studies and (count := len(list(path.glob("tune/*/")))):
            raise UsageError(
                f"{path.name} holds {count} {'study' if count == 1 else 'studies'} of `trtpipe tune`",
                remedy=f"copy what you need of {path}/tune, and give --studies",
            )
    for path in paths:
        if path.is_symlink():
            path.unlink()
        else:
            roots = RunFolder(path).roots(store)
            try:
                shutil.rmtree(path)
            except OSError as error:  # it names the file without its folder
                raise HostError(
                    f"{path} cannot be removed", why=error.strerror or str(error), remedy="check the permissions"
                ) from None
            for root in roots:
                root.unlink(missing_ok=True)
    return [path.name if path.parent == RUNS else str(path) for path in paths]


def _planned(path: Path) -> bool:
    """Whether the folder has the plan.json of a target. One whose settings this version refuses counts too."""
    try:
        RunFolder(path).spec()
    except InputDataError:
        return False
    except UsageError:
        return True
    return True


def _path(name: str) -> Path:
    """The folder or link to remove; ./runs/NAME where it is in ./runs. Raises UsageError for an unknown target."""
    found = require_run(name).path
    path = Path(name) if found.parent != RUNS and Path(name).is_symlink() else found
    here = RUNS / path.name
    return here if path.parent.resolve() == RUNS.resolve() else path
