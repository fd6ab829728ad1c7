"""How much memory a registry can make a pull take, each in a process of its own: answers without end, a large file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.registry_servers import Answer, Request, Talk, serving

pytestmark = [pytest.mark.loopback, pytest.mark.process]

PIECE = bytes(1 << 20)
URLS = {"oci": "oci://{}/team/models", "s3": "s3://models/there", "hub": "hf://team/models"}


def run(kind: str, talk: Talk, what: str, tmp_path: Path, *file: str) -> dict[str, Any]:
    """What tests.attacks.registry_child says."""
    with serving(talk) as address:
        env = {
            "DOCKER_CONFIG": str(tmp_path), "HF_ENDPOINT": f"http://{address}", "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1", "AWS_ENDPOINT_URL": f"http://{address}", "AWS_ACCESS_KEY_ID": "one",
            "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        url = URLS[kind].format(address)
        done = subprocess.run(
            [sys.executable, "-m", "tests.attacks.registry_child", url, what, *file],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=250,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    print(f"{kind} {what}: {said['mb']:.0f} MB more, {said['seconds']:.1f} s {said['error']}")
    return said


def registry(of_file: Talk, of_other: Talk) -> Talk:
    """Of all three kinds: empty but for a file, and whatever else is asked for by `targets` and `index`."""

    def talk(request: Request) -> Iterable[bytes]:
        if request.path == "/v2/" or "/agent-harnesses" in request.path:
            return [Answer(200, {}, b"{}").wire()]
        if "/paths-info/" in request.path:
            return [Answer(200, {}, b"[]").wire()]
        if request.method == "HEAD":
            return [Answer(404).wire()]
        if "blobs/" in request.path:
            return of_file(request)
        return of_other(request)

    return talk


def nothing(request: Request) -> Iterable[bytes]:
    return [Answer(404).wire()]


def endless(request: Request) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"%x\r\n%s\r\n" % (len(PIECE), PIECE)


def file_of(size: int) -> Talk:
    def talk(request: Request) -> Iterator[bytes]:
        told = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"])
        assert told is not None
        start, stop = int(told[1]), int(told[2]) + 1
        head = f"Content-Length: {stop - start}\r\nContent-Range: bytes {start}-{stop - 1}/{size}\r\n\r\n"
        yield f"HTTP/1.1 206 OK\r\n{head}".encode()
        for left in range(stop - start, 0, -len(PIECE)):
            yield PIECE[:left]

    return talk


def zeros(size: int) -> tuple[str, str]:
    """(SHA-256, size) of so many zeros."""
    digest = hashlib.sha256()
    for _ in range(size // len(PIECE)):
        digest.update(PIECE)
    return digest.hexdigest(), str(size)


@pytest.mark.parametrize("kind", URLS)
def test_a_file_of_ten_megabytes_that_never_ends(kind: str, tmp_path: Path) -> None:
    """What is beyond the stated size is not read: the file is as it should be."""
    said = run(kind, registry(endless, nothing), "read", tmp_path, *zeros(10 << 20))
    assert said["error"] == ""
    assert said["mb"] < 60
    assert said["seconds"] < 30


@pytest.mark.parametrize("kind", URLS)
@pytest.mark.parametrize("what", ["targets", "index"])
def test_a_list_and_an_index_that_never_end(kind: str, what: str, tmp_path: Path) -> None:
    said = run(kind, registry(nothing, endless), what, tmp_path)
    assert re.search(r"has more than 8,388,608 bytes", said["error"])
    assert said["mb"] < 60
    assert said["seconds"] < 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", URLS)
def test_a_file_of_600_megabytes(kind: str, tmp_path: Path) -> None:
    size = 600 << 20
    said = run(kind, registry(file_of(size), nothing), "read", tmp_path, *zeros(size))
    assert said["error"] == ""
    assert said["mb"] < 150
