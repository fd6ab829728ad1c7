"""Stand-in on this machine for a tritonserver that runs in the toolchain's container.

The process lives as long as the container does. Signals to the process end the server, its exit status is the
server's, and it writes the container's output, so that its parent sees no difference from a local server. The first
SIGTERM gives the server its time, and further ones change nothing: systemd sends it to every process of a service, and
the watchdog once more. SIGINT meanwhile removes the container at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.executor import Task
from trtpipe.pipeline.execution.executors import DockerExecutor


def main() -> None:
    spec = json.loads(sys.argv[1])

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    task = Task(
        command=tuple(spec["command"]),
        reads=tuple(Path(folder) for folder in spec["reads"]),
        out=Path(spec["out"]),
        what="tritonserver",
        gpus=None if spec["gpus"] is None else tuple(spec["gpus"]),
        # Our output already goes to the server's log.
        log=Path(os.devnull),
        network=True,
        grace=spec["grace"],
    )

    def write(line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk costs lines of the log, not the server
            print(line, flush=True)

    try:
        DockerExecutor(spec["image"], shm_size=spec["shm_size"]).run(task, write)
    except KeyboardInterrupt:
        sys.exit(0)
    except TrtpipeError as error:
        print(f"error: {error}", flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
