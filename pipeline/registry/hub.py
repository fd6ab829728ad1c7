"""A registry in a repository of the Hugging Face Hub: laid out as `files` has it, changed by one commit a push.

`HF_TOKEN` and `HF_ENDPOINT` work as everywhere. Large files travel before the commit, and the Hub keeps those of a push
that broke off: the next one does not send them again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engines.errors import HostError, UsageError
from pipeline.registry.base import Blob, Moved
from pipeline.registry.files import FileRegistry


class HubRegistry(FileRegistry):
    """`owner/name` on the Hub, or a branch of it: hf://owner/name@branch."""

    def __init__(self, system: Any, repo_id: str, revision: str, url: str) -> None:
        super().__init__(system, f"{repo_id}@{revision}" if revision != "main" else repo_id, url)
        self._repo_id, self._revision = repo_id, revision
        self._added: list[Any] = []

    @staticmethod
    def at(url: str) -> HubRegistry:
        from huggingface_hub import HfFileSystem
        from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

        disable_progress_bars()  # there is one of ours
        tqdm.monitor_interval = 0  # see pipeline.hub
        name, _, revision = url.removeprefix("hf://").strip("/").partition("@")
        if name.count("/") != 1:
            raise UsageError(f"{url} names no repository", remedy="give hf://owner/name, or hf://owner/name@branch")
        # One of its own: those that are shared remember what they have listed.
        return HubRegistry(HfFileSystem(skip_instance_cache=True), name, revision or "main", url)

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        with self._named():
            if not self._added:
                api.create_repo(self._repo_id, private=True, exist_ok=True)
            added = CommitOperationAdd(f"blobs/{blob.sha256}", str(path))
            api.preupload_lfs_files(self._repo_id, [added], revision=self._revision)
        self._added.append(added)
        moved(blob.size)

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        text = (json.dumps(index, indent=1) + "\n").encode()
        operations = [*self._added, CommitOperationAdd(f"targets/{target}.json", text)]
        with self._named():
            HfApi().create_commit(
                self._repo_id, operations, commit_message=f"trtpipe push {target}", revision=self._revision
            )
        self._added = []

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        with super()._named():
            try:
                yield
            except RuntimeError as error:  # an upload that failed, whatever it failed with
                why = str(error.__cause__ or error).splitlines()[0]
                raise HostError(f"{self.url} does not take a file", why=why, remedy="push again") from None
