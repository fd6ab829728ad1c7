"""S3 servers and Hubs that send too much, too slowly, in circles, or names that lead out of a folder.

Limits of time are shortened where a test waits for them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.registry_servers import Answer, Bucket, Change, Request, Talk, changing, drip, serving
from tests.support.factories import hf_folder
from tests.support.hub_server import Asked, Hub
from tests.support.hub_server import serving as hub_serving
from tests.support.registries import s3_sessions as s3_sessions
from tests.unit.sources.test_hub import use
from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError, UsageError
from trtpipe.pipeline.net import http_limits
from trtpipe.pipeline.registry import hub as hub_registry
from trtpipe.pipeline.registry import parts, s3, s3_session, streams
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.registry.base import Blob, Registry
from trtpipe.pipeline.sources import hub

pytestmark = [pytest.mark.loopback, pytest.mark.process]

DATA = random.Random(5).randbytes(300_000)
BLOB = Blob(hashlib.sha256(DATA).hexdigest(), len(DATA))
REPO = "acme/tiny-llama"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between attempts, and credentials."""
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    monkeypatch.setattr(streams, "WAITS", (0.01, 0.01))
    for name, value in {"ACCESS_KEY_ID": "one", "SECRET_ACCESS_KEY": "two", "SESSION_TOKEN": "three"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short limits of time."""
    for module in (http_limits, s3_session):
        monkeypatch.setattr(module, "STALL_SECONDS", 0.3)
    for module, seconds in ((http_limits, 0.6), (s3_session, 0.6), (s3, 1.0)):
        monkeypatch.setattr(module, "ANSWER_SECONDS", seconds)
        monkeypatch.setattr(module, "SLOWEST", 4 << 20)


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


# S3


def bucket() -> Bucket:
    found = Bucket()
    found.objects[f"there/blobs/{BLOB.sha256}"] = DATA
    return found


def talking(changed: Change) -> Talk:
    return changing(bucket(), changed)


def opened(address: str, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
    return open_registry("s3://models/there")


def used(registry: Registry, what: str) -> Any:
    uses: dict[str, Callable[[], Any]] = {
        "a file": lambda: b"".join(registry.read(BLOB)), "a list": registry.targets,
        "an index": lambda: registry.index("one"), "whether": lambda: registry.has(BLOB),
    }  # fmt: skip
    return uses[what]()


def test_an_object_is_continued_where_a_connection_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    whole = bucket()

    def cut(request: Request) -> Iterable[bytes]:
        return [whole.answer(request).wire()[: 150_000 if len(asked) < 3 else None]]

    with serving(cut, asked) as address:
        assert b"".join(opened(address, monkeypatch).read(BLOB)) == DATA
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (Answer(200, {}, DATA[:1000]), InputDataError, "early: it sends 1,000 of 300,000 bytes"),
        (Answer(206, {"Content-Range": "bytes 7-9/10"}, b"abc"), HostError, "sends another part of a file"),
        (Answer(307, {"Location": "http://127.0.0.1:1/x"}), HostError, "s3://models/there "),
        (Answer(200, {"Content-Length": "x"}), TrtpipeError, "s3://models/there"),
        (Answer(403, {}, b"<html>"), HostError, "s3://models/there"),
        (Answer(500, {}, b"[" * 1000), HostError, "s3://models/there"),
    ],
)
def test_objects_that_are_not_what_was_asked_for(
    answer: Answer, kind: type[TrtpipeError], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(talking(lambda request: answer)) as address:
        registry = opened(address, monkeypatch)
        with pytest.raises(kind, match=why):
            b"".join(registry.read(BLOB))


@pytest.mark.parametrize("what", ["a file", "a list", "an index", "whether"])
@pytest.mark.parametrize("kind", ["silence", "a head that drips", "a body that drips"])
@pytest.mark.usefixtures("short")
def test_an_s3_server_that_never_ends_in_time(what: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (kind, what) == ("a body that drips", "whether"):
        return  # the answer has none

    def slow(request: Request) -> Iterable[bytes]:
        if kind == "silence":
            return drip([b""] * 99, 0.2)
        if kind == "a head that drips":
            return drip([b"HTTP/1.1 200 OK\r\n", *[b"A: b\r\n"] * 99], 0.2)
        return drip([head("HTTP/1.1 200 OK", "Content-Length: 300000"), *[b"x"] * 99], 0.2)

    with serving(slow) as address:
        registry = opened(address, monkeypatch)
        begun = time.monotonic()
        with pytest.raises(HostError, match="s3://models/there"):
            used(registry, what)
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("<IsTruncated>true</IsTruncated><NextContinuationToken>a</NextContinuationToken>", "without an end"),
        ("<IsTruncated>true</IsTruncated><NextContinuationToken>{n}</NextContinuationToken>", "0 on 21 pages"),
        ("<IsTruncated>true</IsTruncated>", "cannot be used: KeyError: 'NextContinuationToken'"),
        ("<IsTruncated>x</IsTruncated><Contents><Size>5</Size></Contents>", "cannot be used: KeyError: 'Key'"),
        ("<html>", "s3://models/there "),
        ("&a;", "s3://models/there "),
    ],
)
def test_lists_of_s3_that_do_not_end(page: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "MAX_PAGES", 20)
    pages = itertools.count()

    def told(request: Request) -> Answer:
        text = f"<ListBucketResult>{page.format(n=next(pages))}</ListBucketResult>"
        return Answer(200, {"Content-Type": "application/xml"}, text.encode())

    with serving(talking(told)) as address:
        registry = opened(address, monkeypatch)
        with pytest.raises(HostError, match=why):
            registry.targets()


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"{", b"\xff", b"9" * 1_000_000])
def test_indexes_of_s3_that_are_none(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(talking(lambda request: Answer(200, {}, text))) as address:
        registry = opened(address, monkeypatch)
        with pytest.raises(InputDataError, match=r"one at s3://models/there is damaged: "):
            registry.index("one")


def test_a_redirect_of_s3_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    with serving(lambda request: [Answer(200, {}, DATA).wire()], asked) as other:
        redirect = Answer(307, {"Location": f"http://{other}/x"})
        with serving(talking(lambda request: redirect)) as address:
            registry = opened(address, monkeypatch)
            for what in ("a file", "a list", "an index", "whether"):
                with pytest.raises(HostError):
                    used(registry, what)
    assert asked == []


def test_parts_of_an_upload_whose_list_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 100_000)
    monkeypatch.setattr(s3, "PART", 100_000)
    (tmp_path / "file").write_bytes(DATA)
    asked: list[Request] = []

    def told(request: Request) -> Answer | None:
        query = request.query
        if "uploads" in query:
            key = f"there/blobs/{BLOB.sha256}"
            return Answer(200, {}, f"<R><Upload><Key>{key}</Key><UploadId>u</UploadId></Upload></R>".encode())
        if request.method == "GET" and "uploadId" in query:
            more = f"<NextPartNumberMarker>{int(query['part-number-marker']) + 3000}</NextPartNumberMarker>"
            return Answer(200, {}, f"<R><IsTruncated>true</IsTruncated>{more}</R>".encode())
        return Answer(200, {"ETag": '"1"'}) if request.method == "PUT" else Answer(200, {}, b"<R><ETag>1</ETag></R>")

    with serving(talking(told), asked) as address:
        opened(address, monkeypatch).put(BLOB, tmp_path / "file", lambda nbytes: None)
    methods = [request.method for request in asked]
    assert methods.count("PUT") == 3
    assert methods.count("GET") == 1 + 4


@pytest.mark.parametrize("part", [100_000, 1_000_000], ids=["parts", "whole"])
def test_what_is_sent_again_is_sent_from_its_start(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server: each request is refused once."""
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    monkeypatch.setattr(parts, "PART", part)
    monkeypatch.setattr(s3, "PART", part)
    (tmp_path / "file").write_bytes(DATA)
    seen: set[str] = set()
    taken: dict[int, bytes] = {}

    def told(request: Request) -> Answer:
        if request.path not in seen:
            seen.add(request.path)
            return Answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
        if request.method == "PUT":
            taken[int(request.query.get("partNumber", 1))] = request.body
        return Answer(200, {"ETag": '"1"'}, b"<R><UploadId>u</UploadId><ETag>1</ETag></R>")

    with serving(talking(told)) as address:
        opened(address, monkeypatch).put(BLOB, tmp_path / "file", lambda nbytes: None)
    assert len(taken) == -(-300_000 // part)
    assert b"".join(taken[number] for number in sorted(taken)) == DATA


# The Hub


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub

    huggingface_hub.close_session()
    with hub_serving() as running:
        use(running, tmp_path / "hf", monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_granted")
        yield running
        huggingface_hub.close_session()
    hub.resolve_commit.cache_clear()


@pytest.fixture
def commit(server: Hub, tmp_path: Path) -> str:
    made = hf_folder(tmp_path / "made")
    return server.add(REPO, {path.name: path.read_bytes() for path in made.iterdir()})


def ignore(done: int, total: int) -> None:
    pass


def outside(tmp_path: Path) -> list[str]:
    """What lies outside the folder of the cache."""
    return sorted(path.name for path in tmp_path.iterdir() if path.name not in ("hf", "made"))


@pytest.mark.parametrize("name", ["../" * 5 + "planted", "/tmp/planted", "..", "a/b", "a\x00b", "a" * 500])
def test_an_etag_is_no_path(server: Hub, commit: str, tmp_path: Path, name: str) -> None:
    """The cache keeps a file under its ETag."""
    name = name.replace("/tmp", str(tmp_path))

    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        if "ETag" in headers:
            headers["ETag"] = f'"{name}"'
        return None

    server.changed = changed
    with pytest.raises(HostError, match=f"the hub did not deliver {REPO}@"):
        hub.download(REPO, commit, ignore)
    assert outside(tmp_path) == []
    assert not list((tmp_path / "hf").rglob("*planted*"))


@pytest.mark.parametrize("place", ["/elsewhere/{path}", "http://{other}/{path}", "/api/resolve-cache/{path}"])
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
def test_a_name_is_no_path_where_a_redirect_leads(
    server: Hub, commit: str, tmp_path: Path, place: str, header: str
) -> None:
    """The client follows redirects to any path and port of the Hub's host."""
    names = {"ETag": '"a"', "X-Repo-Commit": commit, header: '"' + "../" * 6 + 'planted"', "Content-Length": "5"}
    evil = Answer(200, names).wire()

    with serving(lambda request: [evil]) as other:

        def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
            if "/resolve/" in asked.path and asked.method == "HEAD":
                return [Answer(307, {"Location": place.format(other=other, path="config.json")}).wire()]
            return [evil] if asked.path.endswith("/config.json") else None

        server.changed = changed
        with pytest.raises(HostError, match=f"its {header.lower()} is not a digest"):
            hub.download(REPO, commit, ignore)
    assert outside(tmp_path) == []
    assert not list((tmp_path / "hf").rglob("*planted*"))


@pytest.mark.parametrize("name", ["../" * 6 + "planted", "main", "x" * 41, "", 7, ["a"], None])
def test_a_commit_is_no_path(server: Hub, commit: str, tmp_path: Path, name: Any) -> None:
    """The cache keeps the list of a commit's files under the commit."""
    text = json.dumps({"_id": "0", "id": REPO, "sha": name, "siblings": [], "tags": [], "downloads": 0}).encode()

    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        return [Answer(200, {}, text).wire()] if "/revision/" in asked.path else None

    server.changed = changed
    with pytest.raises((HostError, UsageError)):
        hub.resolve_commit(REPO, "main")
    assert outside(tmp_path) == []
    assert not list((tmp_path / "hf").rglob("*planted*"))


@pytest.mark.parametrize("oid", ["../" * 6 + "planted", 7])
def test_a_digest_in_a_list_is_no_path(server: Hub, commit: str, tmp_path: Path, oid: Any) -> None:
    entry = {"type": "file", "path": "model.safetensors", "oid": "0" * 40, "size": 5,
             "lfs": {"oid": oid, "size": 5, "pointerSize": 134}, "xetHash": "0" * 64}  # fmt: skip

    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        return [Answer(200, {}, json.dumps([entry]).encode()).wire()] if "/tree/" in asked.path else None

    server.changed = changed
    with pytest.raises(HostError, match="its `oid` is not a digest"):
        hub.download(REPO, commit, ignore)


@pytest.mark.parametrize(
    "link",
    [
        "<http://127.0.0.2/more>",
        "<http://[::1>",
        "<{here}/api/models/acme/tiny-llama/tree/main?page={n}>",
        "<{here}{path}>",
    ],
)
def test_lists_of_the_hub_that_do_not_end(server: Hub, commit: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.pipeline.net import hub_client

    monkeypatch.setattr(hub_client, "MAX_PAGES", 20)
    monkeypatch.setattr(hub_registry, "MAX_PAGES", 20)
    pages = itertools.count()

    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        if "/tree/" not in asked.path:
            return None
        more = link.format(here=server.url, n=next(pages), path=asked.path) + '; rel="next"'
        return [Answer(200, {"Link": more}, body if status == 200 else b"[]").wire()]

    server.changed = changed
    with pytest.raises(HostError, match=r"its list (goes on at (another host|what is not a URL)|has no end)"):
        hub.download(REPO, commit, ignore)
    with pytest.raises(
        HostError,
        match=r"its list (goes on at (another host|what is not a URL)|has no end)|lists its targets without an end",
    ):
        open_registry(f"hf://{REPO}").targets()


@pytest.mark.parametrize("size", [-1, 1])
def test_files_of_another_size_than_the_list_says(server: Hub, commit: str, size: int) -> None:
    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        if "/revision/" not in asked.path:
            return None
        told = json.loads(body)
        for file in told["siblings"]:
            file["size"] += size
        return [Answer(200, {}, json.dumps(told).encode()).wire()]

    server.changed = changed
    with pytest.raises(HostError, match=r"the hub sends more than its list says|has another size than the hub says"):
        hub.download(REPO, commit, ignore)


@pytest.mark.parametrize("wait", ["100000", "9" * 400, "000000000999", "²", "-1", "x", "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_a_hub_that_wants_us_to_wait(server: Hub, commit: str, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)

    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        said = {"Retry-After": wait, "RateLimit": '"api";r=0;t=90000'}
        return [Answer(429, said).wire()] if "/resolve/" in asked.path else None

    server.changed = changed
    with pytest.raises(HostError, match="429 Too Many Requests"):
        hub.download(REPO, commit, ignore)
    assert max(waited) <= 61


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"7", b"null", b"<html>", b"[" * 100_000, b'{"id": []}', b"9" * 1_000_000, b"\xff"]
)
@pytest.mark.parametrize("where", ["/revision/", "/tree/"])
def test_answers_of_the_hub_of_another_form(server: Hub, commit: str, text: bytes, where: str) -> None:
    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        return [Answer(200, {}, text).wire()] if where in asked.path else None

    server.changed = changed
    with pytest.raises((HostError, InputDataError), match=REPO):
        hub.download(REPO, commit, ignore)
    registry = open_registry(f"hf://{REPO}")
    if where == "/tree/" and text != b"[]":
        with pytest.raises(HostError, match=f"hf://{REPO} c"):
            registry.targets()


@pytest.mark.parametrize("slow", ["silence", "a body that drips"])
@pytest.mark.usefixtures("short")
def test_a_hub_that_never_ends_in_time(server: Hub, commit: str, slow: str) -> None:
    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        if slow == "silence":
            return drip([b""] * 20, 0.2)
        return drip([head("HTTP/1.1 200 OK", "Content-Length: 300000"), *[b"x"] * 20], 0.2)

    server.changed = changed
    begun = time.monotonic()
    with pytest.raises(HostError, match=f"the hub did not deliver {REPO}@"):
        hub.download(REPO, commit, ignore)
    with pytest.raises(HostError, match=f"hf://{REPO} c"):
        open_registry(f"hf://{REPO}").targets()
    assert time.monotonic() - begun < 20


def test_the_token_stays_with_the_hub(server: Hub, commit: str) -> None:
    asked: list[Request] = []
    with serving(lambda request: [Answer(404).wire()], asked) as other:

        def changed(told: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
            if "/resolve/" not in told.path:
                return None
            return [Answer(302, {**headers, "Location": f"http://localhost:{other.partition(':')[2]}/x"}).wire()]

        server.changed = changed
        with pytest.raises(TrtpipeError):
            hub.download(REPO, commit, ignore)
        with pytest.raises(TrtpipeError):
            open_registry(f"hf://{REPO}").index("one")
    assert len(asked) > 1
    assert [request.headers["authorization"] for request in asked if "authorization" in request.headers] == []


def test_a_large_file_is_not_put_into_a_commit(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_registry, "MAX_REGULAR_BYTES", 10_000)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_bytes(DATA)

    def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
        if "/preupload/" not in asked.path:
            return None
        told = json.loads(body)
        for file in told["files"]:
            file["uploadMode"] = "regular"
        return [Answer(200, {}, json.dumps(told).encode()).wire()]

    server.changed = changed
    with pytest.raises(HostError, match="takes 300,000 bytes in a commit alone"):
        open_registry("hf://team/models").put(BLOB, tmp_path / "made" / "file", lambda nbytes: None)
