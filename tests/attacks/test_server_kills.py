"""tritonserver itself is killed, and made to crash."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Cli, until

pytestmark = pytest.mark.real


def running(cli: Cli, repository: Path) -> dict[str, Any]:
    """The record of the server of a folder."""
    return next(one for one in json.loads(cli.ok("ps", "--json").out) if one["server"] == repository.name)


def test_a_crash_is_started_again_with_its_stack_in_the_log_until_sigterm(cli: Cli, tiny_repository: Path) -> None:
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    with cli.serving(str(tiny_repository), *ports, "--no-openai", "--restart", "1") as serving:
        assert serving.stderr is not None
        record = running(cli, tiny_repository)
        log = cli.home / "logs" / f"serve-{record['server']}.log"
        psutil.Process(record["pid"]).send_signal(signal.SIGSEGV)
        steps = ("checking the repository", "loading the models", "asking ")
        # A start that takes long has lines in between, which say for how long now.
        lines = (line for line in serving.stderr if not line.endswith(" now\n"))
        for told in ("starting tritonserver with ", *(f"serve     {step}" for step in steps)):
            assert next(lines).startswith(told)
        crash = next(lines)
        assert "tritonserver ended by itself (status -" in crash
        assert str(log) in crash
        assert "serves again" in next(lines)
        text = log.read_text(errors="replace")
        assert text.count("--- server is started ") == 2
        # The stack of the first, where the message said that it is.
        assert text.index("Signal (11) received.") < text.rindex("--- server is started ")
        again = running(cli, tiny_repository)
        assert (again["http"], again["grpc"]) == (record["http"], record["grpc"])
        server = psutil.Process(again["pid"])
        family = [server, *server.children(recursive=True)]
        serving.send_signal(signal.SIGTERM)
        _, err = serving.communicate(timeout=60)
    assert serving.returncode == 0, err
    # The engine process ends when it has seen that the last of Triton's processes is gone.
    assert until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family))


def test_a_killed_gateway_is_started_again_at_its_address(cli: Cli, tiny_repository: Path) -> None:
    ports = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    with cli.serving(str(tiny_repository), *ports) as serving:
        assert serving.stderr is not None
        record = running(cli, tiny_repository)
        state = json.loads((cli.home / "servers" / f"{record['server']}.json").read_text())
        psutil.Process(state["gateway_pid"]).kill()
        told: list[str] = []
        while not any("the gateway answers again" in line for line in told):
            told.append(next(serving.stderr))
        assert any("the gateway has ended (ended by SIGKILL" in line for line in told)
        assert running(cli, tiny_repository) == record
        assert httpx.get(f"{record['openai']}/v1/models").json()["data"][0]["id"] == tiny_repository.name
        log = cli.home / "logs" / f"serve-{record['server']}.gateway.log"
        assert log.read_text().count("gateway at ") == 2
        serving.send_signal(signal.SIGTERM)
        _, err = serving.communicate(timeout=60)
    assert serving.returncode == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("kill_watchdog", [False, True])
def test_stop_ends_the_watchdog_first(cli: Cli, tiny_repository: Path, kill_watchdog: bool) -> None:
    """Else it would start again what was to be stopped. One that was killed before is not missed."""
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    cli.ok("serve", str(tiny_repository), *ports, "--no-openai", "--restart", "3", "--detach")
    record = running(cli, tiny_repository)
    state = json.loads((cli.home / "servers" / f"{record['server']}.json").read_text())
    processes = [psutil.Process(state["watcher"]), psutil.Process(record["pid"])]
    if kill_watchdog:
        processes[0].kill()
    assert cli.ok("stop", record["server"]).out == f"stopped {record['server']}\n"
    time.sleep(0.2)
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert record["server"] not in cli.ok("ps").out
