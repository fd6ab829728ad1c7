"""Reads with the kernel's stamps: over loopback, and with clocks of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator
from time import monotonic_ns
from typing import Any

import pytest

from pipeline.bench.wire import stamped
from pipeline.bench.wire.stamped import StampedTransport, dial
from tests.loops import run

MS = 1_000_000


class Fed(asyncio.Protocol):
    """Keeps what it is given, and when."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.stamps: list[int] = []
        self.moments: list[int] = []
        self.paused: list[bool] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.more = asyncio.Event()

    def feed(self, data: bytes, stamp: int) -> None:
        self.moments.append(monotonic_ns())
        self.reads.append(data)
        self.stamps.append(stamp)
        self.more.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    def pause_writing(self) -> None:
        self.paused.append(True)

    def resume_writing(self) -> None:
        self.paused.append(False)

    async def until(self, size: int) -> None:
        while sum(map(len, self.reads)) < size:
            self.more.clear()
            await self.more.wait()


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[asyncio.Transport, Fed, socket.socket]]:
    """A dialled connection, and the other end of it, which blocks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        loop = asyncio.get_running_loop()
        transport, fed = await dial(loop, Fed, *server.getsockname())
        peer, _ = server.accept()
        with peer:
            peer.settimeout(20)
            yield transport, fed, peer
            transport.close()
            await fed.lost


@pytest.mark.loopback
def test_no_read_is_stamped_later_than_it_was_read_and_stamps_are_in_order() -> None:
    async def scenario() -> None:
        async with pair() as (_, fed, peer):
            start = monotonic_ns()
            for number in range(300):
                peer.sendall(b"%03d" % number)
                await fed.until(3 * (number + 1) if number % 3 else 0)
            await fed.until(900)
            assert b"".join(fed.reads) == b"".join(b"%03d" % number for number in range(300))
            assert all(stamp <= moment for stamp, moment in zip(fed.stamps, fed.moments, strict=True))
            assert fed.stamps == sorted(fed.stamps)
            assert fed.stamps[0] >= start

    run(scenario())


@pytest.mark.loopback
def test_a_reader_that_comes_late_does_not_make_the_stamp_late() -> None:
    """The kernel begins to stamp a while after it was first asked to, and until then tells when it was read."""

    async def late() -> int:
        async with pair() as (_, fed, peer):
            for number in range(1, 21):
                peer.sendall(b"early")
                time.sleep(0.2)  # the loop stands still
                await fed.until(5 * number)
                if fed.moments[-1] - fed.stamps[-1] >= 100 * MS:
                    break
            return fed.moments[-1] - fed.stamps[-1]

    assert run(late()) >= 100 * MS


class Clocks:
    """`monotonic_ns` and `time_ns` of a test: both go on by `step` with each look at either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000
        self.ahead = 1_700_000_000_000_000_000
        self.steps: list[int] = []
        monkeypatch.setattr(stamped, "monotonic_ns", self._look)
        monkeypatch.setattr(stamped, "time_ns", lambda: self._look() + self.ahead)

    def _look(self) -> int:
        self.now += self.steps.pop(0) if self.steps else 0
        return self.now


