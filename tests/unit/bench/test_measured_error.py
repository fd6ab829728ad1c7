"""What a report says of how wrong the libraries are on this host; tests/unit/bench/test_selftest.py measures it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtpipe.engines.errors import Ended, HostError, StageFailed, UsageError
from trtpipe.pipeline.api.bench import measure
from trtpipe.pipeline.bench import selftest
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.protocols.connect import Wiring
from trtpipe.pipeline.bench.results.report import BenchReport


def report(**changes: Any) -> BenchReport:
    return BenchReport(command=[], options={}, tokenizer_sha256=None, started="", **changes)


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


@pytest.mark.parametrize(
    ("ending", "number"),
    [(KeyboardInterrupt(), signal.SIGINT), (Ended(143), signal.SIGTERM), (Ended(129), signal.SIGHUP)],
)
def test_a_signal_meanwhile_does_not_lose_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException, number: int
) -> None:
    def end(*given: object) -> None:
        raise ending

    monkeypatch.setattr("trtpipe.pipeline.bench.run.run", lambda *given: report())
    monkeypatch.setattr(selftest, "state_error", end)
    options: Any = SimpleNamespace(tokenizer=tmp_path / "tokenizer.json", wiring=Wiring(transport="tritonclient"))
    measured = measure(options, None)
    assert (measured.interrupted, measured.ended_by) == (True, number)


@pytest.mark.parametrize("error", [HostError("no port"), StageFailed("status 502"), UsageError("too many")])
def test_an_error_meanwhile_does_not_lose_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr("trtpipe.pipeline.bench.run.run", lambda *given: report())
    monkeypatch.setattr(selftest, "state_error", fail)
    options: Any = SimpleNamespace(tokenizer=tmp_path / "tokenizer.json", wiring=Wiring(transport="tritonclient"))
    said: list[str] = []
    assert not measure(options, None, note=said.append).partial
    assert said == [f"how wrong tritonclient is here is not known: {error}"]


@pytest.mark.parametrize(
    "measure", [lambda: selftest.measure("grpc", 4, 0.01, Wiring()), lambda: selftest.ceiling("grpc", Wiring())]
)
def test_a_signal_ends_the_self_test(monkeypatch: pytest.MonkeyPatch, measure: Callable[[], object]) -> None:
    """`run` takes Ctrl-C, and returns a report of what was measured until then: of nothing here."""
    server: Any = SimpleNamespace(grpc_port=1, http_port=2, stop=list)
    monkeypatch.setattr(MockServerProcess, "start", lambda *given, **more: server)
    monkeypatch.setattr(selftest, "_apart", lambda: nullcontext(None))
    monkeypatch.setattr(selftest, "run", lambda *given: report(interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        measure()
