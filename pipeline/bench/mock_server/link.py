"""Connection of the mock server: bytes put together are sent by one write, and callbacks get the stamp of that write.

Bytes that a full socket does not take wait here without a stamp: bytes still in this process must not have one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from trtpipe.pipeline.bench.mock_server.clock import Schedule
from trtpipe.pipeline.bench.mock_server.script import Script, Then, Truth


@dataclass
class Hub:
    """State that all connections of one server share."""

    schedule: Schedule
    truth: list[Truth] = field(default_factory=list)
    links: set[Link] = field(default_factory=set)

    def remember(self, request_id: str, protocol: str, arrival_ns: int, script: Script) -> Truth:
        """Make and keep the record of a request that has arrived."""
        size = self.schedule.timing.tokens_per_response
        # A fault comes after whole responses only.
        tokens = script.tokens if script.then is Then.FINISH else script.tokens - script.tokens % size
        truth = Truth(request_id, protocol, arrival_ns, tokens, script.then.name.lower(), size)
        self.truth.append(truth)
        return truth


class Link(asyncio.Protocol):
    """A connection as the schedule sees it. Subclasses put bytes into `out`, and `feed` gives them bytes with stamps:
    see net.stamped."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.out: list[bytes] = []
        self.told: list[Callable[[int], None]] = []  # called with the stamp of the next write
        self._outbox = hub.schedule.outbox
        self._clock = hub.schedule.clock
        self._paused = False
        self._leaving = False
        self.transport: asyncio.Transport

    def feed(self, data: bytes, stamp: int) -> None:
        """Take bytes of the client; `stamp` is when the last of them reached this machine."""
        raise NotImplementedError

    def put(self, data: bytes, *tell: Callable[[int], None]) -> None:
        """Send at the next flush, and call each `tell` with the stamp of that write."""
        if not self.out:
            self._outbox.append(self)
        self.out.append(data)
        self.told += tell

    def leave(self) -> None:
        """End the connection once all that has been put is written."""
        self._leaving = True
        self.put(b"")

    def flush(self) -> None:
        if self._paused or not self.out:
            return
        data = b"".join(self.out)
        self.out.clear()
        stamp = self._clock()
        self.transport.write(data)
        if self.told:
            for tell in self.told:
                tell(stamp)
            self.told.clear()
        if self._leaving:
            self._paused = True
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # With a limit of 0, a write is tried at once, and bytes that the socket does not take call `pause_writing`.
        self.transport.set_write_buffer_limits(high=0)
        self.hub.links.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.hub.links.discard(self)
        self._paused = True  # bytes put after this cannot be sent

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.flush()


class Answer(ABC):
    """One request being answered; the schedule calls its methods."""

    __slots__ = ("due_ns", "left", "script", "tell", "truth")

    def __init__(self, truth: Truth, script: Script) -> None:
        self.truth = truth
        self.script = script
        self.tell = truth.stamps_ns.append
        responses = -(-truth.scripted // truth.tokens_per_response)
        # A fault comes a tick after the last token; the proper end comes with the last token.
        self.left = max(1, responses if script.then is Then.FINISH else responses + 1)
        self.due_ns = 0

    def begin(self) -> None:
        self.open()
        if self.script.burst:
            while self.left > 1:
                self.left -= 1
                self.tick()

    def stop(self) -> None:
        """Stop answering: the client no longer listens."""
        self.left = 0

    @abstractmethod
    def open(self) -> None:
        """Put the bytes that precede the first token."""

    @abstractmethod
    def tick(self) -> None:
        """Put a response of full size."""

    @abstractmethod
    def end(self) -> None:
        """Put the last response and the end, or the fault."""
