"""Run a toolchain's program in this environment, or in the toolchain's container image.

In a container a task sees the same absolute paths as outside, because its folders are mounted at their own paths: its
output needs no translation. The container runs as the calling user, without a network and without privileges, and is
removed in every case; a container that a killed run left behind is removed by the next run of the same folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.executor import Task
from trtpipe.engines.nvidia import read_gpus
from trtpipe.engines.process import Lines, Progress, describe_status, run, tail

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image

Show = Callable[[str], None]

DEFAULT_URL = "unix:///var/run/docker.sock"
# Time limit for an answer from Docker; the first container of a large image takes longest.
ANSWER_SECONDS = 120
# Labels with a container's purpose and output folder, by which leftovers of a killed run are found.
LABEL = "trtpipe"
OUT_LABEL = "trtpipe.out"
# Limits that NVIDIA asks for in its images: unlimited page-locked memory, and deep stacks.
LIMITS = {"memlock": -1, "stack": 64 << 20}
# Exit statuses of a shell, and of the container's init, for a program that cannot be run or does not exist.
CANNOT_RUN = (126, 127)


def _unseen(line: str) -> None: ...


def find_program(name: str) -> str | None:
    """A program of this environment, looked for beside its Python first: the environment need not be activated."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH') or os.defpath}")


class LocalExecutor:
    """Executor of programs in this environment."""

    name = "local"

    def prepare(self, progress: Progress = lambda done, total: None) -> None:
        """Do nothing: there is nothing to fetch."""

    def run(self, task: Task, show: Show = _unseen) -> dict[str, str]:
        program, *arguments = task.command
        found = find_program(program)
        if found is None:
            raise HostError(
                f"this environment has no {program}",
                why=f"it is neither beside {sys.executable} nor on PATH",
                remedy="install the toolchain here, or use --executor docker",
            )
        env = dict(task.env)
        if task.gpus is not None:
            # CUDA's own order is by speed, nvidia-smi's by the place on the bus.
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, task.gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        run([found, *arguments], task.log, what=task.what, env=env, cwd=task.out, show=show)
        return {}


