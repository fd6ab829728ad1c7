"""One worker: `python -m pipeline.gateway SPEC`, started by the supervisor, which keeps the port and the board."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn

from engines.errors import HostError, TrtpipeError
from engines.process import error_to_json
from pipeline.errors import translate
from pipeline.gateway.app import build
from pipeline.gateway.board import Board
from pipeline.gateway.options import GatewayOptions

# Running answers have this long to end once the worker is told to stop.
GRACE_SECONDS = 5


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: int) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            _tell(self._ready, "ready\n")


def main(spec: dict[str, Any]) -> int:
    options = GatewayOptions.from_json(spec["options"])
    try:
        app = build(options, Board(Path(spec["board"]), spec["index"], options.workers))
        listening = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
        # All workers bind the port; the kernel deals the connections out.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((options.host, options.port))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # a path may hold what a user typed
            server_header=False,
            lifespan="on",
            ssl_certfile=options.tls_cert,
            ssl_keyfile=str(options.tls_key) if options.tls_key else None,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        config.load()
    except (TrtpipeError, OSError) as error:
        known = translate(error) or HostError("the gateway cannot listen", why=str(error))
        _tell(spec["ready"], json.dumps(error_to_json(known)))
        return 1
    threading.Thread(target=_follow, args=(spec["life"],), daemon=True).start()
    _Server(config, spec["ready"]).run(sockets=[listening])
    return 0


def _tell(pipe: int, words: str) -> None:
    with contextlib.suppress(OSError):  # nobody waits for a worker that was started again
        os.write(pipe, words.encode())
    os.close(pipe)


def _follow(life: int) -> None:
    """Nobody writes to this pipe: its end is the supervisor's."""
    os.read(life, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
