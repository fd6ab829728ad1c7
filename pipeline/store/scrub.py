"""Check of every file in the store against the digests in the manifests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store


@dataclass(frozen=True)
class Scrubbed:
    """An artefact, its size in bytes, and what is wrong with it, if anything."""

    name: str
    size: int
    fault: str | None


def scrub(store: Store, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Scrubbed]:
    """Read in full every artefact that is not being made, and report on each. Changes nothing."""
    folders = [folder for folder in store.artefacts() if not folder.name.startswith(".")]
    manifests = [read_manifest(folder / "manifest.json") for folder in folders]
    total = sum(manifest.size for manifest in manifests if manifest is not None)
    out, done = [], 0
    for folder, manifest in zip(folders, manifests, strict=True):
        name = folder.relative_to(store.home).as_posix()
        if manifest is None:
            out.append(Scrubbed(name, 0, "it has no readable manifest"))
            continue
        part = store.of(manifest.origin)
        if part.folder(manifest.record) == folder:
            fault = part.fault(manifest.record, verify=True)
        else:
            fault = "it lies in another artefact's place"
        out.append(Scrubbed(name, manifest.size, fault))
        done += manifest.size
        progress(done, total)
    store.digests.save()
    return out
