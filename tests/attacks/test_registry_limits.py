"""Registries that send too much, too slowly, in circles, or somewhere else: each ends in one line, soon and small.

Registries of images; tests/attacks/test_registry_s3_and_hub.py has the others. Limits of time are shortened here.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.registry_servers import (
    Answer,
    Bucket,
    Change,
    Images,
    Request,
    Talk,
    changing,
    drip,
    quiet,
    serving,
)
from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError
from trtpipe.pipeline.net import http_limits
from trtpipe.pipeline.registry import oci, oci_client, oci_upload, streams
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.registry.base import Blob, Registry

pytestmark = [pytest.mark.loopback, pytest.mark.process]

DATA = random.Random(3).randbytes(300_000)
BLOB = Blob(hashlib.sha256(DATA).hexdigest(), len(DATA))
USER = base64.b64encode(b"ali:open sesame").decode()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short waits between attempts, and nobody's credentials."""
    for module in (streams, oci_client, oci_upload):
        monkeypatch.setattr(module, "WAITS", (0.01, 0.01, 0.01))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short limits of time."""
    monkeypatch.setattr(http_limits, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(http_limits, "ANSWER_SECONDS", 0.6)
    monkeypatch.setattr(http_limits, "SLOWEST", 100_000)


def login(tmp_path: Path, **auths: str) -> None:
    (tmp_path / "docker").mkdir(exist_ok=True)
    (tmp_path / "docker" / "config.json").write_text(
        json.dumps({"auths": {host.replace("_", "."): {"auth": word} for host, word in auths.items()}})
    )


def images() -> Images:
    found = Images()
    found.blobs[BLOB.sha256] = DATA
    return found


def talking(changed: Change, base: Images | Bucket | None = None) -> Talk:
    return changing(base or images(), changed)


def of_blob(told: Callable[[Request], Iterable[bytes] | Answer | None]) -> Talk:
    return talking(lambda request: told(request) if "/blobs/sha256" in request.path else None)


def opened(address: str) -> Registry:
    return open_registry(f"oci://{address}/team/models")


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


# Bytes of a file


def test_what_is_beyond_the_stated_size_is_not_read() -> None:
    """A server without ranges that never stops: chunked, so that nothing but our size ends it."""
    sent = [0]

    def endless(request: Request) -> Iterator[bytes]:
        yield head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked")
        for start in range(0, len(DATA), 50_000):
            piece = DATA[start : start + 50_000]
            yield b"%x\r\n%s\r\n" % (len(piece), piece)
        while True:
            yield b"10000\r\n" + b"x" * 65536 + b"\r\n"
            sent[0] += 65536

    with serving(of_blob(endless)) as address:
        assert b"".join(opened(address).read(BLOB)) == DATA
        assert b"".join(opened(address).read(BLOB, 123_456)) == DATA[123_456:]
    assert sent[0] < 64 << 20


def test_a_connection_that_breaks_is_continued_where_it_broke() -> None:
    asked: list[Request] = []
    whole = images()

    def cut(request: Request) -> Iterable[bytes]:
        answer = whole.answer(request)
        return [answer.wire()[: 150_000 if len(asked) < 5 else None]]

    with serving(of_blob(cut), asked) as address:
        assert b"".join(opened(address).read(BLOB)) == DATA
    ranges = [request.headers["range"] for request in asked if "range" in request.headers]
    assert ranges[0] == "bytes=0-299999"
    starts = [int(word.partition("=")[2].partition("-")[0]) for word in ranges]
    assert starts == sorted(set(starts))
    assert len(starts) == 3


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (Answer(200, {}, DATA[:1000]), InputDataError, r"early: it sends 1,000 of 300,000 bytes"),
        (Answer(206, {"Content-Range": "bytes 7-9/10"}, b"abc"), HostError, "sends another part of a file"),
        (Answer(206, {}, b"abc"), HostError, "sends another part of a file"),
        (Answer(200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"), HostError, "its answer is compressed .gzip."),
        (Answer(204, {}, b""), InputDataError, "early: it sends 0 of 300,000 bytes"),
        (Answer(404, {}, b""), InputDataError, "lacks the file sha256"),
        (Answer(416, {}, b""), HostError, "refuses: 416 .*; try again later, or ask those who run it$"),
        (Answer(507, {}, b""), HostError, "refuses: 507 .*; try again later, or ask those who run it$"),
        (Answer(403, {}, b""), HostError, r"refuses: 403 .*; run `docker login [0-9.:]+`, or check the name$"),
        (Answer(302, {"Location": "file:///etc/passwd"}), HostError, "cannot be used: .*protocol"),
        (Answer(302, {"Location": "http://[::1"}), HostError, "cannot be used"),
        (Answer(302, {"Location": "/v2/team/models/blobs/sha256:0"}), HostError, "[Rr]edirect"),
    ],
)  # fmt: skip
def test_files_that_are_not_what_was_asked_for(answer: Answer, kind: type[TrtpipeError], why: str) -> None:
    with serving(of_blob(lambda request: answer)) as address, pytest.raises(kind, match=why):
        b"".join(opened(address).read(BLOB))


# Time


def bytewise(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


SLOW: dict[str, tuple[Callable[[Request], Iterable[bytes]], str]] = {
    "silence": (lambda request: drip([b""] * 99, 0.2), "nothing came for 0 seconds|takes too long"),
    "a head that drips": (
        lambda request: drip(bytewise(b"HTTP/1.1 200 OK\r\n" * 99), 0.1), "takes too long"
    ),
    "100 Continue without end": (
        lambda request: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"), "takes too long"
    ),
    "a body that drips": (
        lambda request: drip([head("HTTP/1.1 200 OK", "Content-Length: 300000"), *bytewise(DATA[:99])], 0.2),
        "takes too long",
    ),
    "chunks without content": (
        lambda request: drip(
            [head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked"), *[b"1;" + b"x" * 999 + b"\r\nx\r\n"] * 99], 0.1
        ),
        "takes too long",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("what", ["a file", "a manifest", "the first request"])
@pytest.mark.usefixtures("short")
def test_answers_that_never_end_in_time(kind: str, what: str) -> None:
    slow, why = SLOW[kind]
    places = {"a file": "/blobs/sha256", "a manifest": "/manifests/", "the first request": "/v2/"}
    armed = [what == "the first request"]

    def told(request: Request) -> Iterable[bytes] | None:
        return slow(request) if armed[0] and places[what] in request.path else None

    def use() -> None:
        registry = opened(address)
        armed[0] = True
        if what == "a file":
            b"".join(registry.read(BLOB))
        else:
            registry.index("one")

    with serving(talking(told)) as address:
        begun = time.monotonic()
        with pytest.raises(HostError, match=why):
            use()
        assert time.monotonic() - begun < 8


@pytest.mark.usefixtures("short")
def test_a_registry_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the head of an upload and never the body."""
    import socket

    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    blob = Blob(hashlib.sha256(path.read_bytes()).hexdigest(), 64 << 20)
    listener = socket.create_server(("127.0.0.1", 0))
    deaf = listener.getsockname()[1]
    monkeypatch.setattr(oci_client.OciClient, "require_own", lambda self, url: None)
    with listener, serving(
        talking(lambda r: Answer(202, {"Location": f"http://127.0.0.1:{deaf}/up"}) if r.method == "POST" else None)
    ) as address:  # fmt: skip
        begun = time.monotonic()
        with pytest.raises(HostError, match="cannot be used"):
            opened(address).put(blob, path, lambda nbytes: None)
        assert time.monotonic() - begun < 8


