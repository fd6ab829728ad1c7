"""Targets in ./runs: what is made of each, and their removal."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import TrtpipeError, UsageError
from trtpipe.pipeline.run_folder import RUNS, RunFolder, require_run
from trtpipe.pipeline.serving.servers import running
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
    server   name of the running server that has it
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
    server: str | None


def list_targets(store: Store) -> list[Target]:
    """The targets in ./runs by name."""
    servers = {served.name: server.name for server in running(store) for served in server.served}
    runs = [RunFolder(plan.parent) for plan in sorted(RUNS.glob("*/plan.json"))]
    return [_describe(run, store, servers.get(run.path.name)) for run in runs]


def _describe(run: RunFolder, store: Store, server: str | None) -> Target:
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
        server=server,
    )


def remove_targets(names: Sequence[str], store: Store) -> list[str]:
    """Delete run folders; `trtpipe gc` then drops what only they referred to. Returns the names of the targets.

    Raises UsageError, before anything is deleted, for an unknown target and for one that is served.
    """
    runs = [require_run(name) for name in names]
    servers = {served.name: server.name for server in running(store) for served in server.served}
    for run in runs:
        if run.path.name in servers:
            stop = f"trtpipe stop {servers[run.path.name]}"
            raise UsageError(f"{run.path.name} is served", remedy=f"run `{stop}` first")
    for path in dict.fromkeys(run.path for run in runs):
        shutil.rmtree(path)
    return [run.path.name for run in runs]
