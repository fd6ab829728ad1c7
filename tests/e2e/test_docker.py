"""A toolchain's program in a container of a real Docker daemon: its files, its output, its failures, and its end."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.factories import hf_folder
from tests.support.paths import ROOT
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.engines.executor import Task
from trtpipe.pipeline.execution.executors import DockerExecutor

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.e2e.dockerd import Daemon, Registry

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(120),
    # The SDK leaves a socket behind that could not connect.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
pytest_plugins = ["tests.e2e.dockerd"]

# A process of its own that runs a task which says "ready" and then takes its time.
CHILD = """
import signal, sys
from pathlib import Path
from trtpipe.engines.executor import Task
from trtpipe.pipeline.cli.app import handle_signals
from trtpipe.pipeline.execution.executors import DockerExecutor
handle_signals()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
url, image, out = sys.argv[1:]
command = ("python3", "-u", "-c", "import time; print('ready'); time.sleep(60)")
task = Task(command=command, reads=(), out=Path(out), what="it", gpus=(), log=Path(f"{out}.log"))
DockerExecutor(image, base_url=url).run(task, lambda line: print(line, flush=True))
"""

MakeTask = Callable[..., Task]


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    """A task that runs a Python script; options of Task come before its own."""

    def make(script: str, *arguments: object, **options: Any) -> Task:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        command = ("python3", "-u", "-c", script, *map(str, arguments))
        usual = {"command": command, "reads": (), "out": out, "what": "it", "gpus": (), "log": tmp_path / "it.log"}
        return Task(**{**usual, **options})

    return make


@pytest.fixture
def executor(dockerd: str, toolchain_image: str) -> DockerExecutor:
    return DockerExecutor(toolchain_image, base_url=dockerd)


def containers(client: DockerClient) -> list[str]:
    return [container.id or "" for container in client.containers.list(all=True)]


@pytest.fixture(autouse=True)
def nothing_left(docker_client: DockerClient) -> Iterator[None]:
    """Whatever a test does, no container is left by it."""
    yield
    assert containers(docker_client) == []


@pytest.fixture
def sockets_collected() -> Iterator[None]:
    """What the SDK left behind goes now, and not in the middle of another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def make_build(make_task: MakeTask, tmp_path: Path) -> MakeTask:
    """A task that builds an engine out of a checkpoint of ours with the double of trtllm-build."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    convert(hf_folder(tmp_path / "model"), checkpoint, dtype=None, mapping=Mapping())

    def make(**env: str) -> Task:
        command = ("trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "out"))
        env = {f"TRTLLM_DOUBLE_{name}": value for name, value in env.items()}
        return make_task("", command=command, reads=(checkpoint,), what="trtllm-build", env=env)

    return make


def test_a_task_reads_and_writes_at_the_same_places(
    executor: DockerExecutor, docker_client: DockerClient, make_task: MakeTask, tmp_path: Path
) -> None:
    given = tmp_path / "a folder, with=signs"
    given.mkdir()
    (given / "text").write_text("hello")
    task = make_task(
        "import os, sys; open('copy', 'w').write(open(sys.argv[1] + '/text').read()); os.mkdir('inner');"
        "print(os.getcwd(), os.environ['MORE'])",
        given,
        reads=(given, given),
        env={"MORE": "a 'b' $HOME"},
    )
    lines: list[str] = []
    facts = executor.run(task, lines.append)
    assert (task.out / "copy").read_text() == "hello"
    assert lines == [f"{task.out} a 'b' $HOME"]
    assert {path.stat().st_uid for path in (task.out / "copy", task.out / "inner")} == {os.getuid()}
    image = docker_client.images.get(executor.image)
    assert facts == {"image": executor.image, "image_digest": image.id}
    header, *rest = task.log.read_text().splitlines()
    assert header.startswith(f"$ docker run {executor.image} python3 -u -c 'import os")
    assert header.endswith(f"'{given}'")
    assert rest == lines


def test_files_belong_to_the_user_it_runs_as(dockerd: str, toolchain_image: str, make_task: MakeTask) -> None:
    task = make_task("import os; open('made', 'w'); print(os.getuid(), os.getgid(), os.environ['HOME'])")
    os.chown(task.out, 1234, 2345)
    lines: list[str] = []
    DockerExecutor(toolchain_image, base_url=dockerd, user="1234:2345").run(task, lines.append)
    assert lines == ["1234 2345 /tmp"]
    made = (task.out / "made").stat()
    assert (made.st_uid, made.st_gid) == (1234, 2345)


def test_what_is_given_to_read_cannot_be_written(executor: DockerExecutor, make_task: MakeTask, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    with pytest.raises(StageFailed, match="Read-only file system"):
        executor.run(make_task("import sys; open(sys.argv[1] + '/new', 'w')", given, reads=(given,)))
    assert list(given.iterdir()) == []


def test_a_folder_to_write_inside_one_to_read(executor: DockerExecutor, make_task: MakeTask, tmp_path: Path) -> None:
    task = make_task("open('made', 'w')", reads=(tmp_path,))
    executor.run(task)
    assert (task.out / "made").exists()


def test_a_task_has_no_network_no_privileges_and_little_around_it(
    executor: DockerExecutor, make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "beside").write_text("not given")
    task = make_task(
        "import os, socket; print(sorted(os.environ), os.listdir('..'));"
        "print(os.strerror(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect_ex(('192.0.2.1', 9))));"
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))));"
        "print(os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize)"
    )
    lines: list[str] = []
    executor.run(task, lines.append)
    assert lines == [
        "['HOME', 'HOSTNAME', 'PATH', 'USER'] ['out']",
        "Network is unreachable",
        f"{0:016x} 1",
        str(1 << 30),
    ]


def test_lines_are_shown_as_they_come(executor: DockerExecutor, make_task: MakeTask) -> None:
    came: list[tuple[str, float]] = []
    script = "import time; print('begin'); time.sleep(1); print('10%', end='\\r'); print('end', end='')"
    executor.run(make_task(script), lambda line: came.append((line, time.monotonic())))
    assert [line for line, _ in came] == ["begin", "10%", "end"]
    assert came[1][1] - came[0][1] > 0.8


def test_a_failure_shows_the_last_lines_and_names_the_log(executor: DockerExecutor, make_task: MakeTask) -> None:
    task = make_task("import sys, time; print('line 1'); time.sleep(0.2); sys.exit('line 2')")
    with pytest.raises(StageFailed) as error:
        executor.run(task)
    assert str(error.value) == f"it failed (exit status 1): line 1 | line 2; the log is {task.log}"


def test_trtllm_build_builds(executor: DockerExecutor, make_build: MakeTask) -> None:
    task = make_build()
    executor.run(task)
    assert {"config.json", "rank0.engine"} <= {path.name for path in task.out.iterdir()}
    assert json.loads((task.out / "config.json").read_text())["version"]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("oom", r"exit status 1\): .*memory"),
        ("killed", r"ended by SIGKILL, usually for want of memory\)"),
        ("crash", r"ended by SIGSEGV\)"),
    ],
)
def test_trtllm_build_fails(executor: DockerExecutor, make_build: MakeTask, failure: str, told: str) -> None:
    with pytest.raises(StageFailed, match=rf"^trtllm-build failed \({told}"):
        executor.run(make_build(FAIL=failure))


def test_a_program_that_is_killed(executor: DockerExecutor, make_task: MakeTask) -> None:
    task = make_task("import os; print('working'); os.kill(os.getpid(), 9)")
    with pytest.raises(StageFailed) as error:
        executor.run(task)
    told = f"it failed (ended by SIGKILL, usually for want of memory): working; the log is {task.log}"
    assert str(error.value) == told


def test_ctrl_c_asks_the_program_first(
    executor: DockerExecutor, docker_client: DockerClient, make_task: MakeTask
) -> None:
    script = "import time\ntry: print('ready'); time.sleep(60)\nexcept KeyboardInterrupt: open('asked', 'w')"
    task = make_task(script)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.run(task, interrupt)
    assert containers(docker_client) == []
    assert (task.out / "asked").exists()


def test_a_program_that_will_not_end_is_killed(
    executor: DockerExecutor, docker_client: DockerClient, make_task: MakeTask
) -> None:
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready'); time.sleep(60)"

    def fail(line: str) -> None:
        raise ValueError(line)

    with pytest.raises(ValueError, match="ready"):
        executor.run(make_task(script, grace=0.3), fail)
    assert containers(docker_client) == []


def start_child(url: str, image: str, out: Path) -> subprocess.Popen[str]:
    """A process that runs a task in a container, once the task has begun."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-c", CHILD, url, image, str(out)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_told_to_end_leaves_no_container(
    dockerd: str, toolchain_image: str, docker_client: DockerClient, tmp_path: Path, number: int
) -> None:
    child = start_child(dockerd, toolchain_image, tmp_path / "out")
    assert len(containers(docker_client)) == 1
    child.send_signal(number)
    _, told = child.communicate(timeout=20)
    assert child.returncode in (-number, 128 + number), told
    assert containers(docker_client) == []


