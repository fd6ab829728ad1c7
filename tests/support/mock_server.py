"""The mock server for its own tests: its parts at a time of the test's own, and the whole on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
from hpack import Encoder

from trtpipe.pipeline.bench.mock_server.clock import Schedule, Timing
from trtpipe.pipeline.bench.mock_server.link import Hub, Link
from trtpipe.pipeline.bench.mock_server.server import MockServer
from trtpipe.pipeline.net.h2 import frames, triton

MS = 1_000_000
SILENCE_S = 0.3


class Wire(asyncio.Transport):
    """Keeps what is written; once `full`, the link is told to pause."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.written: list[bytes] = []
        self.closed = False
        self.full = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))
        if self.full:
            self.link.pause_writing()

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        data = b"".join(self.written)
        self.written.clear()
        return data


class Bench:
    """The server's parts with `now` for a clock, and `alarm` for what it asks to be woken at."""

    def __init__(
        self, *, ttft_ms: float = 50, itl_ms: float = 10, tokens_per_response: int = 1, prefill_ms: float = 0
    ) -> None:
        self.now = 0
        self.alarm = 1 << 62
        timing = Timing(
            ttft_s=ttft_ms / 1e3,
            itl_s=itl_ms / 1e3,
            tokens_per_response=tokens_per_response,
            prefill_s=prefill_ms / 1e3,
        )
        self.hub = Hub(Schedule(timing, self, lambda: self.now))

    def at(self, at_ns: int) -> None:
        self.alarm = at_ns

    def connect(self, kind: Callable[[Hub], Link]) -> tuple[Any, Wire]:
        link = kind(self.hub)
        wire = Wire(link)
        link.connection_made(wire)
        return link, wire

    def wake(self, at_ns: int) -> None:
        self.now = at_ns
        self.hub.schedule.wake()

    def until(self, end_ns: int) -> None:
        """Wake exactly when it is asked for, up to `end_ns`."""
        while self.alarm <= end_ns:
            self.wake(max(self.now, self.alarm))
        self.now = max(self.now, end_ns)

    @property
    def stamps(self) -> dict[str, list[int]]:
        return {truth.id: truth.stamps_ns.tolist() for truth in self.hub.truth}


def come(link: Link, data: bytes) -> None:
    """Bytes of the client's reach the server, now."""
    link.feed(data, link.hub.schedule.clock())


def post(body: dict[str, Any], path: str = "/v2/models/ensemble/generate_stream") -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


def asked(request_id: str, max_tokens: int, prompt: str = "hello", **rest: Any) -> dict[str, Any]:
    return {"id": request_id, "text_input": prompt, "max_tokens": max_tokens, **rest}


def infer(prompt: str, max_tokens: int, request_id: str = "", *, empty_final: bool = True, **more: bool) -> bytes:
    inputs = [
        triton.Tensor("text_input", "BYTES", (1, 1), triton.pack_strings([prompt])),
        triton.Tensor("max_tokens", "INT32", (1, 1), struct.pack("<i", max_tokens)),
        *(triton.Tensor(name, "BOOL", (1, 1), struct.pack("<?", value)) for name, value in more.items()),
    ]
    return triton.infer_request("ensemble", inputs, request_id=request_id, empty_final=empty_final)


def call(number: int, message: bytes, *, last: bool = True, method: str = triton.STREAM_INFER) -> bytes:
    block = Encoder().encode([(":method", "POST"), (":path", method), ("content-type", "application/grpc")])
    flags = frames.END_STREAM if last else 0
    return frames.header_frames(number, block, 16384) + frames.frame(
        frames.DATA, flags, number, frames.PREFIX.pack(0, len(message)) + message
    )


def cut(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of each frame."""
    out = []
    while data:
        high, low, kind, flags, number = frames.HEADER.unpack_from(data)
        end = 9 + (high << 16 | low)
        assert end <= len(data)
        out.append((kind, flags, number, data[9:end]))
        data = data[end:]
    return out


def data_of(sent: list[tuple[int, int, int, bytes]], number: int) -> bytes:
    return b"".join(payload for kind, _, stream, payload in sent if (kind, stream) == (frames.DATA, number))


def messages(data: bytes) -> list[bytes]:
    out = []
    while data:
        compressed, length = frames.PREFIX.unpack_from(data)
        assert not compressed
        assert 5 + length <= len(data)
        out.append(data[5 : 5 + length])
        data = data[5 + length :]
    return out


@contextlib.asynccontextmanager
async def serving(*, ttft_ms: float = 5, itl_ms: float = 2, size: int = 1) -> AsyncIterator[MockServer]:
    timing = Timing(ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3, tokens_per_response=size)
    server = await MockServer.start(timing)
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def grpc_client(server: MockServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.grpc_port}", options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        yield channel


@contextlib.asynccontextmanager
async def http_client(server: MockServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{server.http_port}"
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=httpx.Timeout(30, read=SILENCE_S * 20)
    ) as client:
        yield client
