"""Pool of connections to one server: calls take them in turn and wait for a full server; lost ones are reopened."""

from __future__ import annotations

import asyncio
from collections import deque

from trtpipe.pipeline.net.h2.connection import Connection, OnData, OnEnd, Stream
from trtpipe.pipeline.net.h2.status import CallFailed, ConnectFailed, ConnectionLost

# Pauses between attempts at a call that was refused unbegun. A server counts a stream a moment longer than its client,
# so at the limit it refuses a call that it would accept a moment later.
REFUSED_PAUSES_S = (0.002, 0.01, 0.05, 0.2)


class Pool:
    """Up to `connections` connections, each opened when first needed. Belongs to one event loop."""

    def __init__(self, host: str, port: int, *, connections: int = 1, connect_timeout: float = 5.0) -> None:
        self.host = host
        self.port = port
        self.connect_timeout = connect_timeout
        self._slots: list[Connection | None] = [None] * connections
        self._opening: dict[int, asyncio.Task[Connection]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turn = 0
        self._closed = False

    @property
    def in_flight(self) -> int:
        return sum(connection.in_flight for connection in self._slots if connection is not None)

    async def connection(self) -> Connection:
        """A connection with room for a call; waits while all are at the server's limit. Raises ConnectFailed."""
        waited = False
        ended = 0
        while True:
            failure: ConnectFailed | None = None
            full = False
            for step in range(len(self._slots)):
                if self._closed:
                    raise ConnectionLost("the pool is closed")
                index = (self._turn + step) % len(self._slots)
                connection = self._slots[index]
                try:
                    if connection is None or not connection.usable:
                        connection = await self._open(index)
                except ConnectFailed as error:
                    failure = error
                    continue
                if connection.has_room:
                    self._turn = (index + 1) % len(self._slots)
                    if waited:
                        self._wake()  # there may be room for more than one
                    return connection
                full = full or connection.usable
            if not full:
                ended += 1
                if failure is None and ended < 3:
                    continue  # lost right after it was opened
                if waited:
                    self._wake()  # the next waiting caller must fail too instead of waiting on
                raise failure or ConnectFailed(f"{self.host}:{self.port} takes connections and ends them at once")
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            # A caller that was woken without finding room keeps its position in the queue.
            (self._waiting.appendleft if waited else self._waiting.append)(room)
            waited = True
            try:
                await room
            except asyncio.CancelledError:
                if room.done():
                    self._wake()  # another caller gets the room
                else:
                    self._waiting.remove(room)
                raise

    async def start(
        self,
        method: str,
        message: bytes,
        *,
        on_data: OnData,
        on_end: OnEnd,
        half_close: bool = True,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Stream:
        """`Connection.start` on the next connection."""
        connection = await self.connection()
        return connection.start(
            method, message, on_data=on_data, on_end=on_end, half_close=half_close, metadata=metadata
        )

    async def unary(self, method: str, message: bytes, timeout: float) -> bytes:
        """`Connection.unary` on the next connection; repeated where the server says that it did not begin the call."""
        for pause in REFUSED_PAUSES_S:
            try:
                return await (await self.connection()).unary(method, message, timeout)
            except CallFailed as error:
                if not error.status.retry:
                    raise
            await asyncio.sleep(pause)
        return await (await self.connection()).unary(method, message, timeout)

    async def close(self) -> None:
        """End all connections and the calls on them."""
        self._closed = True
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for connection in self._slots:
            if connection is not None:
                connection.close()
        while self._waiting:
            self._wake()

    async def _open(self, index: int) -> Connection:
        """Open a slot's connection. Concurrent callers share the attempt, and one that gives up does not stop it."""
        task = self._opening.get(index)
        if task is None:
            task = asyncio.ensure_future(Connection.open(self.host, self.port, connect_timeout=self.connect_timeout))
            self._opening[index] = task
            task.add_done_callback(lambda done: self._opened(index, done))
        return await asyncio.shield(task)

    def _opened(self, index: int, task: asyncio.Task[Connection]) -> None:
        del self._opening[index]
        if task.cancelled() or task.exception() is not None:
            return
        connection = task.result()
        connection.on_room = self._wake
        self._slots[index] = connection
        if self._closed:
            connection.close()

    def _wake(self) -> None:
        """Let the first waiting caller look again; where all connections are lost, it opens one."""
        while self._waiting:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)
                return
