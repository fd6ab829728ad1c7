"""What a watchdog goes by: which processes have died, what they held, and who watches."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import trtpipe.pipeline.serving.python_processes
from trtpipe.engines.errors import StageFailed
from trtpipe.engines.process import words_of
from trtpipe.pipeline.gateway import process as gateway_process
from trtpipe.pipeline.serving import serve, servers, triton_package, tritonserver, watchdog
from trtpipe.pipeline.serving.launch_options import LaunchOptions
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.python_processes import Stubs, is_zombie
from trtpipe.pipeline.serving.servers import Server
from trtpipe.pipeline.serving.tritonserver import InFlight, requests_in_flight
from trtpipe.pipeline.store.store import Store

IN_FLIGHT = Path(triton_package.BACKEND) / "trtpipe_in_flight.py"

# Starts a process for each argument as Triton starts its stubs, and collects those that it is told to.
PARENT = """
import subprocess, sys
stubs = {}
for instance in sys.argv[1:]:
    words = ["/backends/python/triton_python_backend_stub", "-c", "import time; time.sleep(600)", instance]
    stubs[instance] = subprocess.Popen(words, executable=sys.executable)
    print(stubs[instance].pid, flush=True)
for line in sys.stdin:
    stubs[line.strip()].terminate()
    stubs[line.strip()].wait()
    print("collected", flush=True)
"""


class Parent:
    """A stand-in for tritonserver."""

    def __init__(self, *instances: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *instances], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.stubs = {instance: int(self.process.stdout.readline()) for instance in instances}
        # A process has no command line for an instant after its parent was told that it runs its program.
        while not all(words_of(pid)[-2:-1] == [instance.encode()] for instance, pid in self.stubs.items()):
            time.sleep(0.001)

    def collect(self, instance: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(instance + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "collected\n"


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent("preprocessing_0_0", "a.cpu.fp32.tensorrt_llm_0_0", "a.cpu.fp32.tensorrt_llm_0_1")
    yield made
    for pid in made.stubs.values():
        kill(pid)
    with made.process as process:
        process.kill()


def kill(pid: int) -> None:
    subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.process
def test_a_process_that_dies_is_noticed_at_once_and_named_by_its_model(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trtpipe.pipeline.serving.python_processes, "_LOOK_SECONDS", 3600.0
    )  # only the death itself wakes it
    stubs = Stubs(parent.process.pid)
    assert stubs.died() == {}
    pid = parent.stubs["a.cpu.fp32.tensorrt_llm_0_1"]
    kill(pid)
    stubs.wait()
    assert stubs.died() == {pid: "a.cpu.fp32.tensorrt_llm"}
    assert is_zombie(pid)
    assert stubs.died() == {}, "each is told once"
    stubs.close()


@pytest.mark.process
def test_processes_that_die_together_are_told_together(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second dies while the first is looked at: else its model would be loaded again twice."""
    module = trtpipe.pipeline.serving.python_processes
    stubs = Stubs(parent.process.pid)
    first, second = (parent.stubs[f"a.cpu.fp32.tensorrt_llm_0_{index}"] for index in (0, 1))
    looked = module._uncollected

    def meanwhile(pid: int) -> bool:
        if pid == first:
            kill(second)
            while not is_zombie(second):
                time.sleep(0.001)
        return looked(pid)

    monkeypatch.setattr(module, "_uncollected", meanwhile)
    kill(first)
    stubs.wait()
    assert stubs.died() == dict.fromkeys((first, second), "a.cpu.fp32.tensorrt_llm")
    stubs.close()


@pytest.mark.process
def test_a_process_that_its_parent_ends_has_not_died(parent: Parent) -> None:
    """As when a model is unloaded or loaded anew."""
    stubs = Stubs(parent.process.pid)
    parent.collect("preprocessing_0_0")
    stubs.wait()
    assert stubs.died() == {}
    stubs.close()


@pytest.mark.process
def test_waiting_ends_with_the_server(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtpipe.pipeline.serving.python_processes, "_LOOK_SECONDS", 3600.0)
    stubs = Stubs(parent.process.pid)
    parent.process.kill()
    stubs.wait()
    stubs.close()


