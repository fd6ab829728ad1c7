"""The gateway's own processes: workers that share a port, certificates, failures of a start."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.certificates import with_openssl, write_certificate
from tests.support.gateways import CHAT, chat
from tests.unit.gateway.conftest import options
from trtpipe.engines.errors import HostError, InputDataError, UsageError
from trtpipe.pipeline.gateway import process, supervisor
from trtpipe.pipeline.gateway.options import ServedModel
from trtpipe.pipeline.gateway.supervisor import Gateway
from trtpipe.pipeline.serving import openai_client

# A gateway makes prompts in processes of its own.
pytestmark = [pytest.mark.real, pytest.mark.process]


@pytest.mark.loopback
def test_workers_share_a_port_are_replaced_and_end(folder: Path, tmp_path: Path) -> None:
    gateway = Gateway.start(options(folder, port=0, workers=2), tmp_path / "log")
    watching = threading.Thread(target=gateway.watch)
    watching.start()
    try:
        for _ in range(10):
            assert httpx.get(f"{gateway.url}/health/live", trust_env=False).status_code == 200
        assert httpx.get(f"{gateway.url}/health/ready", trust_env=False, timeout=20).status_code == 503
        with pytest.raises(HostError, match="cannot be taken"):
            Gateway.start(options(folder, port=gateway.options.port))
        killed = gateway.pids[0]
        os.kill(killed, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while gateway.pids[0] == killed:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asked = chat("in confidence")
        for _ in range(5):
            answer = httpx.post(f"{gateway.url}{CHAT}", json=asked, trust_env=False, timeout=20)
            assert answer.status_code == 503
    finally:
        gateway.stop()
        watching.join()
    assert "in confidence" not in (tmp_path / "log").read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/health/live", trust_env=False)


@pytest.mark.loopback
def test_a_cleaner_of_temporary_folders_finds_nothing_of_a_gateway(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gateway = Gateway.start(options(folder, port=0))
    (killed,) = gateway.pids

    def replaced(gateway: Gateway) -> None:
        if gateway.pids != [killed]:
            assert httpx.get(f"{gateway.url}/health/live", trust_env=False, timeout=60).status_code == 200
            gateway.serve_models((ServedModel(name="new", tokenizer=folder),))
            gateway.leave_watch()

    try:
        for left in tmp_path.iterdir():
            left.unlink()
        assert httpx.post(f"{gateway.url}{CHAT}", json=chat(), trust_env=False, timeout=60).status_code == 503
        os.kill(killed, signal.SIGKILL)
        gateway.watch(replaced)
        with httpx.Client(base_url=gateway.url, trust_env=False, timeout=60) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "new"
            counted = 'trtpipe_gateway_requests_total{endpoint="chat",status="503"} 1\n'
            assert counted in client.get("/metrics").text
    finally:
        gateway.stop()


@pytest.mark.loopback
@with_openssl
def test_a_gateway_with_a_certificate_serves_https(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = write_certificate(tmp_path)
    gateway = Gateway.start(options(folder, port=0, tls_cert=cert, tls_key=key))
    try:
        trusting = ssl.create_default_context(cafile=cert)
        assert gateway.url.startswith("https://")
        assert httpx.get(f"{gateway.url}/health/live", verify=trusting, trust_env=False).text == "live\n"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{gateway.options.port}/health/live", trust_env=False)
        with pytest.raises(
            HostError, match=r"does not answer: .*; SSL_CERT_FILE names the certificates that are trusted"
        ):
            openai_client.post(gateway.url, "/v1/completions", {})
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with pytest.raises(UsageError, match="model"):  # it answers, and refuses an empty request
            openai_client.post(gateway.url, "/v1/completions", {})
    finally:
        gateway.stop()


@pytest.mark.loopback
@with_openssl
def test_keys_and_a_certificate_that_change_are_those_of_all_workers(folder: Path, tmp_path: Path) -> None:
    """The keys are mounted as a Secret of Kubernetes is: a link leads to the folder of their version."""
    cert, key = write_certificate(tmp_path)
    (tmp_path / "renewed").mkdir()
    renewed = write_certificate(tmp_path / "renewed")
    for version, keys in (("1", "old\nkept\n"), ("2", "kept\nnew\n"), ("3", "# none\n")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(keys)
    (tmp_path / "data").symlink_to("1")
    (tmp_path / "keys").symlink_to("data/keys")
    notes: list[str] = []
    own = {"api_keys_file": tmp_path / "keys", "tls_cert": cert, "tls_key": key}
    gateway = Gateway.start(options(folder, port=0, workers=2, **own))
    watching = threading.Thread(target=gateway.watch, kwargs={"note": notes.append})
    watching.start()

    def told(change: Callable[[], object]) -> str:
        count = len(notes)
        change()
        deadline = time.monotonic() + 60
        while len(notes) == count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return notes[-1]

    def mount(version: str) -> Path:
        (tmp_path / "next").symlink_to(version)
        return (tmp_path / "next").rename(tmp_path / "data")

    def accepted() -> list[str]:
        """By each of ten connections, which both workers take."""
        trusting = ssl.create_default_context(cafile=cert)
        statuses = {
            one: {
                httpx.get(
                    f"{gateway.url}/v1/models", headers={"authorization": f"Bearer {one}"}, verify=trusting,
                    trust_env=False, timeout=60,
                ).status_code
                for _ in range(10)
            }
            for one in ("old", "kept", "new")
        }  # fmt: skip
        assert all(found in ({200}, {401}) for found in statuses.values()), statuses
        return [one for one, found in statuses.items() if found == {200}]

    try:
        assert accepted() == ["old", "kept"]
        again = "the gateway has read its API keys and certificate again, which had changed"
        assert told(lambda: mount("2")) == again
        assert accepted() == ["kept", "new"]
        before = gateway.pids
        kept = (
            f"the gateway keeps the API keys and the certificate that it has read: {tmp_path / 'keys'} holds no API key"
        )
        assert told(lambda: mount("3")) == f"{kept}; write one key a line"
        assert gateway.pids == before
        assert accepted() == ["kept", "new"]
        os.kill(before[0], signal.SIGKILL)
        while before[0] in gateway.pids:
            time.sleep(0.05)
        restarted = gateway.pids
        assert accepted() == ["kept", "new"]  # the new worker has the keys too
        assert gateway.pids == restarted
        assert told(lambda: (mount("2"), renewed[0].rename(cert), renewed[1].rename(key))) == again
        assert ssl.get_server_certificate(("127.0.0.1", gateway.options.port)) == cert.read_text()
        assert accepted() == ["kept", "new"]
    finally:
        gateway.stop()
        watching.join()


@pytest.mark.loopback
def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"^.* holds no tokenizer that can be read") as caught:
        Gateway.start(options(tmp_path, port=0))
    with pytest.raises(InputDataError) as again:
        process.start(options(tmp_path, port=0), tmp_path / "log")
    assert str(again.value) == str(caught.value)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.loopback
def test_a_ctrl_c_while_a_gateway_starts_leaves_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at once, where the process has no command line yet by which it is known."""
    before = set(psutil.Process().children())
    started: set[psutil.Process] = set()
    asleep = time.sleep

    def interrupted(seconds: float) -> None:
        started.update(set(psutil.Process().children()) - before)
        monkeypatch.setattr(time, "sleep", asleep)
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    monkeypatch.setattr(process, "words_of", lambda pid: [])
    with pytest.raises(KeyboardInterrupt):
        process.start(options(folder, port=0), tmp_path / "log")
    assert len(started) == 1
    assert not any(one.is_running() for one in started)


