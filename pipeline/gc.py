"""Dropping artefacts that no run folder refers to, and what kills left behind."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.manifest import read_manifest
from pipeline.runner import RunFolder
from pipeline.servers import running
from pipeline.store import Store


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One folder that may go, and the bytes it holds (files linked elsewhere give no space back)."""

    path: Path
    reason: str
    size: int


def find_garbage(store: Store) -> list[Garbage]:
    """What no live run folder or running server refers to. Run folders that were deleted no longer count."""
    kept = {folder.resolve() for run in _runs(store) for folder in _kept(run, store)}
    kept |= {served.repository.parent.resolve() for server in running(store) for served in server.served}
    out = []
    for folder in store.artefacts():
        if folder.name.startswith("."):
            if store.being_made(folder):
                continue
            out.append(Garbage(path=folder, reason="left by an interrupted run", size=_size(folder)))
        elif folder.resolve() not in kept:
            whole = read_manifest(folder / "manifest.json") is not None
            reason = "no run refers to it" if whole else "it has no readable manifest"
            out.append(Garbage(path=folder, reason=reason, size=_size(folder)))
    incoming = store.home / "incoming"
    if incoming.is_dir():
        left = [path for path in sorted(incoming.iterdir()) if not store.arriving(path)]
        out += [Garbage(path=path, reason="left by an interrupted pull", size=_size(path)) for path in left]
    damaged = store.home / "damaged"
    if damaged.is_dir():
        out += [Garbage(path=p, reason="damaged", size=_size(p)) for p in sorted(damaged.iterdir())]
    return out


def remove(garbage: list[Garbage]) -> None:
    for item in garbage:
        with contextlib.suppress(FileNotFoundError):  # a build has swept it, or another gc
            shutil.rmtree(item.path)


def _runs(store: Store) -> Iterator[RunFolder]:
    for root in sorted((store.home / "roots").glob("*.json")):
        try:
            run = RunFolder(Path(json.loads(root.read_text(encoding="utf-8"))["run"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: the next build of that run writes it again
        if run.path.is_dir():
            yield run


def _kept(run: RunFolder, store: Store) -> Iterator[Path]:
    for record in run.records():
        yield store.folder(record)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