class Reads:
    """A socket of the test's own: each read has the time of day at which the kernel got it, or none."""

    def __init__(self, *reads: tuple[bytes, int | None]) -> None:
        self.left = list(reads)
        self.one, self.other = socket.socketpair()

    def recvmsg(self, size: int, ancillary: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        data, at = self.left.pop(0)
        kinds = [(socket.SOL_SOCKET, 99, b"something else")]
        if at is not None:
            kinds.append((socket.SOL_SOCKET, 35, struct.pack("@qq", *divmod(at, 1_000_000_000))))
        return data, kinds, 0, None

    def fileno(self) -> int:
        return self.one.fileno()

    def close(self) -> None:
        self.one.close()
        self.other.close()


def stamps(clocks: Clocks, *reads: tuple[int | None, int, list[int]]) -> list[int]:
    """Of reads that came at a moment (by the monotonic clock), were read at another, by clocks that took so long."""

    async def scenario() -> list[int]:
        sock: Any = Reads(*((b"x", came and came + clocks.ahead) for came, _, _ in reads))
        fed = Fed()
        transport = StampedTransport(asyncio.get_running_loop(), sock, fed)
        for _, read, steps in reads:
            clocks.now, clocks.steps = read, list(steps)
            transport._read()
        transport.close()
        await fed.lost
        return fed.stamps

    return run(scenario())


def test_the_kernel_s_time_of_day_becomes_a_moment_of_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    assert stamps(clocks, (5_000_000, 5_000_000, []), (6_000_001, 9_000_000, [])) == [5_000_000, 6_000_001]


def test_a_read_without_a_stamp_has_that_of_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stamps(Clocks(monkeypatch), (None, 7_000_000, [])) == [7_000_000]


def test_a_time_of_day_that_was_set_back_makes_no_stamp_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stamps(Clocks(monkeypatch), (9_000_000, 7_000_000, [])) == [7_000_000]


def test_a_stop_between_the_looks_at_the_two_clocks_makes_no_stamp_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may be taken off its core there: the stamp is then anything up to the read's."""
    clocks = Clocks(monkeypatch)
    ((stamp),) = stamps(clocks, (5_000_000, 6_000_000, [0, 3_000_000]))
    assert 5_000_000 <= stamp <= 9_000_000


def test_stamps_never_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in ([0, 3_000_000], [3_000_000, 0]):
        clocks = Clocks(monkeypatch)
        first, second = stamps(clocks, (5_000_000, 6_000_000, steps), (6_500_000, 9_000_000, []))
        assert first <= second
        first, second = stamps(clocks, (5_000_000, 6_000_000, []), (6_500_000, 7_000_000, steps))
        assert first <= second


@pytest.mark.loopback
def test_what_the_socket_does_not_take_waits_and_stays_in_order() -> None:
    async def scenario() -> None:
        async with pair() as (transport, fed, peer):
            large = bytes(range(256)) * 40_000
            transport.write(large)
            assert fed.paused == [True]
            transport.write(b"behind")
            loop = asyncio.get_running_loop()

            def read() -> bytes:
                got = b""
                while len(got) < len(large) + 6:
                    got += peer.recv(1 << 20)
                return got

            assert await loop.run_in_executor(None, read) == large + b"behind"
            assert fed.paused == [True, False]
            transport.write(b"small")
            assert peer.recv(100) == b"small", "it leaves at once"
            assert fed.paused == [True, False]

    run(scenario())


@pytest.mark.loopback
@pytest.mark.parametrize("how", ["end", "reset"])
def test_a_peer_that_leaves(how: str) -> None:
    async def scenario() -> None:
        async with pair() as (transport, fed, peer):
            peer.sendall(b"last words")
            if how == "reset":
                await fed.until(10)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            error = await fed.lost
            assert fed.reads == [b"last words"]
            assert isinstance(error, ConnectionResetError) if how == "reset" else error is None
            assert transport.is_closing()
            transport.write(b"nobody hears this")

    run(scenario())


@pytest.mark.loopback
def test_a_write_to_a_peer_that_has_gone_loses_the_connection() -> None:
    async def scenario() -> None:
        async with pair() as (transport, fed, peer):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            transport.write(b"a")
            transport.write(b"b")
            assert isinstance(await fed.lost, ConnectionError)

    run(scenario())


@pytest.mark.loopback
@pytest.mark.parametrize("how", ["close", "abort"])
def test_closing_it_here(how: str) -> None:
    async def scenario() -> None:
        async with pair() as (transport, fed, peer):
            peer.sendall(b"too late")
            getattr(transport, how)()
            getattr(transport, how)()
            assert await fed.lost is None
            assert fed.reads == []
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(10) == b""

    run(scenario())


@pytest.mark.loopback
def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` is ::1 first where a server may listen on 127.0.0.1 alone."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))

            async def addresses(host: str, port: int, **options: Any) -> list[Any]:
                assert (host, port) == ("both", 1)
                found = [closed.getsockname(), server.getsockname()]
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in found]

            monkeypatch.setattr(loop, "getaddrinfo", addresses)
            transport, fed = await dial(loop, Fed, "both", 1)
            assert transport.get_extra_info("socket").getpeername() == server.getsockname()
            transport.close()
            await fed.lost

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.loopback
def test_nobody_listens() -> None:
    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            with pytest.raises(ConnectionRefusedError):
                await dial(asyncio.get_running_loop(), Fed, *closed.getsockname())

    run(scenario())