@pytest.fixture
def payload(tmp_path: Path) -> ModuleType:
    """The module that runs beside the backend's model, from a folder of its own."""
    folder = tmp_path / "tensorrtllm"
    folder.mkdir()
    path = folder / IN_FLIGHT.name
    path.write_bytes(IN_FLIGHT.read_bytes())
    spec = importlib.util.spec_from_file_location("trtpipe_in_flight", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requests_in_flight_are_counted_for_the_watchdog(payload: ModuleType, tmp_path: Path) -> None:
    counts = payload.InFlight("tensorrt_llm")
    assert requests_in_flight(tmp_path, "tensorrt_llm") == InFlight(0, 0)
    counts.add(1, False)
    counts.add(1, True)
    assert requests_in_flight(tmp_path, "tensorrt_llm") == InFlight(2, 1)
    assert requests_in_flight(tmp_path, "b.tensorrt_llm") == InFlight(0, 0)
    assert requests_in_flight(tmp_path, "tensorrt_llm", 1) == InFlight(0, 0), "another process's"
    counts.add(-1, True)
    assert requests_in_flight(tmp_path, "tensorrt_llm") == InFlight(1, 0)
    counts.close()
    assert not list((tmp_path / "tensorrtllm").glob("in-flight.*"))


@pytest.mark.process
def test_a_killed_process_s_counts_are_still_there(payload: ModuleType, tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from trtpipe_in_flight import InFlight; import time; "
    code += "counts = InFlight('m'); counts.add(1, False); print('counted', flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code, str(tmp_path / "tensorrtllm")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        process.kill()
    assert requests_in_flight(tmp_path, "m", process.pid) == InFlight(1, 0)


@pytest.mark.parametrize(
    ("victim", "file", "counts", "held"),
    [
        ("tensorrt_llm", "in-flight.tensorrt_llm.7", (1, 0), True),
        ("tensorrt_llm", "in-flight.tensorrt_llm.7", (0, 0), False),
        ("tensorrt_llm", "in-flight.tensorrt_llm.8", (3, 3), False),  # of another instance, which lives
        ("tensorrt_llm_bls", "in-flight.tensorrt_llm.8", (3, 1), True),
        ("tensorrt_llm_bls", "in-flight.tensorrt_llm.8", (3, 0), False),
        ("a.ensemble", "in-flight.a.tensorrt_llm.8", (1, 1), True),
        ("a.ensemble", "in-flight.b.tensorrt_llm.8", (1, 1), False),
    ],
)
def test_what_waits_for_a_dead_process_for_ever(
    tmp_path: Path, victim: str, file: str, counts: tuple[int, int], held: bool
) -> None:
    folder = tmp_path / "tensorrtllm"
    folder.mkdir()
    (folder / file).write_bytes(b"".join(count.to_bytes(8, sys.byteorder) for count in counts))
    assert watchdog._held(tmp_path, 7, victim) is held


def server(watcher: int | None) -> Server:
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    return Server(name="x", pid=1 << 22, served=(), log=Path("/l"), endpoints=points, watcher=watcher)


@pytest.mark.process
def test_a_watchdog_is_asked_to_end_and_killed_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "WATCHER_SECONDS", 1.0)
    for code, status in (("pass", -signal.SIGTERM), ("signal.signal(15, signal.SIG_IGN)", -signal.SIGKILL)):
        script = f"import signal, time; {code}; print('runs', flush=True); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", script, "serve"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert servers.watched(server(process.pid))
            servers.end_watcher(server(process.pid))
            assert process.wait(30) == status
        assert not servers.watched(server(process.pid))


@pytest.mark.process
def test_a_watchdog_whose_server_s_requests_have_more_time_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "WATCHER_SECONDS", 0.1)
    ends = "signal.signal(15, lambda *_: exit(time.sleep(1)))"
    script = f"import signal, time; {ends}; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script, "serve"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        servers.end_watcher(replace(server(process.pid), drain_s=30))
        assert process.wait(30) == 0


@pytest.mark.process
def test_another_program_that_got_its_number_is_left_alone() -> None:
    words = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(600)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        servers.end_watcher(server(process.pid))
        assert process.poll() is None
        process.kill()
    servers.end_watcher(server(None))


def test_a_server_that_is_told_to_end_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For systemd the status 143 would be one."""
    stubs = SimpleNamespace(wait=lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(watchdog, "Stubs", lambda pid: stubs)
    monkeypatch.setattr(watchdog, "end", lambda server: told.append("ended"))
    told: list[str] = []
    process: Any = None
    options: Any = None
    store = Store(tmp_path)
    watchdog.attend(
        server(None), process, store, options, restarts=0, ready=lambda: told.append("ready"),
        stopping=lambda: told.append("stopping"), note=told.append,
    )  # fmt: skip
    assert (told, servers.recorded(store)) == (["ready", "stopping", "ended"], [])


def test_a_server_whose_announcement_has_no_reader_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in `trtpipe serve TARGET --detach 2>&1 | head -1`: nothing that is written arrives."""

    def unread() -> None:
        raise SystemExit(141)

    monkeypatch.setattr(watchdog, "Stubs", lambda pid: None)
    monkeypatch.setattr(watchdog, "end", lambda server: ended.append(server.name))
    ended: list[str] = []
    process: Any = None
    options: Any = None
    with pytest.raises(SystemExit) as left:
        watchdog.attend(
            server(None), process, Store(tmp_path), options, restarts=0, ready=unread, stopping=unread, note=print
        )
    assert (left.value.code, ended) == (141, [server(None).name])
    assert servers.recorded(Store(tmp_path)) == []


