"""Supervisor of the gateway's worker processes: starts them together, watches, restarts and ends them.

The supervisor binds the port without listening, which reserves it for the workers; they share it by SO_REUSEPORT.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

from trtpipe.engines.errors import HostError, StageFailed
from trtpipe.engines.json_input import parse_json
from trtpipe.engines.process import error_from_json, python_command
from trtpipe.pipeline.gateway.options import GatewayOptions

READY_SECONDS = 60.0
# Beyond the time that answers have.
STOP_SECONDS = 5.0
# A worker with this many deaths within this time counts as broken.
MAX_RESTARTS, RESTART_WINDOW_SECONDS = 5, 60.0


class Gateway:
    """A running gateway. Made by `start`."""

    def __init__(self, options: GatewayOptions, port: socket.socket, counters: Path, log: Path | None) -> None:
        self.options = options
        self._port = port
        self._counters = counters
        self._log = log
        self._workers: list[subprocess.Popen[bytes]] = []
        self._stopping = threading.Event()

    @classmethod
    def start(cls, options: GatewayOptions, log: Path | None = None) -> Gateway:
        """Start the workers and wait until all listen; their output goes to `log`, or where this process's own goes.

        Raises HostError when the port is taken, a worker's own error, or StageFailed.
        """
        port = _hold(options.host, options.port)
        options = replace(options, port=port.getsockname()[1])
        descriptor, name = tempfile.mkstemp(prefix="trtpipe-gateway-")
        counters = Path(name)
        from trtpipe.pipeline.gateway.shared_counters import ROW_BYTES

        os.ftruncate(descriptor, ROW_BYTES * options.workers)
        os.close(descriptor)
        gateway = cls(options, port, counters, log)
        try:
            started = [gateway._spawn(index) for index in range(options.workers)]
            gateway._workers = [process for process, _ in started]
            deadline = time.monotonic() + READY_SECONDS
            for process, ready in started:
                _await_ready(process, ready, deadline)
        except BaseException:
            gateway.stop()
            raise
        return gateway

    @property
    def url(self) -> str:
        return self.options.url

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._workers]

    def watch(self) -> None:
        """Restart workers that die, until `stop` is called. Raises StageFailed when they die too often."""
        deaths: list[float] = []
        while not self._stopping.wait(0.2):
            for index, process in enumerate(self._workers):
                status = process.poll()
                if status is None or self._stopping.is_set():
                    continue
                now = time.monotonic()
                deaths = [at for at in deaths if now - at < RESTART_WINDOW_SECONDS] + [now]
                if len(deaths) > MAX_RESTARTS:
                    raise StageFailed(
                        f"the gateway's workers ended {len(deaths)} times within {RESTART_WINDOW_SECONDS:.0f} s",
                        why=f"the last with status {status}",
                    )
                self._workers[index], ready = self._spawn(index)
                # Other workers go on answering: this one may take its time, and is checked in the next round.
                os.close(ready)

    def stop(self) -> None:
        """End the workers; running answers have some seconds to end. May be called twice, and from a signal."""
        self._stopping.set()
        for process in self._workers:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + self.options.linger_s + self.options.drain_s + STOP_SECONDS
        for process in self._workers:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._counters.unlink(missing_ok=True)
        self._port.close()

    def _spawn(self, index: int) -> tuple[subprocess.Popen[bytes], int]:
        ready, tell = os.pipe()
        spec = {"options": self.options.to_json(), "index": index, "counters": str(self._counters), "ready": tell}
        log = self._log.open("ab") if self._log else None
        try:
            process = subprocess.Popen(
                [*python_command("trtpipe.pipeline.gateway"), json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                pass_fds=(tell,),
                start_new_session=True,  # the supervisor decides whether to pass on a Ctrl-C
            )
        finally:
            os.close(tell)
            if log:
                log.close()
        return process, ready


def serve(options: GatewayOptions, *, ready: Callable[[Gateway], None] = lambda gateway: None) -> None:
    """Run a gateway until Ctrl-C, a signal to end or its own failure. Raises what `Gateway.start` and `watch` raise.

    `ready` is called once the gateway listens and signals are handled.
    """
    gateway = Gateway.start(options)

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        ready(gateway)
        gateway.watch()
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        gateway.stop()
        signal.signal(signal.SIGTERM, previous)


def _hold(host: str, port: int) -> socket.socket:
    """Bind the port without listening. Raises HostError when it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    try:
        if port:
            # Another gateway would share the port with us silently: only a bind that shares with nobody detects it.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise HostError(
            f"port {port} on {host} cannot be taken",
            why=error.strerror or str(error),
            remedy="stop what listens there, or choose another port",
        ) from None
    return held


def _await_ready(process: subprocess.Popen[bytes], ready: int, deadline: float) -> None:
    """Wait until a worker is ready. Raises the worker's own error, or StageFailed."""
    said = b""
    try:
        while not said.endswith(b"ready\n"):
            readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise StageFailed(f"a gateway worker is not ready after {READY_SECONDS:.0f} s")
            piece = os.read(ready, 4096)
            if not piece:
                process.wait(timeout=STOP_SECONDS)
                if said:
                    raise error_from_json(parse_json(said))
                raise StageFailed("the gateway does not start", why=f"it ended with status {process.returncode}")
            said += piece
    finally:
        os.close(ready)
