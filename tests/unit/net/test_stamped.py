"""Reads with the kernel's stamps: over loopback, and with clocks of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import time
from collections.abc import AsyncIterator
from time import monotonic_ns
from typing import Any

import pytest

from tests.support.loops import run
from trtpipe.pipeline.net import stamped
from trtpipe.pipeline.net.stamped import Listener, StampedTransport, dial, listen

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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

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

    def recvmsg_into(self, rooms: Any, ancillary: int) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        data, at = self.left.pop(0)
        kinds = [(socket.SOL_SOCKET, 99, b"something else")]
        if at is not None:
            kinds.append((socket.SOL_SOCKET, 35, struct.pack("@qq", *divmod(at, 1_000_000_000))))
        rooms[0][: len(data)] = data
        return len(data), kinds, 0, None

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


def receive(peer: socket.socket) -> bytes:
    """All up to the end."""
    got = bytearray()
    while data := peer.recv(1 << 20):
        got += data
    return bytes(got)


LARGE = bytes(range(256)) * 40_000


@pytest.mark.loopback
def test_what_was_written_before_the_close_arrives() -> None:
    async def scenario() -> None:
        async with pair() as (transport, fed, peer):
            transport.write(LARGE)
            transport.write(b"behind")
            transport.close()
            transport.write(b"nobody hears this")
            assert transport.is_closing()
            await asyncio.sleep(0.01)
            assert not fed.lost.done(), "the peer has not read it"
            got = await asyncio.get_running_loop().run_in_executor(None, receive, peer)
            assert got == LARGE + b"behind"
            assert await fed.lost is None
            assert fed.paused == [True], "who may write no more is not told to go on"

    run(scenario())


@pytest.mark.loopback
def test_an_abort_does_not_wait_for_what_was_written() -> None:
    async def scenario() -> None:
        async with pair() as (transport, fed, peer):
            transport.write(LARGE)
            transport.close()
            transport.abort()
            assert await fed.lost is None
            with contextlib.suppress(ConnectionResetError):
                assert len(receive(peer)) < len(LARGE)

    run(scenario())


@pytest.mark.loopback
def test_a_peer_that_goes_before_it_has_read_all_ends_the_close() -> None:
    async def scenario() -> None:
        async with pair() as (transport, fed, peer):
            transport.write(LARGE)
            transport.close()
            peer.close()
            assert isinstance(await fed.lost, ConnectionError)

    run(scenario())


@pytest.mark.loopback
def test_small_writes_are_not_held_back() -> None:
    async def scenario() -> None:
        async with pair() as (transport, _, _):
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(scenario())


@pytest.mark.loopback
def test_a_protocol_that_fails_loses_its_connection_and_the_loop_is_told() -> None:
    told: list[Any] = []

    class Failing(Fed):
        def feed(self, data: bytes, stamp: int) -> None:
            super().feed(data, stamp)
            raise ValueError("no such bytes")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(str(context["exception"])))
        with socket.create_server(("127.0.0.1", 0)) as server:
            _, fed = await dial(loop, Failing, *server.getsockname())
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"strange")
                assert isinstance(await fed.lost, ValueError)
                assert fed.reads == [b"strange"]

    run(scenario())
    assert told == ["no such bytes"]


@pytest.mark.loopback
@pytest.mark.parametrize("how", ["end", "reset"])
def test_what_a_peer_sent_before_it_left_is_read(how: str) -> None:
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
def test_nothing_is_read_after_a_transport_is_closed(how: str) -> None:
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
def test_a_refused_connection_is_raised() -> None:
    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            with pytest.raises(ConnectionRefusedError):
                await dial(asyncio.get_running_loop(), Fed, *closed.getsockname())

    run(scenario())


# Connections that come


@contextlib.asynccontextmanager
async def listening(made: list[Fed]) -> AsyncIterator[Listener]:
    """A listener whose protocols are in `made`."""

    def make() -> Fed:
        made.append(Fed())
        return made[-1]

    listener = await listen(asyncio.get_running_loop(), make, "127.0.0.1", 0, backlog=100)
    yield listener
    listener.close()
    for fed in made:
        fed.transport.close()
        await fed.lost


async def come(made: list[Fed], count: int) -> None:
    while len(made) < count:
        await asyncio.sleep(0.001)


@pytest.mark.loopback
def test_connections_that_come_are_read_and_answered() -> None:
    async def scenario() -> None:
        made: list[Fed] = []
        async with listening(made) as listener:
            peers = [socket.create_connection(("127.0.0.1", listener.port), timeout=20) for _ in range(20)]
            for number, peer in enumerate(peers):
                peer.sendall(b"%02d" % number)
            await come(made, 20)
            for fed in made:
                await fed.until(2)
                assert fed.stamps[0] <= fed.moments[0]
                transport: Any = fed.transport
                assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                transport.write(b"I am " + fed.reads[0])
            for number, peer in enumerate(peers):
                assert peer.recv(10) == b"I am %02d" % number
                peer.close()

    run(scenario())


@pytest.mark.loopback
def test_what_came_before_its_connection_was_accepted_has_the_time_at_which_it_came() -> None:
    """The kernel begins to stamp a while after it was first asked to, and until then tells when it was read."""

    async def late() -> int:
        made: list[Fed] = []
        async with listening(made) as listener:
            for number in range(20):
                with socket.create_connection(("127.0.0.1", listener.port)) as peer:
                    peer.sendall(b"early")
                    time.sleep(0.2)  # the loop stands still
                    await come(made, number + 1)
                    fed = made[-1]
                    await fed.until(5)
                    if fed.moments[0] - fed.stamps[0] >= 100 * MS:
                        break
            return fed.moments[0] - fed.stamps[0]

    assert run(late()) >= 100 * MS


@pytest.mark.loopback
def test_a_listener_that_was_closed_takes_no_more_and_leaves_what_it_took() -> None:
    async def scenario() -> None:
        made: list[Fed] = []
        async with listening(made) as listener:
            with socket.create_connection(("127.0.0.1", listener.port)) as peer:
                await come(made, 1)
                listener.close()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", listener.port))
                peer.sendall(b"still here")
                await made[0].until(10)

    run(scenario())


@pytest.mark.loopback
def test_a_connection_that_could_not_be_accepted_is_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the descriptors of this process are used up, its socket goes on to be readable."""
    accept = socket.socket.accept
    failed: list[OSError] = []

    def scarce(sock: socket.socket) -> Any:
        if len(failed) < 2:
            failed.append(OSError(errno.EMFILE, "Too many open files"))
            raise failed[-1]
        return accept(sock)

    async def scenario() -> None:
        made: list[Fed] = []
        async with listening(made) as listener:
            monkeypatch.setattr(socket.socket, "accept", scarce)
            with socket.create_connection(("127.0.0.1", listener.port)) as peer:
                peer.sendall(b"patient")
                await come(made, 1)
                await made[0].until(7)

    run(scenario())
    assert len(failed) == 2


