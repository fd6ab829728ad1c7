"""What a real tritonserver publishes, read by `top`: the numbers are those of the requests that were sent."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.e2e.conftest import Served
from tests.unit.deploy.test_monitoring import family, panels, series
from trtpipe.pipeline.cli import console_top
from trtpipe.pipeline.net.triton_metrics import FAMILIES, KNOWN, EngineFigures, Figures, ModelFigures, Scrape
from trtpipe.pipeline.serving import top

pytestmark = pytest.mark.real

# Labels of Prometheus, which no page has.
CHOSEN = {("job", "trtpipe"), ("job", "trtpipe-gateway")}
# Panels that a server without a GPU, and another than NVIDIA's container, has no data for.
ELSEWHERE = {
    "GPU busy", "GPU memory", "GPU power", "Energy of a token", "Memory of the engine", "Time to load",
    "First response",
}  # fmt: skip

TOKENS = 4
ASK: dict[str, Any] = {
    "text_input": "The capital of France is",
    "max_tokens": TOKENS,
    "end_id": -1,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


def model(figures: Figures, name: str) -> ModelFigures:
    return next(entry for entry in figures.models if entry.model == name)


def engine(figures: Figures) -> EngineFigures:
    (only,) = figures.engines
    return only


def published(served: Served) -> Scrape:
    return top.scrape_once(served.metrics)


def settled(served: Served) -> None:
    """Return when nothing runs and no counter moves: Triton counts a request shortly after it has answered it."""
    before = None
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        scrape = published(served)
        counts = {(s.family, s.part, s.labels): s.value for s in scrape.samples if s.grows}
        if counts == before and scrape.total("nv_trt_llm_request_metrics", request_type="active") == 0:
            return
        before = counts
        time.sleep(0.3)
    raise AssertionError("the server's counters do not come to rest")


def between(served: Served, act: Callable[[], object]) -> Figures:
    """The figures of an interval in which `act` happened, and nothing else."""
    settled(served)

    def sleep(seconds: float) -> None:
        act()
        settled(served)

    snapshots = top.watch(served.metrics, served.name, interval=0.1, sleep=sleep)
    assert next(snapshots).up
    figures = next(snapshots).figures
    snapshots.close()
    assert figures is not None
    assert figures.seconds is not None
    return figures


def test_the_families_of_the_list_are_those_the_server_publishes(served: Served) -> None:
    found = {sample.family for sample in published(served).samples}
    assert found & set(KNOWN) == {family.name for family in FAMILIES if family.reference}
    assert not [name for name in found if name.startswith("nv_") and name not in KNOWN]


def test_rates_are_those_of_what_was_sent(served: Served) -> None:
    replies: list[dict[str, Any]] = []

    def act() -> None:
        replies.extend(served.generate(**ASK) for _ in range(3))
        replies.extend(served.generate("tensorrt_llm_bls", **ASK) for _ in range(2))

    figures = between(served, act)
    assert figures.seconds is not None
    assert figures.restarted == ()
    assert [reply["num_output_tokens"] for reply in replies] == [TOKENS] * 5

    def count(rate: float | None) -> float:
        assert rate is not None
        assert figures.seconds is not None
        return rate * figures.seconds

    for name, requests in (("ensemble", 3), ("tensorrt_llm_bls", 2), ("tensorrt_llm", 5), ("preprocessing", 5)):
        assert count(model(figures, name).succeeded_per_s) == pytest.approx(requests), name
        assert model(figures, name).failed_per_s == 0
        assert model(figures, name).pending == 0
    front = model(figures, "ensemble")
    assert front.request_ms is not None
    assert front.queue_ms is not None
    assert 0 < front.queue_ms < front.request_ms < figures.seconds * 1000 / 3
    assert count(engine(figures).output_tokens_per_s) == pytest.approx(5 * TOKENS)
    sent = sum(reply["num_input_tokens"] for reply in replies)
    assert count(engine(figures).input_tokens_per_s) == pytest.approx(sent)
    # A step gives each request a token, and a request's first step reads its prompt and gives the first.
    assert TOKENS <= round(count(engine(figures).steps_per_s), 6) <= 5 * TOKENS


def test_a_failure_counts_twice_in_the_ensemble_and_not_in_the_engine(served: Served) -> None:
    """As docs/metrics.md warns, and as its alert's description says."""
    figures = between(served, lambda: served.generate(text_input="hello", max_tokens=5000))
    assert figures.seconds is not None
    assert (model(figures, "ensemble").failed_per_s or 0) * figures.seconds == pytest.approx(2)
    assert model(figures, "tensorrt_llm").failed_per_s == 0
    assert model(figures, "ensemble").succeeded_per_s == 0


