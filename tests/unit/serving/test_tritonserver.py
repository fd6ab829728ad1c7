"""What can be said of a tritonserver without starting one: its ports, its folders, its reasons, its end."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtpipe.engines import process
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.engines.extras import install_command
from trtpipe.engines.process import LAUNCHER
from trtpipe.pipeline.serving import server_log, triton_package, tritonserver
from trtpipe.pipeline.serving.model_control import wait_ready
from trtpipe.pipeline.serving.ports import Endpoints, choose_endpoints
from trtpipe.pipeline.serving.server_log import failure
from trtpipe.pipeline.serving.triton_package import Installation, prepare_backends
from trtpipe.pipeline.serving.tritonserver import alive, end

EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
# As tritonserver 2.51 wrote it, the table's lines shortened.
ENGINE_PROCESS = "trtpipe.engines.engine_process.server"
LOG = """\
W1121 12:26:48.263202 12348 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
E1121 12:26:48.263321 12348 server.cc:241] "CudaDriverHelper has not been initialized."
I1121 12:26:48.265330 12348 model_lifecycle.cc:472] "loading: tensorrt_llm:1"
E1121 12:26:49.123456 12348 model_lifecycle.cc:642] "failed to load 'tensorrt_llm' version 1: Internal: \
TritonModelException: the engine process ended: no rank0.safetensors

At:
  model.py(99): initialize
"
I1121 12:26:49.123999 12348 server.cc:674]
| tensorrt_llm     | 1       | UNAVAILABLE: Internal: TritonModelException |
error: creating server: Internal - failed to load all models
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "model tensorrt_llm: the engine process ended: no rank0.safetensors"),
        (
            "E0101 00:00:00.000000 1 model_lifecycle.cc:642] \"failed to load 'a_b' version 12: Invalid argument: "
            'no such thing"\n',
            "model a_b: no such thing",
        ),
        (
            "E0101 00:00:00.000000 1 model_lifecycle.cc:642] failed to load 'x' version 1: Unsupported: unquoted\n",
            "model x: unquoted",
        ),
        (
            'I0101 00:00:00.0 1 a.cc:1] "starting"\nE0101 00:00:00.0 1 server.cc:9] "the first error"\n'
            'E0101 00:00:00.0 1 server.cc:9] "the second"\n',
            "the first error",
        ),
        (
            'E0101 00:00:00.0 1 cuda.cc:1] "CudaDriverHelper has not been initialized"\n'
            "terminate called after throwing an instance of 'lock_exception'\n  what():  lock_exception\n",
            "it crashed: lock_exception",
        ),
        ('E0101 00:00:00.0 1 cuda.cc:1] "CudaDriverHelper has not been initialized"\nE0101 00:00:00.0 1 a.cc:9] "no"\n',
         "no"),
        ("tritonserver: error while loading shared libraries:\nlibx.so\n\n", "tritonserver: error while loading "
         "shared libraries: | libx.so"),
        ("Error: Failed to initialize NVML\nlast words\n", "Error: Failed to initialize NVML | last words"),
        ("Error: Failed to initialize NVML\nRuntimeError: no room\n", "RuntimeError: no room"),
        ("", ""),
    ],
)  # fmt: skip
def test_why_a_server_ended_is_read_from_its_log(tmp_path: Path, log: str, reason: str) -> None:
    path = tmp_path / "serve.log"
    path.write_text(log)
    assert failure(path) == reason


def test_the_last_outcome_of_each_load_counts(tmp_path: Path) -> None:
    def failed(name: str) -> str:
        return f"E0101 00:00:00.0 1 a.cc:6] \"failed to load '{name}' version 1: Internal: no room for {name}\"\n"

    def loaded(name: str) -> str:
        return f"I0101 00:00:00.0 1 a.cc:8] \"successfully loaded '{name}'\"\n"

    path = tmp_path / "serve.log"
    path.write_text(failed("before"))
    begin = server_log.size(path)
    path.write_text(path.read_text() + loaded("x") + failed("a.y") + failed("z") + failed("x") + loaded("a.y"))
    assert list(server_log.loads(path, begin).items()) == [
        ("z", "no room for z"), ("x", "no room for x"), ("a.y", "")
    ]  # fmt: skip
    assert server_log.loads(tmp_path / "none.log", server_log.size(tmp_path / "none.log")) == {}


