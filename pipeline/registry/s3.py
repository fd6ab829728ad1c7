"""Registry in S3 or a server with its protocol: the layout of `files`, with files read as streams."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError
from trtpipe.engines.extras import install_command
from trtpipe.pipeline.net.http_limits import ANSWER_SECONDS, EXTRA_SECONDS, SLOWEST
from trtpipe.pipeline.registry.base import (
    MAX_INDEX_BYTES,
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
from trtpipe.pipeline.registry.parts import PART, Parts
from trtpipe.pipeline.registry.streams import Interrupted, another_part, continued, skip

# Bytes read from the far end at a time.
PIECE = 1 << 20
# Attempts of a call.
ATTEMPTS = 3


class S3Registry(Registry):
    """Registry in `root` (bucket/prefix) of the s3fs file system `system`."""

    def __init__(self, system: Any, root: str, url: str) -> None:
        self.url = url
        self._system = system
        bucket, prefix, _ = system.split_path(root.rstrip("/"))
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    @staticmethod
    def open(url: str) -> S3Registry:
        try:
            import fsspec
            import s3fs  # noqa: F401

            from trtpipe.pipeline.registry.s3_session import settings
        except ModuleNotFoundError as error:
            raise HostError(
                "s3:// is not installed", why=str(error), remedy=f"run `{install_command('registry')}`"
            ) from None
        with translated(url):
            system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, config_kwargs=settings(ATTEMPTS))
            system.retries = 1  # only botocore's own retries send a file again from its start
            system.connect()  # creates a client, which takes longer than many calls
        return S3Registry(system, root, url)

    def has(self, blob: Blob) -> bool:
        with translated(self.url):
            try:
                return bool(self._call("head_object", Key=self._blob(blob))["ContentLength"] == blob.size)
            except FileNotFoundError:
                return False

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        with translated(self.url):
            if blob.size > PART:
                Parts(self._call, self._blob(blob), path).upload(moved)
            else:  # S3 shows an object only when it is whole
                with path.open("rb") as file:
                    self._call("put_object", Key=self._blob(blob), size=blob.size, Body=file)
                moved(blob.size)

    def read(self, blob: Blob, start: int = 0) -> Iterator[bytes]:
        return continued(blob, start, partial(self._open, blob), self.url)

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        with translated(self.url):
            text = (json.dumps(index, indent=1) + "\n").encode()
            self._call("put_object", Key=self._index(target), size=len(text), Body=text)

    def targets(self) -> list[str]:
        out: list[str] = []
        prefix = f"{self._prefix}targets/"
        more: dict[str, Any] = {}
        seen: set[str] = set()
        while True:
            with translated(self.url):
                page = self._call("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
                names = [one["Key"].removeprefix(prefix) for one in page.get("Contents", ())]
                out += [name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name]
                if not page.get("IsTruncated"):
                    return sorted(set(out))
                token = page["NextContinuationToken"]
            if token in seen or len(seen) == MAX_PAGES or len(out) > MAX_TARGETS:
                raise HostError(
                    f"{self.url} lists its targets without an end", why=f"{len(out):,} on {len(seen) + 1:,} pages"
                )
            seen.add(token)
            more = {"ContinuationToken": token}

    def index(self, target: str) -> Any:
        with translated(self.url):
            try:
                answer = self._call("get_object", Key=self._index(target))
            except FileNotFoundError as error:
                if getattr(error.__cause__, "response", {}).get("Error", {}).get("Code") == "NoSuchBucket":
                    raise
                raise unknown_target(target, self) from None
        text = bytearray()
        with self._closing(answer["Body"]) as body:
            while len(text) <= MAX_INDEX_BYTES and (piece := self._piece(body)):
                text += piece
        return parse_index(bytes(text), target, self)

    def _open(self, blob: Blob, position: int) -> Generator[bytes, None, None]:
        with translated(self.url):
            try:
                answer = self._call("get_object", Key=self._blob(blob), Range=f"bytes={position}-{blob.size - 1}")
            except FileNotFoundError:
                raise missing(blob, self) from None
            part = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        with self._closing(answer["Body"]) as body:
            if part and not str(answer.get("ContentRange")).startswith(f"bytes {position}-"):
                raise another_part(self.url)
            yield from skip(iter(partial(self._piece, body), b""), 0 if part else position)

    @contextlib.contextmanager
    def _closing(self, body: Any) -> Iterator[Any]:
        from fsspec.asyn import sync

        try:
            yield body
        finally:
            sync(self._system.loop, _close, body)

    def _piece(self, body: Any) -> bytes:
        """The next PIECE of an object, within the time that SLOWEST takes for it; empty at the object's end."""
        from fsspec.asyn import sync

        try:
            data: bytes = sync(self._system.loop, _read, body, timeout=ANSWER_SECONDS + PIECE / SLOWEST)
        except Exception as error:  # from aiohttp, botocore or fsspec: any exception means that the connection broke
            raise Interrupted(f"{self.url} broke off", why=str(error) or "it takes too long") from None
        return data

    def _call(self, method: str, *, size: int = 0, **named: Any) -> Any:
        """Call a method of S3 that sends `size` bytes. Raises what s3fs and botocore raise, and TimeoutError."""
        limit = ATTEMPTS * (ANSWER_SECONDS + EXTRA_SECONDS.get() + size / SLOWEST)
        return self._system.call_s3(method, timeout=limit, Bucket=self._bucket, **named)

    def _blob(self, blob: Blob) -> str:
        return f"{self._prefix}blobs/{blob.sha256}"

    def _index(self, target: str) -> str:
        return f"{self._prefix}targets/{target}.json"


async def _read(body: Any) -> bytes:
    out = bytearray()
    while len(out) < PIECE and (data := await body.read(PIECE - len(out))):
        out += data
    return bytes(out)


async def _close(body: Any) -> None:
    """Close the body in the thread of the event loop, as aiohttp demands."""
    body.close()
