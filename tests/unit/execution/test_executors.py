"""Executors without Docker: what the local one runs, what is asked of a daemon, and every error in its own words."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
import requests
from docker.errors import APIError, DockerException, ImageNotFound
from urllib3.exceptions import ProtocolError

from tests.support import nvidia_smi
from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.executor import Executor, Task
from trtpipe.pipeline.execution.executors import DockerExecutor, Layers, LocalExecutor

IMAGE = "registry.example/trtllm:1"
EXECUTORS: list[Executor] = [LocalExecutor(), DockerExecutor(IMAGE)]

MakeTask = Callable[..., Task]


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    def make(*command: str, **options: Any) -> Task:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        usual = {"command": command, "reads": (), "out": out, "what": "trtllm-build", "gpus": None}
        return Task(**{**usual, "log": tmp_path / "it.log", **options})

    return make


def test_executors_have_names() -> None:
    assert [executor.name for executor in EXECUTORS] == ["local", "docker"]


@pytest.mark.process
def test_the_sdk_is_loaded_by_who_uses_it() -> None:
    script = (
        "import sys, trtpipe.pipeline.execution.executors; print({'docker', 'requests', 'urllib3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.process
class TestLocal:
    def run(self, task: Task) -> list[str]:
        lines: list[str] = []
        assert LocalExecutor().run(task, lines.append) == {}
        return lines

    def test_a_task_runs_in_its_folder(self, make_task: MakeTask) -> None:
        task = make_task("sh", "-c", "pwd; echo $MORE", env={"MORE": "more"})
        assert self.run(task) == [str(task.out), "more"]
        assert task.log.read_text().endswith(f"/sh -c 'pwd; echo $MORE'\n{task.out}\nmore\n")

    @pytest.mark.parametrize(
        ("gpus", "seen"),
        [
            (None, "7 FASTEST_FIRST"), ((), "none PCI_BUS_ID"), ((2,), "2 PCI_BUS_ID"), ((0, 3), "0,3 PCI_BUS_ID"),
            (("MIG-7f3e",), "MIG-7f3e PCI_BUS_ID"),
        ],
    )  # fmt: skip
    def test_gpus(
        self, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...] | None, seen: str
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        script = "echo ${CUDA_VISIBLE_DEVICES:-none} $CUDA_DEVICE_ORDER"
        assert self.run(make_task("sh", "-c", script, gpus=gpus)) == [seen]

    def test_a_program_beside_python_comes_first(
        self, make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("environment", "elsewhere"):
            program = tmp_path / name / "trtllm-build"
            program.parent.mkdir()
            program.write_text(f"#!/bin/sh\necho {name} $1\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'elsewhere'}:{os.environ['PATH']}")
        assert self.run(make_task("trtllm-build", "x")) == ["elsewhere x"]
        monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
        assert self.run(make_task("trtllm-build", "x")) == ["environment x"]

    def test_a_failure(self, make_task: MakeTask) -> None:
        task = make_task("sh", "-c", "echo why; exit 3")
        with pytest.raises(StageFailed) as error:
            LocalExecutor().run(task)
        assert str(error.value) == f"trtllm-build failed (exit status 3): why; the log is {task.log}"

    def test_without_the_program(self, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        task = make_task("trtllm-bild")
        with pytest.raises(HostError) as error:
            LocalExecutor().run(task)
        assert str(error.value) == (
            f"this environment has no trtllm-bild: it is neither beside {sys.executable} nor on PATH; "
            "install the toolchain here, or use --executor docker"
        )
        assert not task.log.exists()


class Stream:
    """An attached container's output. The SDK's stream has a response, which must be closed."""

    def __init__(self, chunks: list[bytes | BaseException]) -> None:
        self.chunks = chunks
        self.closed = False
        self._response = self

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if not self.chunks:
            raise StopIteration
        chunk = self.chunks.pop(0)
        if isinstance(chunk, BaseException):
            raise chunk
        return chunk

    def close(self) -> None:
        self.closed = True


class FakeDocker:
    """A daemon with one image and one container at a time, and what was asked of it."""

    def __init__(self) -> None:
        self.pulled: list[dict[str, Any] | Exception] = []
        self.image = SimpleNamespace(id="sha256:id", attrs={"RepoDigests": []})
        self.here = True
        self.security: list[str] = ["name=seccomp,profile=default"]
        self.output: list[bytes | BaseException] = []
        self.streams: list[Stream] = []
        self.state = {"ExitCode": 0, "OOMKilled": False}
        self.starts: list[Exception | None] = []
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.left: list[FakeDocker] = []
        self.attrs: dict[str, Any] = {}
        self.images = self.containers = self.api = self

    def close(self) -> None:
        self.calls.append("close")

    def info(self) -> dict[str, Any]:
        return {"SecurityOptions": self.security}

    def get(self, name: str) -> Any:
        if not self.here:
            raise ImageNotFound("no such image")
        return self.image

    def pull(self, name: str, *, stream: bool, decode: bool) -> Iterator[dict[str, Any]]:
        assert stream
        assert decode
        for event in self.pulled:
            if isinstance(event, Exception):
                raise event
            yield event
        self.here = True

    def create(self, image: Any, **options: Any) -> FakeDocker:
        assert image is self.image
        self.asked.append(options)
        self.left = [self]
        return self

    def list(self, *, all: bool, sparse: bool, filters: dict[str, str]) -> list[FakeDocker]:  # noqa: A002
        assert all
        assert sparse
        assert filters["label"].startswith("trtpipe.out=/")
        return self.left

    def attach(self, *, stream: bool) -> Stream:
        assert stream
        assert self.calls[-1:] != ["start"], "what it writes at once would be missed"
        self.streams.append(Stream(list(self.output)))
        return self.streams[-1]

    def start(self) -> None:
        failure = self.starts.pop(0) if self.starts else None
        if failure:
            raise failure
        self.calls.append("start")

    def wait(self, timeout: float | None) -> None:
        self.calls.append(f"wait {timeout}")

    def reload(self) -> None:
        self.attrs = {"State": self.state}

    def kill(self, name: str) -> None:
        self.calls.append(name)

    def remove(self, *, force: bool) -> None:
        assert force
        self.calls.append("remove")
        self.left = []


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    daemon = FakeDocker()
    monkeypatch.setattr(docker, "from_env", lambda **options: daemon)
    return daemon


def refused(reason: str) -> APIError:
    return APIError("500 Server Error", explanation=reason)


def gone_away() -> requests.ConnectionError:
    return connection_error(ConnectionResetError(104, "Connection reset by peer"))


def connection_error(cause: OSError) -> requests.ConnectionError:
    return requests.ConnectionError(ProtocolError("Connection aborted.", cause))


class TestTask:
    def options(self, daemon: FakeDocker, task: Task, **options: Any) -> dict[str, Any]:
        DockerExecutor(IMAGE, **options).run(task)
        return daemon.asked[-1]

    def test_what_is_asked(self, daemon: FakeDocker, make_task: MakeTask, tmp_path: Path) -> None:
        task = make_task("trtllm-build", "--a b", reads=(tmp_path, tmp_path), env={"MORE": "1"})
        options = self.options(daemon, task, shm_size="2g")
        assert options.pop("mounts") == [
            {"Type": "bind", "Source": str(tmp_path), "Target": str(tmp_path), "ReadOnly": True},
            {"Type": "bind", "Source": str(task.out), "Target": str(task.out), "ReadOnly": False},
        ]
        assert [(limit["Name"], limit["Soft"], limit["Hard"]) for limit in options.pop("ulimits")] == [
            ("memlock", -1, -1),
            ("stack", 67108864, 67108864),
        ]
        (request,) = options.pop("device_requests")
        assert (request["Count"], request["DeviceIDs"], request["Capabilities"]) == (-1, [], [["gpu"]])
        assert options == {
            "command": ["trtllm-build", "--a b"],
            "working_dir": str(task.out),
            "user": f"{os.getuid()}:{os.getgid()}",
            "environment": {"HOME": "/tmp", "USER": "trtpipe", "MORE": "1"},
            "shm_size": "2g",
            "init": True,
            "security_opt": ["no-new-privileges"],
            "cap_drop": ["ALL"],
            "network_mode": "none",
            "log_config": {"type": "none"},
            "labels": {"trtpipe": "trtllm-build", "trtpipe.out": str(task.out)},
        }
        assert task.log.read_text() == f"$ docker run {IMAGE} trtllm-build '--a b'\n"

    def test_what_is_written_may_be_named_as_read(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        task = make_task("x", reads=(make_task("x").out,))
        assert [mount["ReadOnly"] for mount in self.options(daemon, task)["mounts"]] == [False]

    def test_gpus(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        assert self.options(daemon, make_task("x", gpus=()))["device_requests"] == []
        (request,) = self.options(daemon, make_task("x", gpus=(0, 3)))["device_requests"]
        assert (request["Count"], request["DeviceIDs"]) == (0, ["0", "3"])

    @pytest.mark.process
    @pytest.mark.parametrize(
        ("visible", "gpus", "devices"),
        [
            (None, None, [(-1, None)]), ("1", None, [(0, ["1"])]), ("GPU-2,0", None, [(0, ["0", "2"])]),
            ("-1", None, []), ("", None, []), ("1", (2,), [(0, ["2"])]),
        ],
    )  # fmt: skip
    def test_gpus_that_cuda_may_not_see(
        self, daemon: FakeDocker, make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        visible: str | None, gpus: tuple[int, ...] | None, devices: list[tuple[int, list[str] | None]],
    ) -> None:  # fmt: skip
        nvidia_smi.install(monkeypatch, tmp_path, nvidia_smi.H100, nvidia_smi.H100, nvidia_smi.H100)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        requests = self.options(daemon, make_task("x", gpus=gpus))["device_requests"]
        assert [(request["Count"], request["DeviceIDs"] or None) for request in requests] == devices

    def test_a_container_runs_as_the_caller_or_as_root_of_rootless_docker(
        self, daemon: FakeDocker, make_task: MakeTask
    ) -> None:
        daemon.security.append("name=rootless")
        assert self.options(daemon, make_task("x"))["user"] == "0:0"
        assert self.options(daemon, make_task("x"), user="1:2")["user"] == "1:2"

    def test_limits_that_the_daemon_may_not_raise_stay(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        daemon.starts = [refused("error setting rlimit type 8: operation not permitted"), None]
        DockerExecutor(IMAGE).run(make_task("x"))
        assert [len(options["ulimits"]) for options in daemon.asked] == [2, 0]
        assert daemon.calls == ["remove", "start", "wait None", "remove", "close"]
        assert all(stream.closed for stream in daemon.streams)


class TestOutcome:
    def test_output_is_logged_and_shown(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        daemon.output = [b"on", b"e\n50%\r", b"end"]
        lines: list[str] = []
        task = make_task("x")
        DockerExecutor(IMAGE).run(task, lines.append)
        assert lines == ["one", "50%", "end"]
        assert task.log.read_bytes().endswith(b"x\none\n50%\rend")
        assert daemon.calls == ["start", "wait None", "remove", "close"]

    @pytest.mark.parametrize(
        ("repositories", "digest"),
        [
            ([], "sha256:id"),
            (["other@sha256:1", "registry.example/trtllm@sha256:2"], "sha256:2"),
            (["other@sha256:1"], "sha256:1"),
        ],
    )
    def test_the_image_is_recorded(
        self, daemon: FakeDocker, make_task: MakeTask, repositories: list[str], digest: str
    ) -> None:
        daemon.image.attrs["RepoDigests"] = repositories
        assert DockerExecutor(IMAGE).run(make_task("x")) == {"image": IMAGE, "image_digest": digest}

    @pytest.mark.parametrize(
        ("status", "oom", "told"),
        [
            (3, False, "exit status 3"),
            (137, False, "ended by SIGKILL, usually for want of memory"),
            (1, True, "ended by SIGKILL, usually for want of memory"),
            (139, False, "ended by SIGSEGV"),
            (255, False, "ended by signal 127"),
        ],
    )
    def test_failures(self, daemon: FakeDocker, make_task: MakeTask, status: int, oom: bool, told: str) -> None:
        daemon.output = [b"why\n"]
        daemon.state = {"ExitCode": status, "OOMKilled": oom}
        task = make_task("x")
        task.log.write_text("another's\n")
        with pytest.raises(StageFailed) as error:
            DockerExecutor(IMAGE).run(task)
        assert str(error.value) == f"trtllm-build failed ({told}): why; the log is {task.log}"

    def test_a_child_killed_for_memory_need_not_matter(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        daemon.state = {"ExitCode": 0, "OOMKilled": True}
        DockerExecutor(IMAGE).run(make_task("x"))

    @pytest.mark.parametrize("status", [126, 127])
    def test_a_program_that_cannot_be_run(self, daemon: FakeDocker, make_task: MakeTask, status: int) -> None:
        daemon.output = [b"exec x failed\n"]
        daemon.state = {"ExitCode": status, "OOMKilled": False}
        with pytest.raises(HostError) as error:
            DockerExecutor(IMAGE).run(make_task("x"))
        assert str(error.value) == f"x cannot be run in {IMAGE}: exec x failed; use an image that has x"

    def test_ctrl_c(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        daemon.output = [KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            DockerExecutor(IMAGE).run(make_task("x"))
        assert daemon.calls == ["start", "SIGINT", "wait 10.0", "remove", "close"]
        assert daemon.streams[0].closed

    def test_a_log_that_cannot_be_written_is_not_dockers_fault(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        daemon.output = [b"line\n"]

        def full(line: str) -> None:
            raise OSError(28, "No space left on device")

        with pytest.raises(OSError, match="No space left") as error:
            DockerExecutor(IMAGE).run(make_task("x"), full)
        assert not isinstance(error.value, TrtpipeError)
        assert daemon.calls[-2:] == ["remove", "close"]

    @pytest.mark.parametrize("step", ["wait", "reload", "list", "create", "info"])
    def test_a_daemon_that_goes_away(
        self, daemon: FakeDocker, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        def fail(*args: object, **options: object) -> None:
            raise gone_away()

        monkeypatch.setattr(daemon, step, fail)
        with pytest.raises(HostError) as error:
            DockerExecutor(IMAGE, base_url=None).run(make_task("x"))
        assert str(error.value) == (
            "Docker at unix:///var/run/docker.sock failed: Connection reset by peer; "
            "see that dockerd runs, then run again: what this run left in it is removed then"
        )

    def test_what_cannot_be_removed_does_not_undo_a_success(
        self, daemon: FakeDocker, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*, force: bool) -> None:
            raise refused("removal of container x is already in progress")

        monkeypatch.setattr(daemon, "remove", fail)
        DockerExecutor(IMAGE).run(make_task("x"))


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', "Docker has no NVIDIA runtime here"),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded", "Docker has no NVIDIA runtime"),
        ("nvidia-container-cli: device error: 5: unknown device", "Docker cannot give GPU 0, 5 to a container"),
        (
            "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9, please update your driver",
            f"this machine's NVIDIA driver is too old for {IMAGE}",
        ),
        ('exec: "x": executable file not found in $PATH: unknown', f"x cannot be run in {IMAGE}"),
        ("unknown or invalid runtime name: nvidia", "Docker has no NVIDIA runtime here"),
        ("bind source path does not exist: /nvidia-container", "Docker cannot mount this machine's folders"),
        ("no space left on device", f"Docker cannot start {IMAGE}"),
    ],
)
def test_containers_that_do_not_start(daemon: FakeDocker, make_task: MakeTask, reason: str, told: str) -> None:
    daemon.starts = [refused(reason)]
    with pytest.raises(HostError) as error:
        DockerExecutor(IMAGE).run(make_task("x", gpus=(0, 5)))
    assert error.value.what.startswith(told)
    assert error.value.why == reason
    assert daemon.calls == ["remove", "close"]
    assert daemon.streams[0].closed


class TestPull:
    def test_an_image_that_is_here_is_not_pulled(self, daemon: FakeDocker) -> None:
        daemon.pulled = [AssertionError("pulled")]
        DockerExecutor(IMAGE).prepare()

    def test_progress_is_of_all_layers(self, daemon: FakeDocker) -> None:
        def event(layer: str, status: str, current: int = 0, total: int = 0) -> dict[str, Any]:
            detail = {"current": current, "total": total} if total else {}
            return {"id": layer, "status": status, "progressDetail": detail}

        daemon.here = False
        daemon.pulled = [
            {"status": "Pulling from trtllm", "id": "1"},
            event("a", "Pulling fs layer"),
            event("b", "Already exists"),
            event("a", "Downloading", 10, 100),
            event("c", "Downloading", 200, 1000),
            event("a", "Download complete"),
            event("a", "Extracting", 40, 100),
            event("a", "Pull complete"),
            event("c", "Extracting", 1000, 1000),
            {"id": "c", "status": "Extracting", "progressDetail": {"current": 3, "units": "s"}},
            event("c", "Pull complete"),
            {"status": "Digest: sha256:1"},
        ]
        seen: list[tuple[int, int]] = []
        DockerExecutor(IMAGE).prepare(lambda done, total: seen.append((done, total)))
        assert list(dict.fromkeys(seen)) == [
            (0, 0), (5, 100), (105, 1100), (150, 1100), (170, 1100), (200, 1100), (1100, 1100),
        ]  # fmt: skip

    def test_a_run_shows_each_tenth(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        daemon.here = False
        daemon.pulled = [
            {"id": "a", "status": "Downloading", "progressDetail": {"current": gigabytes * 10**9, "total": 8 * 10**9}}
            for gigabytes in (0, 1, 2, 2, 4, 8)
        ]
        lines: list[str] = []
        DockerExecutor(IMAGE).run(make_task("x"), lines.append)
        assert lines == [f"pulling {IMAGE}: {percent}% of 8.0 GB" for percent in (0, 12, 25, 50)]

    def test_a_size_that_nobody_knows(self) -> None:
        layers = Layers()
        event = {"id": "a", "status": "Downloading", "progressDetail": {"current": 10, "total": -1}}
        assert layers.feed(event) == (0, 0)

    @pytest.mark.parametrize(
        ("reason", "what", "remedy"),
        [
            ("manifest for x not found: manifest unknown", f"there is no image {IMAGE}", "check its name and tag"),
            (
                "pull access denied for x, repository does not exist or may require 'docker login'",
                f"the registry does not give out {IMAGE}",
                "check its name, or run `docker login registry.example`",
            ),
            (
                "toomanyrequests: You have reached your pull rate limit",
                f"the registry limits pulls of {IMAGE}",
                "wait, or run `docker login registry.example`",
            ),
            (
                "failed to register layer: write /x: no space left on device",
                f"no room for {IMAGE} in Docker's storage",
                "free some space (`docker system df` tells what holds it), then run again",
            ),
            (
                "no matching manifest for linux/arm64/v8 in the manifest list entries",
                f"{IMAGE} is not made for this machine's processor",
                "name an image that is",
            ),
            (
                'Get "https://x/v2/": dial tcp: lookup x on 10.0.0.1:53: no such host',
                f"the registry of {IMAGE} cannot be reached",
                "check the network and dockerd's proxy, or bring the image here with `docker load`",
            ),
            (
                'Get "https://x/v2/": Proxy Authentication Required',
                f"the registry of {IMAGE} cannot be reached",
                "check the network and dockerd's proxy, or bring the image here with `docker load`",
            ),
            ("unexpected EOF", f"the pull of {IMAGE} broke off", "run again: the layers that arrived are kept"),
            (
                "read tcp 10.0.0.2:4->10.0.0.3:443: read: connection reset by peer",
                f"the pull of {IMAGE} broke off",
                "run again: the layers that arrived are kept",
            ),
            ("something else", f"Docker cannot pull {IMAGE}", ""),
        ],
    )
    @pytest.mark.parametrize("early", [True, False])
    def test_failures(self, daemon: FakeDocker, reason: str, what: str, remedy: str, early: bool) -> None:
        daemon.here = False
        daemon.pulled = [refused(reason) if early else {"errorDetail": {"message": reason}, "error": reason}]
        with pytest.raises(HostError) as error:
            DockerExecutor(IMAGE).prepare()
        assert (error.value.what, error.value.why, error.value.remedy) == (what, reason, remedy)

    def test_a_daemon_that_goes_away(self, daemon: FakeDocker) -> None:
        daemon.here = False
        daemon.pulled = [{"status": "Pulling from trtllm"}, gone_away()]
        with pytest.raises(HostError, match=r"Docker at .* failed: Connection reset by peer; "):
            DockerExecutor(IMAGE).prepare()

    @pytest.mark.parametrize(
        ("image", "login"),
        [("trtllm", "docker login`"), ("me/trtllm", "docker login`"), ("h:5/x", "docker login h:5`")],
    )
    def test_the_registry_to_log_in_to(self, daemon: FakeDocker, image: str, login: str) -> None:
        daemon.here = False
        daemon.pulled = [refused("unauthorized")]
        with pytest.raises(HostError) as error:
            DockerExecutor(image).prepare()
        assert error.value.remedy.endswith(login)

    def test_a_name_that_is_none(self, daemon: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
        def get(name: str) -> None:
            raise refused("invalid reference format")

        monkeypatch.setattr(daemon, "get", get)
        with pytest.raises(UsageError, match="'A B' is not the name of an image: invalid reference format"):
            DockerExecutor("A B").prepare()


class TestConnection:
    def failing(self, cause: Exception | None) -> Callable[..., None]:
        def connect(**options: object) -> None:
            try:
                if cause:
                    raise cause
            except Exception as error:
                raise DockerException(f"Error while fetching server API version: {error}") from error
            raise DockerException("Invalid bind address protocol: nowhere")

        return connect

    def test_what_the_system_says_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", "unix:///run/mine.sock")
        cause = connection_error(PermissionError(13, "Permission denied"))
        monkeypatch.setattr(docker, "from_env", self.failing(cause))
        with pytest.raises(HostError) as error:
            DockerExecutor(IMAGE).prepare()
        assert str(error.value) == (
            "Docker cannot be reached at unix:///run/mine.sock: Permission denied; "
            "start dockerd, add your user to the docker group, or set DOCKER_HOST to the endpoint that "
            "`docker context ls` lists"
        )

    def test_what_docker_says_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(docker, "DockerClient", self.failing(None))
        with pytest.raises(HostError, match="reached at nowhere: Invalid bind address protocol: nowhere; "):
            DockerExecutor(IMAGE, base_url="nowhere").prepare()

    def test_a_broken_frame_is_a_failure_of_docker(self, daemon: FakeDocker, make_task: MakeTask) -> None:
        daemon.output = [b"one\n", struct.error("unpack requires a buffer of 8 bytes")]
        with pytest.raises(HostError, match=r"Docker at .* failed: unpack requires a buffer"):
            DockerExecutor(IMAGE).run(make_task("x"))
