"""Attacks on the rendezvous of several pods, by somebody who reaches its port but does not know its secret."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from trtpipe.pipeline.deploy import rendezvous
from trtpipe.pipeline.deploy.rendezvous import Leader, Link, Untrusted, meet

pytestmark = pytest.mark.loopback

SECRET = b"what only the pods of one group know"
COMMAND = "orted -mca ess env"
T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(attack: Coroutine[Any, Any, T]) -> T:
    """The outcome of an attack, all connections of it closed."""

    async def whole() -> T:
        try:
            return await attack
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.05)

    return asyncio.run(whole())


async def listen(handler: Handler) -> tuple[asyncio.AbstractServer, int]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0, limit=rendezvous.LINE_BYTES)
    return server, server.sockets[0].getsockname()[1]


async def genuine_worker(port: int) -> Link:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    link = await Link.greet(reader, writer, SECRET, leads=False)
    await link.send("1", "set-0-1")
    return link


class Tap:
    """A man in the middle: passes bytes on, changed by `change(to_leader, line)`, and keeps what he saw."""

    def __init__(self, port: int, change: Callable[[bool, bytes], bytes] = lambda to_leader, line: line) -> None:
        self.port = port
        self.change = change
        self.seen: list[tuple[bool, bytes]] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, back = await asyncio.open_connection("127.0.0.1", self.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, to_leader: bool) -> None:
            try:
                while line := await source.readline():
                    self.seen.append((to_leader, line))
                    sink.write(self.change(to_leader, line))
                    await sink.drain()
            finally:
                sink.close()

        self._pumps = [
            asyncio.ensure_future(pump(reader, back, True)),
            asyncio.ensure_future(pump(theirs, writer, False)),
        ]


async def group(change: Callable[[bool, bytes], bytes] = lambda to_leader, line: line) -> tuple[Leader, Tap, object]:
    """A leader, a worker that comes through a man in the middle, and what that worker got as its command."""
    leader = Leader(1, SECRET)
    server, port = await listen(leader.welcome)
    tap = Tap(port, change)
    middle, door = await listen(tap)
    worker = asyncio.ensure_future(meet("127.0.0.1", door, 1, SECRET))
    try:
        await asyncio.wait_for(leader.complete.wait(), 2)
        await leader.links["set-0-1"].send("run", COMMAND)
    except asyncio.TimeoutError:
        pass
    found = await asyncio.wait_for(worker, 15)
    if found is not None:
        found[0].close()
    for link in leader.links.values():
        link.close()
    for listener in (server, middle):
        listener.close()
    return leader, tap, found


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "set-0-1")
    monkeypatch.setattr(rendezvous, "GREETING_SECONDS", 0.5)


def test_without_an_attack_the_command_arrives_and_the_secret_is_never_on_the_wire() -> None:
    leader, tap, found = run(group())
    assert isinstance(found, tuple)
    assert found[1] == COMMAND
    assert leader.hosts == {1: "set-0-1"}
    wire = b"".join(line for _, line in tap.seen)
    assert b"orted" in wire
    assert SECRET not in wire
    assert hmac.digest(SECRET, b"", "sha256").hex().encode() not in wire


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda to_leader, line: line.replace(b"orted", b"reboo"), id="another command"),
        pytest.param(lambda to_leader, line: line.replace(b"run ", b"run sh%20-c%20id%20") , id="a longer command"),
        pytest.param(lambda to_leader, line: line if to_leader else line.upper(), id="another greeting"),
        pytest.param(lambda to_leader, line: line[:10] + b"0" * 54 + line[64:], id="other HMACs"),
    ],
)  # fmt: skip
def test_a_line_that_was_changed_on_its_way_is_not_believed(change: Callable[[bool, bytes], bytes]) -> None:
    *_, found = run(group(change))
    assert found is None


def test_a_worker_believes_no_impostor_of_the_leader() -> None:
    """What an attacker who took the leader's address would send: nothing of it is run."""
    _, tap, _ = run(group())
    recorded = [line for to_leader, line in tap.seen if not to_leader]
    old = b'{"run": "touch /tmp/owned"}\n'

    async def impostor(lines: list[bytes]) -> object:
        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"".join(lines))
            await writer.drain()
            await reader.read(1 << 16)
            writer.close()

        server, port = await listen(lead)
        found = await asyncio.wait_for(meet("127.0.0.1", port, 1, SECRET), 15)
        server.close()
        return found

    nonce = b"0" * 64 + b"\n"
    text = b"run touch%20/tmp/owned"
    guess = hmac.new(b"password", b"leader 0 " + text, "sha256").hexdigest().encode()
    for lines in (
        [old],
        [nonce, old],
        [nonce, text + b"\n"],
        [nonce, guess + b" " + text + b"\n"],
        recorded,  # a whole conversation of the day before
        [nonce, b"x" * (1 << 20)],
        [],
    ):
        assert run(impostor(lines)) is None, lines


