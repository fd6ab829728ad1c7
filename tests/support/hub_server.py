"""A small real HTTP server that speaks the Hugging Face hub's API, as far as models and registries need it.

Model info and the file tree under /api/models, files under /<repository>/resolve/<revision>/, with ETag,
X-Repo-Commit and ranges; refusals with the hub's X-Error-Code. Other answers than files have ETags as the hub's web
server makes them. Repositories are made and changed by commits, whose
large files have come before by Git's protocol for them. It keeps what it was asked, and can cut connections in the
middle of a file.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# Git stores larger files elsewhere and names them by their SHA-256.
LFS_FROM_BYTES = 4096
# Length and SHA-1 of a body in base64, most of which have `/` or `+`.
WEB_ETAG = 'W/"1d-Wb+/8vQ0k1oqZ3xJm7cT/4yLhPs"'
# Which the client asks for once a process, in whichever test is its first: not kept with what is asked of repositories.
OF_THE_CLIENT = "/api/agent-harnesses"


@dataclass
class Repository:
    """Commits with their files, and the branches that name them."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    gated: bool = False
    private: bool = False
    # Who may read a gated or private repository.
    token: str = "hf_granted"


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Hub:
    """What the server holds and does. `cuts` gives a file name -> bytes after which to cut, one entry a request."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    # Large files that have come, by digest.
    large: dict[str, bytes] = field(default_factory=dict)
    failing: int | None = None
    # Given what was asked, and the status, headers and body of the answer: other bytes for the wire, or None.
    changed: Callable[[Asked, int, dict[str, str], bytes], Iterable[bytes] | None] | None = None
    url: str = ""

    def add(self, repo_id: str, files: dict[str, bytes], *, branch: str = "main", **options: Any) -> str:
        """Commit `files` to a branch and return the commit's name."""
        text = repr(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items()))
        commit = hashlib.sha1(text.encode()).hexdigest()
        repository = self.repositories.setdefault(repo_id, Repository({}, {}, **options))
        repository.commits[commit] = files
        repository.branches[branch] = commit
        return commit

    def fetched(self, method: str = "GET") -> list[str]:
        """Names of the files asked for, sorted."""
        return sorted(
            entry.path.split("/resolve/")[1].split("/", 1)[1]
            for entry in self.asked
            if entry.method == method and "/resolve/" in entry.path
        )