def test_only_the_last_start_says_why_a_server_ended(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_text(LOG + "--- server is started 2026-11-25 10:00:00 ---\nlast words\n")
    assert failure(path) == "last words"
    assert path.read_bytes()[server_log.last_start(path) :] == b"last words\n"
    assert server_log.last_start(tmp_path / "none.log") == 0


@pytest.mark.process
def test_a_log_is_appended_to_and_its_owner_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "serve.log"
    log.write_text("Signal (11) received.\n")
    log.chmod(0o644)
    for _ in range(2):
        tritonserver.spawn(["/bin/echo", "a word"], {}, tmp_path, log).wait()
    assert re.fullmatch(
        r"Signal \(11\) received\.\n(--- server is started [\d-]+ [\d:]+ ---\na word\n){2}", log.read_text()
    )
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    monkeypatch.setattr(process, "LOG_BYTES", 100)
    tritonserver.spawn(["/bin/echo", "a word"], {}, tmp_path, log).wait()
    assert "Signal (11)" in (tmp_path / "serve.log.1").read_text()
    assert log.read_text().count("a word") == 1


@pytest.mark.process
def test_a_server_is_not_given_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTPIPE_API_KEYS", "of the gateway alone")
    tritonserver.spawn(["/usr/bin/env"], {"MORE": "1"}, tmp_path, tmp_path / "log").wait()
    text = (tmp_path / "log").read_text()
    assert "PATH=" in text
    assert "MORE=1" in text
    assert "TRTPIPE_API_KEYS" not in text


def test_a_log_that_is_not_there_gives_no_reason(tmp_path: Path) -> None:
    assert failure(tmp_path / "none.log") == ""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.loopback
def test_zero_takes_three_different_free_ports() -> None:
    for _ in range(50):
        points = choose_endpoints("127.0.0.1", 0, 0, 0)
        assert len({points.http, points.grpc, points.metrics}) == 3
        assert min(points.http, points.grpc, points.metrics) > 0


@pytest.mark.loopback
@pytest.mark.skipif(not Path(EPHEMERAL).exists(), reason="Linux names the ports that it gives to clients")
def test_a_chosen_port_is_none_that_a_client_may_be_given_while_the_models_load() -> None:
    """Or the server, which binds it minutes later, finds it taken."""
    low, high = map(int, Path(EPHEMERAL).read_text(encoding="ascii").split())
    for _ in range(50):
        points = choose_endpoints("127.0.0.1", 0, 0, 0, openai=0)
        assert not {points.http, points.grpc, points.metrics} & set(range(low, high + 1))


@pytest.mark.loopback
def test_a_port_that_is_asked_for_is_kept() -> None:
    free = choose_endpoints("127.0.0.1", 0, 0, 0)
    again = choose_endpoints("127.0.0.1", free.http, free.grpc, 0)
    assert (again.http, again.grpc) == (free.http, free.grpc)


@pytest.mark.loopback
@pytest.mark.parametrize("name", ["http", "grpc", "metrics", "openai"])
def test_a_taken_port_names_the_option(taken: int, name: str) -> None:
    ports = {"http": 0, "grpc": 0, "metrics": 0, name: taken}
    with pytest.raises(HostError) as caught:
        choose_endpoints("127.0.0.1", **ports)
    assert str(caught.value) == (
        f"port {taken} on 127.0.0.1 cannot be taken: Address already in use; "
        f"stop what listens there, or pass --{name}-port 0 to choose a free one"
    )


@pytest.mark.loopback
def test_one_port_cannot_serve_two() -> None:
    port = choose_endpoints("127.0.0.1", 0, 0, 0).http
    with pytest.raises(UsageError) as caught:
        choose_endpoints("127.0.0.1", port, 0, port)
    assert str(caught.value) == f"port {port} is asked for twice; pass --metrics-port 0 to choose a free one"
    with pytest.raises(UsageError, match="is asked for twice; pass --openai-port 0"):
        choose_endpoints("127.0.0.1", 0, port, 0, port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(UsageError) as caught:
        choose_endpoints("127.0.0.1", port, 0, 0)
    assert str(caught.value) == f"--http-port {port} is not a port; give a number from 0 to 65535"


@pytest.mark.loopback
def test_an_address_of_another_machine_is_refused() -> None:
    # 192.0.2.0/24 is for documentation: no machine has it.
    with pytest.raises(HostError) as caught:
        choose_endpoints("192.0.2.1", 0, 0, 0)
    assert str(caught.value) == (
        "a free port on 192.0.2.1 cannot be taken: Cannot assign requested address; "
        "pass an IPv4 address of this machine as --host"
    )


def test_endpoints_as_urls() -> None:
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    assert (points.http_url, points.grpc_url, points.metrics_url) == (
        "http://127.0.0.1:1", "127.0.0.1:2", "http://127.0.0.1:3/metrics",
    )  # fmt: skip


@pytest.mark.parametrize(("version", "works"), [("1.26.4", True), ("2.0.0", False), ("2.3.1", False)])
def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, works: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if works:
        triton_package.check_numpy()
        return
    with pytest.raises(HostError) as caught:
        triton_package.check_numpy()
    assert str(caught.value) == (
        f"numpy {version} breaks Triton's Python backend: models become ready and then return empty tensors; "
        f"run `{install_command('serve')}`, which brings an earlier one"
    )


def test_a_folder_from_which_no_stub_starts_is_refused() -> None:
    triton_package.check_folder(Path("/data/~me/.cache/trtpipe/servers/llama3-8b.h100.fp8+other"))
    with pytest.raises(HostError, match="a path that has '\u00fc' in it"):
        triton_package.check_folder(Path("/data/m\u00fcller/.cache/trtpipe/servers/llama3-8b.h100.fp8"))
    with pytest.raises(HostError) as caught:
        triton_package.check_folder(Path("/data/Jane Doe/servers/x"))
    assert str(caught.value) == (
        "Triton cannot serve from /data/Jane Doe/servers/x: its Python backend does not start from a path that has ' ' "
        "in it; set TRTPIPE_HOME to a folder of letters and digits; a repository's own name must be so too"
    )


def test_an_editable_install_in_a_folder_that_is_not_ascii_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "_editable_impl_trtpipe.pth"
    file.write_text("/data/me/Gr\u00f6\u00dfe mit Leer/trtpipe", encoding="utf-8")
    with pytest.raises(HostError, match=rf"^{file} holds a path that is not ASCII: Triton's Python backend cannot "):
        triton_package.check_start_files(tmp_path)
    file.write_text("/data/me/a b/trtpipe", encoding="utf-8")
    triton_package.check_start_files(tmp_path)


def test_a_python_without_its_shared_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"Py_ENABLE_SHARED": 0, "LIBDIR": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_config_var", settings.get)
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=99))
    with pytest.raises(HostError, match=r"this Python has no libpython3\.99\.so\.1\.0: Triton's Python backend"):
        triton_package.check_libpython()
    (tmp_path / "libpython3.99.so.1.0").touch()
    triton_package.check_libpython()


