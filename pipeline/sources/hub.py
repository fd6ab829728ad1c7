"""Download of Hugging Face repositories: a moving revision is pinned to a commit, and only needed files are fetched.

`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` are huggingface_hub's own and work as everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import io
import re
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError, UsageError
from trtpipe.engines.files import FULL
from trtpipe.engines.hf.folder import (
    DETAILS,
    INDEX_NAME,
    MOST_INDEX_BYTES,
    SINGLE_NAME,
    TOKENIZER_FILES,
    index_of,
    no_tokenizer,
    read_index,
    read_model_config,
    superseded,
)
from trtpipe.engines.hf.stored import read_stored
from trtpipe.engines.json_input import MAX_BYTES
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.model_source import HubSource, ModelRef
from trtpipe.engines.sizes import MOST_CONFIG_BYTES
from trtpipe.pipeline.net.proxies import with_proxy
from trtpipe.pipeline.sources.interrupts import interruptible

WEIGHTS = (SINGLE_NAME, "model-*.safetensors", INDEX_NAME)
CONFIGS = ("config.json", DETAILS)
WANTED = (*CONFIGS, *WEIGHTS, *TOKENIZER_FILES)
COMMIT = re.compile(r"[0-9a-f]{40}")
# Exceptions of huggingface_hub for an answer of another form than it expects.
MALFORMED = (AssertionError, AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError)

AGAIN = "a second try keeps the files that are whole"


@functools.cache
def resolve_commit(repo_id: str, revision: str) -> str:
    """The commit that a branch or tag names now; in offline mode, the last known one.

    A process asks once, so it downloads the commit that it planned with even if the branch moves meanwhile.
    """
    if COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, constants, snapshot_download

    from trtpipe.pipeline.net.hub_client import limit_hub

    limit_hub()
    with _explained(repo_id, revision):
        if not constants.HF_HUB_OFFLINE:
            # Without this call, snapshot_download treats an unreachable hub as one without changes.
            HfApi().model_info(repo_id, revision=revision)
        # Downloads no file: it notes the commit in the cache, where offline runs look for it.
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=[], tqdm_class=_reporter(_ignore, 0))
    commit = Path(folder).name
    if not COMMIT.fullmatch(commit):
        raise HostError(f"the hub names no commit for {repo_id}@{revision}", why=f"it says {commit[:80]!r}")
    return commit


def file_sizes(repo_id: str, commit: str) -> dict[str, int]:
    """Bytes of the files of a commit that are needed, as the hub lists them; empty in offline mode.

    Raises InputDataError for a repository without safetensors or without a fast tokenizer.
    """
    return {name: size for name, size in _listed(repo_id, commit).items() if size is not None}


def _listed(repo_id: str, commit: str) -> dict[str, int | None]:
    """The same files, with None for those that the hub lists without a size."""
    from huggingface_hub import HfApi, constants

    from trtpipe.pipeline.net.hub_client import limit_hub

    limit_hub()
    if constants.HF_HUB_OFFLINE:
        return {}
    with _explained(repo_id, commit):
        files = HfApi().model_info(repo_id, revision=commit, files_metadata=True).siblings or []
        _require_usable(repo_id, [file.rfilename for file in files])
    sizes = {file.rfilename: file.size for file in files}
    needed = _needed(repo_id, commit, sizes)
    return {name: size for name, size in sizes.items() if name in needed}


def fetch_config(repo_id: str, commit: str) -> Path:
    """The folder of that commit in the Hugging Face cache, with the two configs and what was there before."""
    return _fetch(repo_id, commit, list(CONFIGS), _ignore, 2 * MOST_CONFIG_BYTES)


def fetch_tokenizer(repo_id: str, commit: str) -> Path:
    """The folder of that commit in the Hugging Face cache, with tokenizer.json and what was there before."""
    return _fetch(repo_id, commit, [TOKENIZER_FILES[0]], _ignore, MAX_BYTES)


def peek(model: ModelRef) -> tuple[ModelRef, ModelConfig | None]:
    """`model`, of a hub source, with the quantization of its files, and its config, if it has one; the files that say
    it are fetched if need be. Raises InputDataError for a config that is not read here."""
    source = model.source
    assert isinstance(source, HubSource)
    folder = fetch_config(source.repo_id, resolve_commit(source.repo_id, source.revision))
    config = read_model_config(folder, quantized=True) if (folder / "config.json").is_file() else None
    return dataclasses.replace(model, stored=read_stored(folder)), config


def cache() -> Path:
    """The Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def download(repo_id: str, commit: str, progress: Callable[[int, int], None]) -> Path:
    """The folder of that commit in the Hugging Face cache, completed if need be.

    A connection that breaks in the middle of a file is resumed there; a later call keeps the files that are whole.
    """
    listed = _listed(repo_id, commit)
    sizes = {name: size for name, size in listed.items() if size is not None}
    names = list(listed) or _unlisted(repo_id, commit)
    most = sum(sizes.values()) if sizes and len(sizes) == len(listed) else None
    folder = _fetch(repo_id, commit, names, progress, most)
    for name, size in sizes.items():
        _require_size(folder / name, size, repo_id)
    return folder


