"""A Docker daemon of the tests' own, an image made from this very Python, and a registry to pull from.

The daemon lives in one folder, on a socket of its own, without a bridge and without firewall rules, so that no other
Docker of the machine sees it and nothing of it stays. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from docker import DockerClient

START_SECONDS = 30
STOP_SECONDS = 20
# What dockerd makes outside its folders, whatever it is told.
ELSEWHERE = tuple(map(Path, ("/etc/docker/key.json", "/etc/docker", "/run/docker", "/run/containerd")))
IMAGE = "toolchain.example/trtllm:1.2"
MEDIA = "application/vnd.docker"
DOUBLE = ROOT / "tests" / "support" / "doubles" / "trtllm_build.py"
# Not what a stand-in for trtllm-build needs.
UNUSED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "tkinter",
          "turtledemo", "ensurepip"}  # fmt: skip


class Daemon:
    """A dockerd that lives in `folder`; one that has ended can be started again, with the images that it had."""

    def __init__(self, program: str, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/s"
        self._log = folder / "log"
        config = folder / "daemon.json"
        config.write_text("{}")  # not the machine's own
        self._command = [
            program,
            f"--config-file={config}",
            f"--data-root={folder}/data",
            f"--exec-root={folder}/exec",
            f"--pidfile={folder}/pid",
            f"--host={self.url}",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            "--max-download-attempts=1",
            "--log-level=warn",
        ]

    def start(self, hooks: Path | None = None) -> None:
        """Return when it answers. Raises RuntimeError with its last words when it does not.

        hooks  a folder that comes first on its PATH, where it looks for NVIDIA's hook
        """
        # A killed containerd may stay as a zombie, where nobody reaps: dockerd would wait for it.
        (self.folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)
        path = f"{hooks}:{search_path()}" if hooks else search_path()
        environment = {"PATH": path, "HOME": str(self.folder)}  # no proxy between it and the loopback
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"{self.folder}/s")
                probe.settimeout(START_SECONDS)
                probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                if probe.recv(1):
                    return
            time.sleep(0.05)
        self.kill()
        last = (self._log.read_text(errors="replace").splitlines() or ["it says nothing"])[-1]
        raise RuntimeError(f"dockerd does not start here: {last}")

    def client(self) -> contextlib.closing[DockerClient]:
        import docker

        return contextlib.closing(docker.DockerClient(base_url=self.url, version="auto"))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@contextlib.contextmanager
def running_dockerd() -> Iterator[Daemon]:
    """A daemon that answers; what it made is gone afterwards. Skips the test where there can be none."""
    program = shutil.which("dockerd", path=search_path())
    if program is None:
        pytest.skip("no dockerd here: install Debian's docker.io, or Docker's own docker-ce")
    if os.geteuid():
        pytest.skip("dockerd needs root")
    absent = [path for path in ELSEWHERE if not path.exists()]
    # The path of a Unix socket is at most 107 bytes long: not pytest's own folder.
    folder = Path(tempfile.mkdtemp(prefix="trtpipe-"))
    daemon = Daemon(program, folder)
    try:
        try:
            daemon.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        try:
            yield daemon
        finally:
            daemon.stop()
    finally:
        end_containers(folder)
        remove_mounted(folder)
        for path in absent:
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)


def end_containers(folder: Path) -> None:
    """End what outlived its daemon: each container has a process above it that names the daemon's folder."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in argument for argument in process.cmdline()):
                for each in (*process.children(recursive=True), process):
                    each.kill()


