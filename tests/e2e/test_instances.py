"""Several of Triton's processes in front of one engine process, as a real tritonserver runs them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import ACTIVE, Cli, Served, until
from tests.e2e.test_faults import SOON, ask, idle, processes
from tests.support.factories import hf_folder

pytestmark = pytest.mark.real

INSTANCES = 3
WAITING = "nv_trt_llm_request_metrics{waiting}"
SIZES = ("max_batch_size=2", "max_input_len=64", "max_seq_len=8192", "max_num_tokens=64")


@pytest.fixture(scope="module")
def shared(cli: Cli, serve: Callable[[str], Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = hf_folder(tmp_path_factory.mktemp("models") / "shared", dtype="F32", max_position_embeddings=8192)
    settings = [*(f"build.{size}" for size in SIZES), "serving.max_queue_size=2"]
    settings += [f"serving.engine_instance_count={INSTANCES}"]
    words = [word for setting in settings for word in ("--set", setting)]
    cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *words)
    yield serve("shared.cpu.fp32")
    cli.run("stop", "shared.cpu.fp32")


def whole(served: Served, tokens: int) -> dict[str, Any]:
    return served.generate("tensorrt_llm", **ask("tensorrt_llm", tokens, stream=False))


def test_one_engine_serves_all_and_each_answers_alike(shared: Served) -> None:
    family = processes(shared)
    assert (len(family["tensorrt_llm"]), len(family["engine"])) == (INSTANCES, 1)
    first = whole(shared, 20)["output_ids"]
    with ThreadPoolExecutor(2) as pool:
        assert [answer["output_ids"] for answer in pool.map(lambda _: whole(shared, 20), range(32))] == [first] * 32


@pytest.mark.slow
def test_the_bound_of_the_queue_holds_for_all_instances_together(shared: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        # Two run and two wait, for longer than the rest takes. In pairs: of four in one instant the last may find two
        # waiting before any runs, and be refused.
        taken = [pool.submit(whole, shared, 1500) for _ in range(2)]
        assert until(lambda: shared.gauges()[ACTIVE] == 2)
        taken += [pool.submit(whole, shared, 1500) for _ in range(2)]
        assert until(lambda: shared.gauges()[WAITING] == 2)
        refused = [whole(shared, 2) for _ in range(2 * INSTANCES)]
        assert not [answer.result() for answer in taken if answer.done()]
        assert all("Maximum queue size of 2 has been reached" in answer["error"] for answer in refused)
        assert not any("error" in answer.result() for answer in taken)
    assert until(lambda: idle(shared), SOON)


def test_a_stop_request_ends_what_came_through_another_instance(shared: Served) -> None:
    for number in range(6):
        events = shared.stream("tensorrt_llm", **ask("tensorrt_llm", id=f"mine-{number}"))
        next(events)
        stop = {**ask("tensorrt_llm", 1, stream=False), "stop": True, "id": f"mine-{number}"}
        shared.generate("tensorrt_llm", **stop)
        last = list(events)[-1]
        assert last["sequence_length"] == 0
        assert until(lambda: idle(shared), SOON)


def test_a_dead_engine_is_told_through_every_instance_and_started_once(shared: Served) -> None:
    streams = [shared.stream("tensorrt_llm", **ask("tensorrt_llm")) for _ in range(2)]
    for stream in streams:
        next(stream)
    (engine,) = processes(shared)["engine"]
    engine.kill()
    assert all("engine process ended" in list(stream)[-1]["error"] for stream in streams)
    assert until(lambda: "error" not in whole(shared, 2), 60)
    (again,) = processes(shared)["engine"]
    assert again.pid != engine.pid


@pytest.mark.slow
def test_the_engine_outlives_one_stub_and_leaves_with_the_last(shared: Served) -> None:
    """Without the watchdog, which would load the model again."""
    record = json.loads((shared.cli.home / "servers" / f"{shared.name}.json").read_text())
    psutil.Process(record["watcher"]).kill()
    (engine,) = processes(shared)["engine"]
    first, *others = processes(shared)["tensorrt_llm"]
    # Killed while it holds a lock of its shared memory, a stub takes tritonserver 2.51 with it.
    assert until(lambda: idle(shared), SOON)
    time.sleep(0.5)
    first.kill()
    assert until(lambda: "error" not in whole(shared, 2))
    assert engine.is_running()
    for stub in others:
        stub.kill()
    assert until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 15)
    repository = f"{shared.http}/v2/repository/models/tensorrt_llm"
    assert httpx.post(f"{repository}/unload", json={}, timeout=60).status_code == 200
    assert until(lambda: httpx.post(f"{repository}/load", json={}, timeout=60).status_code == 200)
    assert until(lambda: "error" not in whole(shared, 2), 60)
    assert len(processes(shared)["engine"]) == 1


def test_a_killed_server_leaves_nothing(shared: Served) -> None:
    server = psutil.Process(shared.pid)
    family = [server, *server.children(recursive=True)]
    assert len(processes(shared)["tensorrt_llm"]) == INSTANCES
    server.kill()
    assert until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 10)