@pytest.mark.parametrize(
    ("method", "status", "told", "seconds"),
    [
        ("POST", 429, "7", [7.0]), ("POST", 503, "0", [0.01]), ("PATCH", 429, "999999999", [60.0]),
        ("GET", 503, "Wed, 21 Oct 2015 07:28:00 GMT", [0.01]), ("HEAD", 500, "2", [2.0]),
        ("POST", 500, "7", []), ("PATCH", 503, "7", []),
    ],
)  # fmt: skip
def test_a_busy_registry_is_asked_again_when_it_says(
    method: str, status: int, told: str, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may have been begun of an upload is not repeated."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    answers = iter([Answer(status, {"Retry-After": told}), Answer(200)])
    with serving(lambda request: [quiet(next(answers), request).wire()]) as address:
        client = oci_client.OciClient(address, "")
        answer = client.request(method, f"{client.base}/v2/x", content=b"abc" if method == "PATCH" else b"")
    assert waited == seconds
    assert answer.status_code == (200 if seconds else status)


# Lists, manifests, indexes


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (lambda page: '</v2/team/models/tags/list?last=a>; rel="next"', "lists its tags without an end"),
        (lambda page: f'</v2/team/models/tags/list?last={page}>; rel="next"', "20 tags on 20 pages"),
        (lambda page: '<http://127.0.0.2/v2/team/models/tags/list>; rel="next"', "leads to another host"),
        (lambda page: '<http://[::1/tags/list>; rel="next"', "leads to what is not a URL"),
        (lambda page: '<file:///etc/passwd>; rel="next"', "leads to another host"),
    ],
    ids=["a circle", "no end", "another host", "no URL", "a file"],
)
def test_pages_that_do_not_end(more: Callable[[int], str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "MAX_PAGES", 20)
    pages = itertools.count()

    def told(request: Request) -> Answer | None:
        if "/tags/list" not in request.path:
            return None
        return Answer(200, {"Link": more(next(pages))}, b'{"tags": ["one"]}')

    with serving(talking(told)) as address:
        registry = opened(address)
        with pytest.raises(HostError, match=why):
            registry.targets()


def test_a_list_of_more_targets_than_there_can_be() -> None:
    text = json.dumps({"tags": [f"t{n}" for n in range(10_001)]}).encode()
    with serving(talking(lambda r: Answer(200, {}, text) if "tags/list" in r.path else None)) as address:
        registry = opened(address)
        with pytest.raises(HostError, match="10,001 tags on 1 pages"):
            registry.targets()


# Manifests of somebody else's.
OTHERS = (
    b'{"tags": 7, "config": 7}', b'{"tags": [7], "config": []}', b'{"tags": {"a": 1}}',
    b'{"tags": ["../x"], "config": {"mediaType": []}}',
)  # fmt: skip
TEXTS = [
    *OTHERS,
    b"", b"[]", b"[1, 2]", b"7", b"null", b'"text"', b"<html><body>Sign in</body></html>", b"{", b"\xff\xfe",
    b"[" * 100_000, b'{"a":' * 100_000, b"9" * 1_000_000,
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:24]))
def test_lists_and_manifests_of_another_form(text: bytes) -> None:
    armed: list[str] = []

    def told(request: Request) -> Answer | None:
        return Answer(200, {}, text) if any(word in request.path for word in armed) else None

    with serving(talking(told)) as address:
        registry = opened(address)
        armed += ["/tags/list", "/manifests/"]
        with pytest.raises(HostError, match="gives no list of tags"):
            registry.targets()
        if text in OTHERS:
            assert registry.index("one") is None
        else:
            with pytest.raises(InputDataError, match=r"the manifest of one at .* is damaged"):
                registry.index("one")


