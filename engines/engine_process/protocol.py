"""Protocol between the engine process and Triton's stubs: length-prefixed JSON and an optional block of bytes.

Imports only the standard library: this file is copied beside the Triton backend, which connects to the engine process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from typing import Any

# Version of the prefix and the messages: a server keeps its copy of this file while trtpipe is upgraded.
VERSION = 2
# Lengths of the JSON text and of the bytes.
_PREFIXES = {1: struct.Struct("!II"), VERSION: struct.Struct("!IQ")}
_CREDENTIALS = struct.Struct("3i")
# Exit status of an engine process that found another at its address.
TAKEN = 75


def peer(sock: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the peer of a connected local socket."""
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


class Connection:
    """One end of a stream socket. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, version: int = VERSION) -> None:
        self._socket = sock
        self._prefix = _PREFIXES.get(version, _PREFIXES[VERSION])
        self._sending = threading.Lock()
        self._incoming = sock.makefile("rb", buffering=1 << 16)

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        """Send a message. Raises OSError when the other end has closed the connection."""
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._socket.sendall(self._prefix.pack(len(text), len(blob)) + text + blob)

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """Receive the next message and its bytes; None when the other end has closed the connection."""
        try:
            prefix = self._incoming.read(self._prefix.size)
            if len(prefix) < self._prefix.size:
                return None
            text_length, blob_length = self._prefix.unpack(prefix)
            text = self._incoming.read(text_length)
            blob = self._incoming.read(blob_length)
        except (OSError, ValueError):
            return None
        if len(text) < text_length or len(blob) < blob_length:
            return None
        return json.loads(text), blob

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
