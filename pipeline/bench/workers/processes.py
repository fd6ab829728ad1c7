"""Workers in processes of their own, for a load that one core cannot send and read.

Parent and child exchange pickles over a socket pair: a call's name and arguments in one direction; its value or error,
and progress of the load point, in the other. A thread reads on each side: an event loop would make the socket
non-blocking, but a message must be read as a whole. All processes of a machine share one monotonic clock, so
their stamps need no alignment.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from trtpipe.engines.errors import HostError, TrtpipeError
from trtpipe.engines.process import python_command
from trtpipe.pipeline.bench.load.loads import Load
from trtpipe.pipeline.bench.load.workload import Render
from trtpipe.pipeline.bench.loop.driver import Live
from trtpipe.pipeline.bench.loop.load_point import Driven
from trtpipe.pipeline.bench.options import BenchOptions
from trtpipe.pipeline.bench.workers.share import Share
from trtpipe.pipeline.bench.workers.worker import LocalWorker, Watch

# Kinds of a child's messages: value of a call, its error, progress of the load point.
VALUE, ERROR, LIVE = "value", "error", "live"
# Seconds that a child may take to exit.
LEAVE_S = 5.0
# Seconds that a child may take to collect its results after an interrupt.
END_S = 30.0


class ProcessWorker:
    """A child process with a LocalWorker of its own. Make it in the event loop that uses it."""

    def __init__(self, options: BenchOptions, render: Render | None, share: Share) -> None:
        """`render` is pickled."""
        ours, theirs = socket.socketpair()
        command = [*python_command("trtpipe.pipeline.bench.workers.processes"), str(theirs.fileno())]
        with theirs:
            # A new session: Ctrl-C in a terminal reaches only the parent, which then interrupts its children.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._pipe = Connection(ours.detach())
        self._number = share.index
        self._answer: asyncio.Future[Any] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._watch: Watch | None = None
        self._loop = asyncio.get_running_loop()
        self._pipe.send((options, render, share))
        read_in_thread(self._pipe, self._loop, self._heard)

    async def connect(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await self._call("connect")
        return answer

    async def prepare(self, target: int, load: Load, repeat: int, watch: Watch | None) -> None:
        self._watch = watch
        await self._call("prepare", target, load, repeat, watch is not None)

    async def drive(self, start_ns: int) -> Driven:
        driven: Driven = await self._call("drive", start_ns)
        return driven

    def interrupt(self) -> None:
        if self._ending is not None:  # a second interrupt: do not wait any longer
            self._process.kill()
            return
        self._ending = self._loop.call_later(END_S, self._process.kill)
        with contextlib.suppress(OSError):  # the child has ended, which its pending call reports
            self._pipe.send(("interrupt",))

    async def close(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._end)
        self._pipe.close()

    def _end(self) -> int:
        try:
            return self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    async def _call(self, *words: Any) -> Any:
        self._answer = self._loop.create_future()
        try:
            self._pipe.send(words)
        except OSError:
            self._lost()
        return await self._answer

    def _heard(self, message: Any) -> None:
        if message is None:
            self._lost()
            return
        kind, value = message
        answer = self._answer
        if kind == LIVE:
            if self._watch is not None:
                self._watch(value)
        elif answer is not None and not answer.done():
            if kind == ERROR:
                answer.set_exception(value)
            else:
                answer.set_result(value)

    def _lost(self) -> None:
        if self._answer is not None and not self._answer.done():
            status = self._end()
            why = f"exit status {status}" if status >= 0 else f"signal {-status}"
            remedy = "its last words are above" if status >= 0 else "was it killed for memory?"
            self._answer.set_exception(HostError(f"load process {self._number} ended", why=why, remedy=remedy))


def read_in_thread(pipe: Connection, loop: asyncio.AbstractEventLoop, heard: Callable[[Any], None]) -> None:
    """Call `heard` in the loop with each message, and with None when the other side has gone."""

    def read() -> None:
        message: Any = True
        while message is not None:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(heard, message)

    threading.Thread(target=read, daemon=True).start()


class _Child:
    """Child side: runs calls one after the other, but an interrupt at once."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._calls: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()
        self._hand: LocalWorker | None = None

    async def serve(self) -> None:
        options, render, share = self._pipe.recv()
        read_in_thread(self._pipe, self._loop, self._heard)
        while (call := await self._calls.get()) is not None:
            try:
                if self._hand is None:
                    self._hand = LocalWorker(options, render, share)
                self._pipe.send((VALUE, await self._do(self._hand, *call)))
            except TrtpipeError as error:
                self._pipe.send((ERROR, error))
        if self._hand is not None:
            await self._hand.close()

    async def _do(self, worker: LocalWorker, name: str, *arguments: Any) -> Any:
        if name == "connect":
            return await worker.connect()
        if name == "prepare":
            target, load, repeat, watched = arguments
            return await worker.prepare(target, load, repeat, self._tell if watched else None)
        return await worker.drive(*arguments)

    def _tell(self, live: Live) -> None:
        self._pipe.send((LIVE, live))

    def _heard(self, call: Any) -> None:
        if call is not None and call[0] != "interrupt":
            self._calls.put_nowait(call)
            return
        if self._hand is not None:
            self._hand.interrupt()
        if call is None:  # the last call, or the parent is gone
            self._calls.put_nowait(None)


def main() -> None:
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = uvloop.new_event_loop()
    pipe = Connection(int(sys.argv[1]))

    async def serve() -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone
            await _Child(pipe).serve()

    try:
        loop.run_until_complete(serve())
    finally:
        loop.close()


if __name__ == "__main__":
    main()
