"""How late the server of known timing writes its tokens, under a light client on another core.

Lateness is the server's own: the stamp of a token's write less the moment at which it was due. The client counts
what comes and reads nothing; both processes' CPU time is told as well, as a share of a core.

    python -m tests.benchmarks.known_server [--streams 256] [--itl-ms 10] [--protocol grpc] [--seconds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import uvloop

from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.net.h2.pool import Pool
from trtpipe.pipeline.net.h2.status import Status
from trtpipe.pipeline.net.h2.triton import STREAM_INFER, Tensor, infer_request, pack_strings

TTFT_S = 0.2
QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}


def _keep(kept: list[int], data: bytes, stamp: int) -> None:
    kept.append(stamp)


async def over_grpc(port: int, streams: int, tokens: int) -> None:
    pool = Pool("127.0.0.1", port, connections=2)
    ended: list[Status] = []
    done = asyncio.Event()

    def end(status: Status, stamp: int) -> None:
        ended.append(status)
        if len(ended) == streams:
            done.set()

    inputs = [
        Tensor("text_input", "BYTES", (1, 1), pack_strings(["hello"])),
        Tensor("max_tokens", "INT32", (1, 1), tokens.to_bytes(4, "little")),
    ]
    for number in range(streams):
        kept: list[int] = []
        request = infer_request("ensemble", inputs, request_id=str(number))
        keep = partial(_keep, kept)
        await pool.start(STREAM_INFER, request, on_data=keep, on_end=end)
        await asyncio.sleep(1 / streams)  # so that their tokens fall apart
    await done.wait()
    await pool.close()


class Reader(asyncio.Protocol):
    """One request over HTTP; done when its connection is."""

    def __init__(self, tokens: int) -> None:
        self.stamps: list[int] = []
        self.done = asyncio.get_running_loop().create_future()
        body = json.dumps({"text_input": "hello", "max_tokens": tokens}).encode()
        head = b"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        self.request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.stamps.append(time.monotonic_ns())

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


async def over_http(port: int, streams: int, tokens: int) -> None:
    readers = []
    for _ in range(streams):
        readers.append(Reader(tokens))
        await asyncio.get_running_loop().create_connection(lambda: readers[-1], "127.0.0.1", port)
        await asyncio.sleep(1 / streams)
    await asyncio.gather(*(reader.done for reader in readers))


def measure(protocol: str, streams: int, itl_ms: float, seconds: float, core: int) -> dict[str, object]:
    timing = Timing(ttft_s=TTFT_S, itl_s=itl_ms / 1e3)
    tokens = round(seconds * 1e3 / itl_ms)
    with tempfile.TemporaryDirectory() as folder:
        server = MockServerProcess.start(timing, Path(folder) / "truth", cpu=core)
        client = over_grpc if protocol == "grpc" else over_http
        port = server.grpc_port if protocol == "grpc" else server.http_port
        watched = psutil.Process(server.pid)
        began, cpu, theirs = time.monotonic(), time.process_time(), sum(watched.cpu_times()[:2])
        uvloop.run(client(port, streams, tokens))
        wall = time.monotonic() - began
        shares = (time.process_time() - cpu) / wall, (sum(watched.cpu_times()[:2]) - theirs) / wall
        truth = server.stop()
    assert [one.tokens for one in truth] == [tokens] * streams
    due = timing.first_ns + timing.step_ns * np.arange(tokens)
    late = np.concatenate([np.asarray(one.stamps_ns) - one.arrival_ns - due for one in truth]) / 1e6
    return {
        "protocol": protocol,
        "streams": streams,
        "itl ms": itl_ms,
        "tokens/s": round(streams * tokens / wall),
        "late ms": dict(zip(QUANTILES, np.percentile(late, [*QUANTILES.values()]).round(3).tolist(), strict=True)),
        "client core": round(shares[0], 2),
        "server core": round(shares[1], 2),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    options.add_argument("--streams", type=int, default=256)
    options.add_argument("--itl-ms", type=float, default=10.0)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--runs", type=int, default=3)
    chosen = options.parse_args()
    first, *_, last = sorted(os.sched_getaffinity(0)) * 2
    os.sched_setaffinity(0, {first})
    for _ in range(chosen.runs):
        print(json.dumps(measure(chosen.protocol, chosen.streams, chosen.itl_ms, chosen.seconds, last)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
