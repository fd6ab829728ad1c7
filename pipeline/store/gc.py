"""Search for garbage in the store: artefacts that nothing refers to, and leftovers of killed runs."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One removable folder, and the bytes it holds (files linked elsewhere free no space)."""

    path: Path
    reason: str
    size: int


def find_garbage(store: Store, kept: Set[Path]) -> list[Garbage]:
    """Removable folders of the store: all except `kept`, which are resolved paths, and what is imported while a pull
    or an import runs, whose run folder refers to nothing yet."""
    out = []
    folders = list(store.artefacts())
    importing = store.imports()  # after the list: what a later pull brings is not in it
    for folder in folders:
        if folder.name.startswith("."):
            if store.being_made(folder):
                continue
            out.append(Garbage(path=folder, reason="left by an interrupted run", size=_size(folder)))
        elif folder.resolve() not in kept and not (importing and folder.parents[1].name == "imported"):
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
        with contextlib.suppress(FileNotFoundError):  # a build or another gc has removed it
            store.digests.remove_tree(item.path)
    store.digests.save()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
