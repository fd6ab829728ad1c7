"""Registry in a repository of the Hugging Face Hub: the layout of `files`, changed by one commit a push.

`HF_TOKEN` and `HF_ENDPOINT` work as everywhere. Large files are uploaded before the commit, and the Hub keeps those
of a push that broke off: the next push does not send them again.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import httpx

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.net.http_limits import patience
from trtpipe.pipeline.net.hub_client import limit_hub
from trtpipe.pipeline.registry.base import (
    MAX_PAGES,
    MAX_TARGETS,
    Blob,
    Moved,
    Registry,
    missing,
    parse_index,
    translated,
    unknown_target,
)
from trtpipe.pipeline.registry.streams import body, continued

# The Hub takes larger files by Git LFS only. A smaller one is held in memory, as base64 in the commit.
MAX_REGULAR_BYTES = 10 << 20
# Time that a commit of many files may take beyond other answers.
COMMIT_SECONDS = 300.0


class HubRegistry(Registry):
    """`owner/name` on the Hub, or a branch of it: hf://owner/name@branch."""

    def __init__(self, repo_id: str, revision: str, url: str) -> None:
        self.url = url
        self._repo_id, self._revision = repo_id, revision
        self._added: list[Any] = []

    @staticmethod
    def at(url: str) -> HubRegistry:
        from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

        disable_progress_bars()  # trtpipe shows its own
        tqdm.monitor_interval = 0  # see trtpipe.pipeline.sources.hub
        limit_hub()
        name, _, revision = url.removeprefix("hf://").strip("/").partition("@")
        if name.count("/") != 1:
            raise UsageError(f"{url} names no repository", remedy="give hf://owner/name, or hf://owner/name@branch")
        return HubRegistry(name, revision or "main", url)

    def has(self, blob: Blob) -> bool:
        from huggingface_hub import HfApi

        with translated(self.url):
            found = _unless_absent(
                lambda: HfApi().get_paths_info(self._repo_id, [f"blobs/{blob.sha256}"], revision=self._revision)
            )
            return any(getattr(one, "size", None) == blob.size for one in found or ())

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        with translated(self.url):
            if not self._added:
                api.create_repo(self._repo_id, private=True, exist_ok=True)
            added = CommitOperationAdd(f"blobs/{blob.sha256}", str(path))
            api.preupload_lfs_files(self._repo_id, [added], revision=self._revision)
            if blob.size > MAX_REGULAR_BYTES and added._upload_mode != "lfs":
                raise HostError(f"{self.url} takes {blob.size:,} bytes in a commit alone", why="it does not offer LFS")
        self._added.append(added)
        moved(blob.size)

    def read(self, blob: Blob, start: int = 0) -> Iterator[bytes]:
        return continued(blob, start, partial(self._open, blob), self.url)

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        text = (json.dumps(index, indent=1) + "\n").encode()
        operations = [*self._added, CommitOperationAdd(f"targets/{target}.json", text)]
        with translated(self.url), patience(COMMIT_SECONDS):
            HfApi().create_commit(
                self._repo_id, operations, commit_message=f"trtpipe push {target}", revision=self._revision
            )
        self._added = []

    def targets(self) -> list[str]:
        """List page by page, because huggingface_hub's own list has no limit."""
        from huggingface_hub import constants

        out: list[str] = []
        revision = quote(self._revision, safe="")
        place = f"{constants.ENDPOINT}/api/models/{self._repo_id}/tree/{revision}/targets"
        for _ in range(MAX_PAGES):
            with translated(self.url):
                answer = _unless_absent(lambda place=place: self._get(place))
                if answer is None:
                    return []
                names = [entry["path"].removeprefix("targets/") for entry in parse_json(answer.content)]
                out += [name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name]
                more = answer.links.get("next", {}).get("url")
                if not more:
                    return sorted(set(out))
                place = urljoin(place, more)
            if len(out) > MAX_TARGETS:
                break
        raise HostError(f"{self.url} lists its targets without an end", why=f"{len(out):,} so far")

    def index(self, target: str) -> Any:
        with translated(self.url):
            answer = _unless_absent(lambda: self._get(self._place(f"targets/{target}.json")))
        if answer is None:
            raise unknown_target(target, self)
        return parse_index(answer.content, target, self)

    def _open(self, blob: Blob, position: int) -> Generator[bytes, None, None]:
        with translated(self.url):
            answer = _unless_absent(
                lambda: self._get(
                    self._place(f"blobs/{blob.sha256}"), stream=True, range=f"bytes={position}-{blob.size - 1}"
                )
            )
        if answer is None:
            raise missing(blob, self)
        yield from body(answer, position, self.url)

    def _get(self, place: str, *, stream: bool = False, **headers: str) -> httpx.Response:
        from huggingface_hub import get_session
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status

        client = get_session()
        request = client.build_request("GET", place, headers={**build_hf_headers(), **headers})
        answer = client.send(request, stream=stream)
        try:
            hf_raise_for_status(answer)
        except BaseException:
            answer.close()
            raise
        return answer

    def _place(self, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repo_id, name, revision=self._revision)


def _unless_absent(call: Any) -> Any:
    """The result of a call to the Hub; None where the repository, the branch or the file does not exist."""
    from huggingface_hub import errors

    try:
        return call()
    except errors.GatedRepoError:  # a subclass of RepositoryNotFoundError
        raise
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError):
        return None
