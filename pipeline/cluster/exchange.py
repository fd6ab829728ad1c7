"""Exchange of artefacts between machines that share no file system: a registry, with the keys of their records."""

from __future__ import annotations

import dataclasses
from functools import partial

from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.registry.base import Blob, Registry
from trtpipe.pipeline.registry.fetch import Counter, Fetch
from trtpipe.pipeline.registry.index_schema import entry_fault
from trtpipe.pipeline.registry.package import check_files, receive
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import KEY_DIGITS, Artefact, Store


class Exchange:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def offer(self, artefact: Artefact) -> None:
        """Upload an artefact, unless the registry has it."""
        manifest = artefact.manifest
        blobs = [Blob(file.sha256, file.size) for file in manifest.files]
        for blob, file in zip(blobs, manifest.files, strict=True):
            if not self._registry.has(blob):
                self._registry.put(blob, artefact.path / file.path, lambda nbytes: None)
        files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in manifest.files]
        entry = {"record": dataclasses.asdict(manifest.record), "content": manifest.content, "files": files}
        self._registry.publish(_name(manifest.record), entry, blobs)

    def fetch(self, record: Record, content: str, store: Store) -> Artefact | None:
        """Download an artefact into the store; None when the registry does not have it.

        content  the digest of its files, from the machine that made it: anybody may have written to the registry
        """
        try:
            entry = self._registry.index(_name(record))
        except UsageError:
            return None
        where = f"{_name(record)} at {self._registry.url}"
        fault = entry_fault(entry)
        if fault is None and (Record(**entry["record"]).key, entry["content"]) != (record.key, content):
            fault = "it is another's"
        if fault is not None:
            raise InputDataError(f"{where} is damaged", why=fault)
        check_files(record.stage, entry, where)
        size = sum(file["size"] for file in entry["files"])
        fetch = Fetch(self._registry, Counter(size, lambda done, total: None))
        return receive(entry, store, partial(fetch.take, store.incoming(record)), fetch.skip)


def _name(record: Record) -> str:
    return f"{record.stage}-{record.key[:KEY_DIGITS]}"
