"""Spans of the gateway's requests, as a collector receives them."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import (
    CHAT,
    INPUTS,
    TEXT,
    Asked,
    Triton,
    ask,
    chat,
    events,
    response,
    saying,
    until,
)
from tests.support.otlp import Collector, attributes, collector
from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.gateway import traces
from trtpipe.pipeline.gateway.traces import TIMES, engine_phases, traces_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
MS = 1_000_000


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with collector() as made:
        yield made


def timed(tokens: list[int], times: tuple[int, ...], *, final: bool) -> Any:
    out = response(tokens, final=final)
    for name, value in zip(TIMES, times, strict=True):
        out.infer_response.outputs.add(name=name, datatype="INT64", shape=[1, 1])
        out.infer_response.raw_output_contents.append(struct.pack("<q", value))
    return out


async def slow(asked: Asked, context: Any) -> AsyncIterator[Any]:
    """An engine whose request waited 5 ms, was read in 20 ms and answered in 40 ms."""
    start = 7_000_000
    yield timed([40], (start, start + 5 * MS, start + 25 * MS, start + 25 * MS), final=False)
    yield timed([41, 42], (start, start + 5 * MS, start + 25 * MS, start + 65 * MS), final=True)


TIMED = {
    "inputs": [*INPUTS, "return_perf_metrics"],
    "outputs": ["output_ids", "sequence_length", "output_log_probs", *TIMES],
}


@pytest.mark.process
@pytest.mark.loopback
def test_a_request_is_a_span_of_its_client_s_trace(folder: Path, received: Collector) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> tuple[Any, Asked]:
        answer = await client.post(CHAT, json=chat(max_tokens=3, ignore_eos=True), headers=SAMPLED)
        return answer.json(), triton.asked[0]

    body, asked = ask(slow, folder, scenario, traces_url=f"{received.url}/v1/traces", triton=TIMED)
    ((service, span),) = received.spans
    assert (service, span.name, span.kind) == ("trtpipe-gateway", "chat llama", 2)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    # Triton's spans become children of this one.
    assert asked.metadata["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert asked.metadata["tracestate"] == "vendor=1"
    assert asked.raw["return_perf_metrics"] == b"\1"
    told = attributes(span)
    assert {name: told[name] for name in told if "latency" not in name} == {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "llama", "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 1, "gen_ai.response.id": body["id"], "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 3, "gen_ai.response.finish_reasons": ["length"],
        "http.request.method": "POST", "url.path": CHAT, "url.scheme": "http", "http.response.status_code": 200,
    }  # fmt: skip
    phases = {"queue": 0.005, "prefill": 0.02, "decode": 0.04}
    assert {name: told[name] for name in told if "latency" in name} == {
        "gen_ai.latency.time_in_queue": 0.005,
        "gen_ai.latency.time_in_model_prefill": 0.02,
        "gen_ai.latency.time_in_model_decode": 0.04,
    }
    happened = {event.name: event for event in span.events}
    assert list(happened) == ["prepared", "first token", "queue", "prefill", "decode"]
    assert {name: attributes(happened[name]) for name in phases} == {
        name: {"choice": 0, "seconds": seconds} for name, seconds in phases.items()
    }
    assert happened["decode"].time_unix_nano - happened["queue"].time_unix_nano == 25 * MS
    # The collector gets what OpenTelemetry's own variables say.
    assert received.headers[0]["x-key"] == "secret"


@pytest.mark.process
@pytest.mark.loopback
def test_refused_and_abandoned_requests_are_spans_too(folder: Path, received: Collector) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        assert (await client.post(CHAT, json=chat(n=0))).status_code == 400
        assert (await client.get("/v1/models")).status_code == 200
        with contextlib.suppress(httpx.ReadTimeout):
            await client.post(TEXT, json={"model": "llama", "prompt": "a"}, timeout=0.5)
        await until(lambda: triton.running == 0)

    ask(saying(folder, "a" * 9, pause=2.0), folder, scenario, traces_url=f"{received.url}/v1/traces")
    told = [attributes(span) for _, span in received.spans]
    assert [(one["gen_ai.operation.name"], one["http.response.status_code"]) for one in told] == [
        ("chat", 400),
        ("text_completion", 499),
    ]
    assert not any(name.startswith("gen_ai.latency") for name in told[1])  # this engine reports no times
    assert [span.status.code for _, span in received.spans] == [0, 0]  # the client's doing


@pytest.mark.process
@pytest.mark.loopback
def test_what_is_not_sampled_goes_nowhere(folder: Path, received: Collector) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> Asked:
        await events(client, CHAT, chat(max_tokens=1))
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        await client.post(CHAT, json=chat(max_tokens=1), headers=headers)
        return triton.asked[1]

    asked = ask(slow, folder, scenario, traces_url=f"{received.url}/v1/traces", triton=TIMED)
    (span,) = received.named("chat llama")
    assert span.parent_span_id == b""
    assert not asked.metadata.keys() & {"traceparent", "tracestate"}
    assert "return_perf_metrics" not in asked.raw


@pytest.mark.process
@pytest.mark.loopback
def test_a_collector_that_is_gone_costs_no_answer(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> int:
        return (await client.post(CHAT, json=chat(max_tokens=3))).status_code

    assert ask(slow, folder, scenario, traces_url="http://127.0.0.1:9/v1/traces", triton=TIMED) == 200


@pytest.mark.process
@pytest.mark.loopback
def test_without_traces_nothing_is_asked_of_the_engine(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> Asked:
        await client.post(CHAT, json=chat(max_tokens=1), headers=SAMPLED)
        return triton.asked[0]

    asked = ask(slow, folder, scenario, triton=TIMED)
    assert not asked.metadata.keys() & {"traceparent", "tracestate"}
    assert not set(TIMES) & set(asked.wanted)


@pytest.mark.process
def test_without_traces_opentelemetry_is_not_imported() -> None:
    script = (
        "import sys, trtpipe.pipeline.gateway.__main__;"
        # FastAPI loads the interface.
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_times_that_an_engine_does_not_know_are_left_out() -> None:
    def outputs(*times: int) -> dict[str, bytes]:
        return {name: struct.pack("<q", value) for name, value in zip(TIMES, times, strict=True)}

    assert engine_phases(outputs(1000, 3000, 7000, 15000), 100_000) == [
        ("queue", 86_000, 2e-6),
        ("prefill", 88_000, 4e-6),
        ("decode", 92_000, 8e-6),
    ]
    assert engine_phases(outputs(1000, 0, 7000, 15000), 100_000) == [("decode", 92_000, 8e-6)]
    assert engine_phases({"output_ids": b""}, 100_000) == []


@pytest.mark.parametrize(
    ("endpoint", "environment", "url"),
    [
        (None, {}, None),
        ("http://host:4318", {}, "http://host:4318/v1/traces"),
        ("https://host/otlp/", {}, "https://host/otlp/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318/"}, "http://host:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://host/own"}, "http://host/own"),
        ("http://a:1", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://host/own"}, "http://a:1/v1/traces"),
        ("http://a:1", {"OTEL_SDK_DISABLED": "True"}, None),
        ("http://a:1", {"OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://a:1", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://a:1/v1/traces"),
    ],
)
def test_where_traces_go(endpoint: str | None, environment: dict[str, str], url: str | None) -> None:
    assert traces_url(endpoint, environment) == url


@pytest.mark.parametrize(
    ("endpoint", "environment", "words"),
    [
        ("localhost:4318", {}, "--otlp-endpoint 'localhost:4318' is not a URL of a collector"),
        ("http://:4318", {}, "--otlp-endpoint 'http://:4318' is not a URL of a collector"),
        ("http://a:b", {}, "--otlp-endpoint 'http://a:b' is not a URL of a collector"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://a:1"}, "OTEL_EXPORTER_OTLP_ENDPOINT 'grpc://a:1' is not a URL"),
        (
            "http://a:1",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, but traces are sent by http/protobuf",
        ),
    ],
)
def test_where_traces_cannot_go(endpoint: str | None, environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        traces_url(endpoint, environment)
    assert words in str(raised.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_installed", lambda: False)
    with pytest.raises(HostError) as raised:
        traces_url("http://a:1", {})
    assert "OpenTelemetry is not installed" in str(raised.value)
    assert "traces" in raised.value.remedy
