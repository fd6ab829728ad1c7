"""The arithmetic of the table of peers, and the words it takes from their installation and their logs."""

from __future__ import annotations

from array import array

import pytest

from tests.benchmarks import beside, peers
from trtpipe.pipeline.bench.mock_server.script import Truth


def truth(name: str, arrival: int, *stamps: int) -> Truth:
    return Truth(name, "openai", arrival, len(stamps), "finish", 1, array("q", stamps))


def request(name: str, sent: int, *stamps: int, failure: str | None = None, warmup: bool = False) -> dict[str, object]:
    return {"id": name, "sent_ns": sent, "stamps_ns": list(stamps), "failure": failure, "warmup": warmup}


def test_errors_are_of_the_same_request() -> None:
    requests = [request("a", 0, 7_000_000, 9_000_000), request("b", 0, 9_000_000, 13_000_000)]
    known = {"a": truth("a", 100, 5_000_100, 7_000_100), "b": truth("b", 900, 8_000_900, 11_000_900)}
    found = beside.errors(requests, known)
    assert found["ttft_p50"] == pytest.approx(1.5)
    assert found["itl_mean"] == pytest.approx(0.5)
    assert (found["itl_p99_said"], found["itl_p99_true"]) == pytest.approx((3.98, 2.99))


def test_good_requests_were_measured_and_answered() -> None:
    failed, early = request("a", 0, 1, failure="refused"), request("b", 0, 1, warmup=True)
    assert beside.good([failed, early, request("c", 0), request("d", 0, 1)]) == [request("d", 0, 1)]


def test_the_load_is_what_was_written_while_it_was_whole() -> None:
    warmup = truth("w", 0, 10, 20, 30)
    measured = [truth("a", 10, 15, 25, 35), truth("b", 20, 22, 32, 42), truth("c", 40, 50, 60)]
    # From b's arrival to c's, of two streams: 20 and 30 of the warm-up, 25 and 35, 22 and 32.
    assert peers.written([warmup, *measured], measured, 2) == pytest.approx(6 / 20e-9)
    with pytest.raises(peers.Failed, match="too few for 3 streams"):
        peers.written(measured, measured, 3)


def test_what_is_wanted_of_a_package_s_requirements() -> None:
    lines = [
        "Torch==2.1", "numpy", "typing_extensions>=4", "fastapi[standard]<1; python_version > '3'",
        "torchaudio", "regex; platform_machine == 'none'", "pandas; extra == 'bench'",
    ]  # fmt: skip
    chosen = peers.wanted(lines, ["torch", "typing-extensions", "fastapi", "regex", "pandas"])
    assert chosen == ["Torch==2.1", "typing_extensions>=4", "fastapi[standard]<1"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it said nothing"),
        ("one\ntwo\n", "two"),
        ("\x1b[31mERROR: no | such\x1b[0m\nleaked 3\n", "ERROR: no / such"),
    ],
)
def test_the_last_error_of_a_log(text: str, told: str) -> None:
    assert peers.last_error(text) == told


def test_vllm_s_requests_are_known_by_their_place() -> None:
    assert peers.vllm_id("0-17") == "vllm-17"


def test_a_peer_that_fails_keeps_its_row() -> None:
    failed = peers.Failed("not installed: no such version")
    line = peers.row("aiperf", "chat", 64, 2048, [failed, failed])
    assert line.startswith("| aiperf | chat | 64 | 2 of 2 runs failed: not installed: no such version |")
    figures = dict.fromkeys(
        ("ttft_p50", "ttft_p99", "itl_mean", "itl_p99_said", "itl_p99_true", "load", "cpu", "start", "tail"), 1.0
    )
    mixed = peers.row("ours", "grpc", 64, 2048, [{**figures, "answered": 2048.0, "invalid": 1.0}, failed])
    assert "2048 of 2048; 1 of 2 runs failed: not installed" in mixed
    assert "1 of 2 runs INVALID by its own verdict" in mixed
    assert line.count("|") == mixed.count("|") == peers.HEADER[0].count("|")
