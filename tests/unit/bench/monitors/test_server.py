"""What a server says of itself beside the load: read in time with it, and held against the client's count."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trtpipe.pipeline.bench.monitors.server import ServerMonitor, agree, summarise

SECOND = 1_000_000_000


def page(
    tokens: int, *, queue_us: int = 0, compute_us: int = 0, done: int = 0, active: int = 0, joules: float = 0
) -> bytes:
    """As Triton with TensorRT-LLM's backend writes it, as far as it matters here."""
    return f"""\
# TYPE nv_inference_request_success counter
nv_inference_request_success{{model="tensorrt_llm",version="1"}} {done}
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{{model="tensorrt_llm",version="1"}} {done}
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{{model="tensorrt_llm",version="1"}} {queue_us + compute_us}
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{{model="tensorrt_llm",version="1"}} {queue_us}
# TYPE nv_inference_compute_infer_duration_us counter
nv_inference_compute_infer_duration_us{{model="tensorrt_llm",version="1"}} {compute_us}
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="active",version="1"}} {active}
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="max",version="1"}} 8
# TYPE nv_llm_output_token_len histogram
nv_llm_output_token_len_sum{{model="tensorrt_llm",version="1"}} {tokens}
nv_llm_output_token_len_count{{model="tensorrt_llm",version="1"}} {done}
# TYPE nv_energy_consumption counter
nv_energy_consumption{{gpu_uuid="GPU-1"}} {joules}
""".encode()


def test_a_load_point_by_the_server_s_own_word() -> None:
    pages = [
        (10 * SECOND, page(100, done=10, queue_us=1000, compute_us=9000, joules=50)),
        (11 * SECOND, page(1100, done=20, queue_us=3000, compute_us=29_000, active=6, joules=150)),
        (13 * SECOND, page(1500, done=30, queue_us=5000, compute_us=49_000, active=2, joules=250)),
    ]
    said = summarise(pages, 1400, 9 * SECOND)
    assert said is not None
    assert said["output_tokens"] == {"server": 1400, "client": 1400, "agree": True}
    assert said["energy_j_per_token"] == pytest.approx(200 / 1400)
    assert said["series"]["t_s"] == [2.0, 4.0]
    assert said["series"]["tokens_per_s"] == [1000.0, 200.0]
    assert said["series"]["in_flight"] == [6.0, 2.0]
    (model,) = said["models"]
    assert (model["queue_ms"], model["compute_ms"]) == pytest.approx((0.2, 2.0))


def test_a_load_point_by_the_word_of_vllm_s_own_server() -> None:
    def vllm(tokens: int, running: int, waiting: int, kv: float) -> bytes:
        labels = '{engine="0",model_name="m"}'
        return f"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{labels} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{labels} {kv}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{labels} {tokens}
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{labels} 1.7e+09
""".encode()

    said = summarise(
        [(10 * SECOND, vllm(500, 0, 0, 0)), (12 * SECOND, vllm(900, 4, 2, 0.25)), (13 * SECOND, vllm(1100, 1, 0, 0.1))],
        600,
        10 * SECOND,
    )
    assert said is not None
    assert said["output_tokens"] == {"server": 600, "client": 600, "agree": True}
    series = {name: said["series"][name] for name in ("in_flight", "waiting", "tokens_per_s", "kv_fraction")}
    assert series == {
        "in_flight": [4.0, 1.0], "waiting": [2.0, 0.0], "tokens_per_s": [200.0, 200.0], "kv_fraction": [0.25, 0.1],
    }  # fmt: skip
    assert ([one["model"] for one in said["engines"]], said["models"]) == (["m"], [])


def test_the_last_page_makes_no_rate_over_a_moment() -> None:
    pages = [(at * SECOND // 1000, page(tokens)) for at, tokens in ((0, 0), (1000, 16), (2000, 32), (2010, 72))]
    said = summarise(pages, 72, 0)
    assert said is not None
    assert said["series"]["t_s"] == [1.0, 2.01]
    assert said["series"]["tokens_per_s"] == pytest.approx([16.0, 56 / 1.01])
    assert said["output_tokens"]["server"] == 72
    # A load point of two pages has no other rate.
    short = summarise([pages[0], (SECOND // 100, page(4))], 4, 0)
    assert short is not None
    assert short["series"]["tokens_per_s"] == [400.0]


def test_the_counts_have_to_agree_within_a_hundredth() -> None:
    assert [agree(1000.0, client) for client in (990, 1010, 989, 1011)] == [True, True, False, False]
    # One of them cannot say.
    assert (agree(1000.0, None), agree(0.0, 1000)) == (None, None)


def test_one_page_or_damaged_ones_say_nothing() -> None:
    assert summarise([(SECOND, page(5))], 5, 0) is None
    assert summarise([(SECOND, b"\xff{"), (2 * SECOND, page(5))], 5, 0) is None


@contextmanager
def serving(pages: Iterator[bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = next(pages)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.loopback
def test_pages_are_read_at_both_ends_of_a_load_point() -> None:
    with serving(page(100 * number) for number in range(1, 100)) as url:
        beside = ServerMonitor("http://elsewhere:8000", url)
        with beside:
            pass
        said = beside.said(100, 0)
    assert said is not None
    assert said["output_tokens"] == {"server": 100, "client": 100, "agree": True}
    assert beside.unread == ""


@pytest.mark.loopback
def test_a_server_without_metrics_costs_nothing() -> None:
    with serving(iter([])) as url:
        gone = url
    beside = ServerMonitor("http://elsewhere:8000", gone)
    with beside:
        pass
    assert beside.said(100, 0) is None
    assert beside.unread == "Connection refused"
    assert ServerMonitor("http://elsewhere:8000", None).unread == ""