def test_an_environment_without_a_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytriton" else real(name))
    with pytest.raises(HostError, match="nvidia-pytriton") as caught:
        triton_package.find_installation()
    assert caught.value.remedy == f"run `{install_command('serve')}`"


def test_the_backend_folder_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "python").mkdir(parents=True)
    (package / "python" / "libtriton_python.so").write_bytes(b"library")
    (package / "stub").write_bytes(b"stub")
    (package / "stub").chmod(0o755)
    installation = Installation(
        server=package / "server", python_backend=package / "python", stub=package / "stub",
        libraries=package, caches=package, version="0",
    )  # fmt: skip
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere/lib")
    folder = tmp_path / "backends"
    (folder / "python").mkdir(parents=True)
    (folder / "python" / "old").touch()
    prepare_backends(installation, folder)
    assert sorted(path.name for path in (folder / "python").iterdir()) == [
        "libtriton_python.so", "triton_python_backend_stub",
    ]  # fmt: skip
    assert os.access(folder / "python" / "triton_python_backend_stub", os.X_OK)
    assert not any(path.is_symlink() for path in folder.rglob("*"))  # the server refuses a library behind a link
    assert (folder / "tensorrtllm" / "model.py").read_bytes() == (triton_package.BACKEND / "model.py").read_bytes()
    launch = json.loads((folder / "tensorrtllm" / "engine.json").read_text())
    assert launch == {
        "command": [
            sys.executable, str(LAUNCHER), ENGINE_PROCESS,
            "--protocol", "2", "--runtime", "trtpipe.engines.reference.runtime",
        ],
        "library_path": "/somewhere/lib",
    }  # fmt: skip
    other = tmp_path / "elsewhere" / "python"
    other.parent.mkdir()
    other.touch(0o755)
    monkeypatch.chdir(tmp_path)
    prepare_backends(installation, folder, "vllm", "elsewhere/python")
    launch = json.loads((folder / "tensorrtllm" / "engine.json").read_text())
    assert launch["command"] == [
        str(other), str(LAUNCHER), ENGINE_PROCESS,
        "--protocol", "2", "--runtime", "trtpipe.engines.engine_process.vllm_runtime",
    ]  # fmt: skip
    with pytest.raises(HostError, match=r"^elsewhere/pyton cannot be started: it is not an executable file"):
        prepare_backends(installation, folder, "vllm", "elsewhere/pyton")


