"""One worker of the gateway, started by the supervisor, which holds its socket and the shared counters."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
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
        counters = SharedCounters(spec["counters"], spec["row"], spec["rows"])
        most = most_connections(tls=options.tls_cert is not None)
        app, connections = build(options, counters, forks, most_connections=most)
        server = Server(
            app,
            connections,
            lambda: _tell(spec["tell"], "ready\n"),
            lambda: _tell(spec["tell"], "left\n"),
            linger_s=options.linger_s,
            drain_s=options.drain_s,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=str(options.tls_key) if options.tls_key else None,
        )
    except (TrtpipeError, OSError) as error:
        known = translate(error) or HostError("the gateway cannot listen", why=str(error))
        _tell(spec["tell"], json.dumps(error_to_json(known)))
        return 1
    # The supervisor replaces this worker, and not for the sake of time: no answer is cut short.
    signal.signal(signal.SIGHUP, lambda number, frame: server.leave(math.ceil(options.timeout_s)))
    server.run(sockets=[socket.socket(fileno=spec["port"])])
    forks.stop()
    return 0


def _tell(pipe: int, words: str) -> None:
    with contextlib.suppress(OSError):  # the supervisor was killed
        os.write(pipe, words.encode())


if __name__ == "__main__":
    raise SystemExit(main(parse_json(sys.argv[1])))
