"""The server of known timing: Triton's gRPC on one port, Triton's and OpenAI's HTTP on another.

    python -m trtpipe.pipeline.bench.mock_server.server --ttft-ms 50 --itl-ms 10 [--cpu 1] [--truth FILE]

One process and one thread, without a framework. It says in one line of JSON where it listens; on SIGTERM it writes
what really happened, a Truth a line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trtpipe.engines.errors import HostError, TrtpipeError
from trtpipe.pipeline.bench.loop.alarm import Alarm
from trtpipe.pipeline.bench.mock_server.clock import Schedule, Timing
from trtpipe.pipeline.bench.mock_server.grpc import GrpcLink
from trtpipe.pipeline.bench.mock_server.http import HttpLink
from trtpipe.pipeline.bench.mock_server.link import Hub, Link
from trtpipe.pipeline.bench.mock_server.script import Truth
from trtpipe.pipeline.net.stamped import Listener, listen

# Many clients may connect at the same moment.
_BACKLOG = 4096


class MockServer:
    """A running mock server in the current event loop. Made by `start`."""

    def __init__(self, hub: Hub, alarm: Alarm, listeners: list[Listener]) -> None:
        self.grpc_port, self.http_port = (listener.port for listener in listeners)
        self._hub = hub
        self._alarm = alarm
        self._listeners = listeners

    @classmethod
    async def start(
        cls, timing: Timing, *, host: str = "127.0.0.1", grpc_port: int = 0, http_port: int = 0
    ) -> MockServer:
        """Listen; port 0 stands for a free port. Raises HostError."""
        loop = asyncio.get_running_loop()
        alarm = Alarm(loop, lambda: hub.schedule.wake())
        hub = Hub(Schedule(timing, alarm))
        kinds: list[tuple[Callable[[Hub], Link], int]] = [(GrpcLink, grpc_port), (HttpLink, http_port)]
        listeners: list[Listener] = []
        try:
            for kind, port in kinds:
                listeners.append(await listen(loop, partial(kind, hub), host, port, backlog=_BACKLOG))
        except OSError as error:
            alarm.close()
            for listener in listeners:
                listener.close()
            raise HostError(
                f"cannot listen on {host}:{port}", why=error.strerror or str(error), remedy="name a free port, or 0"
            ) from None
        return cls(hub, alarm, listeners)

    @property
    def truth(self) -> list[Truth]:
        """Records of all requests so far, in the order of arrival."""
        return sorted(self._hub.truth, key=lambda one: one.arrival_ns)

    async def stop(self) -> None:
        self._alarm.close()
        for listener in self._listeners:
            listener.close()
        for link in list(self._hub.links):
            link.transport.abort()
        await asyncio.sleep(0)  # lets each connection's connection_lost run


def write(truth: list[Truth], path: Path) -> None:
    """Write a line of JSON for each request."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(one.as_json(), separators=(",", ":")) + "\n" for one in truth)


def _stay_on(core: int) -> None:
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise HostError(
            f"cannot stay on core {core}", why=error.strerror or str(error), remedy="name a core of this machine"
        ) from None


async def _serve(timing: Timing, chosen: argparse.Namespace) -> list[Truth]:
    """Serve until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = await MockServer.start(timing, host=chosen.host, grpc_port=chosen.grpc_port, http_port=chosen.http_port)
    # A garbage collection during the run would make tokens late, and nothing here needs one.
    gc.collect()
    gc.freeze()
    gc.disable()
    print(json.dumps({"grpc_port": server.grpc_port, "http_port": server.http_port}), flush=True)
    await ended.wait()
    await server.stop()
    return server.truth


def main() -> None:
    import uvloop

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ttft-ms", type=float, default=50.0)
    options.add_argument("--itl-ms", type=float, default=10.0)
    options.add_argument("--tokens-per-response", type=int, default=1)
    options.add_argument("--prefill-ms", type=float, default=0.0, help="the least between two first responses")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--grpc-port", type=int, default=0)
    options.add_argument("--http-port", type=int, default=0)
    options.add_argument("--cpu", type=int, help="the core to stay on")
    options.add_argument("--truth", type=Path, help="where to write what happened")
    chosen = options.parse_args()
    loop = uvloop.new_event_loop()
    try:
        if chosen.cpu is not None:
            _stay_on(chosen.cpu)
        timing = Timing(
            ttft_s=chosen.ttft_ms / 1e3,
            itl_s=chosen.itl_ms / 1e3,
            tokens_per_response=chosen.tokens_per_response,
            prefill_s=chosen.prefill_ms / 1e3,
        )
        truth = loop.run_until_complete(_serve(timing, chosen))
    except TrtpipeError as error:
        raise SystemExit(str(error)) from None
    finally:
        loop.close()
    if chosen.truth is not None:
        write(truth, chosen.truth)


if __name__ == "__main__":
    main()
