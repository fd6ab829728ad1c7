"""Prompt processes: what they are given, how they end, and what a client is told when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.gateways import CHAT, TEXT, Triton, ask, chat, end_fork_servers, saying, write_model
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.supervisor import Gateway

pytestmark = [pytest.mark.loopback, pytest.mark.process]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_model(tmp_path_factory.mktemp("tokenizer"))
    end_fork_servers()


def fork_server() -> psutil.Process:
    (found,) = [
        one for one in psutil.Process().children() if "trtpipe.pipeline.gateway.prompt_process" in one.cmdline()
    ]
    return found


def test_processes_that_are_killed_are_replaced(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for _ in range(3):
            assert (await client.post(CHAT, json=chat())).status_code == 200
            for process in fork_server().children():
                process.kill()
        assert (await client.post(CHAT, json=chat())).status_code == 200
        fork_server().kill()
        # The prompt process of small requests lives on; a large request needs another one.
        assert (await client.post(CHAT, json=chat())).status_code == 200
        large = chat(user="x" * 20_000)
        assert (await client.post(CHAT, json=large)).status_code == 200

    ask(saying(folder, "x"), folder, scenario)


def test_a_fork_server_that_is_killed_at_work_is_told_as_such(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        assert (await client.post(CHAT, json=chat())).status_code == 200
        server = fork_server()
        server.suspend()
        asking = asyncio.ensure_future(client.post(CHAT, json=chat(user="x" * 20_000)))
        await asyncio.sleep(0.3)
        server.kill()
        answer = await asking
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await client.post(CHAT, json=chat(user="x" * 20_000))).status_code == 200

    ask(saying(folder, "x"), folder, scenario)


def test_one_client_s_large_requests_are_bounded_and_small_ones_pass_them(folder: Path) -> None:
    """Each takes a second, two are prepared at a time and sixteen wait."""

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        large = {"model": "llama", "prompt": "x" * 1_000_000, "max_tokens": 1}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, limits=limits, timeout=100, trust_env=False) as many:
            asking = [asyncio.ensure_future(many.post(TEXT, json=large)) for _ in range(20)]
            while not any(one.done() for one in asking):
                await asyncio.sleep(0.01)
            for _ in range(5):
                assert (await client.post(CHAT, json=chat())).status_code == 200
            refused = [one.result().json() for one in asking if one.done() and one.result().status_code == 429]
            assert refused[0]["error"]["message"] == "too many large requests are waiting"
            assert not all(one.done() for one in asking)
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    ask(saying(folder, "x"), folder, scenario)


def test_nothing_is_left_of_a_gateway_that_has_ended_or_was_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTPIPE_API_KEYS", "the-key")
    model = ServedModel(name="llama", tokenizer=folder)
    for end in (signal.SIGTERM, signal.SIGKILL):
        gateway = Gateway.start(GatewayOptions(models=(model,), grpc_url="127.0.0.1:1", port=0), tmp_path / "log")
        try:
            headers = {"authorization": "Bearer the-key"}
            answer = httpx.post(f"{gateway.url}{CHAT}", json=chat(), headers=headers, trust_env=False, timeout=30)
            assert answer.status_code == 503  # no Triton
            worker = psutil.Process(gateway.pids[0])
            processes = worker.children(recursive=True)
            assert len(processes) == 2, "the fork server, and the prompt process of small requests"
            for process in processes:
                assert "the-key" not in "".join(process.cmdline())
                assert "TRTPIPE_API_KEYS" not in process.environ()
            worker.send_signal(end)
            deadline = time.monotonic() + 20
            while any(alive(process) for process in processes):
                assert time.monotonic() < deadline, processes
                time.sleep(0.05)
        finally:
            gateway.stop()
    assert (tmp_path / "log").read_text() == ""


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def test_the_descriptors_of_clients_stay_in_the_gateway(folder: Path) -> None:
    """A prompt process that held a client's connection would keep it open after the gateway has closed it."""

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        assert (await client.post(CHAT, json=chat())).status_code == 200
        # The newest: another test's may be about to end.
        process = max(fork_server().children(), key=psutil.Process.create_time)
        links = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert len([link for link in links if link.startswith("socket:")]) == 1

    ask(saying(folder, "x"), folder, scenario)
