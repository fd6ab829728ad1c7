"""Dropping artefacts that no run folder refers to, and what kills left behind.

Whatever cannot be read of what refers to artefacts stops it: nothing is dropped for want of knowledge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.engines.json_input import load_json
from trtpipe.pipeline.runner import RunFolder
from trtpipe.pipeline.serving.servers import read_server, running
from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One folder that may go, and the bytes it holds (files linked elsewhere give no space back)."""

    path: Path
    reason: str
    size: int


def find_garbage(store: Store) -> list[Garbage]:
    """What no live run folder or running server refers to. Run folders that were deleted no longer count.

    Raises HostError where a run folder, a root or the record of a server cannot be read.
    """
    kept = {folder.resolve() for run in _runs(store) for folder in _kept(run, store)}
    _require_readable_servers(store)
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


def remove(garbage: list[Garbage], store: Store) -> None:
    for item in garbage:
        with contextlib.suppress(FileNotFoundError):  # a build has swept it, or another gc
            store.digests.remove_tree(item.path)
    store.digests.save()


def _runs(store: Store) -> Iterator[RunFolder]:
    for root in sorted((store.home / "roots").glob("*.json")):
        try:
            run = RunFolder(Path(load_json(root)["run"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(root, error, "remove it if that run is gone: its next build writes it again") from None
        try:
            run.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _unreadable(run.path, error, f"make it readable, or remove {root} if that run is gone") from None
        yield run


def _kept(run: RunFolder, store: Store) -> list[Path]:
    try:
        return run.folders(store)
    except (OSError, ValueError) as error:
        raise _unreadable(run.path / "run.json", error, "build that target again, or remove its run folder") from None


def _require_readable_servers(store: Store) -> None:
    for path in sorted((store.home / "servers").glob("*.json")):
        try:
            read_server(path)
        except (OSError, ValueError, InputDataError) as error:
            raise _unreadable(path, error, "remove it if that server is gone") from None


def _unreadable(path: Path, error: Exception, remedy: str) -> HostError:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return HostError(f"{path} cannot be read, so nothing is dropped", why=why, remedy=remedy)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
