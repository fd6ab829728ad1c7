"""Registries whose answers are changed at random on the wire: search, pull and push are right, or an error of ours.

The registry itself is honest: it keeps what comes and answers what it should, and what goes out is changed then. So
what a successful pull has brought can be compared with what was pushed, and what lies in it after pushes with its
digests. Everything that is chosen comes from the number of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.registry_servers import Answer, Bucket, Images, Request, quiet, serving
from tests.support.factories import hf_folder
from tests.support.hub_server import Asked, Hub
from tests.support.hub_server import serving as hub_serving
from tests.support.registries import s3_sessions as s3_sessions
from tests.unit.registry.test_transfer import TARGET, content
from tests.unit.test_runner import Recorder, plan
from trtpipe.engines.errors import TrtpipeError
from trtpipe.pipeline.net import http_limits
from trtpipe.pipeline.registry import oci_client, oci_upload, parts, s3, s3_session, streams, transfer
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.store.store import Store

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning"),
    # Of a server whose client has gone.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    # botocore keeps no hold of an answer whose head it cannot parse; Python's collector closes the connection.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <function Connection.__del__"),
]

# A run that takes longer hangs.
SECONDS = 60

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**64, 10**70, 1e308, "", "x" * 5000, "../../x", "/nowhere/x", "a\0b", "a\nb", "\x1b[31m",
    [], {}, [[]], {"a": {}}, [None] * 1000,
)  # fmt: skip
TEXTS = (
    b"", b"[]", b"7", b"null", b"<html><body>Sign in</body></html>", b"<a><b/>", b"[" * 50_000, b'{"a":' * 50_000,
    b"\xff\xfe", b"9" * 50_000, b"[" * 300 + b"]" * 300, b'{"token": "a"}', b'{"errors": [{"message": "\x1b[2J"}]}',
    b'{"errors": 7}',
)  # fmt: skip
# Of which {here} is the registry's own address.
PLACES = (
    "http://{here}/v2/", "/v2/x/blobs/uploads/9", "http://localhost:9/x", "https://{here}/x", "file:///etc/passwd",
    "//", "http://[::1", "http://user:word@{here}/", "?", "", "http://{here}:x/", "http://\u00e9:9/", "ftp://{here}/",
    "../../../x", "http://{here}/" + "x" * 9000,
)  # fmt: skip
HEADERS = {
    "Location": PLACES,
    "Link": ('<{here}/more>; rel="next"', "<http://127.0.0.2/>; rel=next", '</v2/>; rel="next"', "<", ";;,<>;rel=next"),
    "Content-Range": ("bytes 0-1/2", "bytes 5-", "x", "bytes 0-0/*", "bytes 9-1/0"),
    "Range": ("0-5", "0-99999999999", "x", "5-9", "bytes=0-3", "0-0"),
    "Content-Encoding": ("gzip", "br", "identity", "x"),
    "Transfer-Encoding": ("chunked", "gzip", "x"),
    "Content-Length": ("-1", "0", "5", "99999999999", "x", "1e9", "5, 6"),
    "WWW-Authenticate": (
        'Bearer realm="http://{here}/token",service="x"', 'Bearer realm="https://evil.example/"', "Basic", "Bearer",
        "x", 'Bearer realm="file:///x"', 'Bearer realm="http://127.0.0.2/"', 'Bearer realm="' + "x" * 9000,
    ),
    "ETag": ('"../../x"', "", "x" * 500, "W/", '"/x"'),
    "X-Repo-Commit": ("../../x", "", "x" * 500, "main"),
    "X-Linked-Size": ("-1", "x", "99999999999999"),
    "X-Linked-Etag": ('"../../x"', '"' + "a" * 64 + '"'),
    "X-Error-Code": ("RepoNotFound", "GatedRepo", "RevisionNotFound", "EntryNotFound"),
    "Retry-After": ("99999", "x", "-1"),
    "Set-Cookie": ("a=b", "=" * 5000, "a=b; Domain=127.0.0.1; Expires=x"),
    "x\x00": ("x",),
}  # fmt: skip
STATUSES = (
    100,
    101,
    199,
    200,
    201,
    202,
    204,
    206,
    301,
    302,
    304,
    307,
    308,
    400,
    401,
    403,
    404,
    409,
    416,
    429,
    500,
    503,
    600,
    999,
)


def mutated(rng: random.Random, answer: Answer, here: str) -> bytes:
    """An answer on the wire, changed in one to three ways."""
    answer = Answer(answer.status, dict(answer.headers), answer.body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.randrange(12)
        if kind == 0:
            answer.status = rng.choice(STATUSES)
        elif kind == 1:
            answer.body = rng.choice(TEXTS)
        elif kind in (2, 3, 4):
            answer.body = mutated_text(rng, answer.body)
        elif kind == 5:
            answer.body = answer.body[: rng.randrange(len(answer.body) + 1)]
        elif kind == 6:
            answer.body += rng.choice((b"\0", b"x" * 70_000, answer.body))
        elif kind == 7:
            answer.status = rng.choice((301, 302, 307, 308))
            answer.headers["Location"] = rng.choice(PLACES).replace("{here}", here)
        elif kind == 8:
            answer.status = rng.choice((401, 403))
            answer.headers["WWW-Authenticate"] = rng.choice(HEADERS["WWW-Authenticate"]).replace("{here}", here)
        else:
            name = rng.choice(list(HEADERS))
            answer.headers[name] = rng.choice(HEADERS[name]).replace("{here}", here)
    wire = answer.wire()
    kind = rng.randrange(20)
    if kind == 0:
        return wire[: rng.randrange(len(wire) + 1)]
    if kind == 1:
        at = rng.randrange(len(wire))
        return wire[:at] + bytes([wire[at] ^ (1 << rng.randrange(8))]) + wire[at + 1 :]
    if kind == 2:
        return rng.choice(
            (b"", b"\0", rng.randbytes(500), b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + wire, b"A" * 200_000)
        )
    return wire


def mutated_text(rng: random.Random, text: bytes) -> bytes:
    """JSON with another value or one less somewhere inside; else other bytes somewhere inside."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        return text[:at] + rng.choice((b"", b"\0", b"<x>", text[at:end] * 3)) + text[end:]
    spots: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        one = todo.pop()
        pairs = list(one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ())
        spots += [(one, key) for key, _ in pairs]
        todo += [inner for _, inner in pairs]
    if not spots:
        return rng.choice(TEXTS)
    container, key = rng.choice(spots)
    if rng.random() < 0.2:
        del container[key]
    else:
        container[key] = rng.choice(NASTY)
    return json.dumps(value).encode()