def test_a_worker_is_not_given_back_its_own_words() -> None:
    """An attacker without the secret may use the worker itself to authenticate: what it sends comes back."""

    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line)
                await writer.drain()
        finally:
            writer.close()

    async def meeting() -> object:
        server, port = await listen(reflect)
        found = await asyncio.wait_for(meet("127.0.0.1", port, 1, SECRET), 15)
        server.close()
        return found

    assert run(meeting()) is None


def test_strangers_do_not_take_a_worker_s_place() -> None:
    async def attack() -> dict[int, str]:
        _, tap, _ = await group()
        recorded = [line for to_leader, line in tap.seen if to_leader]
        leader = Leader(1, SECRET)
        server, port = await listen(leader.welcome)
        nonce = b"0" * 64 + b"\n"
        messages = (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[]\n",
            b'{"index": 1, "host": "evil"}\n',
            nonce + b'{"index": 1, "host": "evil"}\n',
            nonce + b"0" * 64 + b" 1 evil\n",
            nonce + hmac.new(b"guess", b"worker 0 1 evil", "sha256").hexdigest().encode() + b" 1 evil\n",
            b"".join(recorded),
            nonce + b"\xff\xfe\x00\n",
            nonce + b"y" * (rendezvous.LINE_BYTES * 2),
        )
        for message in messages:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(message)
                await writer.drain()
                # The leader's random number, and then its end.
                assert len(await asyncio.wait_for(reader.read(), 10)) in (0, 65)
            except ConnectionError:
                pass
            writer.close()
            assert not leader.hosts, message
        # One who knows the secret is still held to the numbers that there are.
        for index in ("0", "2", "-1", "x"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            link = await Link.greet(reader, writer, SECRET, leads=False)
            await link.send(index, "evil")
            assert await link.receive() == []
            link.close()
        link = await genuine_worker(port)
        await asyncio.wait_for(leader.complete.wait(), 10)
        # All are here: one more would be an impostor.
        late = await genuine_worker(port)
        assert await late.receive() == []
        for one in (link, late, leader.links["set-0-1"]):
            one.close()
        server.close()
        return leader.hosts

    assert run(attack()) == {1: "set-0-1"}


def test_who_says_nothing_keeps_no_worker_out(caplog: pytest.LogCaptureFixture) -> None:
    async def attack() -> None:
        leader = Leader(1, SECRET)
        server, port = await listen(leader.welcome)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * rendezvous.MAX_GREETINGS)]
        link = await asyncio.wait_for(genuine_worker(port), 10)
        await asyncio.wait_for(leader.complete.wait(), 10)
        ends = [asyncio.wait_for(reader.read(), 10) for reader, _ in silent]
        # Each is given up, the last after GREETING_SECONDS.
        assert {len(end) for end in await asyncio.gather(*ends)} <= {0, 65}
        for _, writer in silent:
            writer.close()
        for one in (link, leader.links["set-0-1"]):
            one.close()
        server.close()

    with caplog.at_level(logging.WARNING):
        run(attack())


def test_both_ends_use_keys_of_their_own_conversation() -> None:
    """The same secret and words, and yet no line is valid in another conversation, direction or place."""

    async def lines() -> list[bytes]:
        out = []
        for _ in range(2):
            _, tap, _ = await group()
            out += [line for _, line in tap.seen if b" " in line]
        return out

    macs = [line.split(b" ")[0] for line in run(lines())]
    assert len(macs) == len(set(macs)) == 4


def test_an_untrusted_line_is_an_error_and_not_a_message() -> None:
    async def attack() -> None:
        async def leader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = await Link.greet(reader, writer, b"another secret altogether", leads=True)
            await link.send("run", "id")
            writer.close()

        server, port = await listen(leader)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        link = await Link.greet(reader, writer, SECRET, leads=False)
        with pytest.raises(Untrusted, match="does not know the secret"):
            await link.receive()
        link.close()
        server.close()

    run(attack())
