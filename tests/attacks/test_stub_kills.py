"""Python processes of Triton's are killed, with requests that wait in them and without.

Before: what waited in a dead process waited for ten minutes, and the server called itself ready.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.attacks.streams import Attacked, load, untold

pytestmark = [pytest.mark.real, pytest.mark.clock]

# Promised are two; what is looked for here is a client that waits for ever, and a server that says it is ready.
SECONDS = 5.0
MODELS = ("tensorrt_llm", "tensorrt_llm_bls", "preprocessing", "postprocessing")


def attack(attacked: Attacked, victim: str) -> None:
    """Kill the processes of a model under load: everybody is told, ready is withdrawn, and all answers again."""
    gateway = attacked.state()["gateway_pid"]
    streams = load(attacked)
    killed = attacked.kill(victim)
    until_withdrawn(attacked, killed)
    assert not list(untold(streams, killed, SECONDS))
    attacked.recover()
    # Clients of the gateway are refused meanwhile, and not turned away by a closed port.
    assert attacked.state()["gateway_pid"] == gateway


def until_withdrawn(attacked: Attacked, killed: float) -> None:
    while attacked.ready()[0]:
        assert time.monotonic() < killed + SECONDS, "the server goes on calling itself ready"


@pytest.mark.parametrize("victim", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_whoever_waits_is_told_and_ready_is_withdrawn(attacked: Attacked, victim: str) -> None:
    attack(attacked, victim)


def test_a_gateway_says_why_and_until_when(attacked: Attacked) -> None:
    (stream,) = load(attacked, (("gateway", ""),))
    killed = attacked.kill("tensorrt_llm")
    assert stream.join(killed + SECONDS)
    assert '"code": "upstream_unavailable"' in str(stream.told)
    while attacked.ready()[1]:
        assert time.monotonic() < killed + SECONDS
    refused = attacked.completion(2)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    attacked.recover()


@pytest.mark.parametrize("victim", MODELS)
def test_where_nobody_waits_the_model_alone_is_loaded_again(attacked: Attacked, victim: str) -> None:
    pid = attacked.pid
    before = {process.pid for process in attacked.processes()[victim]}
    killed = attacked.kill(victim)
    until_withdrawn(attacked, killed)
    attacked.recover()
    assert attacked.pid == pid
    assert not before & {process.pid for process in attacked.processes()[victim]}


@pytest.mark.parametrize("victim", ["tensorrt_llm_bls", "preprocessing"])
def test_streams_that_need_no_dead_process_go_on(attacked: Attacked, victim: str) -> None:
    pid = attacked.pid
    (stream,) = load(attacked, (("gateway", ""),))
    attacked.kill(victim)
    time.sleep(2.0)
    attacked.recover()
    before, deadline = stream.events, time.monotonic() + SECONDS
    while stream.told is None and stream.events == before:
        assert time.monotonic() < deadline, "the stream stands still"
    assert stream.told in (None, "")
    assert attacked.pid == pid
    stream.leave()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_of_any_process_are_told_to_everybody(attacked: Attacked) -> None:
    chance = random.Random(20)
    for _ in range(20):
        attack(attacked, chance.choice(MODELS))
