"""Peer of a TCP connection: detection of other protocols than HTTP/2, and socket options."""

from __future__ import annotations

import socket
from typing import Any


def foreign(data: bytes) -> str:
    """Protocol other than HTTP/2 that a peer speaks, where its first bytes show it; else empty."""
    if data.startswith(b"HTTP/"):
        line = data[:60].split(b"\r")[0].decode("latin-1")
        return f"speaks HTTP/1.1, not gRPC ({line})"
    if len(data) >= 3 and data[0] in (0x15, 0x16) and data[1] == 3:
        return "speaks TLS, and this connection is plaintext"
    return ""


def tune(sock: Any) -> None:
    """Send small frames without delay, and let the kernel detect a peer whose machine is gone."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