@pytest.mark.process
def test_another_program_with_the_server_s_number_is_not_the_server() -> None:
    assert not alive(os.getpid())
    with subprocess.Popen(["sh", "-c", "read line", "/opt/bin/tritonserver"], stdin=subprocess.PIPE) as editor:
        assert not alive(editor.pid)


@pytest.mark.process
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_server_is_asked_to_end_and_then_killed(stubborn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "STOP_SECONDS", 0.5)
    script = ("trap '' TERM; " if stubborn else "") + "echo up; while :; do sleep 0.05; done"
    command = ["/opt/bin/tritonserver", "-c", script]
    process = subprocess.Popen(command, executable="/bin/sh", stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert alive(process.pid)
    assert end(process.pid) is not stubborn
    process.stdout.close()
    process.wait()
    assert not alive(process.pid)


@pytest.mark.process
@pytest.mark.parametrize(("drain_s", "by_itself"), [(0, False), (30, True)])
def test_requests_that_were_given_more_time_have_it(
    monkeypatch: pytest.MonkeyPatch, *, drain_s: int, by_itself: bool
) -> None:
    monkeypatch.setattr(tritonserver, "STOP_SECONDS", 0.1)
    script = "trap 'sleep 1; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    command = ["/opt/bin/tritonserver", "-c", script]
    with subprocess.Popen(
        command, executable="/bin/sh", stdout=subprocess.PIPE, start_new_session=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert end(process.pid, drain_s=drain_s) is by_itself


@pytest.mark.process
@pytest.mark.loopback
def test_a_server_that_loads_longer_than_it_may_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("loading: tensorrt_llm:1\n")
    with subprocess.Popen(["sleep", "600"]) as process:
        with pytest.raises(StageFailed, match=r"^tritonserver is not ready after 1 s: loading: .*; if it still loads"):
            wait_ready(process, "http://127.0.0.1:1/v2/health/ready", tmp_path / "log", seconds=1)
        process.kill()


@pytest.mark.process
def test_the_stand_in_of_a_container_is_asked_once_more_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tritonserver, "STOP_SECONDS", 0.3)
    (tmp_path / "container").touch()
    script = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(os.unlink(sys.argv[1]))); print('up', flush=True); "
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "container"), tritonserver.STAND_IN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert not end(process.pid)
        process.wait()
    assert not (tmp_path / "container").exists()


# Its executor runs a container that ends the seconds of the second argument after it was told to.
STAND_IN_SCRIPT = """
import sys
import time
from trtpipe.pipeline.serving import docker_server

class Executor:
    def __init__(self, image, shm_size): ...

    def run(self, task, write):
        try:
            write("runs")
            time.sleep(600)
        except KeyboardInterrupt:
            write("asked")
            time.sleep(float(sys.argv[2]))
            write("ended")
            raise

docker_server.DockerExecutor = Executor
docker_server.main()
"""


@pytest.mark.process
@pytest.mark.parametrize(("second", "takes_s", "told"), [(signal.SIGTERM, "0.5", "ended\n"), (signal.SIGINT, "60", "")])
def test_a_container_has_its_time_to_end_when_every_process_of_a_service_is_told_to(
    second: signal.Signals, takes_s: str, told: str
) -> None:
    """systemd tells the stand-in, and then the watchdog does. Only SIGINT ends it at once."""
    spec = {"image": "i", "shm_size": "1g", "command": ["x"], "reads": [], "out": "/o", "gpus": None, "grace": 1}
    command = [sys.executable, "-c", STAND_IN_SCRIPT, json.dumps(spec), takes_s]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(second)
        assert (process.stdout.read(), process.wait(30)) == (told, 0)


@pytest.mark.process
def test_a_server_is_killed_at_once_but_the_stand_in_of_a_container_is_asked_to_end(tmp_path: Path) -> None:
    """Or its container would go on, and hold the GPU and the ports."""
    script = f"trap 'echo removed > {tmp_path}/container; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    for word, status in ((tritonserver.PROGRAM, -signal.SIGKILL), (tritonserver.STAND_IN, 0)):
        with subprocess.Popen(["sh", "-c", script, word], stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            tritonserver.kill(process)
        assert process.returncode == status
        assert (tmp_path / "container").exists() is (word == tritonserver.STAND_IN)


@pytest.mark.process
def test_a_second_ctrl_c_kills_a_server_that_is_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tritonserver"
    program.symlink_to(sys.executable)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([program, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        server.stdout.readline()

        def interrupted(seconds: float) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            end(server.pid)
        assert server.wait(timeout=10) == -signal.SIGKILL