def test_a_model_that_dies_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Deaths of another model do not count."""
    deaths = ["preprocessing", "postprocessing"] * 10 + ["preprocessing"]

    class Dying:
        def __init__(self, server_pid: int) -> None: ...

        def wait(self) -> None: ...

        def died(self) -> dict[int, str]:
            return {1: deaths.pop(0)}

    ended: list[Any] = []
    monkeypatch.setattr(watchdog, "Stubs", Dying)
    monkeypatch.setattr(watchdog, "_load_again", lambda *given: None)
    monkeypatch.setattr(tritonserver, "kill", ended.append)
    process: Any = SimpleNamespace(poll=lambda: None)
    options: Any = None
    with pytest.raises(StageFailed, match="Python processes of preprocessing died 11 times within 20 s"):
        watchdog.attend(
            server(None), process, Store(tmp_path), options, restarts=0, ready=lambda: None, stopping=lambda: None,
            note=lambda text: None,
        )  # fmt: skip
    assert (deaths, ended) == ([], [process])


def test_a_server_that_ends_once_more_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was started again once, as it may be; the command then ends with exit code 5."""
    monkeypatch.setattr(watchdog, "Stubs", lambda pid: SimpleNamespace(wait=lambda: None, close=lambda: None))
    crashed: Any = SimpleNamespace(poll=lambda: -11)
    monkeypatch.setattr(watchdog, "_start_again", lambda ended, *given: (ended, crashed))
    told: list[str] = []
    options: Any = None
    with pytest.raises(StageFailed, match="ended by itself") as caught:
        watchdog.attend(
            server(None), crashed, Store(tmp_path), options, restarts=1, ready=lambda: None, stopping=lambda: None,
            note=told.append,
        )  # fmt: skip
    assert caught.value.exit_code == 5
    assert [text.rpartition("; ")[2] for text in told] == ["starting it again", "x serves again"]


def test_a_gateway_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server goes on, as it is recorded by then."""
    ended = {1: "ended by SIGKILL", 2: None}
    told: list[str] = []
    left: list[Server] = []

    def wait() -> None:
        if told:
            raise KeyboardInterrupt

    def again(found: Server, *given: object) -> Server:
        return replace(found, gateway_pid=2)

    stubs = SimpleNamespace(wait=wait, died=dict)
    monkeypatch.setattr(watchdog, "Stubs", lambda pid: stubs)
    monkeypatch.setattr(watchdog, "as_recorded", lambda store, server: replace(server, keyed=True))
    monkeypatch.setattr(watchdog, "start_gateway_again", again)
    monkeypatch.setattr(watchdog, "end", left.append)
    monkeypatch.setattr(gateway_process, "ended", ended.get)
    monkeypatch.setattr(gateway_process, "end", lambda pid, drain_s: None)
    process: Any = SimpleNamespace(poll=lambda: None)
    options: Any = None
    first = replace(server(None), gateway_pid=1, gateway_url="http://127.0.0.1:9000")
    watchdog.attend(
        first, process, Store(tmp_path), options, restarts=0, ready=lambda: None, stopping=lambda: None,
        note=told.append,
    )  # fmt: skip
    assert told == [
        "the gateway has ended (ended by SIGKILL); starting it again",
        "the gateway answers again at http://127.0.0.1:9000",
    ]
    assert [(one.gateway_pid, one.keyed) for one in left] == [(2, True)]


def test_a_record_that_cannot_be_written_ends_no_server(tmp_path: Path) -> None:
    (tmp_path / "servers").touch()  # no folder
    told: list[str] = []
    watchdog._record(Store(tmp_path), server(None), told.append)
    assert told == ["`trtpipe ps` will tell what is out of date: the record cannot be written: File exists"]


@pytest.mark.process
def test_how_a_gateway_ended() -> None:
    """Of a child; whoever collected it before leaves no status."""
    running = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "trtpipe.pipeline.gateway.process"]
    )
    while not gateway_process.alive(running.pid):
        time.sleep(0.001)
    assert gateway_process.ended(running.pid) is None
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    assert gateway_process.ended(running.pid) == "ended by SIGKILL, usually for want of memory"
    assert gateway_process.ended(running.pid) == "its status is not known"
    running.wait()


def test_a_server_starts_again_beside_a_gateway_that_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options of the gateway are no obstacle to it, though it starts none."""

    def checked(name: str, repository: Path, gpus: None) -> None:
        raise StageFailed("the launch has gone on to the repository")

    for module, name, does in (
        (tritonserver, "end", lambda *given: None), (gateway_process, "alive", lambda pid: True),
        (serve, "check_passport", checked),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, does)
    served = servers.Served(name="x", repository=tmp_path)
    ended = replace(server(None), served=(served,), gateway_pid=1, gateway_url="https://127.0.0.1:9000")
    options = LaunchOptions(
        tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", cors_origins=("*",), model_names=("m",),
        gateway_workers=2, reasoning=False, otlp_endpoint="http://127.0.0.1:4318",
    )  # fmt: skip
    with pytest.raises(StageFailed, match="the launch has gone on to the repository"):
        watchdog._start_again(ended, Store(tmp_path), options, print)
