"""Registry of container images (any OCI registry): a repository with a tag for each target.

A tag's manifest has the index as its config and every file as a layer, under the file's own digest. The manifest's
annotations repeat what `search` asks for, so that the config need not be fetched for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from trtpipe.configs.home import default_home
from trtpipe.engines.errors import HostError, InputDataError, UsageError, kind_of
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.net.http_limits import MAX_ANSWER_BYTES, certificate_remedy
from trtpipe.pipeline.net.proxies import with_proxy
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
from trtpipe.pipeline.registry.oci_client import OciClient, joined
from trtpipe.pipeline.registry.oci_upload import Upload
from trtpipe.pipeline.registry.streams import body, continued

ARTIFACT = "application/vnd.trtpipe.target.v1"
CONFIG = "application/vnd.trtpipe.index.v1+json"
LAYER = "application/vnd.trtpipe.file.v1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
# Registries answer 404 for a manifest of a type that is not accepted: images of others are accepted too.
MANIFESTS = ", ".join(
    (
        MANIFEST, "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    )
)  # fmt: skip
# Name of a repository, as the distribution specification defines it, and a tag.
NAME = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
TAG = r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}"
HOST = r"(?:[a-zA-Z0-9][a-zA-Z0-9.-]*|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
OK = (200, 201, 202, 204, 206)


class OciRegistry(Registry):
    """The repository `name` at `host`, with the credentials of `docker login`."""

    def __init__(self, client: OciClient, name: str) -> None:
        self.url = client.url
        self._client = client
        self._name = name

    @classmethod
    def open(cls, url: str) -> OciRegistry:
        host, _, name = url.removeprefix("oci://").strip("/").partition("/")
        if not re.fullmatch(NAME, name) or not re.fullmatch(HOST, host):
            raise UsageError(
                f"{url} names no repository", why="its name is of small letters, digits and single '.', '_', '-', '/'",
                remedy="give for example oci://registry.example/team/engines",
            )  # fmt: skip
        made = cls(OciClient(host, url), name)
        made._require_access()
        return made

    def _require_access(self) -> None:
        """Check access before anything is read or hashed. Raises HostError."""
        try:
            answer = self._client.probe()
        except httpx.HTTPError as error:
            why, check = str(error) or type(error).__name__, "check its address"
            if "WRONG_VERSION_NUMBER" in why or "record layer failure" in why:  # before and from OpenSSL 3.2
                check = f"it does not speak https, and plain http is for this machine alone; {check}"
            raise HostError(
                f"{self.url} cannot be reached",
                why=why,
                remedy=certificate_remedy(error) or with_proxy(check, self._client.base),
            ) from None
        if answer.status_code not in (200, 401, 403):
            raise HostError(
                f"{self.url} is not a registry of images", why=f"{answer.url} answers {answer.status_code}",
                remedy="check its address",
            )  # fmt: skip
        # Any tag will do: who may pull or push may read manifests, and not always list tags.
        self._manifest("latest")

    def require_name(self, target: str) -> None:
        if not _is_tag(target):
            raise UsageError(
                f"'{target}' cannot be a tag of {self.url}", why="a tag has letters, digits, '.', '_' and '-' alone",
                remedy="push it to a folder, S3 or the Hugging Face Hub, or build it from a folder or a link of "
                "another name",
            )  # fmt: skip

    def has(self, blob: Blob) -> bool:
        answer = self._ask("HEAD", self._place(f"blobs/sha256:{blob.sha256}"), also=(404,))
        size = str(blob.size)
        return answer.status_code != 404 and answer.headers.get("Content-Length", size) == size

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        Upload(self._ask, self._place("blobs/uploads/"), blob, path, default_home()).upload(moved)

    def read(self, blob: Blob, start: int = 0) -> Iterator[bytes]:
        return continued(blob, start, partial(self._open, blob), self.url)

    def _open(self, blob: Blob, position: int) -> Generator[bytes, None, None]:
        answer = self._ask(
            "GET", self._place(f"blobs/sha256:{blob.sha256}"), also=(404,), stream=True,
            headers={"Range": f"bytes={position}-{blob.size - 1}"},
        )  # fmt: skip
        if answer.status_code == 404:
            answer.close()
            raise missing(blob, self)
        yield from body(answer, position, self.url)

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        text = json.dumps(index, indent=1).encode()
        config = Blob(hashlib.sha256(text).hexdigest(), len(text))
        with tempfile.NamedTemporaryFile() as file:
            file.write(text)
            file.flush()
            if not self.has(config):
                self.put(config, Path(file.name), lambda nbytes: None)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": ARTIFACT,
            "config": _descriptor(CONFIG, config),
            "layers": [_descriptor(LAYER, blob) for blob in blobs],
            "annotations": {"org.opencontainers.image.title": target},
        }
        self._ask(
            "PUT", self._place(f"manifests/{target}"), headers={"Content-Type": MANIFEST},
            content=json.dumps(manifest).encode(),
        )  # fmt: skip

    def targets(self) -> list[str]:
        out: list[str] = []
        place = self._place("tags/list")
        seen: set[str] = set()
        while place:
            seen.add(place)
            answer = self._ask("GET", place, also=(404,))
            if answer.status_code == 404:
                return []
            try:
                listed = _object(answer.content).get("tags") or []
                if not isinstance(listed, list) or not all(_is_tag(tag) for tag in listed):
                    raise ValueError("`tags` is not a list of tags")
            except ValueError as error:
                raise HostError(f"{self.url} gives no list of tags", why=str(error)) from None
            out += listed
            more = answer.links.get("next", {}).get("url")
            place = joined(place, more) if more else ""
            if place in seen or len(seen) == MAX_PAGES or len(out) > MAX_TARGETS:
                raise HostError(
                    f"{self.url} lists its tags without an end", why=f"{len(out):,} tags on {len(seen):,} pages"
                )
        return sorted(set(out))

    def index(self, target: str) -> Any:
        answer = self._manifest(target)
        if answer.status_code == 404:
            raise unknown_target(target, self)
        try:
            blob = _config_of(_object(answer.content))
        except ValueError as error:
            raise InputDataError(
                f"the manifest of {target} at {self.url} is damaged", why=str(error), remedy="push it again"
            ) from None
        if blob is None:
            return None  # an image, or another program's artefact
        text = b"".join(continued(blob, 0, partial(self._open, blob), self.url))
        if hashlib.sha256(text).hexdigest() != blob.sha256:
            raise InputDataError(
                f"{target} at {self.url} is damaged", why="the digest of its index is another", remedy="push it again"
            )
        return parse_index(text, target, self)

    def _manifest(self, tag: str) -> httpx.Response:
        """The manifest of a tag, or an answer of status 404."""
        return self._ask("GET", self._place(f"manifests/{tag}"), headers={"Accept": MANIFESTS}, also=(404,))

    def _place(self, rest: str) -> str:
        return f"{self._client.base}/v2/{self._name}/{rest}"

    def _ask(self, method: str, url: str, *, also: tuple[int, ...] = (), **rest: Any) -> httpx.Response:
        """The answer with a success status, or one of `also`. Raises HostError."""
        with translated(self.url):
            answer = self._client.request(method, url, **rest)
        if answer.status_code not in also:
            self._check(answer)
        return answer

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code in OK:
            return
        why = f"{answer.status_code} {answer.reason_phrase}"
        try:
            with translated(self.url):
                text = answer.read()
            why = "; ".join(str(error["message"]) for error in _object(text)["errors"]) or why
        except (ValueError, KeyError, TypeError, HostError):
            pass
        finally:
            answer.close()
        why, remedy = why[:300], "try again later, or ask those who run it"
        if answer.status_code in (401, 403, 404):
            why = self._client.with_failure(why)
            remedy = f"run `docker login {self._client.host}`, or check the name"
        raise HostError(f"{self.url} refuses", why=why, remedy=remedy)


def _descriptor(media: str, blob: Blob) -> dict[str, Any]:
    return {"mediaType": media, "digest": f"sha256:{blob.sha256}", "size": blob.size}


def _object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else."""
    value = parse_json(text, max_bytes=MAX_ANSWER_BYTES)
    if not isinstance(value, dict):
        raise ValueError(f"it is {kind_of(value)}, not an object")
    return value


def _is_tag(tag: Any) -> bool:
    return isinstance(tag, str) and re.fullmatch(TAG, tag) is not None


def _config_of(manifest: dict[str, Any]) -> Blob | None:
    """The blob of the index that a manifest names; None for a manifest that is not ours. Raises ValueError."""
    config = manifest.get("config")
    if not isinstance(config, dict) or config.get("mediaType") != CONFIG:
        return None
    digest, size = config.get("digest"), config.get("size")
    if not isinstance(digest, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError("the digest of its index is malformed")
    if type(size) is not int or not 0 <= size <= MAX_INDEX_BYTES:
        raise ValueError(f"the size of its index is not a number up to {MAX_INDEX_BYTES:,}")
    return Blob(digest.removeprefix("sha256:"), size)
