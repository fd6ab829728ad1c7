"""The engine process, run as a stub runs it: what it has started goes with it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtpipe.engines.engine_process import server
from trtpipe.engines.engine_process.request import Output

pytestmark = pytest.mark.process


def test_what_it_started_ends_with_the_server_and_not_with_a_signal_to_every_process(tmp_path: Path) -> None:
    """`systemctl stop` sends SIGTERM to the server, whose requests have time to end, and to the engine beside it."""
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    command = [
        sys.executable, "-m", "trtpipe.engines.engine_process.server",
        "--runtime", "tests.support.doubles.runtime_with_child", "--engine", str(tmp_path),
        "--address", f"trtpipe-test-{os.getpid()}", "--server", str(server.pid), "--protocol", "2",
    ]  # fmt: skip
    engine = subprocess.Popen(command, start_new_session=True)
    try:
        child = number(tmp_path / "child")
        engine.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            engine.wait(0.5)
        server.kill()
        assert select.select([child], [], [], 30)[0]
        assert engine.wait(30) != 0
    finally:
        for process in (server, engine):
            process.kill()
            process.wait()


@pytest.mark.loopback
@pytest.mark.parametrize(("protocol", "prefix"), [((), "!II"), (("--protocol", "3"), "!IQ")])
def test_a_server_of_another_version_is_told_so(tmp_path: Path, protocol: tuple[str, ...], prefix: str) -> None:
    address = f"trtpipe-test-version-{os.getpid()}"
    command = [
        sys.executable, "-m", "trtpipe.engines.engine_process.server", *protocol,
        "--runtime", "tests.support.doubles.runtime_with_child", "--engine", str(tmp_path), "--address", address,
    ]  # fmt: skip
    engine = subprocess.Popen(command)
    try:
        with connected(address) as sock, sock.makefile("rb") as incoming:
            said = incoming.read()
        length, blob = struct.unpack_from(prefix, said)
        text = said[struct.calcsize(prefix) :]
        assert (len(text), blob) == (length, 0)
        assert json.loads(text) == {
            "type": "failed",
            "error": "this server was started by another version of trtpipe: stop it and serve it again",
        }
        assert engine.wait(30) == 1
        assert not (tmp_path / "child").exists(), "nothing is loaded"
    finally:
        engine.kill()
        engine.wait()


def connected(address: str) -> socket.socket:
    """A stub's socket, once the engine process listens."""
    deadline = time.monotonic() + 30
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + address)
            return sock
        except OSError:
            sock.close()
            assert time.monotonic() < deadline, "the engine process does not listen"
            time.sleep(0.02)


def number(path: Path) -> int:
    """A descriptor of the process whose number is in a file that is being written."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return os.pidfd_open(int(path.read_text()))
        time.sleep(0.02)
    raise AssertionError("the engine has not started its process")


def test_a_stop_ends_the_request_of_a_key_or_all_of_an_id() -> None:
    stubs = {number: server._Stub(SimpleNamespace(send=print), number) for number in (1, 2)}  # type: ignore[arg-type]
    stubs[1].running = {10: ["same", "7"], 11: ["", "8"]}
    stubs[2].running = {10: ["same", "9"]}
    cancelled: list[Any] = []
    runtime: Any = SimpleNamespace(cancel=cancelled.append)
    for name in ("9", "8", "same", "nobody's"):
        server._handle(runtime, stubs, stubs[1], {"type": "stop", "name": name}, b"", None)
    assert cancelled == [(2, 10), (1, 11), (1, 10), (2, 10)]


def test_a_request_that_the_runtime_gave_up_is_told_apart_from_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[Any] = []
    connection: Any = SimpleNamespace(send=lambda message, blob: sent.append(message))
    stub = server._Stub(connection, 1)
    stub.running = {10: ["", "7"], 11: ["", "8"]}
    gone, wrong = (
        Output(id=(1, number), tokens=[], finish="refused", refusal="no", failed=failed, cause=cause)
        for number, failed, cause in ((10, True, OSError(2, "No such file", "/secret")), (11, False, None))
    )
    server._publish({1: stub}, [gone, wrong], None)
    told = {"type": "refused", "full": False, "error": "no"}
    assert sent[:2] == [{**told, "id": 10, "failed": True}, {**told, "id": 11, "failed": False}]
    assert stub.running == {}
    assert capsys.readouterr().err == "no: [Errno 2] No such file: '/secret'\n"


def test_a_log_on_a_full_disk_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115  # its end fails too
    monkeypatch.setattr(sys, "stderr", full)
    server._log("the adapter is damaged", ValueError("no weights"))
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left on device"):
        full.close()
