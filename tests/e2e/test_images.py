"""The images of the Dockerfile, built and run by a real Docker daemon on a base that debootstrap makes here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import START_SECONDS, until
from tests.e2e.dockerd import search_path
from tests.support.paths import ROOT
from trtpipe import __version__
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.launch import GATEWAY_PORT, MODELS, PORTS, gateway_words
from trtpipe.triton_repo.layout import TOKENIZER_FOLDER

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    # The SDK leaves sockets behind.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
pytest_plugins = ["tests.e2e.dockerd"]

PACKAGES = "python3-venv,libpython3.11,ca-certificates"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
BASE = "base.example/python:3.11"
MOST_MB = 150
# As `deploy k8s` writes it: nothing can be written but in a volume at /tmp.
AS_IN_A_POD: dict[str, Any] = {
    "user": "1000:1000",
    "environment": {"TRTPIPE_HOME": "/tmp/trtpipe"},
    "read_only": True,
    "tmpfs": {"/tmp": "mode=1777,exec"},
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
}


@pytest.fixture(scope="module")
def base(docker_client: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian with Python, the certificates that this machine trusts, and the torch that it installs."""
    program = shutil.which("debootstrap", path=search_path())
    if program is None:
        pytest.skip("no debootstrap here")
    folder = tmp_path_factory.mktemp("images")
    root, tar = folder / "root", folder / "base.tar"
    command = [program, "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.copyfile(os.environ.get("SSL_CERT_FILE", f"/{CERTIFICATES}"), root / CERTIFICATES)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(root / "wheels")]
    subprocess.run([*download, "torch==2.13.0"], check=True)
    with tarfile.open(tar, "w") as file:
        file.add(root, arcname=".", filter=lambda info: None if "var/cache/apt/" in info.name else info)
    shutil.rmtree(root)
    repository, _, tag = BASE.partition(":")
    changes = [
        "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        f"ENV PIP_CERT=/{CERTIFICATES}",
        "ENV PIP_FIND_LINKS=/wheels",
    ]
    docker_client.api.import_image_from_file(str(tar), repository=repository, tag=tag, changes=changes)
    return BASE


@pytest.fixture(scope="module")
def images(docker_client: DockerClient, base: str) -> dict[str, Any]:
    """The image of each target, built."""
    arguments = {"BASE": base, "TORCH_INDEX": "https://pypi.org/simple"}
    return {
        target: docker_client.images.build(
            path=str(ROOT), target=target, tag=f"trtpipe-{target}", buildargs=arguments, network_mode="host", rm=True
        )[0]
        for target in ("bench", "serve")
    }


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder that the image's user may write to."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.fixture
def serving(docker_client: DockerClient, images: dict[str, Any], tiny_repository: Path, work: Path) -> Iterator[Any]:
    """A container that serves a small model, and the port of its gRPC server."""
    shutil.copytree(tiny_repository, work / "tiny")
    for path in (work / "tiny").rglob("*"):
        path.chmod(0o755)
    ports = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    container = docker_client.containers.run(
        images["serve"], ["trtpipe", "serve", "/data/tiny", *ports], detach=True, network_mode="host", shm_size="1g",
        volumes={str(work): {"bind": "/data", "mode": "ro"}}, **AS_IN_A_POD,
    )  # fmt: skip
    try:
        assert until(lambda: b"Ctrl-C" in container.logs(), START_SECONDS), container.logs().decode()
        found = re.search(r"gRPC +127\.0\.0\.1:(\d+)", container.logs().decode())
        assert found
        yield container, int(found[1])
    finally:
        container.remove(force=True)


def test_the_images_are_small_and_not_of_root(docker_client: DockerClient, images: dict[str, Any], base: str) -> None:
    plain = docker_client.images.get(base).attrs["Size"]
    added = {target: (image.attrs["Size"] - plain) / 1e6 for target, image in images.items()}
    print({target: f"{size:.0f} MB over its base" for target, size in added.items()})
    assert 50 < added["bench"] <= MOST_MB
    for image in images.values():
        said = docker_client.containers.run(
            image, ["-c", "id -u; touch /opt/venv/x; true"], entrypoint="sh", stderr=True
        )
        # The daemon may send the two streams in either order.
        assert sorted(said.decode().splitlines()) == ["1000", "touch: cannot touch '/opt/venv/x': Permission denied"]
        assert docker_client.containers.run(image, ["trtpipe", "--version"]).decode() == f"trtpipe {__version__}\n"


def test_the_small_image_plans_and_measures(
    docker_client: DockerClient, images: dict[str, Any], known: MockServerProcess, tokenizer: Path, work: Path
) -> None:
    def run(*words: str) -> str:
        volumes = {str(work): {"bind": "/data"}}
        out = docker_client.containers.run(
            images["bench"], ["trtpipe", *words], network_mode="host", volumes=volumes, remove=True
        )
        return str(out.decode())

    shutil.copy(tokenizer, work)
    assert "1 x h100" in run("plan", "--model", "llama3-8b", "--gpu", "h100", "--explain")
    server = ("--protocol", "grpc", "--grpc-url", f"127.0.0.1:{known.grpc_port}", "--tokenizer", "tokenizer.json")
    for transport in ("own", "tritonclient"):
        run("bench", *server, "--concurrency", "2", "--requests", "4", "--output-tokens", "4", "--transport", transport)
        assert (work / "reports" / "latest" / "report.json").exists()
        shutil.rmtree(work / "reports")


def test_the_large_image_serves_and_ends_when_it_is_told_to(
    docker_client: DockerClient, images: dict[str, Any], serving: Any, work: Path
) -> None:
    container, port = serving
    volumes = {str(work): {"bind": "/data"}}
    server = [
        "--protocol",
        "grpc",
        "--grpc-url",
        f"127.0.0.1:{port}",
        "--tokenizer",
        f"tiny/{TOKENIZER_FOLDER}/tokenizer.json",
    ]
    words = ["trtpipe", "bench", *server, "--concurrency", "2", "--requests", "4", "--output-tokens", "4"]
    docker_client.containers.run(images["bench"], words, network_mode="host", volumes=volumes, remove=True)
    assert (work / "reports" / "latest" / "report.html").exists()
    words = gateway_words(DeployConfig(name="llama", host_path="/r", termination_grace_seconds=60), keys=False)
    given = {MODELS: "/data/tiny", "0.0.0.0": "127.0.0.1", f"127.0.0.1:{PORTS['grpc']}": f"127.0.0.1:{port}"}
    given[str(GATEWAY_PORT["openai"])] = "0"
    gateway = docker_client.containers.run(
        images["bench"], [given.get(word, word) for word in words], detach=True, network_mode="host", volumes=volumes,
        **AS_IN_A_POD,
    )  # fmt: skip
    try:
        assert until(lambda: b"Ctrl-C" in gateway.logs(), START_SECONDS), gateway.logs().decode()
        found = re.search(r"http://127\.0\.0\.1:\d+", gateway.logs().decode())
        assert found
        assert httpx.get(f"{found[0]}/health/ready", timeout=60).status_code == 200
        assert [model["id"] for model in httpx.get(f"{found[0]}/v1/models", timeout=60).json()["data"]] == ["llama"]
        body = {"model": "llama", "prompt": "Hello", "max_tokens": 4}
        answer = httpx.post(f"{found[0]}/v1/completions", json=body, timeout=100).json()
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("llama", 4)
    finally:
        gateway.remove(force=True)
    container.stop(timeout=60)
    assert container.wait()["StatusCode"] == 0
