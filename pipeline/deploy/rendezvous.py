"""Ranks on several pods without ssh, kubectl or a token: the leader runs mpirun, each worker runs what it is handed.

mpirun starts its daemon on another host through an agent, usually ssh. Here the agent hands the command to the leader,
and the leader to the worker, over a connection that the worker opened: a worker listens on nothing, and runs only
what the leader it was told of sends. This file is mounted into the pods as it is, so it needs the standard library
alone.

    rendezvous.py lead WORKERS SLOTS PORT mpirun ...   in the leader: wait for the workers, then run mpirun
    rendezvous.py agent HOST COMMAND...                what mpirun calls instead of ssh
    rendezvous.py work PORT                            in a worker: run what the leader hands over, until it ends
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

DOOR = "TRTPIPE_RENDEZVOUS"
RETRY_SECONDS = 2.0
# A line holds a daemon's whole command with the addresses of all hosts.
LINE_BYTES = 1 << 20

logger = logging.getLogger("rendezvous")


class Leader:
    """Who has come, and the way of a command to each."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.hosts: dict[int, str] = {}
        self.lines: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.complete = asyncio.Event()

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker says who it is, then waits for its command."""
        try:
            message = await receive(reader)
            index, host = int(message["index"]), str(message["host"])
        except (KeyError, ValueError, TypeError):
            writer.close()
            return
        if self.complete.is_set() or not 1 <= index <= self.workers:
            logger.warning("turned away worker %s (%s)", index, host)
            writer.close()
            return
        if index in self.hosts:  # it lost its connection and came again before all were here
            self.lines.pop(self.hosts[index], None)
        self.hosts[index] = host
        self.lines[host] = reader, writer
        logger.info("worker %d of %d is here: %s", index, self.workers, host)
        if len(self.hosts) == self.workers:
            self.complete.set()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An agent's command goes to its host; the status it ends with comes back."""
        message = await receive(reader)
        # Taken out: a host gets one command, as it would run one daemon.
        line = self.lines.pop(str(message.get("host")), None)
        # Cancelled: mpirun has ended, and with it the agent that would want to know.
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            status = 1
            if line is None:
                logger.error("mpirun asks for %s, which is not here", message.get("host"))
            else:
                theirs, way = line
                await send(way, {"run": message["run"]})
                status = int((await receive(theirs)).get("status", 1))
            await send(writer, {"status": status})
        writer.close()


async def lead(workers: int, slots: int, port: int, command: list[str]) -> int:
    """Run mpirun once every worker is here; its status. TERM is passed on to it."""
    leader = Leader(workers)
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
    await send(writer, {"host": host, "run": " ".join(command)})
    status = int((await receive(reader)).get("status", 1))
    writer.close()
    return status


async def work(address: str, port: int, index: int) -> int:
    """Run what the leader hands over; its status. Ends what runs when the leader is gone."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while True:
        connection = asyncio.ensure_future(meet(address, port, index))
        if not await first(connection, stop.wait()):
            return 0  # nothing runs here yet
        reader, writer, message = connection.result()
        if "run" in message:
            break
        writer.close()
        logger.info("the leader closed the connection; trying again")
        await asyncio.sleep(RETRY_SECONDS)
    logger.info("running %s", message["run"])
    # From here on TERM is the leader's affair: requests may still be in flight on its ranks and on ours.
    process = await asyncio.create_subprocess_exec("sh", "-c", message["run"], start_new_session=True)
    ended = asyncio.ensure_future(process.wait())
    if not await first(asyncio.shield(ended), reader.read()):
        logger.error("the leader is gone")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    status = await ended
    logger.info("it ended with status %d", status)
    with contextlib.suppress(ConnectionError):
        await send(writer, {"status": status})
        writer.close()
    return status


async def meet(
    address: str, port: int, index: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    """Find the leader, which may start later than this worker, and wait for its word."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(address, port, limit=LINE_BYTES)
            break
        except OSError as error:
            logger.info("no leader at %s:%d yet: %s", address, port, error)
            await asyncio.sleep(RETRY_SECONDS)
    link: socket.socket = writer.get_extra_info("socket")
    # A node that loses power sends no goodbye.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    host = os.environ.get("HOSTNAME") or socket.gethostname()
    try:
        await send(writer, {"index": index, "host": host})
        return reader, writer, await receive(reader)
    except ConnectionError:
        return reader, writer, {}


async def first(one: Any, other: Any) -> bool:
    """Wait for either; whether `one` has finished. What has not is cancelled."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done = tasks[0].done()
    for task in tasks:
        task.cancel()
    return done


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message; {} when the other side is gone or says something else."""
    try:
        message = json.loads(await reader.readline())
    except (ValueError, ConnectionError):
        return {}
    return message if isinstance(message, dict) else {}


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rendezvous: %(message)s")
    role, *rest = arguments
    if role == "lead":
        return asyncio.run(lead(int(rest[0]), int(rest[1]), int(rest[2]), rest[3:]))
    if role == "agent":
        return asyncio.run(agent(rest[0], rest[1:]))
    address, index = os.environ["LWS_LEADER_ADDRESS"], int(os.environ["LWS_WORKER_INDEX"])
    return asyncio.run(work(address, int(rest[0]), index))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