@pytest.mark.loopback
def test_a_listener_that_was_closed_does_not_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[socket.socket] = []

    async def scenario() -> None:
        made: list[Fed] = []
        async with listening(made) as listener:

            def fail(sock: socket.socket) -> Any:
                tried.append(sock)
                asyncio.get_running_loop().call_soon(listener.close)
                raise OSError(errno.EMFILE, "Too many open files")

            monkeypatch.setattr(socket.socket, "accept", fail)
            with socket.create_connection(("127.0.0.1", listener.port)):
                while not tried:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(3 * stamped._ACCEPT_AGAIN_S)

    run(scenario())
    assert len(tried) == 1


@pytest.mark.loopback
def test_every_address_of_a_name_is_listened_on_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        hosts = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}

        async def addresses(host: str, port: int, **options: Any) -> list[Any]:
            assert host == "several"
            found = [(kind, socket.SOCK_STREAM, 6, "", (one, port)) for one, kind in hosts.items()]
            return found + found[:1]

        monkeypatch.setattr(loop, "getaddrinfo", addresses)
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
        listener = await listen(loop, Fed, "several", port, backlog=100)
        assert listener.port == port
        for host in hosts:
            socket.create_connection((host, port)).close()
        listener.close()
        with (
            socket.create_server(("::1", port), family=socket.AF_INET6),
            pytest.raises(OSError, match="already in use"),
        ):
            await listen(loop, Fed, "several", port, backlog=100)
        socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