class DockerExecutor:
    """Executor of programs in a container image, through the daemon at `base_url` (default: that of DOCKER_HOST)."""

    name = "docker"

    def __init__(
        self, image: str, *, shm_size: str = "1g", base_url: str | None = None, user: str | None = None
    ) -> None:
        self.image = image
        self.shm_size = shm_size
        self.base_url = base_url
        self.user = user

    def require(self) -> str:
        """The daemon's version and address. Raises HostError when it cannot be reached."""
        scheme, _, place = self._url.partition("://")
        if scheme == "unix" and not Path(place).exists():  # where Docker is not installed, the SDK need not be loaded
            raise self._unreachable("No such file or directory")
        with self._connected() as client:
            return f"{client.version()['Version']} at {self._url}"

    def prepare(self, progress: Progress = lambda done, total: None) -> None:
        """Fetch the image unless Docker has it. Raises HostError with the reason for a failure."""
        with self._connected() as client:
            self._find_image(client, progress)

    def remove_left(self, out: Path) -> None:
        """Remove the containers that write to `out`. Raises HostError when Docker does not answer."""
        with self._connected() as client:
            _remove_containers(client, out)

    def run(self, task: Task, show: Show = _unseen) -> dict[str, str]:
        with self._connected() as client, task.log.open("ab") as log:
            log.write(f"$ docker run {self.image} {shlex.join(task.command)}\n".encode())
            log.flush()
            begin = log.tell()
            image = self._find_image(client, self._in_tenths(show))
            _remove_containers(client, task.out)
            try:
                container, output = self._start(client, image, task)
                try:
                    output.copy(log, show)
                    state = _wait(container)
                except BaseException:
                    _interrupt(container, task.grace)
                    raise
                finally:
                    output.close()
            finally:
                with _unanswered():  # the outcome is known; the next run removes what is left
                    _remove_containers(client, task.out)
        self._check(state, task, begin)
        return {"image": self.image, "image_digest": self._digest(image)}

    @contextlib.contextmanager
    def _connected(self) -> Iterator[DockerClient]:
        """A client of the daemon; a failure of the daemon to answer becomes a HostError."""
        # Imported only in this class and only when it is used: the import is slow, because it loads an HTTP client.
        import docker
        from docker.errors import DockerException

        try:
            client = (
                docker.DockerClient(base_url=self.base_url, version="auto", timeout=ANSWER_SECONDS)
                if self.base_url
                else docker.from_env(version="auto", timeout=ANSWER_SECONDS)
            )
        except DockerException as error:
            raise self._unreachable(_reason(error)) from None
        with contextlib.closing(client):
            try:
                yield client
            except _transport_errors() as error:
                raise HostError(
                    f"Docker at {self._url} failed",
                    why=_reason(error),
                    remedy="see that dockerd runs, then run again: what this run left in it is removed then",
                ) from None

    def _unreachable(self, why: str) -> HostError:
        return HostError(
            f"Docker cannot be reached at {self._url}",
            why=why,
            remedy="start dockerd, add your user to the docker group, or set DOCKER_HOST to the endpoint that "
            "`docker context ls` lists",
        )

    @property
    def _url(self) -> str:
        return self.base_url or os.environ.get("DOCKER_HOST") or DEFAULT_URL

    def _find_image(self, client: DockerClient, progress: Progress = lambda done, total: None) -> Image:
        from docker.errors import APIError, ImageNotFound

        try:
            with contextlib.suppress(ImageNotFound):
                return client.images.get(self.image)
            layers = Layers()
            failure = None
            for event in client.api.pull(self.image, stream=True, decode=True):
                failure = event.get("error", failure)
                progress(*layers.feed(event))
            if failure:
                raise self._pull_failure(failure)
            return client.images.get(self.image)
        except APIError as error:
            raise self._pull_failure(_reason(error)) from None

    def _in_tenths(self, show: Show) -> Progress:
        """Report a pull's progress as lines, one for each tenth."""
        shown = -1

        def progress(done: int, total: int) -> None:
            nonlocal shown
            tenths = 10 * done // total if total else -1
            if tenths > shown:
                shown = tenths
                show(f"pulling {self.image}: {done / total:.0%} of {total / 1e9:.1f} GB")

        return progress

    def _pull_failure(self, reason: str) -> TrtpipeError:
        """The error for Docker's message about an image that it cannot fetch."""
        reasons = (
            (r"toomanyrequests|rate limit", f"the registry limits pulls of {self.image}", self._login("wait, or")),
            (r"dial tcp|no such host|connection refused|server misbehaving|awaiting headers|unreachable|x509|"
             r"proxyconnect|proxy authentication", f"the registry of {self.image} cannot be reached",
             "check the network and dockerd's proxy, or bring the image here with `docker load`"),
            (r"denied|unauthorized|authentication required|no basic auth",
             f"the registry does not give out {self.image}", self._login("check its name, or")),
            (r"no space left", f"no room for {self.image} in Docker's storage",
             "free some space (`docker system df` tells what holds it), then run again"),
            (r"no matching manifest", f"{self.image} is not made for this machine's processor",
             "name an image that is"),
            (r"manifest unknown|not found|no such image", f"there is no image {self.image}", "check its name and tag"),
            (r"EOF|connection reset|timeout|broken pipe|canceled|closed|byte range",
             f"the pull of {self.image} broke off", "run again: the layers that arrived are kept"),
        )  # fmt: skip
        if re.search(r"invalid reference|invalid (repository|tag)", reason):
            return UsageError(f"'{self.image}' is not the name of an image", why=reason)
        for pattern, what, remedy in reasons:
            if re.search(pattern, reason, re.IGNORECASE):
                return HostError(what, why=reason, remedy=remedy)
        return HostError(f"Docker cannot pull {self.image}", why=reason)

    def _login(self, before: str) -> str:
        host, slash, _ = self.image.partition("/")
        registry = f" {host}" if slash and re.search(r"[.:]|^localhost$", host) else ""
        return f"{before} run `docker login{registry}`"

    def _start(self, client: DockerClient, image: Image, task: Task) -> tuple[Container, Output]:
        """Start a container; return it and its output. Raises HostError for what this Docker or this image lacks."""
        from docker.errors import APIError

        def start(limits: dict[str, int]) -> tuple[Container, Output]:
            container = client.containers.create(image, **self._options(client, task, limits))
            output = Output(container)
            try:
                container.start()
            except BaseException:
                output.close()
                raise
            return container, output

        try:
            try:
                return start(LIMITS)
            except APIError as error:
                # The daemon may not raise limits itself (rootless, or in a container).
                if "rlimit" not in _reason(error):
                    raise
            _remove_containers(client, task.out)
            return start({})
        except APIError as error:
            raise self._start_failure(_reason(error), task) from None

    def _options(self, client: DockerClient, task: Task, limits: dict[str, int]) -> dict[str, Any]:
        from docker.types import DeviceRequest, Mount, Ulimit

        reads = dict.fromkeys(str(path) for path in task.reads if path != task.out)
        gpus = task.gpus
        if gpus is None and "CUDA_VISIBLE_DEVICES" in os.environ:
            gpus = tuple(gpu.device for gpu in read_gpus())
        devices = {"count": -1} if gpus is None else {"device_ids": [str(gpu) for gpu in gpus]}
        return {
            "command": list(task.command),
            "working_dir": str(task.out),
            "mounts": [
                *(Mount(path, path, type="bind", read_only=True) for path in reads),
                Mount(str(task.out), str(task.out), type="bind"),
            ],
            "user": self.user or _caller(client),
            # The image has no user of that number: programs that look up their user find these values instead.
            "environment": {"HOME": "/tmp", "USER": "trtpipe", **task.env},
            "device_requests": [] if gpus == () else [DeviceRequest(capabilities=[["gpu"]], **devices)],
            "shm_size": self.shm_size,
            "ulimits": [Ulimit(name=name, soft=limit, hard=limit) for name, limit in limits.items()],
            "init": True,
            "security_opt": ["no-new-privileges"],
            "cap_drop": ["ALL"],
            "network_mode": "host" if task.network else "none",
            # We keep the log; Docker need not keep another.
            "log_config": {"type": "none"},
            "labels": {LABEL: task.what, OUT_LABEL: str(task.out)},
        }

    def _start_failure(self, reason: str, task: Task) -> HostError:
        """The error for Docker's message about a container that it cannot start."""
        program = task.command[0]
        indices = ", ".join(map(str, task.gpus or ()))
        gpus = f"GPU {indices}" if indices else "the GPUs"
        reasons = (
            (r"unsatisfied condition", f"this machine's NVIDIA driver is too old for {self.image}",
             "update the driver, or use a toolchain made for it"),
            (r"unknown device|unresolvable CDI", f"Docker cannot give {gpus} to a container",
             "see `nvidia-smi -L` for the GPUs that are there"),
            (r"bind source path does not exist|mounts denied|mount source path|error mounting",
             "Docker cannot mount this machine's folders",
             "use a Docker that runs on this machine and may read the folder"),
            (r"could not select device driver|nvidia-container|runtime name: nvidia",
             "Docker has no NVIDIA runtime here", "install the NVIDIA Container Toolkit and restart Docker"),
            (r"executable file not found|exec: ", f"{program} cannot be run in {self.image}",
             f"use an image that has {program}"),
        )  # fmt: skip
        for pattern, what, remedy in reasons:
            if re.search(pattern, reason):
                return HostError(what, why=reason, remedy=remedy)
        return HostError(f"Docker cannot start {self.image}", why=reason)

    def _check(self, state: dict[str, Any], task: Task, begin: int) -> None:
        """Raise an error for a program that failed."""
        status = int(state["ExitCode"])
        if not status:
            return
        if state["OOMKilled"]:
            status = -signal.SIGKILL
        elif status > 128:  # the init reports a signal as a shell does
            status = 128 - status
        why = tail(task.log, begin=begin)
        if status in CANNOT_RUN:
            program = task.command[0]
            raise HostError(
                f"{program} cannot be run in {self.image}", why=why, remedy=f"use an image that has {program}"
            )
        raise StageFailed(f"{task.what} failed ({describe_status(status)})", why=why, remedy=f"the log is {task.log}")

    def _digest(self, image: Image) -> str:
        """The image's digest in a registry; for an image made here, its own identifier."""
        from docker.utils import parse_repository_tag

        repository, _ = parse_repository_tag(self.image)
        digests = dict(entry.rsplit("@", 1) for entry in image.attrs.get("RepoDigests") or ())
        return str(digests.get(repository) or next(iter(digests.values()), image.id))


