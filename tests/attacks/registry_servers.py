"""Registries on loopback that keep what they are given, and whose answers a test changes on the wire.

`Images` speaks as much of the OCI distribution protocol as our client needs, `Bucket` as much of S3's. `serving` puts
either, or any other function from a request to the bytes of an answer, behind a socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Request:
    """`path` as it was sent, with its query; names of headers in small letters."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def place(self) -> str:
        return unquote(urlsplit(self.path).path)

    @property
    def query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}


@dataclass
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def wire(self) -> bytes:
        """With the length of the body, unless the headers say something else."""
        framed = {"content-length", "transfer-encoding"} & {name.lower() for name in self.headers}
        length = {} if framed else {"Content-Length": str(len(self.body))}
        lines = [f"{name}: {value}" for name, value in {"Connection": "close", **length, **self.headers}.items()]
        head = "\r\n".join([f"HTTP/1.1 {self.status} Said", *lines, "", ""])
        return head.encode("latin-1", "replace") + self.body


# The bytes of an answer, piece by piece, without end if need be; the connection is closed after them.
Talk = Callable[[Request], Iterable[bytes]]
Change = Callable[[Request], "Iterable[bytes] | Answer | None"]


@contextlib.contextmanager
def serving(
    talk: Talk, asked: list[Request] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[str]:  # fmt: skip
    """host:port of a server that answers each request, which it notes in `asked`, over a connection of its own."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    open_now: set[socket.socket] = set()

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock if tls is None else tls.wrap_socket(sock, True) as sock:
            request = _read(sock)
            if request is None:
                return
            if asked is not None:
                asked.append(request)
            for piece in talk(request):
                sock.sendall(piece)
            if tls is None:
                sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):  # what the client still sends would reset the connection, and lose our answer
                pass
        open_now.discard(sock)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                sock.settimeout(30)
                open_now.add(sock)
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for sock in (listener, *open_now):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def _read(sock: socket.socket) -> Request | None:
    """A request and its body, of a stated length or in chunks."""
    file = sock.makefile("rb")
    first = file.readline().decode("latin-1").split()
    if len(first) != 3:
        return None
    headers = {}
    while (line := file.readline().decode("latin-1")).strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("expect"):
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("transfer-encoding") == "chunked":
        body = _chunks(file)
    else:
        body = file.read(int(headers.get("content-length", 0)))
    if "aws-chunked" in headers.get("content-encoding", ""):
        body = _chunks(io.BytesIO(body))
    return Request(first[0], first[1], headers, body)


def _chunks(file: object) -> bytes:
    out = b""
    while size := int(file.readline().partition(b";")[0], 16):  # type: ignore[attr-defined]
        out += file.read(size)  # type: ignore[attr-defined]
        file.readline()  # type: ignore[attr-defined]
    return out


def part_of(data: bytes, request: Request, headers: dict[str, str]) -> Answer:
    """The range that is asked for, or all."""
    told = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if told is None:
        return Answer(200, headers, data)
    start, stop = int(told[1]), int(told[2] or len(data) - 1) + 1
    return Answer(
        206, {**headers, "Content-Range": f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"}, data[start:stop]
    )


class Images:
    """Of one repository: blobs by digest, manifests by tag, uploads that are under way."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self._uploads: dict[str, bytes] = {}

    def answer(self, request: Request) -> Answer:
        place, method = request.place, request.method
        if place == "/v2/":
            return Answer(200, {}, b"{}")
        if place.endswith("/tags/list"):
            if not self.manifests:
                return Answer(404)
            return Answer(200, {}, json.dumps({"name": "x", "tags": sorted(self.manifests)}).encode())
        kind, name = place.split("/")[-2:]
        if kind == "manifests":
            if method == "PUT":
                self.manifests[name] = request.body
                return Answer(201)
            return Answer(200, {}, self.manifests[name]) if name in self.manifests else Answer(404)
        if "/uploads/" in place:
            return self._upload(place, name, request)
        digest = name.removeprefix("sha256:")
        if digest not in self.blobs:
            return Answer(404)
        return part_of(self.blobs[digest], request, {})

    def _upload(self, place: str, name: str, request: Request) -> Answer:
        if request.method == "POST":
            name = str(len(self._uploads))
            self._uploads[name] = b""
            return Answer(202, {"Location": f"{place}{name}"})
        if name not in self._uploads:
            return Answer(404)
        if request.method == "PATCH":
            self._uploads[name] += request.body
        elif request.method == "PUT":
            data = self._uploads.pop(name)
            digest = hashlib.sha256(data).hexdigest()
            if request.query["digest"] != f"sha256:{digest}":
                return Answer(400)
            self.blobs[digest] = data
            return Answer(201)
        said = max(0, len(self._uploads[name]) - 1)
        return Answer(204 if request.method == "GET" else 202, {"Location": place, "Range": f"0-{said}"})


class Bucket:
    """Objects by key, of a bucket that the path begins with."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def answer(self, request: Request) -> Answer:
        key = request.place[1:].partition("/")[2]
        if request.method == "PUT":
            self.objects[key] = request.body
            return Answer(200, {"ETag": '"1"'})
        if not key:
            prefix = request.query.get("prefix", "")
            found = "".join(
                f"<Contents><Key>{escape(one)}</Key><Size>{len(self.objects[one])}</Size></Contents>"
                for one in sorted(self.objects)
                if one.startswith(prefix)
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
            return Answer(200, {"Content-Type": "application/xml"}, text.encode())
        if key not in self.objects:
            text = "<Error><Code>NoSuchKey</Code><Message>none</Message></Error>" if request.method == "GET" else ""
            return Answer(404, {"Content-Type": "application/xml"}, text.encode())
        answer = part_of(self.objects[key], request, {"ETag": '"1"'})
        if request.method == "HEAD":
            answer.headers["Content-Length"], answer.body = str(len(answer.body)), b""
        return answer


def quiet(answer: Answer, request: Request) -> Answer:
    """As it goes out to a HEAD: the length without the body."""
    if request.method == "HEAD" and answer.body:
        return Answer(answer.status, {**answer.headers, "Content-Length": str(len(answer.body))})
    return answer


def changing(base: Images | Bucket, changed: Change) -> Talk:
    """As `base`, but for the requests for which `changed` has an answer."""

    def talk(request: Request) -> Iterable[bytes]:
        told = changed(request)
        if told is None:
            told = base.answer(request)
        return [quiet(told, request).wire()] if isinstance(told, Answer) else told

    return talk


def drip(pieces: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        time.sleep(seconds)
