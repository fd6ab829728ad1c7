"""Search for garbage in the store: artefacts that nothing refers to, and leftovers of killed runs."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store

# Returns the resolved folders of the store's artefacts that something refers to.
References = Callable[[Store], Set[Path]]


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One removable folder, and the bytes it holds (files linked elsewhere free no space)."""

    path: Path
    reason: str
    size: int


def find_garbage(store: Store, references: References) -> list[Garbage]:
    """Removable folders of the store: all except those of `references`, and what is imported while a pull or an import
    runs, whose run folder refers to nothing yet. Raises as `references`."""
    out = []
    folders = list(store.artefacts())
    importing = store.imports()  # after the list: what a later pull brings is not in it
    kept = references(store)
    for folder in folders:
        if folder.name.startswith("."):
            if store.being_made(folder):
                continue
            out.append(Garbage(path=folder, reason="left by an interrupted run", size=_size(folder)))
        elif folder.resolve() not in kept and not (importing and _is_imported(folder, store)):
            whole = read_manifest(folder / "manifest.json") is not None
            reason = "no run refers to it" if whole else "it has no readable manifest"
            out.append(Garbage(path=folder, reason=reason, size=_size(folder)))
    incoming = store.home / "incoming"
    if incoming.is_dir():
        left = [path for path in sorted(incoming.iterdir()) if not store.being_made(path)]
        out += [Garbage(path=path, reason="left by an interrupted pull", size=_size(path)) for path in left]
    damaged = store.home / "damaged"
    if damaged.is_dir():
        out += [Garbage(path=p, reason="damaged", size=_size(p)) for p in sorted(damaged.iterdir())]
    return out


def remove(garbage: list[Garbage], store: Store, references: References) -> list[Garbage]:
    """Delete what `find_garbage` found, except what has come into use since. Returns what was deleted. Raises as
    `references`, and OSError."""
    removed = []
    for item in garbage:
        damaged = item.path.parent == store.home / "damaged"
        with contextlib.nullcontext(True) if damaged else store.claimed(item.path) as free:
            with store.referring():
                if not free or _in_use(item.path, store, references):
                    continue
                # From here on no build takes it for whole, and a killed gc leaves nothing that passes for whole. Builds
                # of other artefacts do not wait for the deletion.
                (item.path / "manifest.json").unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a build or another gc has removed it
                store.digests.remove_tree(item.path)
                removed.append(item)
    store.digests.save()
    return removed


def _in_use(folder: Path, store: Store, references: References) -> bool:
    """Whether something refers to a folder now, or may once an import that runs has ended. To be called under
    `referring`."""
    if _is_imported(folder, store) and store.imports():
        return True
    return folder.resolve() in references(store)


def _is_imported(folder: Path, store: Store) -> bool:
    return folder.parents[1] == store.home / "imported"


def _size(folder: Path) -> int:
    """Bytes of its regular files. Those that another command deletes meanwhile count nothing."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = Path(parent, name).lstat()
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return size
