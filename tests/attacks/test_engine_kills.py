"""The engine process is killed while streams through every door are in flight.

Before: tritonserver crashed in four of six kills (an error and then a final flag, to a client of gRPC statuses).
"""

from __future__ import annotations

import random
import time

import pytest

from tests.attacks.streams import Attacked, load, untold

pytestmark = [pytest.mark.real, pytest.mark.clock]

# Promised are two; what is looked for here is a client that waits for ever.
SECONDS = 5.0


def attack(attacked: Attacked, pause: float) -> None:
    """One kill: everybody is told, the server lives, and answers again."""
    pid = attacked.pid
    streams = load(attacked)
    time.sleep(pause)
    killed = attacked.kill("engine")
    assert not list(untold(streams, killed, SECONDS))
    for stream in streams:
        # A script is given the end of a stream without its reason.
        reason = "ended the request early" if stream.model == "tensorrt_llm_bls" else "engine process ended (signal 9)"
        assert reason in str(stream.told), stream
    attacked.recover()
    assert attacked.pid == pid
    assert "Signal (11)" not in attacked.log()


def test_three_kills_end_no_server_and_everybody_is_told(attacked: Attacked) -> None:
    for pause in (0.0, 0.1, 0.7):
        attack(attacked, pause)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_end_no_server_and_everybody_is_told(attacked: Attacked) -> None:
    chance = random.Random(50)
    for _ in range(50):
        attack(attacked, chance.uniform(0.0, 1.5))


def test_a_request_that_comes_while_the_engine_starts_again_is_refused_at_once(attacked: Attacked) -> None:
    killed = attacked.kill("engine")
    # Triton's ready is that of its Python process; whoever distributes requests asks the gateway.
    while attacked.ready() != (True, False):
        assert time.monotonic() < killed + SECONDS, "the gateway goes on calling itself ready"
    begun = time.monotonic()
    refused = attacked.completion(2)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "upstream_unavailable"
    assert time.monotonic() - begun < SECONDS
    attacked.recover()


def test_an_engine_that_does_not_start_again_takes_its_model_out_of_service(attacked: Attacked) -> None:
    """Its Python process ends then, and the watchdog loads the model from the beginning."""
    (before,) = attacked.processes()["tensorrt_llm"]
    deadline = time.monotonic() + 120
    while before.is_running() and before.status() != "zombie":
        assert time.monotonic() < deadline
        for engine in attacked.processes()["engine"]:
            engine.kill()
        time.sleep(0.1)
    attacked.recover()
    assert "a Python process of tensorrt_llm has died; loading it again" in attacked.log()
    (after,) = attacked.processes()["tensorrt_llm"]
    assert after.pid != before.pid