def etag(data: bytes) -> str:
    if len(data) >= LFS_FROM_BYTES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Run a hub on 127.0.0.1. Its clients should have closed their connections when the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path != OF_THE_CLIENT:
                hub.asked.append(Asked(self.command, path, {name.lower(): text for name, text in self.headers.items()}))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self._chunks()
            if hub.failing is not None:
                self._refuse(hub.failing, "", "Internal Error")
            elif path == "/api/repos/create":
                self._create(json.loads(body))
            elif path.endswith(".git/info/lfs/objects/batch"):
                self._batch(json.loads(body))
            elif path.startswith("/large/"):
                digest = path.removeprefix("/large/")
                assert hashlib.sha256(body).hexdigest() == digest
                hub.large[digest] = body
                self._send(200, b"", {})
            elif self.command == "POST" and path.startswith("/api/models/"):
                self._change(path.removeprefix("/api/models/").split("/"), body)
            elif path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/").split("/"))
            elif "/resolve/" in path:
                repo_id, _, rest = path[1:].partition("/resolve/")
                self._file(repo_id, *rest.split("/", 1))
            else:
                self._refuse(404, "", "Not Found")

        def _chunks(self) -> bytes:
            out = b""
            while size := int(self.rfile.readline(), 16):
                out += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return out

        def _create(self, asked: dict[str, Any]) -> None:
            repo_id = f"{asked['organization']}/{asked['name']}"
            known = repo_id in hub.repositories
            if not known:
                hub.add(repo_id, {}, private=asked.get("visibility") == "private")
            self._send(409 if known else 200, json.dumps({"url": f"{hub.url}/{repo_id}"}).encode(), {})

        def _batch(self, asked: dict[str, Any]) -> None:
            """Where large files go; nowhere those that are here."""
            objects = []
            for one in asked["objects"]:
                actions = {"upload": {"href": f"{hub.url}/large/{one['oid']}", "header": {}}}
                objects.append({**one, **({} if one["oid"] in hub.large else {"actions": actions})})
            self._json({"transfer": "basic", "objects": objects})

        def _change(self, parts: list[str], body: bytes) -> None:
            """OWNER/NAME/preupload/REVISION, .../paths-info/REVISION or .../commit/REVISION."""
            repo_id, verb, revision = "/".join(parts[:2]), *parts[2:4]
            found = self._find(repo_id, revision)
            if found is None:
                return
            files = dict(found[1])
            if verb == "preupload":
                modes = [
                    {
                        "path": file["path"], "shouldIgnore": False,
                        "uploadMode": "lfs" if file["size"] >= LFS_FROM_BYTES else "regular",
                    }
                    for file in json.loads(body)["files"]
                ]  # fmt: skip
                self._json({"files": modes})
                return
            if verb == "paths-info":
                names = parse_qs(body.decode())["paths"]
                self._json([self._tree_entry(name, files[name]) for name in names if name in files])
                return
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
            commit = hub.add(repo_id, files, branch=revision)
            url = f"{hub.url}/{repo_id}/commit/{commit}"
            self._json({"commitUrl": url, "commitOid": commit, "success": True})

        def _api(self, parts: list[str]) -> None:
            """OWNER/NAME, OWNER/NAME/revision/REVISION or OWNER/NAME/tree/REVISION/FOLDER."""
            repo_id = "/".join(parts[:2])
            verb, revision = parts[2:4] or ("revision", "main")
            folder = "/".join(parts[4:])
            found = self._find(repo_id, revision)
            if found is None:
                return
            commit, files = found
            if verb == "tree":
                inside = {name: data for name, data in files.items() if not folder or name.startswith(f"{folder}/")}
                if folder and not inside:
                    self._refuse(404, "EntryNotFound", "Entry not found")
                    return
                self._json([self._tree_entry(name, data) for name, data in inside.items()])
                return
            repository = hub.repositories[repo_id]
            self._json({
                "_id": "0", "id": repo_id, "modelId": repo_id, "sha": commit, "tags": [], "downloads": 0,
                "siblings": [
                    {"rfilename": name, **({"size": len(data)} if "blobs=" in self.path else {})}
                    for name, data in files.items()
                ],
                "private": repository.private, "gated": "manual" if repository.gated else False,
            })  # fmt: skip

        @staticmethod
        def _tree_entry(name: str, data: bytes) -> dict[str, Any]:
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(data), "path": name}
            if len(data) >= LFS_FROM_BYTES:
                entry["lfs"] = {"oid": etag(data), "size": len(data), "pointerSize": 134}
            return entry

        def _find(self, repo_id: str, revision: str, *, read: bool = False) -> tuple[str, dict[str, bytes]] | None:
            """(commit, files), or None after a refusal. `read` is for files; anyone may look at a gated repository."""
            repository = hub.repositories.get(repo_id)
            known = "Authorization" in self.headers
            granted = repository is not None and self.headers["Authorization"] == f"Bearer {repository.token}"
            commit = repository.branches.get(revision, revision) if repository is not None else ""
            if repository is None or (repository.private and not granted):
                # Who may not know of it is told the same as for one that is not there.
                self._refuse(404 if known else 401, "RepoNotFound", "Repository not found")
            elif read and repository.gated and not granted:
                self._refuse(403 if known else 401, "GatedRepo", f"Access to model {repo_id} is restricted.")
            elif commit not in repository.commits:
                self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            else:
                return commit, repository.commits[commit]
            return None

        def _file(self, repo_id: str, revision: str, name: str) -> None:
            found = self._find(repo_id, revision, read=True)
            if found is None:
                return
            commit, files = found
            if name not in files:
                self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
                return
            data = files[name]
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            status, start = 200, 0
            if "Range" in self.headers:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                status, start, size = 206, int(first), len(data)
                data = data[: int(last) + 1] if last else data
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{size}"
            self._send(status, data[start:], headers, self._cut(name))

        def _cut(self, name: str) -> int | None:
            cuts = hub.cuts.get(name)
            return cuts.pop(0) if cuts and self.command == "GET" else None

        def _json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
            extra = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
            self._send(status, json.dumps({"error": message}).encode(), {**extra, **(headers or {})})

        def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
            headers = {"ETag": WEB_ETAG, **headers}
            if hub.changed is not None:
                asked = Asked(
                    self.command, unquote(self.path), {key.lower(): text for key, text in self.headers.items()}
                )
                pieces = hub.changed(asked, status, headers, body)
                if pieces is not None:
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        for piece in pieces:
                            self.wfile.write(piece)
                    return
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # so that closing the server waits for its connections
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
