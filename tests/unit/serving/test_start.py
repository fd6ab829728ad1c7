"""What `serve` tells while a server starts, and once it runs."""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.unit.engines.test_passport import passport
from trtpipe.engines.errors import StageFailed, UsageError
from trtpipe.engines.process import Progress
from trtpipe.pipeline.cli.console_serve import first_steps
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.serving import serve, temporary, triton_package, tritonserver
from trtpipe.pipeline.serving.launch_options import LaunchOptions, check_container_options, exposure, server_image
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.repositories import Found, choose_server
from trtpipe.pipeline.serving.server_log import STARTED, Loading
from trtpipe.pipeline.serving.servers import Served, Server
from trtpipe.pipeline.store.store import Store

GATEWAY = GatewayOptions(models=(ServedModel(name="a", tokenizer=Path("/t")),), grpc_url="127.0.0.1:1")


def test_how_far_a_server_is_is_read_from_the_log_of_its_last_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    told: list[tuple[str, str]] = []
    loaded = "I1125 17:37:37.0 1 model_lifecycle.cc:839] \"successfully loaded '{}'\"\n"
    start = f"{STARTED}2026-11-25 17:37:30 ---\n"
    for text in (
        "",
        start + loaded.format("ensemble") + start,
        start + "pulling image:1: 10% of 12.3 GB\npulling image:1: 20% of 12.3 GB\n",
        start + "pulling image:1: 20% of 12.3 GB\n" + '"loading: tensorrt_llm:1"\n' + loaded.format("tensorrt_llm"),
    ):
        log.write_text(text)
        Loading(("ensemble", "tensorrt_llm"), log, lambda *shown: told.append(shown))()
    assert told == [
        ("loading the models", "0 of 2, left: ensemble, tensorrt_llm"),
        ("loading the models", "0 of 2, left: ensemble, tensorrt_llm"),
        ("pulling the image", "20% of 12.3 GB"),
        ("loading the models", "1 of 2, left: ensemble"),
    ]


@pytest.mark.parametrize(
    ("host", "gateway", "keyed", "words"),
    [
        ("127.0.0.1", GATEWAY, False, None),
        ("localhost", GATEWAY, False, None),
        ("0.0.0.0", GATEWAY, False, ("and the gateway", "--api-keys-file")),
        ("0.0.0.0", GATEWAY, True, ("HTTP, gRPC and metrics: ", "close these ports")),
        ("10.0.0.7", None, False, ("HTTP, gRPC and metrics: ", "close these ports")),
    ],
)
def test_who_can_reach_a_server_without_a_key(
    host: str, gateway: GatewayOptions | None, keyed: bool, words: tuple[str, ...] | None
) -> None:
    warning = exposure(LaunchOptions(host=host), gateway, keyed=keyed)
    assert (warning is None) == (words is None)
    assert all(word in str(warning) for word in words or ())


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("docker", {"shm_size": "512m", "gpus": (0,)}, None),
        ("docker", {"shm_size": "1.5GB"}, None),
        ("docker", {"shm_size": "1x"}, "--shm-size 1x is not a size; give for example 512m or 2g"),
        ("docker", {"shm_size": "0"}, "--shm-size 0 is not a size; give for example 512m or 2g"),
        ("docker", {"shm_size": "-1g"}, "--shm-size -1g is not a size; give for example 512m or 2g"),
        ("local", {}, None),
        ("local", {"shm_size": "1x"}, "--shm-size 1x is not a size; give for example 512m or 2g"),
        (
            "local",
            {"shm_size": "1g"},
            "--shm-size is for a container, and this server runs without one; leave --shm-size out",
        ),
        ("local", {"gpus": (0,)}, "--gpus is for a container, and this server runs without one; leave --gpus out"),
    ],
)
def test_options_of_a_container_are_checked(kind: str, options: dict[str, Any], line: str | None) -> None:
    told = None
    try:
        check_container_options(LaunchOptions(**options), kind)
    except UsageError as error:
        told = str(error)
    assert told == line


def test_a_release_without_a_known_image_is_served_from_one_that_is_given() -> None:
    newest = passport(runtime="trtllm_pytorch", toolchain="1.3.0rc29", image=None)
    assert choose_server("auto", newest) == "docker"
    with pytest.raises(UsageError, match=r"no image with tritonserver and TensorRT-LLM 1\.3\.0rc29 .*; give --image"):
        server_image(LaunchOptions(), newest)
    assert server_image(LaunchOptions(image="ours:1"), newest) == "ours:1"
    assert server_image(LaunchOptions(), passport()) == passport().image


