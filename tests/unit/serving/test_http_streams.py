"""How many answers Triton can stream over HTTP, as this machine's sockets say it."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from trtpipe.engines.passport import Passport
from trtpipe.pipeline.serving import http_streams

PASSPORT = Passport(
    runtime="reference", gpu="cpu", sm=None, sms=None, toolchain=None, image=None, versions={}, tp_size=1, pp_size=1,
    dtype="bfloat16", quant_algo=None, kv_cache_quant_algo=None, rank_bytes=1, checkpoint="",
    build_config={"max_batch_size": 256},
)  # fmt: skip


def test_what_a_socket_holds_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = http_streams.capacity()
    pair = socket.socketpair

    def small() -> tuple[socket.socket, socket.socket]:
        reader, writer = pair()
        writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # which Linux doubles
        return reader, writer

    monkeypatch.setattr(socket, "socketpair", small)
    # Each message is of 17 bytes, and costs the kernel some hundred.
    assert 8 <= http_streams.capacity() <= (32 << 10) // 17
    assert http_streams.capacity() < usual


def test_more_streams_than_fit_are_warned_of() -> None:
    assert http_streams.warning([PASSPORT], 278) is None
    assert http_streams.warning([replace(PASSPORT, build_config={"max_batch_size": 278})], 278) is None
    assert http_streams.warning([PASSPORT, PASSPORT], 278) == (
        "HTTP generate_stream loses tokens where more than 278 answers stream at once, and up to 512 can: use gRPC or "
        "the gateway, or run `sysctl -w net.core.wmem_default=8388608` first"
    )
