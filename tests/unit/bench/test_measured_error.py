"""What a report says of how wrong the libraries are on this host; tests/unit/bench/test_selftest.py measures it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trtpipe.pipeline.bench import selftest
from trtpipe.pipeline.bench.mock_server.clock import Timing


def test_a_slow_server_is_not_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a report would wait for minutes: eight requests of 16 tokens, a second apart each."""
    asked: list[Timing] = []

    def measure(protocol: str, streams: int, timing: Timing, *given: object, **more: object) -> SimpleNamespace:
        asked.append(timing)
        return SimpleNamespace(ttft_p50=0.1, ttft_p99=0.2, itl_mean=0.0, itl_p99_said=1.0, itl_p99_true=1.0)

    monkeypatch.setattr(selftest, "_measure", measure)
    result: Any = SimpleNamespace(
        protocol="grpc", metrics={"inter_chunk_latency": {"p50": 1100.0}}, client={"in_flight": {"reached": 1}}
    )
    report: Any = SimpleNamespace(endpoints=[{}], results=[result])
    options: Any = SimpleNamespace(targets=[SimpleNamespace(protocol="grpc")], wiring=None)
    selftest.state_error(report, options)
    assert [one.itl_s for one in asked] == [0.05]
    assert report.endpoints[0]["measured_error"]["itl_ms"] == 50