class Output:
    """Output of a container on both streams, as it arrives, from its start to its end.

    Docker's own log would hold back an unfinished line, and a follower of that log may miss the last lines.
    """

    def __init__(self, container: Container) -> None:
        self._stream = container.attach(stream=True)

    def copy(self, log: BinaryIO, show: Show) -> None:
        lines = Lines(show)
        for chunk in self._stream:
            log.write(chunk)
            log.flush()
            lines.feed(chunk)
        lines.close()

    def close(self) -> None:
        # Closing the stream leaves the descriptor open.
        self._stream._response.close()  # type: ignore[attr-defined]


class Layers:
    """Progress of a pull over all layers: half of a layer counts when it has arrived, half when it is unpacked."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._arrived: dict[str, int] = {}
        self._unpacked: dict[str, int] = {}

    def feed(self, event: dict[str, Any]) -> tuple[int, int]:
        """Bytes done and bytes known so far, after one event of the pull."""
        layer, status, detail = event.get("id", ""), event.get("status"), event.get("progressDetail") or {}
        size = detail.get("total", 0)  # absent, or -1, where Docker does not know it
        if status == "Downloading" and size > 0:
            self._sizes[layer] = size
            self._arrived[layer] = detail["current"]
        elif status == "Extracting" and size > 0:
            self._sizes[layer] = self._arrived[layer] = size
            self._unpacked[layer] = detail["current"]
        elif layer in self._sizes and status in ("Download complete", "Pull complete"):
            self._arrived[layer] = self._sizes[layer]
            if status == "Pull complete":
                self._unpacked[layer] = self._sizes[layer]
        return (sum(self._arrived.values()) + sum(self._unpacked.values())) // 2, sum(self._sizes.values())


def _caller(client: DockerClient) -> str:
    """The user in the container who owns our files outside: in a rootless Docker, the container's root."""
    rootless = any("rootless" in option for option in client.info().get("SecurityOptions") or ())
    return "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"


