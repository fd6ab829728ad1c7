"""A registry of container images, as any OCI registry is one: a repository with a tag for each target.

A tag's manifest has the index as its config and every file as a layer, under the digest it has anyway. What `search`
asks for is in the manifest's annotations too, so that the config need not be fetched for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engines.errors import HostError, UsageError
from pipeline.bench.options import is_local
from pipeline.registry.base import Blob, Moved, missing, unknown_target
from pipeline.registry.oci_upload import Upload
from pipeline.store import default_home

ARTIFACT = "application/vnd.trtpipe.target.v1"
CONFIG = "application/vnd.trtpipe.index.v1+json"
LAYER = "application/vnd.trtpipe.file.v1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
# Of a repository, as the distribution specification has it.
NAME = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
ANSWER_SECONDS = 10.0
OK = (200, 201, 202, 204, 206)


class OciRegistry:
    """The repository `name` at `host`, with the credentials that `docker login` has left."""

    def __init__(self, client: Any, host: str, name: str, url: str) -> None:
        self.url = url
        self._client = client
        self._host, self._name = host, name

    @classmethod
    def open(cls, url: str) -> OciRegistry:
        try:
            from pipeline.registry.oci_client import Client
        except ModuleNotFoundError:
            raise HostError("oci:// is not installed", remedy="run `pip install trtpipe[registry]`") from None
        logging.getLogger("oras").setLevel(logging.CRITICAL)  # what it has to say comes as exceptions
        host, _, name = url.removeprefix("oci://").strip("/").partition("/")
        if not re.fullmatch(NAME, name):
            raise UsageError(
                f"{url} names no repository", why="its name is of small letters, digits and single '.', '_', '-', '/'",
                remedy="give for example oci://registry.example/team/engines",
            )  # fmt: skip
        address = f"{'http' if is_local(f'http://{host}') else 'https'}://{host}/v2/"
        client = Client(hostname=host, insecure=address.startswith("http:"), auth_backend=_authentication(address, url))
        folder = os.environ.get("DOCKER_CONFIG")
        client.auth.load_configs(
            client.get_container(f"{host}/{name}"), [str(Path(folder, "config.json"))] if folder else None
        )
        made = cls(client, host, name, url)
        made._require_access()
        return made

    def _require_access(self) -> None:
        """Before anything is read or hashed for it."""
        with self._named():
            try:
                answer = self._client.do_request(self._place("tags/list"))
            except (ValueError, AttributeError):  # it is asked who it is, and has nothing to say
                raise HostError(
                    f"{self.url} does not let you", why="it asks who you are", remedy=f"run `docker login {self._host}`"
                ) from None
        if answer.status_code != 404:  # nothing was pushed yet
            self._check(answer)

    def has(self, blob: Blob) -> bool:
        answer = self._ask("HEAD", self._place(f"blobs/sha256:{blob.sha256}"), also=(404,))
        return bool(answer.status_code != 404)

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        Upload(self._ask, self._place("blobs/uploads/"), blob, path, default_home()).upload(moved)

    def read(self, blob: Blob, start: int, stop: int) -> bytes:
        answer = self._ask(
            "GET", self._place(f"blobs/sha256:{blob.sha256}"), headers={"Range": f"bytes={start}-{stop - 1}"},
            also=(404,),
        )  # fmt: skip
        if answer.status_code == 404:
            raise missing(blob, self)
        # A registry may know no ranges, and send all of it.
        data: bytes = answer.content
        return data if answer.status_code == 206 else data[start:stop]

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
        self._ask("PUT", self._place(f"manifests/{target}"), headers={"Content-Type": MANIFEST}, json=manifest)

    def targets(self) -> list[str]:
        out: list[str] = []
        place: str | None = self._place("tags/list")
        while place:
            answer = self._ask("GET", place, also=(404,))
            if answer.status_code == 404:
                return []
            out += answer.json().get("tags") or []
            more = answer.links.get("next", {}).get("url")
            place = more and (more if "://" in more else f"{self._client.prefix}://{self._host}{more}")
        return sorted(out)

    def index(self, target: str) -> Any:
        answer = self._ask("GET", self._place(f"manifests/{target}"), headers={"Accept": MANIFEST}, also=(404,))
        if answer.status_code == 404:
            raise unknown_target(target, self)
        config = answer.json().get("config", {})
        if config.get("mediaType") != CONFIG:
            return None  # an image, or something of somebody else's
        return self._ask("GET", self._place(f"blobs/{config['digest']}")).json()

    def _place(self, rest: str) -> str:
        return f"{self._client.prefix}://{self._host}/v2/{self._name}/{rest}"

    def _ask(self, method: str, url: str, *, also: tuple[int, ...] = (), **rest: Any) -> Any:
        with self._named():
            answer = self._client.do_request(url, method, **rest)
        if answer.status_code not in also:
            self._check(answer)
        return answer

    def _check(self, answer: Any) -> None:
        if answer.status_code in OK:
            return
        try:
            why = "; ".join(error["message"] for error in answer.json()["errors"])
        except (ValueError, KeyError, TypeError):
            why = f"{answer.status_code} {answer.reason}"
        raise HostError(f"{self.url} refuses", why=why, remedy=f"run `docker login {self._host}`, or check the name")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        from requests.exceptions import RequestException

        try:
            yield
        except (RequestException, ValueError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise HostError(f"{self.url} cannot be used", why=why, remedy=f"check the address {self._host}") from None


def _authentication(address: str, url: str) -> str:
    """How the registry wants to be told who asks: "basic" or "token". Raises HostError where there is none."""
    import httpx

    try:
        answer = httpx.get(address, timeout=ANSWER_SECONDS)
    except httpx.HTTPError as error:
        raise HostError(
            f"{url} cannot be reached", why=str(error) or type(error).__name__, remedy="check its address"
        ) from None
    if answer.status_code not in (200, 401, 403):
        raise HostError(
            f"{url} is no registry of images", why=f"{address} answers {answer.status_code}", remedy="check its address"
        )
    return "basic" if answer.headers.get("www-authenticate", "").lower().startswith("basic") else "token"


def _descriptor(media: str, blob: Blob) -> dict[str, Any]:
    return {"mediaType": media, "digest": f"sha256:{blob.sha256}", "size": blob.size}
