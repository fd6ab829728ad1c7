"""How fast the front is: tokens from an engine that computes nothing to clients that only count; `make bench-front`.

The engine (tests/benchmarks/synthetic_runtime.py) gives every live stream a token at each tick, so that what is offered
is known: streams x rate. What reaches the client, and when, is what the front lets through: Triton with the model's
stub instances over gRPC streaming and HTTP generate_stream, and the gateway. A row is one path, number of streams,
number of instances and number of the gateway's workers:

    reached       tokens received in the window over those the engine gave in it
    added TTFT    time from sending a request to its first token, beyond the wait for the next tick (half a tick on
                  average, and the prompt takes none); p50 and p99, ms
    added ITL     how much later than a tick after the one before it a token came; p99, ms
    CPU s         of server, stubs and gateway for 1,000 tokens; the engine's and the clients' own are not in it

    python -m tests.benchmarks.front SCRATCH [--streams 64,256,512] [--rate 200] [--instances 1,4] [--workers 1]
        [--report FILE.md]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support.factories import hf_folder
from trtpipe.pipeline.gateway import process as gateway_process
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.net.h2.connection import Connection
from trtpipe.pipeline.net.h2.triton import STREAM_INFER, Tensor, infer_request
from trtpipe.pipeline.serving import model_control, ports, triton_package, tritonserver

WARM_SECONDS, SECONDS = 2.0, 5.0
PROMPT = [1, 2, 3, 4]
TOKEN_LIMIT = 1 << 14


@dataclass(frozen=True)
class Load:
    """What one client process does: `streams` requests at once, of `tokens` tokens each."""

    path: str
    url: str
    streams: int
    tokens: int


def request_bytes(tokens: int) -> bytes:
    one = (1, 1)
    return infer_request(
        "tensorrt_llm",
        [
            Tensor("input_ids", "INT32", (1, len(PROMPT)), np.array(PROMPT, np.int32).tobytes()),
            Tensor("input_lengths", "INT32", one, np.array([len(PROMPT)], np.int32).tobytes()),
            Tensor("request_output_len", "INT32", one, np.array([tokens], np.int32).tobytes()),
            Tensor("streaming", "BOOL", one, b"\x01"),
        ],
        ("output_ids", "sequence_length"),
    )


def stamping(stamps: list[int]) -> Callable[[bytes, int], None]:
    return lambda data, stamp: stamps.append(stamp)


async def read_grpc(load: Load) -> tuple[list[float], list[list[int]]]:
    """(seconds at which each request was sent, the stamps of its responses)."""
    host, _, port = load.url.partition(":")
    message = request_bytes(load.tokens)
    # One connection carries some hundred streams; Triton answers each on the thread of its connection.
    connections = [await Connection.open(host, int(port)) for _ in range(max(1, load.streams // 64))]
    done = asyncio.get_running_loop().create_future()
    left = load.streams
    sent, stamps = [], []

    def ended(status: Any, stamp: int) -> None:
        nonlocal left
        left -= 1
        if (left == 0 or not status.ok) and not done.done():
            done.set_result(status)

    for index in range(load.streams):
        mine: list[int] = []
        stamps.append(mine)
        sent.append(time.monotonic())
        connections[index % len(connections)].start(STREAM_INFER, message, on_data=stamping(mine), on_end=ended)
        await asyncio.sleep(0)
    status = await done
    if not status.ok:
        raise RuntimeError(str(status))
    for connection in connections:
        connection.close()
    return sent, stamps


class Events(asyncio.Protocol):
    """One HTTP request whose events are counted by their mark, stamped once a read."""

    def __init__(self, request: bytes, mark: bytes, end: bytes, done: asyncio.Future[None]) -> None:
        self._request, self._mark, self._end, self._done = request, mark, end, done
        self._tail = b""
        self.sent = 0.0
        self.stamps: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.sent = time.monotonic()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        stamp = time.monotonic_ns()
        # A mark may be cut by the end of a read.
        text = self._tail + data
        self.stamps += [stamp] * text.count(self._mark)
        self._tail = text[len(text) - len(self._mark) + 1 :] if self._mark not in text[-len(self._mark) :] else b""
        if self._end in text:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def read_http(load: Load) -> tuple[list[float], list[list[int]]]:
    loop = asyncio.get_running_loop()
    host, _, port = load.url.partition(":")
    if load.path == "gateway":
        target, mark, end = "/v1/completions", b"data: {", b"data: [DONE]"
        body: dict[str, Any] = {"model": "tensorrt_llm", "prompt": "a", "max_tokens": load.tokens, "stream": True}
    else:
        target, mark, end = "/v2/models/tensorrt_llm/generate_stream", b"data: {", b"\r\n0\r\n\r\n"
        body = {"input_ids": PROMPT, "input_lengths": len(PROMPT), "request_output_len": load.tokens, "streaming": True}
    text = json.dumps(body).encode()
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {load.url}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    protocols, waits = [], []
    for _ in range(load.streams):
        done: asyncio.Future[None] = loop.create_future()
        waits.append(done)
        made = partial(Events, head.encode() + text, mark, end, done)
        _, protocol = await loop.create_connection(made, host, int(port))
        protocols.append(protocol)
    await asyncio.gather(*waits)
    return [protocol.sent for protocol in protocols], [protocol.stamps for protocol in protocols]


def client(load: Load, pipe: Pipe) -> None:
    import gc

    import uvloop

    gc.freeze()
    gc.disable()
    read = read_grpc if load.path == "grpc" else read_http
    try:
        sent, stamps = uvloop.run(read(load))
        pipe.send((sent, [np.array(mine, np.int64) for mine in stamps], time.process_time()))
    except Exception as error:
        pipe.send(error)


def measure(load: Load, processes: int, tick: float) -> dict[str, float]:
    """One row but for the CPU: `load` shared out among client processes."""
    context = multiprocessing.get_context("spawn")
    parts = [load.streams // processes + (index < load.streams % processes) for index in range(processes)]
    pipes, children = [], []
    for streams in parts:
        here, there = context.Pipe()
        child = context.Process(target=client, args=(Load(load.path, load.url, streams, load.tokens), there))
        child.start()
        pipes.append(here)
        children.append(child)
    sent: list[float] = []
    stamps: list[np.ndarray[Any, Any]] = []
    for pipe, child in zip(pipes, children, strict=True):
        answer = pipe.recv()
        child.join()
        if isinstance(answer, Exception):
            raise answer
        sent += answer[0]
        stamps += answer[1]
    # From when all streams are there to when the first of them ends.
    first, last = max(mine[0] for mine in stamps) / 1e9, min(mine[-1] for mine in stamps) / 1e9
    begin = first + WARM_SECONDS
    end = min(begin + SECONDS, last - 0.2)
    times = np.concatenate(stamps) / 1e9
    received = int(((times >= begin) & (times < end)).sum())
    waits = np.array([mine[0] / 1e9 - start for mine, start in zip(stamps, sent, strict=True)]) * 1e3
    gaps = np.concatenate([np.diff(mine) for mine in stamps]) / 1e6
    return {
        "offered": load.streams / tick,
        "tokens_per_s": received / (end - begin),
        "ttft_p50": float(np.percentile(waits, 50)) - tick * 500,
        "ttft_p99": float(np.percentile(waits, 99)) - tick * 500,
        "itl_p99": float(np.percentile(gaps, 99)) - tick * 1e3,
        "received": float(len(times)),
    }


@contextmanager
def served(scratch: Path, instances: int, tick: float) -> Iterator[tuple[ports.Endpoints, psutil.Process]]:
    """A tritonserver with the synthetic engine and so many instances of the engine's model."""
    model = scratch / "tiny"
    if not model.is_dir():
        hf_folder(model, max_position_embeddings=TOKEN_LIMIT)
    sizes = {"max_batch_size": 1024, "max_input_len": 64, "max_seq_len": TOKEN_LIMIT, "max_num_tokens": 1024}
    settings = [f"build.{name}={value}" for name, value in sizes.items()]
    settings += [f"serving.engine_instance_count={instances}"] if instances > 1 else []
    command = [sys.executable, "-m", "trtpipe", "build", "--model", str(model), "--gpu", "cpu", "--dtype", "bf16"]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "TRTPIPE_HOME": str(scratch / "home"), "PYTHONPATH": str(Path.cwd())}
    subprocess.run(command, cwd=scratch, env=environment, check=True, stdout=subprocess.DEVNULL)
    repository = (scratch / "runs" / "tiny.cpu.bf16" / "repository").resolve()
    installation = triton_package.find_installation()
    backends = scratch / "backends"
    triton_package.prepare_backends(installation, backends)
    launch = json.loads((backends / "tensorrtllm" / "engine.json").read_text())
    launch["command"][-1] = "tests.benchmarks.synthetic_runtime"
    os.environ["PYTHONPATH"] = str(Path.cwd())  # where the engine process finds that runtime
    (backends / "tensorrtllm" / "engine.json").write_text(json.dumps(launch))
    endpoints = ports.choose_endpoints("127.0.0.1", 0, 0, 0)
    os.environ["TRTPIPE_TICK_MS"] = str(tick * 1e3)
    names = sorted(path.name for path in repository.iterdir())
    process = tritonserver.start_local(installation, repository, names, backends, endpoints, scratch / "server.log")
    try:
        model_control.wait_ready(process, endpoints.ready_url, scratch / "server.log")
        yield endpoints, psutil.Process(process.pid)
    finally:
        tritonserver.end(process.pid)