class Docker:
    """Docker on a machine without the image, whose pull is interrupted when 9 of 12 GB are there."""

    removed: ClassVar[list[Path]] = []

    def __init__(self, image: str) -> None:
        assert image in ("", "ours:1")

    def remove_left(self, out: Path) -> None:
        self.removed.append(out)

    def require(self) -> str:
        return "29.0"

    def prepare(self, progress: Progress) -> None:
        for done, total in ((0, 0), (3 * 10**9, 12 * 10**9), (9 * 10**9, 12 * 10**9)):
            progress(done, total)
        raise KeyboardInterrupt


@pytest.mark.loopback
@pytest.mark.parametrize("front", ["triton", "native"])
def test_an_image_is_pulled_before_the_server_is_started(
    front: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull of an image takes longer than a server has to become ready. A container that a killed server left holds
    its ports."""
    Docker.removed.clear()
    monkeypatch.setattr(tritonserver, "DockerExecutor", Docker)
    (tmp_path / "a" / "tensorrt_llm" / "1").mkdir(parents=True)
    (tmp_path / "a" / "tensorrt_llm" / "config.pbtxt").write_text('name: "tensorrt_llm"')
    built = passport(runtime="trtllm_pytorch" if front == "native" else "tensorrt_llm")
    options = LaunchOptions(front=front, image="ours:1", http=0, grpc=0, metrics=0, openai=0)
    shown: list[tuple[str, str]] = []
    with pytest.raises(KeyboardInterrupt):
        serve._launch(
            "a", [Found("a", tmp_path / "a")], [built], "docker", Store(tmp_path / "home"),
            options if front == "native" else replace(options, openai=None), print, lambda *told: shown.append(told),
        )  # fmt: skip
    told = ["", "25% of 12.0 GB", "75% of 12.0 GB"]
    assert shown == [("pulling the image", detail) for detail in told]
    assert not list((tmp_path / "home" / "logs").glob("*"))
    written = "native" if front == "native" else "models"
    assert Docker.removed == [tmp_path / "home" / "servers" / "a" / written]


@pytest.mark.loopback
def test_a_start_that_fails_leaves_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "tensorrt_llm" / "1").mkdir(parents=True)
    (tmp_path / "a" / "tensorrt_llm" / "config.pbtxt").write_text('name: "tensorrt_llm"')
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(triton_package, "find_installation", lambda: None)
    monkeypatch.setattr(triton_package, "prepare_backends", lambda *given: None)
    made: list[str] = []

    def start(*given: object, more: dict[str, str], **named: object) -> None:
        made.append(more["TMPDIR"])
        assert Path(made[0]).is_dir()
        raise StageFailed("it does not load")

    monkeypatch.setattr(tritonserver, "start_local", start)
    options = LaunchOptions(http=0, grpc=0, metrics=0, openai=None)
    home = tmp_path / "home"
    with pytest.raises(StageFailed, match="it does not load"):
        serve._launch(
            "a", [Found("a", tmp_path / "a")], [passport(runtime="vllm")], "local", Store(home), options, print,
            lambda *told: None,
        )  # fmt: skip
    assert not Path(made[0]).exists()
    assert not (home / "servers" / "a" / temporary.LINK).is_symlink()


@pytest.mark.parametrize("keyed", [False, True])
def test_the_first_commands_are_such_as_a_shell_takes(*, keyed: bool) -> None:
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    served = (Served(name="a", repository=Path("/r"), names=("it's", "b")),)
    server = Server(
        name="a", pid=1, log=Path("/l"), endpoints=points, served=served, gateway_url="http://127.0.0.1:9", keyed=keyed
    )
    generate, curl = first_steps(server)
    assert shlex.split(generate) == ["trtpipe", "generate", "What is the capital of France?"]
    words = shlex.split(curl)
    assert words[:2] == ["curl", "http://127.0.0.1:9/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["max_tokens"]) == ("it's", 64)
    assert ("Authorization: Bearer $TRTPIPE_API_KEY" in words) is keyed
    other = Served(name="b", repository=Path("/r"))
    assert first_steps(replace(server, served=(*served, other)), served=other)[0].endswith(" --target b")
    assert first_steps(server, Path("/my cert.pem"))[1].startswith("curl --cacert '/my cert.pem' http")
