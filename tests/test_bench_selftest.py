"""`trtpipe bench selftest`, as people run it: it says how wrong the load tester is here."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.loopback, pytest.mark.process, pytest.mark.clock]

ROW = re.compile(
    r"(?P<protocol>\w+) +4 +(?P<p50>-?[\d.]+) +(?P<p99>-?[\d.]+) +(?P<mean>-?[\d.]+) +[\d.]+/[\d.]+ +(?P<load>[\d.]+)%"
)


def test_it_says_how_wrong_this_client_is() -> None:
    command = [sys.executable, "-m", "pipeline", "bench", "selftest", "--protocol", "grpc,http", "--streams", "4"]
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
