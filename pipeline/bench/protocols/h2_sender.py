"""Sender of gRPC calls through our own HTTP/2 reader: one call for each request, many calls on a connection.

With one call per request, responses cannot be attributed to the wrong request, a failed or cancelled request affects no
other, and the status of the call is the status of the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.bench.loop.in_flight import Failure, InFlightRequest
from trtpipe.pipeline.bench.protocols.endpoint import CONNECT_TIMEOUT_S, MAX_BYTES
from trtpipe.pipeline.bench.protocols.triton_grpc import CallRefused
from trtpipe.pipeline.net.h2.connection import Connection, Dial
from trtpipe.pipeline.net.h2.status import CallFailed, ConnectFailed, H2Error, Status
from trtpipe.pipeline.net.h2.triton import STREAM_INFER

# Pause before a call that the server refused unbegun is sent again: the server may still count one that has ended.
_AGAIN_S = 0.001


class H2Sender:
    """Sender over a number of gRPC connections. Made by `open`."""

    def __init__(self, host: str, port: int, first: Connection, connections: int, dial: Dial | None) -> None:
        self._host = host
        self._port = port
        self._dial = dial
        self._least = connections
        self._connections: list[Connection] = []
        self._turn = 0
        self._waiting: deque[InFlightRequest] = deque()  # requests that wait for room at the server
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self._adopt(first)

    @classmethod
    async def open(cls, url: str, connections: int = 1, dial: Dial | None = None) -> H2Sender:
        """Connect; see `Connection.open` for `dial`. Raises UsageError, HostError."""
        if url.startswith("grpcs://"):
            raise UsageError(
                f"{url} is TLS, which our own reader does not speak", remedy="use --transport tritonclient for it"
            )
        host, port = parse_address(url)
        try:
            first = await Connection.open(host, port, connect_timeout=CONNECT_TIMEOUT_S, dial=dial)
        except H2Error as error:
            raise HostError(
                f"no Triton answers over gRPC at {url}",
                why=str(error),
                remedy="start one with `trtpipe serve`, or give the URL of one that runs",
            ) from None
        made = cls(host, port, first, connections, dial)
        try:
            await made._open_more(connections)
        except BaseException:
            await made.close()
            raise
        return made

    async def ask(self, method: str, message: bytes) -> bytes:
        """Make a unary call, before anything is measured. Raises CallRefused, HostError."""
        try:
            return await self._connections[0].unary(method, message, CONNECT_TIMEOUT_S, MAX_BYTES)
        except CallFailed as error:
            if error.status.lost or error.status.oversized:
                why = error.status.message
                raise HostError(f"{self._host}:{self._port} does not answer over gRPC", why=why) from None
            raise CallRefused(str(error)) from None
        except H2Error as error:
            raise HostError(f"the connection to {self._host}:{self._port} is lost", why=str(error)) from None

    def described(self) -> dict[str, Any]:
        stamps = "read" if self._dial is None else "kernel"
        return {"transport": "own HTTP/2", "stamps": stamps, "connections": len(self._connections)}

    async def warm(self, calls: int) -> None:
        await asyncio.sleep(0.001)  # lets connections that the server has closed meanwhile be lost
        self._connections = [connection for connection in self._connections if connection.usable]
        await self._open_more(self._least)
        most = self._connections[0].max_concurrent_streams
        await self._open_more(ceil(calls / max(1, most)))

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        self._waiting.extend(batch)
        self._begin_waiting()

    def cancel(self, request: InFlightRequest) -> None:
        if request.call is not None:
            request.call.cancel()
        elif request in self._waiting:
            self._waiting.remove(request)

    async def close(self) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        for connection in self._connections:
            connection.close()

    # Connections

    async def _open_more(self, total: int) -> None:
        """Open connections until there are `total`. Raises HostError."""
        while len(self._connections) < total:
            try:
                connection = await Connection.open(
                    self._host, self._port, connect_timeout=CONNECT_TIMEOUT_S, dial=self._dial
                )
            except ConnectFailed as error:
                raise HostError("Triton takes no further connection", why=str(error)) from None
            self._adopt(connection)

    def _adopt(self, connection: Connection) -> None:
        self._connections.append(connection)
        connection.write_at_once()
        connection.on_room = self._begin_waiting

    def _begin_waiting(self) -> None:
        """Begin waiting requests as far as the server has room; all bytes of one connection are one write."""
        if self._closed or not self._waiting:
            return
        if not any(connection.usable for connection in self._connections):
            self._reopen()
        while self._waiting and (roomy := [connection for connection in self._connections if connection.has_room]):
            for left in range(min(len(roomy), len(self._waiting)), 0, -1):
                self._begin(roomy[self._turn % len(roomy)], ceil(len(self._waiting) / left))
                self._turn += 1

    def _begin(self, connection: Connection, share: int) -> None:
        begun: list[InFlightRequest] = []
        connection.cork()
        try:
            while self._waiting and len(begun) < share and connection.has_room:
                request = self._waiting.popleft()
                begun.append(request)
                request.call = connection.start(
                    STREAM_INFER,
                    request.message,
                    on_data=request.receive,
                    on_end=partial(self._ended, request),
                    max_bytes=request.limit,
                    max_message=request.response_limit,
                )
        finally:
            sent = connection.uncork()
        for request in begun:
            request.sent_ns = sent if request.sent_ns is None else request.sent_ns

    def _ended(self, request: InFlightRequest, status: Status, stamp_ns: int) -> None:
        if status.retry and not self._closed and not request.stamps:
            request.call = asyncio.get_running_loop().call_later(_AGAIN_S, self._start_again, request)
            return
        request.message = b""
        if status.ok:
            request.end(stamp_ns)
        elif status.oversized:
            request.fail_oversized(status.message)
        else:
            kind = "ConnectionLost" if status.lost else f"grpc {status.code.name}"
            request.end(stamp_ns, Failure.of(kind, f"{status.message} (after {len(request.stamps)} responses)"))

    def _start_again(self, request: InFlightRequest) -> None:
        request.call = None
        self.start([request])

    def _reopen(self) -> None:
        """All connections are lost: open them again, or fail the requests that wait for them."""

        async def again() -> None:
            self._connections.clear()
            why = ""
            try:
                await self._open_more(self._least)
            except HostError as error:
                why = error.why
            self._opening = None  # a failed request's callback may start another request
            if not self._connections:
                failed = list(self._waiting)
                self._waiting.clear()
                for request in failed:
                    request.fail("ConnectFailed", why)
            self._begin_waiting()

        if self._opening is None:
            self._opening = asyncio.ensure_future(again())


def parse_address(url: str) -> tuple[str, int]:
    """Split host:port. Raises UsageError."""
    host, _, port = url.removeprefix("grpc://").rstrip("/").rpartition(":")
    try:
        is_one = bool(host.encode("idna")) and "/" not in host and port.isdigit() and int(port) <= 65535
    except UnicodeError:  # not a host name
        is_one = False
    if not is_one:
        raise UsageError(f"'{url}' is not a gRPC address", remedy="give host:port, such as localhost:8001")
    return host.strip("[]"), int(port)
