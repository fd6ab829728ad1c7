"""Supervisor of the gateway's worker processes: starts them together, watches, restarts, replaces and ends them.

Workers read API keys and certificate when they start, so other workers replace them where these files change. They
read the supervisor's copies, so that a worker starts again while a changed file cannot be read.

The supervisor binds the port once for each worker, by SO_REUSEPORT, and the worker listens on that socket. So the port
is reserved, the kernel distributes the connections, and those that wait to be accepted outlive a worker.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError, InputDataError, StageFailed, TrtpipeError
from trtpipe.engines.json_input import parse_json
from trtpipe.engines.process import error_from_json, python_command
from trtpipe.pipeline.gateway import access
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.shared_counters import ROW_BYTES, SharedCounters

READY_SECONDS = 60.0
# Beyond the time that answers have.
STOP_SECONDS = 5.0
# A replaced worker has this long to stop taking requests; after it nobody waits any longer.
LEAVE_SECONDS = 10.0
READY, LEFT = b"ready\n", b"left\n"
# Time between two looks at the files of keys and certificate, which are taken when two looks find the same; and until
# workers that did not start are started again.
LOOK_SECONDS, RETRY_SECONDS = 1.0, 60.0
# A worker with this many deaths within this time counts as broken.
MAX_RESTARTS, RESTART_WINDOW_SECONDS = 5, 60.0


@dataclass(frozen=True)
class Worker:
    """A worker's process, its row in the shared counters, and the pipe that tells when it is ready and when it left."""

    process: subprocess.Popen[bytes]
    row: int
    pipe: io.FileIO

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def read_until(self, word: bytes, deadline: float) -> bytes:
        """Read the worker's pipe up to `word`, the worker's end or `deadline` (monotonic seconds); what was read."""
        said = b""
        while not said.endswith(word):
            readable, _, _ = select.select([self.pipe], [], [], max(0.0, deadline - time.monotonic()))
            piece = self.pipe.read(4096) if readable else b""
            if not piece:
                break
            said += piece
        return said

    def await_ready(self, deadline: float) -> None:
        """Raises the worker's own error, or StageFailed."""
        said = self.read_until(READY, deadline)
        if said.endswith(READY):
            return
        if time.monotonic() >= deadline:
            raise StageFailed(f"a gateway worker is not ready after {READY_SECONDS:.0f} s")
        self.process.wait(timeout=STOP_SECONDS)
        if said:
            raise error_from_json(parse_json(said))
        raise StageFailed("the gateway does not start", why=f"it ended with status {self.process.returncode}")