def test_what_a_killed_run_left_is_removed_by_the_next(
    executor: DockerExecutor, dockerd: str, docker_client: DockerClient, make_task: MakeTask, tmp_path: Path
) -> None:
    children = [start_child(dockerd, executor.image, tmp_path / name) for name in ("out", "other")]
    for child in children:
        child.kill()
        child.communicate()
    left = containers(docker_client)
    assert len(left) == 2, "killing the process does not end its container"
    executor.run(make_task("pass"))
    (other,) = containers(docker_client)
    assert docker_client.containers.get(other).labels["trtpipe.out"] == str(tmp_path / "other"), "another's is not ours"
    executor.remove_left(tmp_path / "other")
    assert containers(docker_client) == []


@pytest.mark.skipif(shutil.which("nvidia-container-runtime-hook") is not None, reason="this Docker has a GPU runtime")
@pytest.mark.parametrize("gpus", [None, (0, 1)])
def test_gpus_where_docker_has_none(
    executor: DockerExecutor, make_task: MakeTask, gpus: tuple[int, ...] | None
) -> None:
    with pytest.raises(HostError) as error:
        executor.run(make_task("pass", gpus=gpus))
    assert str(error.value) == (
        'Docker has no NVIDIA runtime here: could not select device driver "" with capabilities: [[gpu]]; '
        "install the NVIDIA Container Toolkit and restart Docker"
    )


