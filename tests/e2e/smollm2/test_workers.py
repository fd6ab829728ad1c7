"""A worker of the gateway that is killed. It ends the gateway for other tests: the name of this file is the last."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from tests.e2e.conftest import ACTIVE, Served, until
from trtpipe.pipeline.gateway.supervisor import Gateway

pytestmark = pytest.mark.real


def test_a_worker_that_is_killed_ends_its_requests_and_the_other_goes_on(served: Served, gateway: Gateway) -> None:
    os.kill(gateway.pids[0], signal.SIGKILL)
    answered = 0
    for _ in range(8):
        try:
            answered += httpx.get(f"{gateway.url}/health/ready").status_code == 200
        except httpx.TransportError:
            continue
    assert answered
    assert until(lambda: served.gauges()[ACTIVE] == 0)