CONFIG = {"mediaType": "application/vnd.trtpipe.index.v1+json", "digest": f"sha256:{BLOB.sha256}", "size": BLOB.size}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "one at .* is damaged: "),
        ({"size": BLOB.size - 1}, "the digest of its index is another"),
        ({"size": 10**12}, "the size of its index is not a number up to 8,388,608"),
        ({"size": -1}, "the size of its index"),
        ({"size": "7"}, "the size of its index"),
        ({"size": True}, "the size of its index"),
        ({"digest": "sha256:../../x"}, "the digest of its index is malformed"),
        ({"digest": None}, "the digest of its index is malformed"),
    ],
)
def test_manifests_whose_index_is_not_to_be_believed(changes: dict[str, Any], why: str) -> None:
    found = images()
    found.manifests["one"] = json.dumps({"config": {**CONFIG, **changes}}).encode()
    with serving(talking(lambda request: None, found)) as address, pytest.raises(InputDataError, match=why):
        opened(address).index("one")


@pytest.mark.parametrize("place", ["/tags/list", "/manifests/", "/v2/"])
def test_small_answers_without_an_end(place: str) -> None:
    sent = [0]

    def endless(request: Request) -> Iterator[bytes]:
        yield head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked")
        while True:
            yield b"10000\r\n" + b"[" * 65536 + b"\r\n"
            sent[0] += 65536

    with (
        serving(talking(lambda request: endless(request) if place in request.path else None)) as address,
        pytest.raises(HostError, match=r"its answer has more than 8,388,608 bytes|takes too long"),
    ):
        opened(address).targets()
    assert sent[0] < 32 << 20


# Credentials


def asks(challenge: str) -> Talk:
    """A registry that lets nobody in without a token."""
    return talking(
        lambda r: (
            Answer(401, {"WWW-Authenticate": challenge}) if r.headers.get("authorization") != "Bearer it" else None
        )
    )


def test_credentials_are_for_the_registrys_own_site(tmp_path: Path) -> None:
    """Whoever tried to reach another host from here would be stopped by the guard of the tests."""
    with serving(asks('Bearer realm="https://tokens.evil.example/token",service="here"')) as address:
        login(tmp_path, **{address: USER})
        with pytest.raises(HostError) as error:
            opened(address)
    assert str(error.value) == (
        f"oci://{address}/team/models asks for your credentials on behalf of tokens.evil.example: that is another "
        "site, and they were not sent; set TRTPIPE_AUTH_HOSTS=tokens.evil.example if they are for it, too"
    )


