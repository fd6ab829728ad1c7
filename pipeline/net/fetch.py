"""HTTP request whose response is bounded in bytes and in time."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

# Bytes read at a time.
_PIECE = 64 << 10


def fetch(
    url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, max_bytes: int, within_s: float
) -> tuple[int, bytes]:
    """Status and body of the answer at `url`, http or https. Redirects are not followed.

    within_s  seconds from the first byte of the connection to the last of the body, however slowly bytes come

    Raises OSError or http.client.HTTPException where no whole answer comes (TimeoutError where none comes in time),
    ValueError for a body of more than `max_bytes`.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # Where it is given no port, it takes the end of an IPv6 address for one.
    connection = kind(parts.hostname or "", parts.port or kind.default_port)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    sock = socket.create_connection((connection.host, connection.port), within_s)
    sock.settimeout(None)
    try:
        if parts.scheme == "https":
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=connection.host, do_handshake_on_connect=False)
        connection.sock = sock
        with _ended_after(sock, within_s):
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection.request(method, path, headers=dict(headers or {}))
            response = connection.getresponse()
            body = bytearray()
            while piece := response.read(_PIECE):
                body += piece
                if len(body) > max_bytes:
                    raise ValueError(f"the answer has more than {max_bytes:,} bytes")
            return response.status, bytes(body)
    finally:
        connection.close()
        sock.close()


@contextlib.contextmanager
def _ended_after(sock: socket.socket, seconds: float) -> Iterator[None]:
    """End a connection when its time is over. A socket's own timeout applies to one read, of which there may be any
    number: it does not stop a response with a byte now and then, or with endless informational responses."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's shutdown, which would wait for the peer

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():  # the response was cut off, though it may look complete
            raise TimeoutError(f"no whole answer within {seconds:g} s") from None
