"""The memory and the answers of a real gateway worker under requests and connections of the worst kinds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.attacks import gateway_load
from tests.support.gateways import write_model
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.supervisor import Gateway

pytestmark = [pytest.mark.loopback, pytest.mark.process]

KEY = {"authorization": f"Bearer {gateway_load.KEY}", "content-type": "application/json"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    keys = folder / "keys"
    keys.write_text(gateway_load.KEY)
    model = ServedModel(name="m", tokenizer=write_model(folder / "model"), max_input_len=512, max_seq_len=1024)
    options = GatewayOptions(models=(model,), grpc_url="127.0.0.1:1", port=0, api_keys_file=keys)
    made = Gateway.start(options, folder / "log")
    yield made
    made.stop()
    assert (folder / "log").read_text() == ""


class Watched:
    """The most memory that the worker takes meanwhile, in MB beyond what it took at first; /health/live answers."""

    def __init__(self, gateway: Gateway) -> None:
        self.worker = psutil.Process(gateway.pids[0])
        self.url = f"{gateway.url}/health/live"
        self.first = self.most = self.worker.memory_info().rss
        self.answered = 0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        while not self.stopping.wait(0.02):
            self.answered += httpx.get(self.url, trust_env=False, timeout=30).status_code == 200
            self.most = max(self.most, self.worker.memory_info().rss)

    def __enter__(self) -> Watched:
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopping.set()
        self.thread.join()

    @property
    def growth(self) -> float:
        return (self.most - self.first) / 1e6


@pytest.mark.parametrize("kind", gateway_load.BODIES)
def test_a_body_of_4_mb_is_refused_and_costs_little(gateway: Gateway, kind: str) -> None:
    path, body = gateway_load.BODIES[kind]()
    with Watched(gateway) as watched:
        answer = httpx.post(f"{gateway.url}{path}", content=body, headers=KEY, trust_env=False, timeout=100)
    assert answer.status_code == 400, answer.text[:300]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 1000
    assert watched.answered > 0
    # The body, and what the way to it takes.
    assert watched.growth < 50


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", gateway_load.HELD)
def test_held_connections_cost_10_kb_each_and_nobody_s_answer(gateway: Gateway, kind: str, count: int) -> None:
    with Watched(gateway) as watched, gateway_load.child(gateway_load.hold, kind, gateway.options.port, count) as pipe:
        for _ in range(3):
            pipe.recv()
        connected = len(watched.worker.net_connections("tcp"))
        models = httpx.get(f"{gateway.url}/v1/models", headers=KEY, trust_env=False, timeout=30)
        assert models.status_code == 200
    assert connected > 0.9 * count
    assert watched.answered > 0
    assert watched.growth < 5 + count / 100


def test_attacks_without_a_key_cost_nothing(gateway: Gateway) -> None:
    with Watched(gateway) as watched:
        for name in ("wrong key", "endless header", "headers"):
            with gateway_load.child(gateway_load.attack, name, gateway.options.port):
                before = watched.answered
                while watched.answered < before + 10:
                    time.sleep(0.01)
    assert watched.growth < 20
    metrics = httpx.get(f"{gateway.url}/metrics", headers=KEY, trust_env=False).text
    for status in (401, 431):
        assert f'{{endpoint="chat",status="{status}"}} 0' not in metrics


def test_a_large_text_is_prepared(gateway: Gateway) -> None:
    """The limits are not in the way of an honest request."""
    body = json.dumps({"model": "m", "prompt": [5] * 512, "user": "x" * 1_000_000})
    answer = httpx.post(f"{gateway.url}/v1/completions", content=body, headers=KEY, trust_env=False, timeout=100)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
