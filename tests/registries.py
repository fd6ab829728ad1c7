"""Real registries of the tests' own: an S3 server (moto's), a registry of images (Debian's docker-registry)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path, **environment: str) -> Iterator[None]:
    """The server, listening."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text(errors="replace"))
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a client of an S3 server with an empty bucket named `models`."""
    import boto3

    port = free_port()
    with running([sys.executable, "-m", "moto.server", "-p", str(port)], port, folder / "s3.log"):
        url = f"http://127.0.0.1:{port}"
        keys = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1"}
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="one", aws_secret_access_key="two", region_name="us-east-1"
        )
        client.create_bucket(Bucket="models")
        yield {**keys, "AWS_ENDPOINT_URL": url}


@contextlib.contextmanager
def oci(folder: Path, users: str | None = None) -> Iterator[str]:
    """host:port of an empty registry of images. Skips where there is no docker-registry.

    users  those whom it lets in, as htpasswd has them; None lets everybody in
    """
    program = shutil.which("docker-registry") or shutil.which("registry")
    if program is None:
        pytest.skip("no docker-registry on this machine")
    port = free_port()
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {folder / 'images'}\n"
        f"http:\n  addr: 127.0.0.1:{port}\n"
    )
    if users is not None:
        (folder / "users").write_text(users + "\n")
        with config.open("a") as file:
            file.write(f"auth:\n  htpasswd:\n    realm: here\n    path: {folder / 'users'}\n")
    with running([program, "serve", str(config)], port, folder / "registry.log"):
        yield f"127.0.0.1:{port}"
