"""A gateway is replaced under load, as a Deployment does it with maxUnavailable 0: no request fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.support.gateways import CHAT, Triton, chat, events, run, saying, spoken, write_model
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.supervisor import Gateway

pytestmark = [pytest.mark.real, pytest.mark.process, pytest.mark.loopback]

TEXT = "a text of some length"
SECONDS = 250


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS / 4
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tokenizer"))


class Service:
    """A stand-in for a Kubernetes Service: a new connection goes to a gateway that was ready when last asked."""

    def __init__(self) -> None:
        self.gateways: list[Gateway] = []
        self.ready: list[Gateway] = []
        self.taken: dict[str, int] = {}

    async def probe(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while True:
                ready = []
                for gateway in list(self.gateways):
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(f"{gateway.url}/health/ready")).status_code == 200:
                            ready.append(gateway)
                self.ready = ready
                await asyncio.sleep(0.05)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gateway = self.ready[sum(self.taken.values()) % len(self.ready)]
        self.taken[gateway.url] = self.taken.get(gateway.url, 0) + 1
        theirs = await asyncio.open_connection("127.0.0.1", gateway.options.port)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while piece := await source.read(1 << 16):
                    sink.write(piece)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pass_on(reader, theirs[1]), pass_on(theirs[0], writer))


@contextlib.asynccontextmanager
async def cluster(folder: Path, pause: float = 0.05) -> AsyncIterator[tuple[Service, str, GatewayOptions]]:
    """A Triton that pauses after each response, a service without gateways, its address, and options of a gateway."""
    triton = Triton(saying(folder, TEXT, pause=pause, cut=8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, triton.server)
    port = triton.server.add_insecure_port("127.0.0.1:0")
    await triton.server.start()
    service = Service()
    probing = asyncio.ensure_future(service.probe())
    listening = await asyncio.start_server(service.connect, "127.0.0.1", 0)
    model = ServedModel(name="llama", tokenizer=folder)
    # A connection that stays open would keep the gateway for the whole drain, which is longer than the test.
    options = GatewayOptions(models=(model,), grpc_url=f"127.0.0.1:{port}", port=0, linger_s=10, drain_s=2 * SECONDS)
    try:
        yield service, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", options
    finally:
        probing.cancel()
        listening.close()
        for gateway in service.gateways:
            await asyncio.to_thread(gateway.stop)
        await triton.server.stop(None)


def test_each_answer_of_a_gateway_that_lingers_ends_its_connection(folder: Path) -> None:
    async def scenario() -> list[str | None]:
        async with cluster(folder) as (service, _, options):
            gateway = await asyncio.to_thread(Gateway.start, replace(options, linger_s=SECONDS))
            service.gateways.append(gateway)
            await until(lambda: service.ready == [gateway])
            said = []
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
                for told in (False, True):
                    if told:
                        os.kill(gateway.pids[0], signal.SIGTERM)
                        await until(lambda: service.ready == [])
                    answer = await client.post(CHAT, json=chat(max_tokens=50))
                    said.append(answer.headers.get("connection"))
            os.kill(gateway.pids[0], signal.SIGKILL)
            return said

    assert run(scenario(), SECONDS) == [None, "close"]


def test_what_a_gateway_does_not_finish_before_it_ends_is_told_so(folder: Path) -> None:
    async def scenario() -> list[tuple[int, str]]:
        async with cluster(folder, pause=60) as (_, _, options):
            gateway = await asyncio.to_thread(Gateway.start, replace(options, linger_s=0, drain_s=1))
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
                asked = [
                    asyncio.ensure_future(client.post(CHAT, json=chat(max_tokens=4000, stream=stream)))
                    for stream in (False, True)
                ]
                await asyncio.sleep(0.5)
                await asyncio.to_thread(gateway.stop)
                answers = [await one for one in asked]
            return [(one.status_code, one.text) for one in answers]

    (status, whole), (streamed, text) = run(scenario(), SECONDS)
    assert (status, streamed) == (503, 200)
    assert json.loads(whole)["error"]["code"] == "gateway_stopped"
    assert text.endswith('"code": "gateway_stopped"}}\n\ndata: [DONE]\n\n')


@pytest.mark.slow
def test_no_request_fails_while_a_gateway_is_replaced(folder: Path) -> None:
    async def scenario() -> None:
        async with cluster(folder) as (service, url, options):
            old = await asyncio.to_thread(Gateway.start, options)
            service.gateways.append(old)
            await until(lambda: service.ready == [old])
            answered = 0
            going = True

            async def user(number: int) -> None:
                nonlocal answered
                async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                    while going:
                        if number % 2:
                            assert spoken(await events(client, CHAT, chat(max_tokens=50))) == TEXT
                        else:
                            answer = await client.post(CHAT, json=chat(max_tokens=50))
                            assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (
                                200,
                                TEXT,
                            )
                        answered += 1

            users = [asyncio.ensure_future(user(number)) for number in range(4)]
            await until(lambda: answered >= 8)
            # An update that was wrong: its gateway does not become ready, gets no request, and is taken away again.
            misspelt = ServedModel(name="llama", tokenizer=folder, triton_model="misspelt")
            wrong = await asyncio.to_thread(Gateway.start, replace(options, models=(misspelt,)))
            service.gateways.append(wrong)
            enough = answered + 4
            await until(lambda: answered >= enough)
            service.gateways.remove(wrong)
            await asyncio.to_thread(wrong.stop)
            new = await asyncio.to_thread(Gateway.start, options)
            service.gateways.append(new)
            await until(lambda: new in service.ready)
            leaving = asyncio.ensure_future(asyncio.to_thread(old.stop))
            await until(lambda: service.ready == [new])
            await leaving
            service.gateways.remove(old)
            more = answered + 8
            await until(lambda: answered >= more)
            going = False
            await asyncio.gather(*users)
            assert set(service.taken) == {old.url, new.url}

    run(scenario(), SECONDS)