def test_an_image_without_the_program(executor: DockerExecutor, make_task: MakeTask) -> None:
    with pytest.raises(HostError) as error:
        executor.run(make_task("", command=("trtllm-bild", "x")))
    assert str(error.value).startswith(f"trtllm-bild cannot be run in {executor.image}: [FATAL tini ")
    assert str(error.value).endswith("No such file or directory; use an image that has trtllm-bild")


def test_a_folder_that_docker_does_not_see(executor: DockerExecutor, make_task: MakeTask) -> None:
    with pytest.raises(HostError, match=r"Docker cannot mount this machine's folders: .* does not exist: /nowhere;"):
        executor.run(make_task("pass", reads=(Path("/nowhere"),)))


@pytest.mark.usefixtures("sockets_collected")
def test_no_daemon(make_task: MakeTask, tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/none.sock"
    with pytest.raises(HostError) as error:
        DockerExecutor("image", base_url=url).run(make_task("pass"))
    assert str(error.value) == (
        f"Docker cannot be reached at {url}: No such file or directory; "
        "start dockerd, add your user to the docker group, or set DOCKER_HOST to the endpoint that "
        "`docker context ls` lists"
    )


def test_docker_host_names_the_daemon(
    dockerd: str, toolchain_image: str, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", dockerd)
    DockerExecutor(toolchain_image).run(make_task("pass"))


def test_an_image_is_pulled_once(dockerd: str, docker_client: DockerClient, registry: Registry) -> None:
    executor = DockerExecutor(f"{registry.address}/good:1", base_url=dockerd)
    seen: list[tuple[int, int]] = []
    executor.prepare(lambda done, total: seen.append((done, total)))
    size = len(registry.images["good"].layer)
    assert seen[-1] == (size, size)
    assert any(0 < done < size for done, _ in seen)
    assert seen == sorted(seen)
    image = docker_client.images.get(executor.image)
    assert image.attrs["RepoDigests"] == [f"{registry.address}/good@{registry.images['good'].digest}"]
    seen.clear()
    executor.prepare(lambda done, total: seen.append((done, total)))
    assert seen == [], "it is here already"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing:1", "there is no image {}: manifest unknown; check its name and tag"),
        ("secret:1", "the registry does not give out {}: .*; check its name, or run `docker login {address}`"),
        ("cut:1", "the pull of {} broke off: .*; run again: the layers that arrived are kept"),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_pulled(
    dockerd: str, registry: Registry, make_task: MakeTask, name: str, told: str
) -> None:
    image = f"{registry.address}/{name}"
    with pytest.raises(HostError) as error:
        DockerExecutor(image, base_url=dockerd).run(make_task("pass"))

    assert re.fullmatch(told.format(image, address=registry.address), str(error.value)), error.value


def test_a_registry_that_is_not_there(dockerd: str, make_task: MakeTask) -> None:
    with pytest.raises(HostError) as error:
        DockerExecutor("127.0.0.1:1/trtllm:1", base_url=dockerd).run(make_task("pass"))
    assert str(error.value) == (
        'the registry of 127.0.0.1:1/trtllm:1 cannot be reached: Get "http://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: '
        "connect: connection refused; "
        "check the network and dockerd's proxy, or bring the image here with `docker load`"
    )


@pytest.mark.parametrize("image", ["UPPER", "a b", "x:"])
def test_a_name_that_is_none(dockerd: str, image: str) -> None:
    with pytest.raises(UsageError, match=f"'{image}' is not the name of an image: "):
        DockerExecutor(image, base_url=dockerd).prepare()


@pytest.mark.usefixtures("sockets_collected")
def test_a_daemon_that_dies_in_the_middle(daemon: Daemon, toolchain_image: str, make_task: MakeTask) -> None:
    executor = DockerExecutor(toolchain_image, base_url=daemon.url)
    with pytest.raises(HostError) as error:
        executor.run(make_task("import time; print('ready'); time.sleep(60)"), lambda line: daemon.kill())
    assert str(error.value) == (
        f"Docker at {daemon.url} failed: Connection refused; "
        "see that dockerd runs, then run again: what this run left in it is removed then"
    )
    daemon.start()
    with daemon.client() as client:
        assert len(containers(client)) == 1
        executor.run(make_task("pass"))
        assert containers(client) == []