def _fetch(repo_id: str, commit: str, names: list[str], progress: Callable[[int, int], None], most: int | None) -> Path:
    """Fetch the files that match `names`, of at most `most` bytes together. A signal does not wait for their end."""
    from huggingface_hub import snapshot_download

    from trtpipe.pipeline.net.hub_client import end_requests, limit_hub

    limit_hub()
    ended = threading.Event()
    reporter = _reporter(progress, most, ended)

    def stop() -> None:
        ended.set()
        end_requests()

    with _explained(repo_id, commit):
        return Path(
            interruptible(
                lambda: snapshot_download(repo_id, revision=commit, allow_patterns=names, tqdm_class=reporter), stop
            )
        )


def check_access(repo_id: str, seconds: float) -> None:
    """Ask the hub once, for `seconds` at most, for a repository's config.json. Raises as `download` does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    from trtpipe.pipeline.net.hub_client import limit_hub

    limit_hub()
    with _explained(repo_id, "main", again=""):
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), timeout=seconds)


def download_data(repo_id: str, commit: str, name: str) -> Path:
    """One file of a data set, in the Hugging Face cache. Raises HostError when the hub does not deliver it."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    from trtpipe.pipeline.net.hub_client import limit_hub

    limit_hub()
    size = None
    try:
        with _explained(repo_id, commit):
            if not constants.HF_HUB_OFFLINE:
                found = HfApi().get_paths_info(repo_id, [name], repo_type="dataset", revision=commit)
                size = getattr(found[0], "size", None) if found else None
            path = Path(hf_hub_download(repo_id, name, repo_type="dataset", revision=commit))
    except (HostError, UsageError) as error:
        raise HostError(
            f"the data set {repo_id} cannot be had",
            why=error.why or error.what,
            # The shipped text has 128 rows of 512 tokens for usual tokenizers, not the 512 rows of the default.
            remedy="give a .txt or .jsonl file, or the shipped text, "
            "--set calibration.data=demo --set calibration.samples=128",
        ) from None
    if size is not None:
        _require_size(path, size, repo_id)
    return path


def _needed(repo_id: str, commit: str, names: Collection[str]) -> set[str]:
    """Of the files `names` those that are read: weights are a single file, or the shards that an index names."""
    needed = {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in WANTED)}
    others = {name for name in names if name.endswith(".safetensors")} - needed
    if INDEX_NAME not in names or not (others or SINGLE_NAME in names):
        return needed
    index = _fetch(repo_id, commit, [INDEX_NAME], _ignore, MOST_INDEX_BYTES) / INDEX_NAME
    unread = superseded(index) if SINGLE_NAME in names else set()
    return needed - unread if unread else needed | (others & set(read_index(index).values()))


def _unlisted(repo_id: str, commit: str) -> list[str]:
    """Patterns of the files that are read, for offline mode: shards beside a single file may be absent."""
    folder = fetch_config(repo_id, commit)
    alone = (folder / SINGLE_NAME).is_file() and index_of(folder) is None
    return [*CONFIGS, *((SINGLE_NAME,) if alone else WEIGHTS), *TOKENIZER_FILES]