class Gateway:
    """A running gateway. Made by `start`."""

    def __init__(self, options: GatewayOptions, ports: list[socket.socket], log: Path | None) -> None:
        self.options = options
        self._ports = ports
        # Memory alone: cleaners of temporary folders would remove a file.
        self._counters = io.FileIO(os.memfd_create("trtpipe-gateway"), "r+")
        self._log = log
        self._rows = 0
        self._workers: list[Worker] = []
        self._leaving: list[Worker] = []
        self._copies: dict[str, io.FileIO] = {}
        # The files as the workers have read them, as the last look found them, and when the next look is due.
        self._read = self._seen = access.stamps(options)
        self._look = 0.0
        # Not an Event: a signal's exception in its `wait` may leave it locked, and then `set` would not return.
        self._stopping = False

    @classmethod
    def start(cls, options: GatewayOptions, log: Path | None = None) -> Gateway:
        """Start the workers and wait until all listen; their output goes to `log`, or where this process's own goes.

        Raises HostError when the port is taken, InputDataError for unusable keys or an unusable certificate, a worker's
        own error, or StageFailed.
        """
        ports = _bind(options.host, options.port, options.workers)
        options = replace(options, port=ports[0].getsockname()[1])
        gateway = cls(options, ports, log)
        try:
            gateway._copies = _copy_files(options)
            gateway._workers = gateway._start_workers(options)
        except BaseException:
            gateway.stop()
            raise
        return gateway

    @property
    def url(self) -> str:
        return self.options.url

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def watch(
        self, tick: Callable[[Gateway], None] = lambda gateway: None, note: Callable[[str], None] = lambda text: None
    ) -> None:
        """Restart workers that die, and replace all where keys or certificate change, until `stop` is called; `tick` is
        called five times a second, `note` with what is to be told. Raises StageFailed when they die too often."""
        deaths: list[float] = []
        while True:
            time.sleep(0.2)
            if self._stopping:
                return
            tick(self)
            self._take_changed_files(note)
            self._forget_left()
            for index, worker in enumerate(self._workers):
                if worker.alive or self._stopping:
                    continue
                now = time.monotonic()
                deaths = [at for at in deaths if now - at < RESTART_WINDOW_SECONDS] + [now]
                if len(deaths) > MAX_RESTARTS:
                    raise StageFailed(
                        f"the gateway's workers ended {len(deaths)} times within {RESTART_WINDOW_SECONDS:.0f} s",
                        why=f"the last with status {worker.process.returncode}",
                    )
                worker.pipe.close()
                # Other workers go on answering: this one may take its time, and is checked in the next round.
                self._workers[index] = self._spawn(self.options, index, worker.row)

    def serve_models(self, models: tuple[ServedModel, ...]) -> None:
        """Replace the workers by others that serve `models`, and wait until the old ones take no more requests. None is
        refused: the old workers take requests until all new ones do, and end with their last answer.

        Raises a worker's own error, or StageFailed; the old workers go on then.
        """
        options = replace(self.options, models=models)
        started = self._start_workers(options)
        replaced, self._workers, self.options = self._workers, started, options
        self._leaving += replaced
        for worker in replaced:
            if worker.alive:
                worker.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + LEAVE_SECONDS
        for worker in replaced:
            worker.read_until(LEFT, deadline)

    def _take_changed_files(self, note: Callable[[str], None]) -> None:
        """Replace the workers where the files of keys and certificate have changed and can be read."""
        now = time.monotonic()
        if now < self._look or self._stopping:
            return
        self._look = now + LOOK_SECONDS
        last, self._seen = self._seen, access.stamps(self.options)
        if self._seen == self._read or self._seen != last:  # nothing is new, or is being written
            return
        try:
            copies = _copy_files(self.options)
        except (InputDataError, OSError) as error:
            self._read = self._seen
            note(f"the gateway keeps the API keys and the certificate that it has read: {error}")
            return
        before, self._copies = self._copies, copies
        try:
            self.serve_models(self.options.models)
        except (TrtpipeError, OSError) as error:
            self._copies, before = before, copies
            self._look = now + RETRY_SECONDS
            note(f"the gateway does not take the new API keys or certificate, and tries again soon: {error}")
            return
        finally:
            for copy in before.values():
                copy.close()
        self._read = self._seen
        note("the gateway has read its API keys and certificate again, which had changed")

    def leave_watch(self) -> None:
        """Let `watch` return; may be called from a signal's handler."""
        self._stopping = True

    def stop(self) -> None:
        """End the workers; running answers have some seconds to end. May be called twice, and from a signal."""
        self.leave_watch()
        for port in self._ports:  # otherwise connections would wait for workers that have stopped listening
            port.close()
        self._end([*self._workers, *self._leaving])
        for memory in (self._counters, *self._copies.values()):
            memory.close()

    def _start_workers(self, options: GatewayOptions) -> list[Worker]:
        """Start workers and wait until all of them listen. Raises a worker's own error, or StageFailed; none of them is
        left then."""
        started: list[Worker] = []
        try:
            for index, row in enumerate(self._free_rows(options.workers)):
                started.append(self._spawn(options, index, row))
            deadline = time.monotonic() + READY_SECONDS
            for worker in started:
                worker.await_ready(deadline)
        except BaseException:
            self._end(started)
            raise
        return started

    def _end(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.alive:
                worker.process.terminate()
        deadline = time.monotonic() + self.options.linger_s + self.options.drain_s + STOP_SECONDS
        for worker in workers:
            try:
                worker.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.pipe.close()

    def _free_rows(self, count: int) -> list[int]:
        """Rows of the shared counters that no running worker adds to; their counts go on."""
        taken = {worker.row for worker in (*self._workers, *self._leaving) if worker.alive}
        self._rows = max(self._rows, len(taken) + count)
        self._counters.truncate(ROW_BYTES * self._rows)
        return [row for row in range(self._rows) if row not in taken][:count]

    def _forget_left(self) -> None:
        for worker in [one for one in self._leaving if not one.alive]:
            self._leaving.remove(worker)
            worker.pipe.close()
            if worker.row not in {one.row for one in self._workers}:
                # Sets its gauges to 0, if it was killed.
                SharedCounters(self._counters.fileno(), worker.row, self._rows)

    def _spawn(self, options: GatewayOptions, index: int, row: int) -> Worker:
        pipe, tell = os.pipe()
        port, counters = self._ports[index].fileno(), self._counters.fileno()
        copies = {name: copy.fileno() for name, copy in self._copies.items()}
        paths: dict[str, Any] = {name: Path(f"/proc/self/fd/{number}") for name, number in copies.items()}
        spec = {
            "options": replace(options, **paths).to_json(), "counters": counters, "row": row, "rows": self._rows,
            "port": port, "tell": tell,
        }  # fmt: skip
        log = self._log.open("ab") if self._log else None
        try:
            process = subprocess.Popen(
                [*python_command("trtpipe.pipeline.gateway"), json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                pass_fds=(port, counters, tell, *copies.values()),
                start_new_session=True,  # the supervisor decides whether to pass on a Ctrl-C
            )
        finally:
            os.close(tell)
            if log:
                log.close()
        return Worker(process, row, io.FileIO(pipe))


def serve(
    options: GatewayOptions, *,
    ready: Callable[[Gateway], None] = lambda gateway: None, tick: Callable[[Gateway], None] = lambda gateway: None,
    note: Callable[[str], None] = lambda text: None,
) -> None:  # fmt: skip
    """Run a gateway until Ctrl-C, a signal to end or its own failure. Raises what `Gateway.start` and `watch` raise.

    `ready` is called once the gateway listens and signals are handled, `tick` and `note` as `watch` calls them.
    """
    gateway = Gateway.start(options)
    previous = signal.signal(signal.SIGTERM, lambda number, frame: gateway.leave_watch())
    try:
        ready(gateway)
        gateway.watch(tick, note)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        gateway.stop()
        signal.signal(signal.SIGTERM, previous)


def _copy_files(options: GatewayOptions) -> dict[str, io.FileIO]:
    """The files of keys and certificate in memory, by the option that names them. Raises InputDataError where they
    cannot be read or used."""
    access.check(options)
    files = {name: getattr(options, name) for name in ("api_keys_file", "tls_cert", "tls_key")}
    read = {name: access.read(str(file), file) for name, file in files.items() if file is not None}
    copies = {name: io.FileIO(os.memfd_create(f"trtpipe-{name}"), "r+") for name in read}
    for name, copy in copies.items():
        copy.write(read[name])
    return copies


def _bind(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets that share the port, and do not listen yet. Raises HostError when it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound: list[socket.socket] = []
    try:
        if port:
            # Another gateway would share the port with us silently: only a bind that shares with nobody detects it.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        for _ in range(count):
            one = socket.socket(family)
            bound.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((host, port))
            port = one.getsockname()[1]
    except OSError as error:
        for one in bound:
            one.close()
        raise HostError(
            f"port {port} on {host} cannot be taken",
            why=error.strerror or str(error),
            remedy="stop what listens there, or choose another port",
        ) from None
    return bound
