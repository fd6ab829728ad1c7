"""Several of Triton's processes in front of one engine process, as a real tritonserver runs them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import ACTIVE, Served, until
from tests.e2e.faults.conftest import INSTANCES
from tests.e2e.faults.test_faults import SOON, ask, idle, processes

pytestmark = pytest.mark.real

WAITING = "nv_trt_llm_request_metrics{waiting}"


def whole(served: Served, tokens: int) -> dict[str, Any]:
    return served.generate("tensorrt_llm", **ask("tensorrt_llm", tokens, stream=False))


def test_one_engine_serves_all_and_each_answers_alike(tiny: Served) -> None:
    family = processes(tiny)
    assert (len(family["tensorrt_llm"]), len(family["engine"])) == (INSTANCES, 1)
    first = whole(tiny, 20)["output_ids"]
    with ThreadPoolExecutor(2) as pool:
        assert [answer["output_ids"] for answer in pool.map(lambda _: whole(tiny, 20), range(32))] == [first] * 32


@pytest.mark.slow
def test_the_bound_of_the_queue_holds_for_all_instances_together(tiny: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        # Two run and two wait, for longer than the rest takes. In pairs: of four in one instant the last may find two
        # waiting before any runs, and be refused.
        taken = [pool.submit(whole, tiny, 1500) for _ in range(2)]
        assert until(lambda: tiny.gauges()[ACTIVE] == 2)
        taken += [pool.submit(whole, tiny, 1500) for _ in range(2)]
        assert until(lambda: tiny.gauges()[WAITING] == 2)
        refused = [whole(tiny, 2) for _ in range(2 * INSTANCES)]
        assert not [answer.result() for answer in taken if answer.done()]
        assert all("Maximum queue size of 2 has been reached" in answer["error"] for answer in refused)
        assert not any("error" in answer.result() for answer in taken)
    assert until(lambda: idle(tiny), SOON)


def test_a_stop_request_ends_what_came_through_another_instance(tiny: Served) -> None:
    for number in range(6):
        events = tiny.stream("tensorrt_llm", **ask("tensorrt_llm", id=f"mine-{number}"))
        next(events)
        stop = {**ask("tensorrt_llm", 1, stream=False), "stop": True, "id": f"mine-{number}"}
        tiny.generate("tensorrt_llm", **stop)
        last = list(events)[-1]
        assert last["sequence_length"] == 0
        assert until(lambda: idle(tiny), SOON)


def test_a_dead_engine_is_told_through_every_instance_and_started_once(tiny: Served) -> None:
    streams = [tiny.stream("tensorrt_llm", **ask("tensorrt_llm")) for _ in range(2)]
    for stream in streams:
        next(stream)
    (engine,) = processes(tiny)["engine"]
    engine.kill()
    assert all("engine process ended" in list(stream)[-1]["error"] for stream in streams)
    assert until(lambda: "error" not in whole(tiny, 2), 60)
    (again,) = processes(tiny)["engine"]
    assert again.pid != engine.pid


@pytest.mark.slow
def test_the_engine_outlives_one_stub_and_leaves_with_the_last(tiny: Served) -> None:
    """Without the watchdog, which would load the model again."""
    record = json.loads((tiny.cli.home / "servers" / f"{tiny.name}.json").read_text())
    psutil.Process(record["watcher"]).kill()
    (engine,) = processes(tiny)["engine"]
    first, *others = processes(tiny)["tensorrt_llm"]
    # Killed while it holds a lock of its shared memory, a stub takes tritonserver 2.51 with it.
    assert until(lambda: idle(tiny), SOON)
    time.sleep(0.5)
    first.kill()
    assert until(lambda: "error" not in whole(tiny, 2))
    assert engine.is_running()
    for stub in others:
        stub.kill()
    assert until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 15)
    repository = f"{tiny.http}/v2/repository/models/tensorrt_llm"
    assert httpx.post(f"{repository}/unload", json={}, timeout=60).status_code == 200
    assert until(lambda: httpx.post(f"{repository}/load", json={}, timeout=60).status_code == 200)
    assert until(lambda: "error" not in whole(tiny, 2), 60)
    assert len(processes(tiny)["engine"]) == 1
