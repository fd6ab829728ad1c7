"""One worker of the gateway, started by the supervisor, which holds the port and the shared counters."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError, TrtpipeError
from trtpipe.engines.json_input import parse_json
from trtpipe.engines.process import error_to_json
from trtpipe.pipeline.errors import translate
from trtpipe.pipeline.gateway.app import build
from trtpipe.pipeline.gateway.options import GatewayOptions
from trtpipe.pipeline.gateway.prompts import ForkServer
from trtpipe.pipeline.gateway.server import Server, most_connections
from trtpipe.pipeline.gateway.shared_counters import SharedCounters


def main(spec: dict[str, Any]) -> int:
    options = GatewayOptions.from_json(spec["options"])
    try:
        forks = ForkServer(options)
        forks.start()  # runs beside this process, which loads the same files
        counters = SharedCounters(Path(spec["counters"]), spec["row"], spec["rows"])
        most = most_connections(tls=options.tls_cert is not None)
        app, connections = build(options, counters, forks, most_connections=most)
        listening = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
        # All workers bind the port; the kernel distributes the connections.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((options.host, options.port))
        server = Server(
            app,
            connections,
            lambda: _tell(spec["ready"], "ready\n"),
            linger_s=options.linger_s,
            drain_s=options.drain_s,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=str(options.tls_key) if options.tls_key else None,
        )
    except (TrtpipeError, OSError) as error:
        known = translate(error) or HostError("the gateway cannot listen", why=str(error))
        _tell(spec["ready"], json.dumps(error_to_json(known)))
        return 1
    # The supervisor replaces this worker, and not for the sake of time: no answer is cut short.
    signal.signal(signal.SIGHUP, lambda number, frame: server.leave(math.ceil(options.timeout_s)))
    server.run(sockets=[listening])
    forks.stop()
    return 0


def _tell(pipe: int, words: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads the pipe of a restarted worker
        os.write(pipe, words.encode())
    os.close(pipe)


if __name__ == "__main__":
    raise SystemExit(main(parse_json(sys.argv[1])))
