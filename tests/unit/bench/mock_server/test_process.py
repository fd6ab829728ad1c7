"""The mock server as a process, and the file of what it did."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.h2 import run
from tests.support.mock_server import MS, Bench, asked, come, post, serving
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.http import HttpLink
from trtpipe.pipeline.bench.mock_server.script import Truth
from trtpipe.pipeline.bench.mock_server.server import MockServer, write


def test_truth_is_the_same_once_written_and_read(tmp_path: Path) -> None:
    bench = Bench(tokens_per_response=2)
    for index in range(3):
        link, _ = bench.connect(HttpLink)
        come(link, post(asked(f"é{index}", 5)))
    bench.until(70 * MS)
    write(bench.hub.truth, tmp_path / "truth")
    lines = [json.loads(line) for line in (tmp_path / "truth").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {
        "id": "é0", "protocol": "http", "arrival_ns": 0, "scripted": 5, "then": "finish", "tokens_per_response": 2,
        "stamps_ns": [50 * MS, 70 * MS], "end_ns": None, "tokens": 4,
    }  # fmt: skip
    assert [Truth.from_json(line) for line in lines] == bench.hub.truth


@pytest.mark.loopback
@pytest.mark.process
def test_a_process_serves_and_says_what_it_did(tmp_path: Path) -> None:
    timing = Timing(ttft_s=0.01, itl_s=0.002, tokens_per_response=2)
    server = MockServerProcess.start(timing, tmp_path / "truth", cpu=min(os.sched_getaffinity(0)))
    try:
        assert os.sched_getaffinity(server.pid) == {min(os.sched_getaffinity(0))}
        before = time.monotonic_ns()
        url = f"http://127.0.0.1:{server.http_port}/v2/models/ensemble/generate_stream"
        answer = httpx.post(url, json=asked("a", 9), trust_env=False, timeout=60)
        after = time.monotonic_ns()
        assert answer.text.count("data:") == 5
    finally:
        truth = server.stop()
    (one,) = truth
    assert (one.id, one.tokens, len(one.stamps_ns)) == ("a", 9, 5)
    assert before < one.arrival_ns < one.arrival_ns + 10 * MS <= one.stamps_ns[0]
    assert [*one.stamps_ns] == sorted(one.stamps_ns)
    assert one.end_ns == one.stamps_ns[-1] < after


@pytest.mark.process
def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = (
        f"import os, pathlib; from {MockServerProcess.__module__} import MockServerProcess, Timing; "
        f"truth = pathlib.Path({str(tmp_path / 'truth')!r}); "
        "server = MockServerProcess.start(Timing(ttft_s=0.01, itl_s=0.002), truth); "
        "print(server.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)


@pytest.mark.loopback
@pytest.mark.process
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            with pytest.raises(HostError, match=f"cannot listen on 127.0.0.1:{server.http_port}"):
                await MockServer.start(Timing(ttft_s=0, itl_s=0), http_port=server.http_port)

    run(scenario())
    with pytest.raises(HostError, match="does not start: cannot stay on core 99999"):
        MockServerProcess.start(Timing(ttft_s=0, itl_s=0), tmp_path / "truth", cpu=99999)