@pytest.mark.parametrize(
    ("challenge", "why"),
    [
        ('Bearer realm="http://tokens.example/"', "has its tokens from http://tokens.example/: that is not https"),
        ('Bearer realm="file:///etc/passwd"', "that is not https"),
        ('Bearer realm="http://[::1"', "cannot be used"),
        ("Bearer", "it asks who you are"),
        ("Negotiate", "it asks who you are"),
        ('Bearer realm="' + "x" * 50_000, "it asks who you are"),
    ],
)
def test_challenges_that_lead_nowhere(challenge: str, why: str, tmp_path: Path) -> None:
    with serving(asks(challenge)) as address:
        login(tmp_path, **{address: USER})
        with pytest.raises(HostError, match=why):
            opened(address)


@pytest.mark.parametrize(
    "text", [b"[]", b"7", b'{"token": 7}', b'{"token": "a\\r\\nX: y"}', b"<html>", b"{}", '{"token": "é"}'.encode()]
)
def test_tokens_that_are_none(text: bytes) -> None:
    with (
        serving(lambda request: [Answer(200, {}, text).wire()]) as tokens,
        serving(asks(f'Bearer realm="http://{tokens}/token"')) as address,
        pytest.raises(HostError, match="gives no token"),
    ):
        opened(address)


def test_a_token_is_had_with_credentials_and_said_to_the_registry_alone(tmp_path: Path) -> None:
    """Also after a redirect to where the files are: that server is told nothing."""
    asked: list[list[Request]] = [[], [], []]
    give = Answer(200, {}, b'{"token": "it"}').wire()
    with serving(lambda r: [part(r).wire()], asked[2]) as storage, serving(lambda r: [give], asked[1]) as tokens:
        challenge = f'Bearer realm="http://{tokens}/token?a=b",service="s p",scope="repository:x:pull"'

        def told(request: Request) -> Answer | None:
            if request.headers.get("authorization") != "Bearer it":
                return Answer(401, {"WWW-Authenticate": challenge})
            if "/blobs/" in request.path:
                return Answer(307, {"Location": f"http://{storage}/elsewhere"})
            return None

        with serving(talking(told), asked[0]) as address:
            login(tmp_path, **{address: USER})
            assert b"".join(opened(address).read(BLOB)) == DATA
    assert {request.headers["authorization"] for request in asked[1]} == {f"Basic {USER}"}
    assert asked[1][0].query == {"a": "b", "service": "s p", "scope": "repository:x:pull"}
    assert [request.headers.get("authorization") for request in asked[2]] == [None]
    assert asked[2][0].headers["range"] == "bytes=0-299999"
    assert "authorization" not in asked[0][0].headers


def part(request: Request) -> Answer:
    from tests.attacks.registry_servers import part_of

    return part_of(DATA, request, {})


def test_an_upload_stays_with_the_registry(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    asked: list[Request] = []
    with serving(lambda request: [Answer(202).wire()], asked) as other:

        def told(request: Request) -> Answer | None:
            return Answer(202, {"Location": f"http://{other}/up"}) if request.method == "POST" else None

        with (
            serving(talking(told)) as address,
            pytest.raises(HostError, match=r"leads to another host: http://127.0.0.1:.*/up is not at http"),
        ):
            opened(address).put(BLOB, tmp_path / "file", lambda nbytes: None)
    assert asked == []


@pytest.mark.parametrize("said", ["0-999999999999", "x", "5-9", "0--1", "bytes=0-", "0-" + "9" * 400])
def test_an_upload_whose_state_is_a_lie(tmp_path: Path, said: str) -> None:
    (tmp_path / "file").write_bytes(DATA)

    def failing(request: Request) -> Answer | None:
        if request.method == "PATCH":
            return Answer(500)
        return Answer(204, {"Range": said}) if "uploads/0" in request.path else None

    with serving(talking(failing)) as address, pytest.raises(HostError, match="refuses: 500"):
        opened(address).put(BLOB, tmp_path / "file", lambda nbytes: None)


def test_an_upload_that_loses_what_it_took_ends(tmp_path: Path) -> None:
    """Every second time something is there, and then nothing: progress that is none."""
    (tmp_path / "file").write_bytes(DATA)
    asked: list[Request] = []
    said = itertools.cycle(["0-99999", "0-0"])

    def told(request: Request) -> Answer | None:
        if request.method == "PATCH":
            return Answer(500)
        return Answer(204, {"Range": next(said)}) if request.method == "GET" and "uploads/" in request.path else None

    with serving(talking(told), asked) as address, pytest.raises(HostError, match="refuses: 500"):
        opened(address).put(BLOB, tmp_path / "file", lambda nbytes: None)
    sent = [request.headers.get("content-range") for request in asked if request.method == "PATCH"]
    assert sent == [None, "100000-299999", None, "100000-299999"]
