"""HTTP client with limits of time, size and redirects, for servers that may be hostile or broken."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import httpcore
import httpx

# Seconds that a single read or write may take.
STALL_SECONDS = 60.0
# Seconds from the end of a request to the end of the response head, and to the end of a small body.
ANSWER_SECONDS = 60.0
# A streamed body has ANSWER_SECONDS plus a second for each of this number of bytes.
SLOWEST = 10_000
CONNECT_SECONDS = 10.0
# Most bytes of a small response: a manifest, an index, a list, a token. Registries bound manifests to 4 MiB.
MAX_ANSWER_BYTES = 8 << 20
MAX_REDIRECTS = 5
# Additional seconds for a response: see `patience`.
EXTRA_SECONDS = ContextVar("EXTRA_SECONDS", default=0.0)


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Allow more time for responses in this context, from a server that has to work before it answers."""
    token = EXTRA_SECONDS.set(seconds)
    try:
        yield
    finally:
        EXTRA_SECONDS.reset(token)


class AnswerRefused(httpx.TransportError):
    """A response that violates a limit. Repeating the request does not help."""


def certificate_remedy(error: BaseException) -> str | None:
    """The remedy for a certificate that httpx does not trust; None for any other error."""
    untrusted = isinstance(error, httpx.HTTPError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
    return "SSL_CERT_FILE names the certificates that are trusted" if untrusted else None


class LimitedClient(httpx.Client):
    """httpx client that raises errors for responses that are too slow, too large, or redirect elsewhere.

    A response that is not streamed must be complete within ANSWER_SECONDS and MAX_ANSWER_BYTES; so must responses to
    refusals and redirects. Nothing is decompressed. Redirects are bounded; httpx drops `Authorization` across hosts.

    https  whether plain http is refused, also in redirects
    """

    def __init__(self, *, https: bool) -> None:
        super().__init__(
            timeout=httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS),
            headers={"Accept-Encoding": "identity"},
            follow_redirects=True,
            max_redirects=MAX_REDIRECTS,
            event_hooks={"request": [self.check_request], "response": [self.check_response]},
        )
        self._https = https
        self._backend = _Backend()
        for transport in (self._transport, *self._mounts.values()):
            if isinstance(transport, httpx.HTTPTransport):
                # httpx has no parameter for a network backend, and its own timeouts apply to single reads.
                transport._pool._network_backend = self._backend

    def end(self) -> None:
        """End all connections: other threads that wait for them get AnswerRefused. Later requests open new ones."""
        self._backend.end()

    def send(self, request: httpx.Request, *, stream: bool = False, **named: Any) -> httpx.Response:
        request.extensions = {**request.extensions, "trtpipe.stream": stream}
        return super().send(request, stream=stream, **named)

    def check_request(self, request: httpx.Request) -> None:
        """Called for every request, including redirected ones. Raises httpx.TransportError."""
        if self._https and request.url.scheme != "https":
            raise AnswerRefused(f"it redirects from https to {request.url.scheme}://{request.url.host}")

    def check_response(self, response: httpx.Response) -> None:
        """Called for every response head, before the body is read. Raises httpx.TransportError."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity" and response.request.method != "HEAD":
            raise AnswerRefused(f"its answer is compressed ({encoding[:20]}), which was not asked for")
        streamed = response.request.extensions["trtpipe.stream"] and response.status_code in (200, 206)
        assert isinstance(response.stream, httpx.SyncByteStream)
        network = response.extensions.get("network_stream") if streamed else None
        response.stream = _Body(response.stream, None if streamed else MAX_ANSWER_BYTES, network)


class _Body(httpx.SyncByteStream):
    """A body that is limited to `limit` bytes, or whose bytes extend the time of the connection `network`."""

    def __init__(self, inner: httpx.SyncByteStream, limit: int | None, network: Any) -> None:
        self._inner = inner
        self._limit = limit
        self._network = network

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self._inner:
            size += len(part)
            if self._limit is not None and size > self._limit:
                raise AnswerRefused(f"its answer has more than {self._limit:,} bytes")
            if isinstance(self._network, _Stream):
                self._network.lengthen(len(part) / SLOWEST)
            yield part

    def close(self) -> None:
        self._inner.close()


class _Stream(httpcore.NetworkStream):
    """A connection on which a response has ANSWER_SECONDS, counted from the first read after a write."""

    def __init__(self, inner: httpcore.NetworkStream, backend: _Backend) -> None:
        self._inner = inner
        self._backend = backend
        self._end: float | None = None
        self._ended = False
        backend.add(self)

    def end(self) -> None:
        """Called in another thread than the one that reads or writes, which closing would not wake."""
        self._ended = True
        with contextlib.suppress(OSError):  # it is closed already
            # Not TLS's shutdown, which would wait for the peer.
            socket.socket.shutdown(self._inner.get_extra_info("socket"), socket.SHUT_RDWR)

    def lengthen(self, seconds: float) -> None:
        assert self._end is not None
        self._end += seconds

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        now, extra = time.monotonic(), EXTRA_SECONDS.get()
        if self._end is None:
            self._end = now + ANSWER_SECONDS + extra
        stall = (STALL_SECONDS if timeout is None else timeout) + extra
        left = self._end - now
        try:
            if left <= 0:
                raise httpcore.ReadTimeout
            return self._inner.read(max_bytes, min(stall, left))
        except httpcore.ReadTimeout:
            if left < stall:
                raise AnswerRefused("its answer takes too long, or comes too slowly") from None
            raise httpcore.ReadTimeout(f"nothing came for {stall:.0f} seconds") from None
        finally:
            self._require_kept()

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._end = None
        try:
            self._inner.write(buffer, STALL_SECONDS if timeout is None else timeout)
        finally:
            self._require_kept()

    def _require_kept(self) -> None:
        if self._ended:  # also where the connection looks broken, after which a client would try again
            raise AnswerRefused("its answer is no longer wanted") from None

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        limit = CONNECT_SECONDS if timeout is None else timeout
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, limit), self._backend)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.SyncBackend):
    def __init__(self) -> None:
        self._streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.add(stream)

    def end(self) -> None:
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.end()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        limit = CONNECT_SECONDS if timeout is None else timeout
        return _Stream(super().connect_tcp(host, port, limit, local_address, socket_options), self)