class Wire:
    """Changes answers, of which `odds` are left as they are."""

    def __init__(self) -> None:
        self.rng: random.Random | None = None
        self.here = ""
        self.odds = 0.0
        self.changed = 0

    def sent(self, answer: Answer) -> bytes | None:
        """Other bytes for an answer, or None."""
        if self.rng is None or self.rng.random() < self.odds:
            return None
        self.changed += 1
        return mutated(self.rng, answer, self.here)


@pytest.fixture
def made(in_folder: Path, tmp_path: Path) -> Store:
    store = Store(tmp_path / "home")
    execute(plan(hf_folder(in_folder / "tiny"), gpu="cpu", dtype="bf16"), store, Recorder())
    return store


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of time, and waits."""
    for module in (http_limits, s3_session):
        monkeypatch.setattr(module, "STALL_SECONDS", 0.5)
        monkeypatch.setattr(module, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(s3, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    for module in (streams, oci_client, oci_upload):
        monkeypatch.setattr(module, "WAITS", (0.0, 0.0, 0.0))
    for module in (parts, s3):
        monkeypatch.setattr(module, "PART", 1 << 30)
    import huggingface_hub.file_download as downloads
    import huggingface_hub.utils._http as theirs

    for module in (downloads, theirs):
        monkeypatch.setattr(module, "time", type("NoTime", (), {"sleep": staticmethod(lambda seconds: None)}))


@contextlib.contextmanager
def fuzzed(kind: str, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """(URL of a registry whose answers go through `wire`, what it keeps)."""
    if kind == "hub":
        import huggingface_hub

        from tests.unit.sources.test_hub import use

        huggingface_hub.close_session()
        with hub_serving() as server:
            use(server, tmp_path / "hf", monkeypatch)
            monkeypatch.setenv("HF_TOKEN", "hf_granted")
            wire.here = server.url.removeprefix("http://")

            def changed(asked: Asked, status: int, headers: dict[str, str], body: bytes) -> Iterable[bytes] | None:
                answer = Answer(status, dict(headers), b"" if asked.method == "HEAD" else body)
                sent = wire.sent(answer)
                return None if sent is None else [sent]

            server.changed = changed
            yield "hf://team/models", server
            huggingface_hub.close_session()
        return
    base: Images | Bucket = Images() if kind == "oci" else Bucket()

    def talk(request: Request) -> Iterable[bytes]:
        answer = quiet(base.answer(request), request)
        sent = wire.sent(answer)
        return [answer.wire() if sent is None else sent]

    with serving(talk) as address:
        wire.here = address
        if kind == "s3":
            for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
                monkeypatch.setenv(f"AWS_{name}", value)
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        yield {"oci": f"oci://{address}/team/models", "s3": "s3://models/there"}[kind], base


def kept(base: Images | Bucket | Hub) -> dict[str, bytes]:
    """Every file that is there under its digest."""
    if isinstance(base, Images):
        return base.blobs
    if isinstance(base, Bucket):
        files = base.objects
    else:
        repository = base.repositories["team/models"]
        files = repository.commits[repository.branches["main"]]
    return {name.rpartition("/")[2]: data for name, data in files.items() if "blobs/" in name}


def attempt(seed: int, wire: Wire, url: str, made: Store, before: dict[str, bytes], folder: Path) -> str:
    """What came of one run, in the folder of another machine."""
    rng = random.Random(seed)
    wire.rng, wire.odds = rng, rng.choice((0.0, 0.5, 0.8, 0.95))
    what = rng.choice(("search", "pull", "pull", "push"))
    begun = time.monotonic()
    try:
        registry = open_registry(url)
        if what == "search":
            transfer.search(registry)
        elif what == "push":
            transfer.push(TARGET, registry, made)
        else:
            home = Path.cwd()
            os.chdir(folder)
            try:
                transfer.pull(TARGET, registry, Store(folder / "home"))
            finally:
                os.chdir(home)
    except TrtpipeError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return f"{what} {type(error).__name__}"
    finally:
        wire.rng = None
        assert time.monotonic() - begun < SECONDS, f"run {seed}: {what}"
    if what == "pull":
        assert content(folder / "runs" / TARGET) == before, f"run {seed}"
    return f"{what} done"


def fuzz(kind: str, seeds: range, made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each outcome was."""
    outcomes: dict[str, int] = {}
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text('{"auths": {"127.0.0.1": {"auth": "YTpi"}}}')
    wire = Wire()
    runs = Path("runs").absolute()
    before = {name: data for name, data in content(runs / TARGET).items() if name.startswith(("tokenizer/", "engine/"))}
    with fuzzed(kind, wire, tmp_path, monkeypatch) as (url, base):
        transfer.push(TARGET, open_registry(url), made)
        shorten(monkeypatch)
        for seed in seeds:
            folder = tmp_path / "elsewhere"
            folder.mkdir()
            try:
                outcome = attempt(seed, wire, url, made, before, folder)
            except Exception as error:
                raise AssertionError(f"{kind}, run {seed}: {type(error).__name__}: {error}") from error
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            shutil.rmtree(folder)
            assert {hashlib.sha256(data).hexdigest() for data in kept(base).values()} == set(kept(base))
    assert not [path for path in tmp_path.rglob("x") if path.is_file()]
    print(kind, wire.changed, "answers changed:", outcomes)
    return outcomes


@pytest.mark.parametrize(("kind", "runs"), [("oci", 25), ("s3", 8), ("hub", 12)])
def test_answers_that_are_changed_at_random(
    kind: str, runs: int, made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = fuzz(kind, range(runs), made, tmp_path, monkeypatch)
    assert len(outcomes) > 3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runs"), [("oci", 2000), ("s3", 600), ("hub", 2000)])
@pytest.mark.timeout(3600)
def test_answers_that_are_changed_at_random_for_long(
    kind: str, runs: int, made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = fuzz(kind, range(1000, 1000 + runs), made, tmp_path, monkeypatch)
    assert outcomes["pull done"] > runs // 100
