"""The engine process that the instances of a model share, and one instance's connection to it.

The first instance that needs it starts it; the others find it by an address made of the server's process, the engine
and its options: one process for each engine of a server, a new one when the engine's files are others. It leaves when
the last instance has.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils
from trtpipe_wire import TAKEN, Connection, peer

HERE = Path(__file__).resolve().parent
START_SECONDS = 600.0


class Engine:
    def __init__(self, path, options):
        launch = json.loads((HERE / "engine.json").read_text(encoding="utf-8"))
        self.environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
        if launch["library_path"]:
            self.environment["LD_LIBRARY_PATH"] = launch["library_path"]
        server = os.getppid()
        config = (path / "config.json").stat()
        names = [str(path), config.st_ino, config.st_mtime_ns, options, launch["command"]]
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]
        # Containers that share a network share these names, and have server processes of the same number.
        self.address = f"trtpipe-{Path('/proc/self/ns/pid').stat().st_ino}-{server}-{digest}"
        self.command = [*launch["command"], "--engine", str(path), "--address", self.address]
        # A call into a killed server never returns and holds the interpreter: the engine process watches for both.
        self.command += ["--options", json.dumps(options), "--server", str(server)]
        self.process = None  # where this instance has started it
        self.connection = None
        self.loading = None  # the connection to an engine that is not ready
        self.reason = None

    def start(self):
        """Find the process or start it, and wait until it has loaded; its own words are the error when it cannot."""
        self.reason = None
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.process = None
            self._connect(deadline)
            received = self.loading.receive()
            if received is not None:
                break
            self.loading.close()
            if self.process is not None:
                raise pb_utils.TritonModelException(self.exit_reason())
            # Another's, and about to leave when this one came.
        if received[0]["type"] != "ready":
            self.loading.close()
            raise pb_utils.TritonModelException(f"the engine does not load: {received[0]['error']}")
        # Only now: a request that comes while the engine loads is refused at once, and does not wait.
        self.connection = self.loading

    def _connect(self, deadline):
        while time.monotonic() < deadline:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect("\0" + self.address)
            except OSError:
                sock.close()
                self._start_process()
                time.sleep(0.02)
                continue
            pid, user = peer(sock)
            if user != os.geteuid():
                raise pb_utils.TritonModelException(f"a process of user {user} has the engine's address")
            self.loading = Connection(sock)
            if self.process is not None and self.process.pid != pid:
                self.process.wait()  # another instance's was faster, and this one ends
                self.process = None
            return
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
        raise pb_utils.TritonModelException(f"the engine process did not answer within {START_SECONDS:.0f} s")

    def _start_process(self):
        status = None if self.process is None else self.process.poll()
        if status == TAKEN:
            self.process = None  # another instance's has the address, and will answer or be gone
        elif status is not None:
            raise pb_utils.TritonModelException(self.exit_reason())
        if self.process is None:
            # In a group with what it starts: a process of vLLM's would outlive it, and keep the GPU's memory.
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, env=self.environment, start_new_session=True
            )

    def exit_reason(self):
        """Why the process is gone; its last message when it sent one."""
        if self.connection is not None:
            self.connection.close()
        if self.process is None:
            return self.reason or "the engine process ended"
        try:
            status = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        ended = f"signal {-status}" if status < 0 else f"exit status {status}"
        return self.reason or f"the engine process ended ({ended})"

    def stop(self):
        """Leave. The process ends with the last instance, by itself."""
        self.connection.close()
        self.loading.close()
