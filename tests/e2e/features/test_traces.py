"""Traces of a served model: the gateway's spans, Triton's below them, and the engine's times, at a collector."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import until
from tests.e2e.features.conftest import TARGET, Front
from tests.support.otlp import Collector, attributes

pytestmark = pytest.mark.real

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SPAN = f"text_completion {TARGET}"


def ask(front: Front, traceparent: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    body = {"model": TARGET, "prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, **body}
    reply = httpx.post(f"{front.served.openai}/v1/completions", json=body, headers=headers, timeout=60)
    answer: dict[str, Any] = reply.json()
    return answer


def children(received: Collector, parent: bytes) -> dict[str, Any]:
    return {span.name: (service, span) for service, span in received.spans if span.parent_span_id == parent}


def test_a_request_is_one_trace_from_the_client_to_the_model(front: Front) -> None:
    answer = ask(front, f"00-{TRACE}-{PARENT}-01")
    assert answer["usage"]["completion_tokens"] == 20

    def own() -> dict[str, Any]:
        return children(front.received, bytes.fromhex(PARENT))

    assert until(lambda: bool(own()))
    ((name, (service, span)),) = own().items()
    assert (name, service) == (SPAN, "trtpipe-gateway")
    # The id of an answer finds its trace.
    assert attributes(span)["gen_ai.response.id"] == answer["id"]

    assert until(lambda: "InferRequest" in children(front.received, span.span_id))
    triton, request = children(front.received, span.span_id)["InferRequest"]
    assert triton == "triton"
    _, step = children(front.received, request.span_id)["tensorrt_llm"]
    assert {one.trace_id.hex() for one in (span, request, step)} == {TRACE}
    assert span.start_time_unix_nano < request.start_time_unix_nano < span.end_time_unix_nano


def test_the_engine_s_times_fill_the_request(front: Front) -> None:
    before = len(front.received.named(SPAN))
    ask(front, max_tokens=40)
    assert until(lambda: len(front.received.named(SPAN)) > before)
    span = front.received.named(SPAN)[before]
    happened = {event.name: event for event in span.events}
    seconds = {name: attributes(happened[name])["seconds"] for name in ("queue", "prefill", "decode")}
    assert all(value > 0 for value in seconds.values()), seconds
    assert sum(seconds.values()) < (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    begun = [happened[name].time_unix_nano for name in ("prepared", "queue", "prefill", "decode")]
    assert begun == sorted(begun)
    # The gateway hears of the first token when the engine has begun to write.
    assert happened["first token"].time_unix_nano > happened["prefill"].time_unix_nano


def test_what_a_client_does_not_sample_is_traced_by_nobody(front: Front) -> None:
    assert "choices" in ask(front, f"00-{'a' * 32}-{'b' * 16}-00")
    ask(front)  # its spans come after those of the other would
    count = len(front.received.named("InferRequest"))
    assert until(lambda: len(front.received.named("InferRequest")) >= count)
    time.sleep(1.0)
    assert not [span for _, span in front.received.spans if span.trace_id.hex() == "a" * 32]


def test_triton_traces_its_own_clients_where_they_bring_a_trace(front: Front) -> None:
    url, trace = f"{front.served.http}/v2/models/ensemble/generate", "c" * 32
    body = {"text_input": "Hello", "max_tokens": 2}
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    headers = {"traceparent": f"00-{trace}-{'d' * 16}-01"}
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200

    def roots() -> list[Any]:
        return [s for s in front.received.named("InferRequest") if s.parent_span_id.hex() == "d" * 16]

    assert until(lambda: bool(roots()))
    assert {span.trace_id.hex() for span in front.received.named("InferRequest") if not span.parent_span_id} == set()


def test_clients_that_leave_do_not_disturb_a_traced_server(front: Front) -> None:
    """Triton finishes the span of a request whose stream was reset or stopped."""
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{front.served.openai}/v1/completions", timeout=0.3,
                json={"model": TARGET, "prompt": [5], "max_tokens": 4000, "ignore_eos": True},
            )  # fmt: skip
    assert len(ask(front)["choices"]) == 1
    assert until(
        lambda: [attributes(span)["http.response.status_code"] for _, span in front.received.spans
                 if span.name == SPAN].count(499) == 5
    )  # fmt: skip


def test_an_endpoint_that_is_none_is_refused_before_anything_starts(front: Front, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(front.run / "repository")
    done = front.served.cli.run("serve", str(other), "--otlp-endpoint", "localhost:4317")
    assert done.status == 2
    assert "--otlp-endpoint 'localhost:4317' is not a URL of a collector" in done.err
