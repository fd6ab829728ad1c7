"""`trtpipe bench selftest`, as people run it: it says how wrong the load tester is here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.selftest import write_tokenizer

pytestmark = [pytest.mark.loopback, pytest.mark.process, pytest.mark.clock]

ROW = re.compile(
    r"(?P<protocol>\w+) +4 +(?P<p50>-?[\d.]+) +(?P<p99>-?[\d.]+) +(?P<mean>-?[\d.]+) +[\d.]+/[\d.]+ +(?P<load>[\d.]+)%"
)


@pytest.mark.slow
def test_it_says_how_wrong_this_client_is() -> None:
    command = [sys.executable, "-m", "trtpipe", "bench", "selftest", "--protocol", "grpc,http", "--streams", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["protocol"]: row for row in ROW.finditer(done.stdout)}
    assert list(rows) == ["grpc", "http"]
    for row in rows.values():
        # A stamp is never before what it is of; how long after depends on what else this machine does.
        assert 0 <= float(row["p50"]) <= float(row["p99"])
        assert abs(float(row["mean"])) < 1
        assert 0 < float(row["load"]) <= 101
    assert re.search(r"a core of this client can take: grpc [\d,]+, http [\d,]+", done.stdout)


def test_a_report_says_how_wrong_the_libraries_are(tmp_path: Path) -> None:
    server = MockServerProcess.start(Timing(ttft_s=0.01, itl_s=0.004), tmp_path / "truth.jsonl")
    try:
        words = ["--grpc-url", f"127.0.0.1:{server.grpc_port}", "--http-url", f"http://127.0.0.1:{server.http_port}",
                 "--protocol", "grpc,http", "--transport", "tritonclient", "--concurrency", "3", "--requests", "8",
                 "--output-tokens", "8", "--tokenizer", str(write_tokenizer(tmp_path))]  # fmt: skip
        command = [sys.executable, "-m", "trtpipe", "bench", *words, "--report", str(tmp_path / "report.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        server.stop()
    assert done.returncode in (0, 5), done.stderr  # INVALID on a busy machine
    grpc, http = json.loads((tmp_path / "report.json").read_text())["endpoints"]
    for endpoint in (grpc, http):
        error = endpoint["measured_error"]
        assert error["streams"] == 3
        assert 3 < error["itl_ms"] < 8
        assert 0 < error["ttft_p50_ms"] <= error["ttft_p99_ms"]
        assert f"{endpoint['protocol']} through tritonclient: here, with 3 in flight, TTFT comes out " in done.stderr
