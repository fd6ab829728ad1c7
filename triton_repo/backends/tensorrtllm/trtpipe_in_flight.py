"""How many requests a process of the backend holds, in a file that outlives it.

Triton ends no request of a process that has died. The watchdog of `trtpipe serve` reads from this file whether there
is any, and how many come from scripts (tensorrt_llm_bls), which the engine waits for when they die.
"""

import contextlib
import mmap
import os
import threading
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


class InFlight:
    """Two numbers of 8 bytes: all requests, and those of scripts. The file's name is `in-flight.MODEL.PROCESS`."""

    def __init__(self, model):
        self._path = FOLDER / f"in-flight.{model}.{os.getpid()}"
        try:
            self._path.write_bytes(bytes(16))
            with self._path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 16)
        except OSError:  # a folder that cannot be written, where no watchdog of ours looks
            self._memory = mmap.mmap(-1, 16)
        self._counts = memoryview(self._memory).cast("q")
        self._lock = threading.Lock()

    def add(self, step, script):
        """Count one more (1) or one less (-1)."""
        with self._lock:
            self._counts[0] += step
            self._counts[1] += step if script else 0

    def close(self):
        with contextlib.suppress(OSError):
            self._path.unlink()
