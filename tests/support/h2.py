"""A connection of the HTTP/2 reader on a wire of a test's own, and calls that keep what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.support.wires import Wire
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.connection import Connection, Stream
from trtpipe.pipeline.net.h2.status import Status

METHOD = "/test.Test/Ask"
T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 60))


class Call:
    """A call, and what came of it."""

    def __init__(self, connection: Connection, message: bytes = b"", method: str = METHOD, **options: Any) -> None:
        self.messages: list[bytes] = []
        self.stamps: list[int] = []
        self.ended: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.first = asyncio.Event()
        self.stream: Stream = connection.start(
            method, message, on_data=self._data, on_end=lambda status, stamp: self.ended.set_result(status), **options
        )

    def _data(self, data: bytes, stamp: int) -> None:
        self.messages.append(data)
        self.stamps.append(stamp)
        self.first.set()


class Bench:
    """A connection on a wire of the test's own, past its settings."""

    def __init__(self, settings: dict[int, int] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.problems.append(context))
        self.connection = Connection("test", self.loop)
        self.wire = Wire()
        self.connection.connection_made(self.wire)
        self.connection.data_received(frames.settings_frame(settings or {}))
        self.wire.frames()
        self.streams: list[Stream] = []
        self.got: dict[int, list[bytes]] = {}
        self.status: dict[int, Status] = {}

    def start(self, message: bytes = b"", **options: Any) -> Stream:
        mine: list[bytes] = []
        stream: Stream

        def ended(status: Status, stamp: int) -> None:
            assert stream.number not in self.status, "a call ended twice"
            self.status[stream.number] = status

        stream = self.connection.start(
            METHOD, message, on_data=lambda data, stamp: mine.append(data), on_end=ended, **options
        )
        self.streams.append(stream)
        self.got[stream.number] = mine
        return stream

    def feed(self, *data: bytes) -> None:
        for piece in data:
            self.connection.data_received(piece)