def test_a_request_in_flight_is_seen_with_its_blocks(served: Served) -> None:
    settled(served)
    # Through BLS, which ends a request in the engine when its client leaves: nothing has to be waited for.
    stream = served.stream("tensorrt_llm_bls", text_input="Count: one, two,", max_tokens=900, end_id=-1)
    with contextlib.closing(stream):  # type: ignore[type-var]
        next(stream)
        deadline = time.monotonic() + 20
        for snapshot in top.watch(served.metrics, served.name, interval=0.2):
            assert snapshot.figures is not None
            at = engine(snapshot.figures)
            # The engine's page is as old as its last step, which may have begun before the request had blocks.
            if (at.in_flight == 1 and at.kv_used) or time.monotonic() > deadline:
                break
        assert (at.in_flight, at.waiting) == (1, 0)
        assert at.kv_used is not None
        assert at.kv_max is not None
        assert at.kv_used > 0
        assert at.kv_fraction == at.kv_used / at.kv_max
        assert at.kv_free == at.kv_max - at.kv_used
    settled(served)


def test_once_as_json_agrees_with_what_was_sent(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    def look() -> dict[str, Any]:
        settled(served)
        console_top.run(served.metrics, served.name, interval=0.2, once=True, as_json=True)
        value: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert value["up"]
        return value["figures"]  # type: ignore[no-any-return]

    def counts(figures: dict[str, Any]) -> dict[str, float]:
        (tokens,) = figures["engines"]
        found = {entry["model"]: entry["succeeded"] for entry in figures["models"]}
        return {
            **found,
            **{name: tokens[name] for name in ("input_tokens", "output_tokens") if tokens[name] is not None},
        }

    before = counts(look())
    replies = [served.generate(**ASK) for _ in range(4)]
    after = counts(look())
    grown = {name: after[name] - before[name] for name in after}
    assert (grown["ensemble"], grown["tensorrt_llm"], grown["tensorrt_llm_bls"]) == (4, 4, 0)
    assert grown["output_tokens"] == sum(reply["num_output_tokens"] for reply in replies) == 4 * TOKENS
    assert grown["input_tokens"] == sum(reply["num_input_tokens"] for reply in replies)
    assert look()["models"][0]["succeeded_per_s"] == 0


@pytest.fixture
def gateway(served: Served) -> Iterator[str]:
    """Address of a gateway that `trtpipe gateway` runs in front of the server; it is told to end, and does."""
    words = ("gateway", served.name, "--triton", served.grpc, "--served-model-name", "small", "--port", "0")
    process = served.cli.start(*words, "--linger", "1")
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        found = re.match(r"gateway at (http://\S+)/v1;", process.stdout.readline())
        assert found, process.stderr.read()
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE)
    return {
        (name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))): float(value.lower()) for name, labels, value in found
    }


def test_every_panel_and_alert_has_data_while_a_server_and_its_gateway_work(
    served: Served, gateway: str, tmp_path: Path
) -> None:
    folder = tmp_path / "monitoring"
    served.cli.ok("monitoring", served.name, "--gateways", urlsplit(gateway).netloc, "-o", str(folder))
    jobs = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == [urlsplit(served.metrics).netloc]
    body = {"model": "small", "prompt": "Count to a hundred:", "max_tokens": 24, "ignore_eos": True}

    def ask(number: int) -> int:
        return client.post(f"{gateway}/v1/completions", json=body).status_code

    with httpx.Client(timeout=250) as client, ThreadPoolExecutor(8) as pool:
        asked = pool.map(ask, range(8))
        deadline = time.monotonic() + 200
        here: dict[Any, float] = {}
        while here.get(("trtpipe_gateway_inter_token_seconds_count", frozenset()), 0) < 100:
            assert time.monotonic() < deadline
            here = samples(client.get(f"{gateway}/metrics").text) | samples(client.get(served.metrics).text)
            time.sleep(0.1)
        assert set(asked) == {200}
    assert here["trtpipe_gateway_running", frozenset()] > 0

    def has_data(expr: str) -> bool:
        return all(
            name == "up" or any(own == name and set(labels.items()) - CHOSEN <= has for own, has in here)
            for name, selections in series(expr).items()
            for labels in selections
        )

    board = json.loads((folder / "grafana-dashboard.json").read_text())
    empty = {panel["title"] for panel in panels(board) for target in panel["targets"] if not has_data(target["expr"])}
    assert empty == ELSEWHERE
    missing = [
        name
        for panel in panels(board)
        for target in panel["targets"]
        for name in series(target["expr"])
        if panel["title"] in ELSEWHERE and not any(own == name for own, _ in here)
    ]
    # They lack what is known to be elsewhere, and nothing else.
    assert not [name for name in missing if KNOWN[family(name)].reference]
    (group,) = yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"] if not has_data(rule["expr"])] == []
