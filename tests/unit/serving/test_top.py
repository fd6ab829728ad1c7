"""`trtpipe top` against a server of the test's own that publishes metrics, changes them, vanishes and returns."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.cli import console_top
from trtpipe.pipeline.cli.console_top import run
from trtpipe.pipeline.net.triton_metrics import Figures, GpuFigures
from trtpipe.pipeline.serving import top
from trtpipe.pipeline.serving.top import Snapshot, metrics_url, watch

SERIES = """\
# TYPE nv_inference_request_success counter
nv_inference_request_success{{model="ensemble",version="1"}} {requests}
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{{model="ensemble",reason="OTHER",version="1"}} {failed}
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{{model="ensemble",version="1"}} {us}
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="active",version="1"}} 12
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="max",version="1"}} 32
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="waiting",version="1"}} 5
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="used",model="tensorrt_llm",version="1"}} 1000
nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="max",model="tensorrt_llm",version="1"}} 1024
# TYPE trtpipe_speculation gauge
trtpipe_speculation{{model="tensorrt_llm",speculation_type="decode_steps",version="1"}} {requests}
trtpipe_speculation{{model="tensorrt_llm",speculation_type="draft_tokens",version="1"}} {tokens}
trtpipe_speculation{{model="tensorrt_llm",speculation_type="accepted_draft_tokens",version="1"}} {requests}
# TYPE nv_llm_output_token_len histogram
nv_llm_output_token_len_sum{{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"}} {tokens}
"""


def busy(requests: int) -> str:
    """The scrape of a server that has answered so many requests, with 10 tokens and in 0.2 s each."""
    return SERIES.format(requests=requests, failed=0, us=requests * 200_000, tokens=requests * 10)


class Triton:
    """An HTTP server on loopback whose answer the test sets."""

    def __init__(self) -> None:
        self.body = busy(0)
        self.status = 200
        self.paths: list[str] = []
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.appear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def appear(self) -> None:
        triton = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                triton.paths.append(self.path)
                self.send_response(triton.status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.end_headers()
                self.wfile.write(triton.body.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def vanish(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


@pytest.fixture
def triton() -> Iterator[Triton]:
    server = Triton()
    yield server
    server.vanish()


class Clock:
    """Time that passes only while somebody sleeps; `between` is called then."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.between: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.between()


def watched(triton: Triton, clock: Clock, interval: float = 2.0) -> Generator[Snapshot, None, None]:
    return watch(triton.url, "demo", interval=interval, clock=clock, sleep=clock.sleep)


def figures(snapshot: Snapshot) -> Figures:
    assert snapshot.figures is not None
    return snapshot.figures


@pytest.mark.loopback
def test_snapshots_have_the_rates_of_their_interval(triton: Triton) -> None:
    clock = Clock()
    snapshots = watched(triton, clock)
    triton.body = busy(10)
    assert figures(next(snapshots)).models[0].succeeded_per_s is None
    triton.body = busy(16)
    second = next(snapshots)
    assert (second.server, second.url, second.up, second.why) == ("demo", triton.url, True, "")
    (model,) = figures(second).models
    assert (model.succeeded, model.succeeded_per_s, model.request_ms) == (16, 3.0, 200.0)
    (engine,) = figures(second).engines
    assert (engine.output_tokens_per_s, engine.waiting, engine.in_flight_max) == (30.0, 5, 32)
    assert engine.input_tokens_per_s is None
    assert clock.slept == [2.0]


@pytest.mark.loopback
def test_a_server_that_vanishes_is_told_and_comes_back(triton: Triton) -> None:
    clock = Clock()
    snapshots = watched(triton, clock)
    triton.body = busy(100)
    assert next(snapshots).up
    triton.vanish()
    gone = [next(snapshots), next(snapshots)]
    assert [snapshot.up for snapshot in gone] == [False, False]
    assert "refused" in gone[0].why
    triton.body = busy(9)  # a new process: it counts from 0
    triton.appear()
    back = figures(next(snapshots))
    # Nobody knows when it came back: the rate is that of all the time since the last answer.
    assert back.seconds == 6.0
    assert back.restarted == ("ensemble", "tensorrt_llm")
    assert back.models[0].succeeded_per_s == 1.5


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("status", "body", "telling"),
    [
        (503, busy(1), "HTTP status 503"),
        (200, "<html>hello</html>", "not metrics in Prometheus' text format"),
        (200, "", "none of the families is one of Triton's"),
        (200, "# TYPE node_load1 gauge\nnode_load1 0.5\n", "none of the families is one of Triton's"),
    ],
)
def test_an_answer_that_is_none_is_an_outage_with_its_reason(
    triton: Triton, status: int, body: str, telling: str
) -> None:
    clock = Clock()
    snapshots = watched(triton, clock)
    assert next(snapshots).up
    triton.status, triton.body = status, body
    bad = next(snapshots)
    assert (bad.up, bad.figures) == (False, None)
    assert telling in bad.why
    triton.status, triton.body = 200, busy(1)
    assert next(snapshots).up


@pytest.mark.loopback
def test_a_server_that_hangs_counts_as_gone(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "TIMEOUT_S", 0.2)
    triton.vanish()
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", triton.port))
        silent.listen()
        snapshot = next(watched(triton, Clock()))
    assert not snapshot.up
    assert snapshot.why == "no whole answer within 0.2 s"


@pytest.mark.loopback
def test_scrapes_that_took_too_long_are_not_made_up_for(triton: Triton) -> None:
    clock = Clock()
    snapshots = watched(triton, clock, interval=1.0)
    next(snapshots)
    clock.now += 3.5  # whoever reads was busy
    next(snapshots)
    next(snapshots)
    assert clock.slept == [0.0, 1.0]


@pytest.mark.loopback
def test_once_waits_one_interval_and_prints_json(triton: Triton, capsys: pytest.CaptureFixture[str]) -> None:
    triton.body = busy(3)
    run(f"127.0.0.1:{triton.port}", "demo", interval=0.1, once=True, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["server"], shown["url"], shown["up"]) == ("demo", triton.url, True)
    assert shown["figures"]["seconds"] > 0
    assert shown["figures"]["models"][0]["succeeded"] == 3
    assert shown["figures"]["models"][0]["succeeded_per_s"] == 0
    assert shown["figures"]["engines"][0]["kv_free"] is None
    assert triton.paths == ["/metrics", "/metrics"]


@pytest.fixture
def three_looks(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """`run` sees three scrapes, two requests apart, the server gone for the fourth; then somebody presses Ctrl-C."""
    clock, real = Clock(), watch

    def between() -> None:
        looks = len(clock.slept)
        triton.body = busy(2 * looks)
        if looks == 3:
            triton.vanish()
        if looks == 4:
            raise KeyboardInterrupt

    clock.between = between

    def with_clock(url: str, name: str, *, interval: float) -> Generator[Snapshot, None, None]:
        return real(url, name, interval=interval, clock=clock, sleep=clock.sleep)

    monkeypatch.setattr(console_top, "watch", with_clock)
    return clock


@pytest.mark.loopback
def test_json_is_a_line_for_each_snapshot_until_ctrl_c(
    triton: Triton, three_looks: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    run(triton.url, "demo", interval=1.0, once=False, as_json=True)
    out, err = capsys.readouterr()
    shown = [json.loads(line) for line in out.splitlines()]
    assert [entry["up"] for entry in shown] == [True, True, True, False]
    rates = [entry["figures"]["models"][0]["succeeded_per_s"] for entry in shown[:3]]
    assert rates == [None, 2.0, 2.0]
    assert err == ""


@pytest.mark.loopback
def test_where_stdout_is_no_terminal_snapshots_are_plain_lines(
    triton: Triton, three_looks: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    run(triton.url, "demo", interval=1.0, once=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7  # a line for the model and one for the engine, thrice, and that it is gone
    assert "\x1b" not in "".join(lines)
    assert "demo ensemble requests/s 2.00 failed/s 0.00 request 200.0 ms queue - ms" in lines[2]
    assert "demo tensorrt_llm tokens/s in - out 20.0 in flight 12 of 32 scheduled - waiting 5 KV blocks 1000 of 1024 "
    assert "(97.7 %)" in lines[3]
    assert lines[3].endswith(" tokens/step 2.00 drafts accepted 10.0 %")
    assert "demo down: " in lines[-1]


@pytest.mark.loopback
def test_without_a_server_there_is_one_named_error(triton: Triton) -> None:
    triton.vanish()
    for once in (True, False):
        with pytest.raises(HostError, match=r"no Triton metrics at .*refused; start a server") as caught:
            run(triton.url, "demo", interval=1.0, once=once, as_json=True)
        assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("given", "scraped"),
    [
        ("http://localhost:8002", "http://localhost:8002/metrics"),
        ("localhost:8002/", "http://localhost:8002/metrics"),
        ("gpu-7:8002", "http://gpu-7:8002/metrics"),
        ("https://example.org/triton/metrics", "https://example.org/triton/metrics"),
        ("http://[::1]:8002", "http://[::1]:8002/metrics"),
    ],
)
def test_a_url_needs_neither_scheme_nor_path(given: str, scraped: str) -> None:
    assert metrics_url(given) == scraped


@pytest.mark.parametrize("url", ["", "grpc://localhost:8001", "http://", "http://host:port", "http:///metrics"])
def test_an_impossible_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not an HTTP URL"):
        metrics_url(url)


@pytest.mark.parametrize("interval", [0.0, -1.0, 0.01, float("nan"), float("inf")])
def test_an_impossible_interval_is_refused(interval: float) -> None:
    with pytest.raises(UsageError, match="an interval of"):
        run("localhost:8002", "demo", interval=interval, once=True, as_json=True)


def seen(snapshot: Snapshot, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    console.print(console_top.render(snapshot))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return str(text)


def snapshot_of(first: str, second: str, **more: Any) -> Snapshot:
    from dataclasses import replace

    from trtpipe.pipeline.net.triton_metrics import derive, parse

    found = replace(derive(parse(first, 0.0), parse(second, 2.0)), **more)
    time = "2026-01-02T03:04:05+00:00"
    return Snapshot(server="demo", url="http://127.0.0.1:8002/metrics", time=time, up=True, figures=found)


def test_the_table_shows_rates_queue_and_kv_cache_in_80_columns() -> None:
    text = seen(snapshot_of(busy(0), busy(16)))
    assert "demo  http://127.0.0.1:8002/metrics" in text
    assert "over 2.0 s  03:04:05 UTC" in text
    assert "model     req/s  fail/s  total ms  queue ms  infer ms  first ms  pending" in text
    assert "in flight 12 of 32   scheduled -   waiting 5   paused -" in text
    assert "97.7 %" in text
    assert "1000 of 1024 blocks used, - free" in text
    assert "in -   out 80.0   being made -   steps/s -" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_long_names_and_large_numbers_fit(width: int) -> None:
    name = "a_model_whose_name_is_longer_than_any_terminal_is_wide_" * 3
    gpu = GpuFigures(
        uuid="GPU-340cec52-80ba-c0df-8511-5f9680aae0ed", utilization=0.97, memory_used_bytes=7e10,
        memory_total_bytes=8.5e10, power_w=641.2, power_limit_w=None,
    )  # fmt: skip
    first, second = (busy(count).replace("ensemble", name) for count in (0, 10**9))
    text = seen(snapshot_of(first, second, gpus=(gpu,)), width)
    if width >= 80:
        assert "500000000" in text
        assert "97.0 %  70.0 GB of 85.0 GB  641 W" in text


def test_a_restart_and_an_outage_are_shown() -> None:
    assert "started again: ensemble, tensorrt_llm" in seen(snapshot_of(busy(9), busy(3)))
    down = Snapshot(server="demo", url="http://127.0.0.1:8002/metrics", time="2026-01-02T03:04:05+00:00", up=False,
                    why="connection refused")  # fmt: skip
    assert "no answer: connection refused" in seen(down)


@pytest.mark.loopback
def test_a_terminal_gets_a_table_that_refreshes(
    triton: Triton, three_looks: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, highlight=False, markup=False, emoji=False)
    monkeypatch.setattr(console_top, "console", lambda: console)
    run(triton.url, "demo", interval=1.0, once=False, as_json=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("req/s") == 3
    assert "no answer: " in text
    assert "\x1b[2K" in text  # what was drawn is drawn over
