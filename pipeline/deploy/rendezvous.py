"""Ranks on several pods without ssh, kubectl or a token: the leader runs mpirun, each worker runs what it is handed.

mpirun starts its daemon on another host through an agent, usually ssh. Here the agent hands the command to the leader,
and the leader to the worker, over a connection that the worker opened: a worker listens on nothing, and runs only
what the leader it was told of sends. This file is mounted into the pods as it is, so it needs the standard library
alone.

Leader and workers share a secret, in the environment variable TRTPIPE_RENDEZVOUS_SECRET, which no process that they
start is given. Each end begins with a random number; every line after that begins with the HMAC of what follows, of
both numbers, of its direction and of its place in the conversation. A line is read only once its HMAC is right. It is
words, each quoted as in a URL.

    rendezvous.py lead WORKERS SLOTS PORT mpirun ...   in the leader: wait for the workers, then run mpirun
    rendezvous.py agent HOST COMMAND...                what mpirun calls instead of ssh
    rendezvous.py work PORT                            in a worker: run what the leader hands over, until it ends
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

DOOR = "TRTPIPE_RENDEZVOUS"
SECRET = "TRTPIPE_RENDEZVOUS_SECRET"
# Shorter ones can be guessed.
SECRET_CHARS = 16
RETRY_SECONDS = 2.0
# How long the other end has to show that it knows the secret, and how many may be trying to at once.
GREETING_SECONDS = 10.0
MAX_GREETINGS = 64
# A line holds a daemon's whole command with the addresses of all hosts.
LINE_BYTES = 1 << 18
NONCE = re.compile(rb"[0-9a-f]{64}\n")

logger = logging.getLogger("rendezvous")


class Untrusted(Exception):
    """The other end does not know the secret, or is not a rendezvous at all."""


class Link:
    """A connection whose lines are authenticated. Made by `greet`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, ours: bytes, theirs: bytes
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._key = key
        self._ours, self._theirs = ours, theirs  # names of the two directions
        self._sent = self._received = 0

    @classmethod
    async def greet(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, leads: bool
    ) -> Link:
        """Exchange random numbers. Raises Untrusted, or OSError."""
        own = secrets.token_hex(32).encode() + b"\n"
        writer.write(own)
        await writer.drain()
        try:
            other = await asyncio.wait_for(reader.readline(), GREETING_SECONDS)
        except (ValueError, asyncio.TimeoutError):
            other = b""
        if not NONCE.fullmatch(other):
            raise Untrusted("it does not begin as a rendezvous does")
        key = hmac.digest(secret, own + other if leads else other + own, "sha256")
        ours, theirs = (b"leader", b"worker") if leads else (b"worker", b"leader")
        return cls(reader, writer, key, ours, theirs)

    async def send(self, *words: str) -> None:
        text = b" ".join(quote(word, safe="").encode() for word in words)
        self.writer.write(self._mac(self._ours, self._sent, text) + b" " + text + b"\n")
        self._sent += 1
        await self.writer.drain()

    async def receive(self) -> list[str]:
        """The words of the next line; none when the other end is gone. Raises Untrusted."""
        try:
            line = await self.reader.readline()
        except ValueError:
            raise Untrusted("a line is too long") from None
        except ConnectionError:
            return []
        if not line:
            return []
        mac, _, text = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, text)):
            raise Untrusted("it does not know the secret")
        self._received += 1
        return _words(text)

    def close(self) -> None:
        self.writer.close()

    def _mac(self, direction: bytes, number: int, text: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d %s" % (direction, number, text), "sha256").hexdigest().encode()


class Leader:
    """Who has come, and the way of a command to each."""

    def __init__(self, workers: int, secret: bytes) -> None:
        self.workers = workers
        self.hosts: dict[int, str] = {}
        self.links: dict[str, Link] = {}
        self.complete = asyncio.Event()
        self._secret = secret
        self._greetings: list[asyncio.Task[Any]] = []

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker shows that it knows the secret and says who it is, then waits for its command."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._greetings) >= MAX_GREETINGS:
            self._greetings[0].cancel()  # a worker needs milliseconds, so the oldest is none
        self._greetings.append(task)
        try:
            link = await Link.greet(reader, writer, self._secret, leads=True)
            index, host = _introduction(await asyncio.wait_for(link.receive(), GREETING_SECONDS))
        except (Untrusted, OSError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            logger.warning("turned away a connection: %s", error or "it says nothing")
            writer.close()
            return
        finally:
            self._greetings.remove(task)
        if self.complete.is_set() or not 1 <= index <= self.workers:
            logger.warning("turned away worker %s (%s)", index, host)
            link.close()
            return
        if index in self.hosts:  # it lost its connection and came again before all were here
            self.links.pop(self.hosts[index], None)
        self.hosts[index] = host
        self.links[host] = link
        logger.info("worker %d of %d is here: %s", index, self.workers, host)
        if len(self.hosts) == self.workers:
            self.complete.set()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An agent's command goes to its host; the status it ends with comes back."""
        host, command = _words((await reader.readline()).rstrip(b"\n"))
        # Taken out: a host gets one command, as it would run one daemon.
        link = self.links.pop(host, None)
        # Cancelled: mpirun has ended, and with it the agent that would want to know.
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            status = 1
            if link is None:
                logger.error("mpirun asks for %s, which is not here", host)
            else:
                await link.send("run", command)
                with contextlib.suppress(Untrusted):
                    status = _status(await link.receive())
            writer.write(b"%d\n" % status)
            await writer.drain()
        writer.close()


async def lead(workers: int, slots: int, port: int, command: list[str], secret: bytes) -> int:
    """Run mpirun once every worker is here; its status. TERM is passed on to it."""
    leader = Leader(workers, secret)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await asyncio.start_server(leader.welcome, port=port, limit=LINE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        door = str(Path(folder) / "door")
        inner = await asyncio.start_unix_server(leader.relay, door, limit=LINE_BYTES)
        with contextlib.closing(server), contextlib.closing(inner):
            logger.info("waiting for %d worker(s) on port %d", workers, port)
            if not await first(leader.complete.wait(), stop.wait()):
                return 0
            # In the order of the workers' indices, so that consecutive ranks share a pod.
            hosts = [socket.gethostname(), *(leader.hosts[index] for index in sorted(leader.hosts))]
            words = [command[0], "--host", ",".join(f"{host}:{slots}" for host in hosts), *command[1:]]
            environment = {
                **os.environ,
                DOOR: door,
                "OMPI_MCA_plm_rsh_agent": f"{sys.executable} {Path(__file__).resolve()} agent",
                # A worker has no agent of its own to start a third one with.
                "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
                # Else the daemon goes to the background, and its worker takes it for ended.
                "OMPI_MCA_orte_leave_session_attached": "1",
            }
            process = await asyncio.create_subprocess_exec(*words, env=environment)
            ended = asyncio.ensure_future(process.wait())
            if not await first(asyncio.shield(ended), stop.wait()):
                logger.info("ending mpirun")
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            return await ended


async def agent(host: str, command: list[str]) -> int:
    """Hand a command to `host` and stay until it has ended there, as ssh would; its status."""
    reader, writer = await asyncio.open_unix_connection(os.environ[DOOR], limit=LINE_BYTES)
    writer.write(b"%s %s\n" % (quote(host, safe="").encode(), quote(" ".join(command), safe="").encode()))
    await writer.drain()
    status = int(await reader.readline() or 1)
    writer.close()
    return status


async def work(address: str, port: int, index: int, secret: bytes) -> int:
    """Run what the leader hands over; its status. Ends what runs when the leader is gone."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while True:
        meeting = asyncio.ensure_future(meet(address, port, index, secret))
        if not await first(meeting, stop.wait()):
            return 0  # nothing runs here yet
        found = meeting.result()
        if found is not None:
            break
        await asyncio.sleep(RETRY_SECONDS)
    link, command = found
    logger.info("running %s", command)
    # From here on TERM is the leader's affair: requests may still be in flight on its ranks and on ours.
    process = await asyncio.create_subprocess_exec("sh", "-c", command, start_new_session=True)
    ended = asyncio.ensure_future(process.wait())
    if not await first(asyncio.shield(ended), _end(link.reader)):
        logger.error("the leader is gone")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    status = await ended
    logger.info("it ended with status %d", status)
    with contextlib.suppress(ConnectionError):
        await link.send("status", str(status))
        link.close()
    return status


async def meet(address: str, port: int, index: int, secret: bytes) -> tuple[Link, str] | None:
    """Find the leader, which may start later than this worker, and wait for its command. None when it has none."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(address, port, limit=LINE_BYTES)
            break
        except OSError as error:
            logger.info("no leader at %s:%d yet: %s", address, port, error)
            await asyncio.sleep(RETRY_SECONDS)
    connection: socket.socket = writer.get_extra_info("socket")
    # A node that loses power sends no goodbye.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    host = os.environ.get("HOSTNAME") or socket.gethostname()
    try:
        link = await Link.greet(reader, writer, secret, leads=False)
        await link.send(str(index), host)
        words = await link.receive()
        if len(words) == 2 and words[0] == "run":
            return link, words[1]
        logger.info("the leader closed the connection; trying again")
    except (Untrusted, OSError) as error:
        logger.warning("what answers at %s:%d is not believed: %s", address, port, error)
    writer.close()
    return None


def _introduction(words: list[str]) -> tuple[int, str]:
    """A worker's index and host. Raises Untrusted."""
    if len(words) != 2 or not words[0].isdecimal():
        raise Untrusted("it does not say which worker it is")
    return int(words[0]), words[1]


def _status(words: list[str]) -> int:
    """Of a daemon; 1 when its worker has gone without a word."""
    return int(words[1]) if len(words) == 2 and words[0] == "status" else 1


def _words(text: bytes) -> list[str]:
    return [unquote(word) for word in text.decode("ascii").split(" ")]


async def _end(reader: asyncio.StreamReader) -> None:
    """Return when the other end closes the connection; what it sends instead is not looked at."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(LINE_BYTES):
            pass


async def first(one: Any, other: Any) -> bool:
    """Wait for either; whether `one` has finished. What has not is cancelled."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done = tasks[0].done()
    for task in tasks:
        task.cancel()
    return done


def read_secret() -> bytes:
    """Take the secret out of the environment, so that mpirun, the ranks and their models have none."""
    secret = os.environ.pop(SECRET, "").strip()
    if len(secret) < SECRET_CHARS:
        raise SystemExit(
            f"rendezvous: {SECRET} has fewer than {SECRET_CHARS} characters: leader and workers could not know each "
            "other; create the Secret that the manifests name"
        )
    return secret.encode()


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rendezvous: %(message)s")
    role, *rest = arguments
    if role == "agent":
        return asyncio.run(agent(rest[0], rest[1:]))
    secret = read_secret()
    if role == "lead":
        return asyncio.run(lead(int(rest[0]), int(rest[1]), int(rest[2]), rest[3:], secret))
    address, index = os.environ["LWS_LEADER_ADDRESS"], int(os.environ["LWS_WORKER_INDEX"])
    return asyncio.run(work(address, int(rest[0]), index, secret))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
