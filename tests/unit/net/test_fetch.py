"""Requests whose response is bounded: where they go."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from trtpipe.pipeline.net.fetch import fetch


@pytest.mark.parametrize(
    ("url", "address", "host"),
    [
        ("http://[::1]/metrics", ("::1", 80), b"[::1]"),
        ("http://[::1]:8002/metrics", ("::1", 8002), b"[::1]:8002"),
        ("http://gpu-7/metrics", ("gpu-7", 80), b"gpu-7"),
    ],
)
def test_the_address_and_the_host_of_a_url(
    url: str, address: tuple[str, int], host: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = socket.socketpair()
    asked: list[Any] = []

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(place)
        return here

    monkeypatch.setattr(socket, "create_connection", connect)
    with there:
        there.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        assert fetch(url, max_bytes=10, within_s=10) == (200, b"ok")
        assert asked == [address]
        assert b"\r\nHost: " + host + b"\r\n" in there.recv(1 << 16)
