"""Processes of a group of servers on several nodes: a leader, and workers that run what it hands over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtpipe.pipeline.deploy import rendezvous

# Starts daemons as Open MPI does: through the agent, one for each host but its own, and waits for them.
MPIRUN = """#!PYTHON
import os, shlex, signal, subprocess, sys
assert "TRTPIPE_RENDEZVOUS_SECRET" not in os.environ
hosts = [word.partition(":")[0] for word in sys.argv[sys.argv.index("--host") + 1].split(",")]
log = open(sys.argv[-1], "a")
def leave(number, frame):
    log.write("told to end\\n")
    sys.exit(3)
signal.signal(signal.SIGTERM, leave)
log.write(" ".join(hosts) + "\\n"); log.flush()
agent = shlex.split(os.environ["OMPI_MCA_plm_rsh_agent"])
command = ["echo", "$WHO", ";", os.environ["DAEMON"]]
daemons = [subprocess.Popen([*agent, host, *command]) for host in hosts[1:]]
sys.exit(sum(daemon.wait() for daemon in daemons))
"""


class Group:
    """A leader and its workers as processes of this machine, under a stand-in for mpirun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = [sys.executable, rendezvous.__file__]
        (folder / "mpirun").write_text(MPIRUN.replace("PYTHON", sys.executable, 1))
        (folder / "mpirun").chmod(0o755)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, words: list[str], **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            environment = {**os.environ, "TMPDIR": str(self.folder), rendezvous.SECRET: "of this group 16", **variables}
            process = subprocess.Popen([*self.script, *words], env=environment, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def lead(self, workers: int, daemon: str) -> subprocess.Popen[bytes]:
        mpirun = [str(self.folder / "mpirun"), str(self.folder / "mpirun.log")]
        return self.start("leader", ["lead", str(workers), "8", self.port, *mpirun], DAEMON=daemon)

    def work(self, index: int) -> subprocess.Popen[bytes]:
        variables = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_WORKER_INDEX": str(index), "WHO": f"worker {index}"}
        return self.start(f"worker{index}", ["work", self.port], HOSTNAME=f"set-0-{index}", **variables)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, words: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / f"{name}.log").exists() or words not in self.said(name):
            assert time.monotonic() < deadline, f"{name} does not say '{words}'"
            time.sleep(0.05)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.chdir(tmp_path)
    made = Group(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.mark.process
@pytest.mark.loopback
def test_workers_run_what_the_leader_hands_over_in_their_own_environment(group: Group) -> None:
    # Workers may come first, and in any order.
    second = group.work(2)
    leader = group.lead(2, "sleep 0.2")
    first = group.work(1)
    assert [process.wait(60) for process in (leader, first, second)] == [0, 0, 0]
    assert group.said("mpirun") == f"{socket.gethostname()} set-0-1 set-0-2\n"
    assert "worker 1\n" in group.said("worker1")
    assert "worker 2\n" in group.said("worker2")


@pytest.mark.process
@pytest.mark.loopback
def test_a_daemon_that_fails_fails_the_group(group: Group) -> None:
    leader, worker = group.lead(1, "exit 7"), group.work(1)
    assert (leader.wait(60), worker.wait(60)) == (7, 7)


@pytest.mark.process
@pytest.mark.loopback
def test_a_worker_does_not_outlive_its_leader(group: Group) -> None:
    leader, worker = group.lead(1, "echo $$ > daemon; exec sleep 600"), group.work(1)
    group.wait_for("worker1", "worker 1\n")
    leader.kill()
    assert worker.wait(60) != 0
    pid = int((group.folder / "daemon").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.process
@pytest.mark.loopback
def test_term_is_for_mpirun_to_pass_on(group: Group) -> None:
    leader, worker = group.lead(1, "exec sleep 600"), group.work(1)
    group.wait_for("worker1", "worker 1\n")
    # The worker's ranks may still be answering.
    worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert worker.poll() is None
    leader.send_signal(signal.SIGTERM)
    assert leader.wait(60) == 3
    assert "told to end" in group.said("mpirun")
    assert worker.wait(60) != 0


@pytest.mark.process
@pytest.mark.loopback
def test_who_waits_leaves_at_once(group: Group) -> None:
    leader = group.lead(2, "sleep 600")
    group.wait_for("leader", "waiting for 2 worker(s)")
    worker = group.work(1)
    group.wait_for("leader", "worker 1 of 2 is here: set-0-1")
    for process in (worker, leader):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.process
@pytest.mark.loopback
def test_neither_side_begins_without_a_secret(group: Group) -> None:
    for secret in ("", "fifteen letters"):
        worker = group.start("worker1", ["work", group.port], LWS_LEADER_ADDRESS="127.0.0.1", LWS_WORKER_INDEX="1",
                             **{rendezvous.SECRET: secret})  # fmt: skip
        leader = group.start("leader", ["lead", "1", "8", group.port, "mpirun"], **{rendezvous.SECRET: secret})
        assert (worker.wait(60), leader.wait(60)) == (1, 1)
        for name in ("worker1", "leader"):
            assert "TRTPIPE_RENDEZVOUS_SECRET has fewer than 16 characters" in group.said(name)


@pytest.mark.process
@pytest.mark.loopback
def test_what_they_start_is_not_given_the_secret(group: Group) -> None:
    leader, worker = group.lead(1, "env > daemon"), group.work(1)
    assert (leader.wait(60), worker.wait(60)) == (0, 0)
    assert "WHO=worker 1" in (group.folder / "daemon").read_text()
    # Nor mpirun: the stand-in fails when it has it.
    assert rendezvous.SECRET not in (group.folder / "daemon").read_text()