def _wait(container: Container) -> dict[str, Any]:
    container.wait(timeout=None)  # a program may close its output and go on
    container.reload()
    state: dict[str, Any] = container.attrs["State"]
    return state


def _interrupt(container: Container, grace: float) -> None:
    """Send the signal of Ctrl-C, and give the program time to end. Removal kills what is left."""
    with _unanswered():
        container.kill("SIGINT")
        container.wait(timeout=grace)


def _remove_containers(client: DockerClient, out: Path) -> None:
    """Remove every container that writes to `out`, running or not."""
    from docker.errors import APIError

    found = client.containers.list(all=True, sparse=True, filters={"label": f"{OUT_LABEL}={out}"})
    for container in found:
        with contextlib.suppress(APIError):  # its removal is under way already
            container.remove(force=True)


def _transport_errors() -> tuple[type[Exception], ...]:
    """Exceptions that the SDK raises when the daemon goes away. Errors in writing our own files are not among them."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    return DockerException, RequestException, HTTPError, struct.error


def _unanswered() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(*_transport_errors())


def _reason(error: BaseException) -> str:
    """The cause inside an SDK's error: Docker's message, else the operating system's."""
    explanation = getattr(error, "explanation", None)
    if explanation:
        return str(explanation)
    todo: list[object] = [error]
    while todo:
        found = todo.pop(0)
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        if isinstance(found, BaseException):
            todo += [*found.args, found.__cause__ or found.__context__]
    return (str(error).splitlines() or [type(error).__name__])[0]