def _require_size(path: Path, size: int, repo_id: str) -> None:
    """Check that a file, downloaded now or before, has the size in the hub's list. Raises HostError."""
    there = path.stat().st_size if path.exists() else 0
    if there != size:
        raise HostError(
            f"{path.name} of {repo_id} has another size than the hub says",
            why=f"{there:,} bytes have come, of {size:,}",
            # The file in the snapshot is a link, which the client makes again to the file that it has.
            remedy=f"remove {path.resolve()} and try again",
        )


def _require_usable(repo_id: str, files: list[str]) -> None:
    """Raises InputDataError without weights in safetensors or without the fast tokenizer."""
    if not any(fnmatch.fnmatch(name, pattern) for name in files for pattern in WEIGHTS):
        pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise InputDataError(
                f"{repo_id} has only pickle weights ({pickles[0]})",
                why="a pickle can run code when it is loaded",
                remedy="choose a revision or repository with safetensors",
            )
        raise InputDataError(f"{repo_id} has no weights", why=f"no file matches {' or '.join(WEIGHTS)}")
    if TOKENIZER_FILES[0] not in files:
        raise no_tokenizer(repo_id)


@contextlib.contextmanager
def _explained(repo_id: str, revision: str, *, again: str = AGAIN) -> Iterator[None]:
    """Turn exceptions of huggingface_hub and httpx into one line with a remedy. `again` tells what a second try does
    where the hub fails."""
    import httpx
    from huggingface_hub import constants, errors, get_token

    from trtpipe.pipeline.net.http_limits import certificate_remedy

    where = f"{repo_id}@{revision}"
    try:
        yield
    except errors.GatedRepoError:
        raise HostError(
            f"{repo_id} is gated",
            why="its licence must be accepted and a token sent",
            remedy="accept it on the model's page, then set HF_TOKEN or run `hf auth login`",
        ) from None
    except errors.RepositoryNotFoundError:
        hint = "check the spelling" if get_token() else "check the spelling; if it is private, set HF_TOKEN"
        raise UsageError(f"the hub has no model repository {repo_id}", remedy=hint) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{repo_id} has no revision {revision}", remedy="pass a branch, tag or commit") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = error.__cause__ or error
        raise HostError(
            f"{where} is not in the local Hugging Face cache and the hub cannot be asked",
            why="HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(cause),
            remedy=certificate_remedy(cause) or "download it while online, or pass a local folder as --model",
        ) from None
    except errors.HFValidationError as error:
        raise UsageError(f"'{repo_id}' is not a repository id", why=str(error)) from None
    except TrtpipeError:
        raise
    except (httpx.HTTPError, httpx.InvalidURL, OSError, *MALFORMED) as error:
        if (isinstance(error, OSError) and error.errno is not None) or FULL.search(str(error)):
            raise  # an error of the disk, not of the hub
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        remedy = certificate_remedy(error) or (
            with_proxy("check the connection and HF_ENDPOINT", constants.ENDPOINT) + (again and f"; {again}")
        )
        raise HostError(
            f"the hub did not deliver {where}",
            why=_first_line(error),
            remedy="check HF_TOKEN" if status in (401, 403) else remedy,
        ) from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _ignore(done: int, total: int) -> None:
    pass


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def _reporter(progress: Callable[[int, int], None], most: int | None, ended: threading.Event | None = None) -> Any:
    """A tqdm class that draws nothing, reports the bytes on disk to `progress`, and ends a download of more than `most`
    bytes, and any once `ended` is set, with a HostError."""
    from tqdm import tqdm

    class Reporter(tqdm):  # type: ignore[misc]  # untyped
        # No monitor thread: if it starts while a bar is garbage-collected, the two deadlock.
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = str(kwargs.get("desc", "")).startswith("Reconstructing")
            kwargs.update(file=_Nowhere(), disable=False)
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            changed: bool | None = super().update(n)
            if ended is not None and ended.is_set():
                raise HostError("the download was interrupted")
            if self._counts and most is not None and self.n > most:
                raise HostError("the hub sends more than its list says", why=f"that is {most:,} bytes")
            if self._counts:
                # Its own total grows while it lists the files.
                progress(int(self.n), int(most or self.total or 0))
            return changed

    return Reporter