def remove_mounted(folder: Path) -> None:
    """Remove a folder with file systems of such containers still mounted in it."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(folder)


def build_image(client: DockerClient, tag: str, program: Path, **others: Path) -> None:
    """Make an image of this Python's interpreter and library, with `program` in it as trtllm-build, and `others` under
    their names."""
    interpreter = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    binaries = [interpreter, *library.glob("lib-dynload/*.so")]
    programs = {"trtllm-build": program, **others}
    with tempfile.NamedTemporaryFile() as file:
        # Everything keeps its place, so that the interpreter finds its library and both find their libraries.
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in (*binaries[:1], *shared_libraries(binaries), Path("/etc/ld.so.cache")):
                tar.add(path.resolve(), arcname=str(path))
            tar.add(library, filter=used)
            add(tar, "tmp", tarfile.DIRTYPE, mode=0o1777)
            add(tar, "usr/bin/python3", tarfile.SYMTYPE, target=str(interpreter))
            for name, path in programs.items():
                add(tar, f"usr/local/bin/{name}", tarfile.REGTYPE, body=b"#!/usr/bin/python3\n" + path.read_bytes())
        file.flush()
        repository, _, version = tag.rpartition(":")
        changes = ["ENV PATH=/usr/local/bin:/usr/bin"]
        client.api.import_image_from_file(file.name, repository=repository, tag=version, changes=changes)


def shared_libraries(binaries: list[Path]) -> list[Path]:
    """Every library that the binaries load, the loader among them."""
    told = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in sorted(set(re.findall(r"(/\S+) \(0x", told)))]


def used(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(info.name).name
    info.mode |= 0o555 if info.isdir() else 0o444  # for every user
    return None if name in UNUSED or name.startswith("config-") else info


def add(
    tar: tarfile.TarFile, name: str, kind: bytes, *, mode: int = 0o755, target: str = "", body: bytes = b""
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.size = kind, mode, target, len(body)
    tar.addfile(info, io.BytesIO(body))


class StoredImage:
    """An image of one layer, as a registry keeps it."""

    def __init__(self, seed: int) -> None:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            # What cannot be compressed takes the time to arrive in which progress is told.
            add(tar, "data", tarfile.REGTYPE, body=random.Random(seed).randbytes(4 << 20))
        self.layer = gzip.compress(file.getvalue(), compresslevel=1)
        config = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine),
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [digest(file.getvalue())]},
        }
        self.config = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{MEDIA}.distribution.manifest.v2+json",
            "config": self._entry(self.config, "container.image.v1+json"),
            "layers": [self._entry(self.layer, "image.rootfs.diff.tar.gzip")],
        }
        self.manifest = json.dumps(manifest).encode()
        self.digest = digest(self.manifest)

    def _entry(self, body: bytes, kind: str) -> dict[str, str | int]:
        return {"mediaType": f"{MEDIA}.{kind}", "size": len(body), "digest": digest(body)}


class Registry:
    """An image registry on the loopback, which Docker talks to without TLS.

    `good` can be pulled, `cut` breaks off in the middle of its layer, `secret` asks for a login, and nothing else is
    there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.images = {"good": StoredImage(0), "cut": StoredImage(1)}

    def answer(self, path: str) -> tuple[int, str, bytes, int]:
        """Status, type, body, and how much of the body is sent."""
        name = path.split("/")[2]
        image = self.images.get(name)
        if path == "/v2/":
            return 200, "application/json", b"{}", 2
        if image is None:
            secret = name == "secret"
            return self.refuse(401, "UNAUTHORIZED") if secret else self.refuse(404, "MANIFEST_UNKNOWN")
        if "/manifests/" in path:
            return 200, f"{MEDIA}.distribution.manifest.v2+json", image.manifest, len(image.manifest)
        if path.endswith(digest(image.config)):
            return 200, "application/octet-stream", image.config, len(image.config)
        return 200, "application/octet-stream", image.layer, len(image.layer) // (2 if name == "cut" else 1)

    def refuse(self, status: int, code: str) -> tuple[int, str, bytes, int]:
        body = json.dumps({"errors": [{"code": code, "message": code.replace("_", " ").lower()}]}).encode()
        return status, "application/json", body, len(body)


def digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body, sent = served.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", digest(body))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:sent])

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Registry(f"127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield served
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon without images. A test that ends it starts it again."""
    with running_dockerd() as made:
        yield made


@pytest.fixture(scope="session")
def dockerd(daemon: Daemon) -> str:
    return daemon.url


@pytest.fixture(scope="session")
def docker_client(dockerd: str) -> Iterator[DockerClient]:
    import docker

    with contextlib.closing(docker.DockerClient(base_url=dockerd, version="auto")) as client:
        yield client


@pytest.fixture(scope="session")
def toolchain_image(docker_client: DockerClient) -> str:
    """The name of an image in that daemon with python3 and trtllm-build on its PATH."""
    build_image(docker_client, IMAGE, DOUBLE)
    return IMAGE
