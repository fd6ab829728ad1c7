"""Real registries of the tests' own: an S3 server (moto's), a registry of images (Debian's docker-registry)."""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

SECONDS = 60


@pytest.fixture(autouse=True, scope="module")
def s3_sessions() -> Iterator[None]:
    """All sessions share what botocore reads of its services: each would take a tenth of a second. At the end collect
    what s3fs has left: it closes its sessions in whatever event loop runs when they are collected."""
    import botocore.session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield
    gc.collect()


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
def oci(folder: Path, users: str | None = None, issuer: str | None = None) -> Iterator[str]:
    """host:port of an empty registry of images. Skips where there is no docker-registry.

    users   those whom it lets in, as htpasswd has them; None lets everybody in
    issuer  URL of `tokens` in the same folder, where it sends those who come without one
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
    if issuer is not None:
        with config.open("a") as file:
            file.write(
                f"auth:\n  token:\n    realm: {issuer}/token\n    service: here\n    issuer: tests\n"
                f"    rootcertbundle: {folder / 'issuer.pem'}\n"
            )
    with running([program, "serve", str(config)], port, folder / "registry.log"):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def tokens(folder: Path, user: str, password: str, identity: str = "") -> Iterator[str]:
    """URL of a server that gives tokens to `user` alone, as those of large registries do, or to who has an `identity`
    token. Its certificate is issuer.pem in `folder`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1)).sign(key, hashes.SHA256())
    )  # fmt: skip
    (folder / "issuer.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    chain = base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()

    def packed(value: Any) -> bytes:
        return base64.urlsafe_b64encode(value if isinstance(value, bytes) else json.dumps(value).encode()).rstrip(b"=")

    def token(scopes: list[str]) -> str:
        access = []
        for scope in scopes:
            kind, repository, actions = scope.split(":")
            access.append({"type": kind, "name": repository, "actions": actions.split(",")})
        begin = int(time.time()) - 60
        said = {
            "iss": "tests", "sub": user, "aud": "here", "iat": begin, "nbf": begin, "exp": begin + 600, "jti": "1",
            "access": access,
        }  # fmt: skip
        text = packed({"typ": "JWT", "alg": "RS256", "x5c": [chain]}) + b"." + packed(said)
        return (text + b"." + packed(key.sign(text, padding.PKCS1v15(), hashes.SHA256()))).decode()

    class Issuer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = base64.b64encode(f"{user}:{password}".encode()).decode()
            asked = parse_qs(urlparse(self.path).query)
            self._answer("token", asked if self.headers.get("Authorization") == f"Basic {known}" else None)

        def do_POST(self) -> None:
            """OAuth 2: https://distribution.github.io/distribution/spec/auth/oauth/"""
            asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            told = {name: asked.get(name) for name in ("grant_type", "refresh_token", "service")}
            known = {"grant_type": ["refresh_token"], "refresh_token": [identity], "service": ["here"]}
            self._answer("access_token", asked if "client_id" in asked and told == known else None)

        def _answer(self, name: str, asked: dict[str, list[str]] | None) -> None:
            status, answer = 401, {"details": "who are you?"}
            if asked is not None:
                status, answer = 200, {name: token(asked.get("scope", []))}
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *words: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Issuer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