@contextmanager
def gateway(scratch: Path, endpoints: ports.Endpoints, workers: int) -> Iterator[tuple[str, psutil.Process]]:
    """A gateway in front of the server: (host:port, its process)."""
    folder = scratch / "tiny"
    model = ServedModel(name="tensorrt_llm", tokenizer=folder, max_input_len=64, max_seq_len=TOKEN_LIMIT)
    options = GatewayOptions(models=(model,), grpc_url=endpoints.grpc_url, port=0, workers=workers)
    pid, url = gateway_process.start(options, scratch / "gateway.log")
    try:
        yield url.partition("//")[2], psutil.Process(pid)
    finally:
        gateway_process.end(pid)


def cpu_seconds(*parents: psutil.Process) -> float:
    """Of those and their children, without the engine process."""
    total = 0.0
    for process in [process for parent in parents for process in (parent, *parent.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):
            if "trtpipe.engines.engine_process.server" not in process.cmdline():
                times = process.cpu_times()
                total += times.user + times.system
    return total


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("scratch", type=Path)
    options.add_argument("--streams", default="64,256,512")
    options.add_argument("--rate", type=float, default=200.0, help="tokens a second of each stream")
    options.add_argument("--instances", default="1,4")
    options.add_argument("--paths", default="grpc,http,gateway")
    options.add_argument("--workers", default="1", help="processes of the gateway")
    options.add_argument("--clients", type=int, default=max(1, (os.cpu_count() or 2) // 4))
    options.add_argument("--report", type=Path)
    chosen = options.parse_args()
    chosen.scratch.mkdir(parents=True, exist_ok=True)
    scratch = chosen.scratch.resolve()
    tick = 1 / chosen.rate
    tokens = min(TOKEN_LIMIT - 64, int(chosen.rate * (WARM_SECONDS + SECONDS + 4)))
    rows: list[dict[str, Any]] = []
    for instances in map(int, chosen.instances.split(",")):
        with served(scratch, instances, tick) as (endpoints, server):
            urls = {"grpc": endpoints.grpc_url, "http": f"{endpoints.host}:{endpoints.http}"}
            for path in chosen.paths.split(","):
                for workers in map(int, chosen.workers.split(",")) if path == "gateway" else [0]:
                    with ExitStack() as stack:
                        front = [server]
                        if path == "gateway":
                            urls[path], process = stack.enter_context(gateway(scratch, endpoints, workers))
                            front.append(process)
                        for streams in map(int, chosen.streams.split(",")):
                            load = Load(path, urls[path], streams, tokens)
                            before = cpu_seconds(*front)
                            row = measure(load, chosen.clients, tick)
                            spent = (cpu_seconds(*front) - before) / row.pop("received") * 1000
                            setting = {"path": path, "instances": instances, "workers": workers, "streams": streams}
                            row = {**setting, **row, "cpu": spent}
                            rows.append(row)
                            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}))
    if chosen.report:
        chosen.report.write_text(report(rows, chosen), encoding="utf-8")
    shutil.rmtree(scratch / "backends", ignore_errors=True)
    return 0


def report(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> str:
    versions = f"Python {platform.python_version()}, tritonserver of nvidia-pytriton"
    lines = [
        "# The front, with an engine that computes nothing",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {os.cpu_count()} cores, {versions}. Each stream is offered "
        f"{chosen.rate:g} tokens a second; {chosen.clients} client process(es) on the same machine. Written by "
        "`python -m tests.benchmarks.front`, which says what the columns mean.",
        "",
        "| path | instances | workers | streams | offered tok/s | reached tok/s | reached | added TTFT p50 / p99 ms "
        "| added ITL p99 ms | CPU s / 1,000 tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['path']} | {row['instances']} | {row['workers'] or '-'} | {row['streams']} "
            f"| {row['offered']:,.0f} | {row['tokens_per_s']:,.0f} | {row['tokens_per_s'] / row['offered']:.1%} "
            f"| {row['ttft_p50']:.1f} / {row['ttft_p99']:.1f} | {row['itl_p99']:.1f} | {row['cpu']:.4f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