@pytest.mark.loopback
def test_a_gateway_that_is_told_to_end_is_no_failure(folder: Path) -> None:
    """Whichever signal tells it: SystemExit is what the command makes of the end of the terminal."""
    pids: list[int] = []

    def told(gateway: Gateway) -> None:
        pids.extend(gateway.pids)
        raise SystemExit(129)

    supervisor.serve(options(folder, port=0), ready=told)
    assert len(pids) == 1
    assert not process.alive(pids[0])


@pytest.mark.loopback
def test_a_second_sigterm_does_not_interrupt_a_gateway_that_is_ending(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GNU `timeout` sends two, one to the process and one to its group."""
    end = Gateway._end

    def told_again(gateway: Gateway, workers: list[supervisor.Worker]) -> None:
        signal.raise_signal(signal.SIGTERM)
        end(gateway, workers)

    monkeypatch.setattr(Gateway, "_end", told_again)
    pids: list[int] = []

    def told(gateway: Gateway) -> None:
        pids.extend(gateway.pids)
        signal.raise_signal(signal.SIGTERM)

    supervisor.serve(options(folder, port=0), ready=told)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])


@pytest.mark.loopback
def test_a_gateway_whose_port_is_taken_says_so_in_its_own_words(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(HostError) as caught:
            process.start(options(folder, port=port), tmp_path / "log")
    assert str(caught.value) == (
        f"port {port} on 127.0.0.1 cannot be taken: Address already in use; stop what listens there, or choose "
        "another port"
    )


def test_what_the_command_needs_of_the_gateway_is_light() -> None:
    script = (
        "import sys, trtpipe.pipeline.gateway.supervisor;"
        "print([name for name in ('fastapi', 'uvicorn', 'pydantic', 'tokenizers', 'hpack', 'tritonclient') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
