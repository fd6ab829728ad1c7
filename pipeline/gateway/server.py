"""HTTP server of one gateway worker: uvicorn with the gateway's own limits on connections."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from trtpipe.pipeline.gateway.connections import (
    MOST_CONNECTIONS,
    MOST_TLS_CONNECTIONS,
    SETTLE_SECONDS,
    Connection,
    Connections,
)

HANDSHAKE_SECONDS = 10.0


def most_connections(*, tls: bool) -> int:
    """Raise the limit of open files as far as this user may, and return how many connections to hold.

    A quarter of the files is left for connections that are being made or closed, and for Triton.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    most = MOST_TLS_CONNECTIONS if tls else MOST_CONNECTIONS
    return most if files == resource.RLIM_INFINITY else min(most, files * 3 // 4)


class Server(uvicorn.Server):
    """Serves `app` to `connections`; calls `ready` when it listens, and `left` when it takes no more requests."""

    def __init__(
        self, app: Any, connections: Connections, ready: Callable[[], None] = lambda: None,
        left: Callable[[], None] = lambda: None, *, linger_s: int = 0, drain_s: int = 5, **options: Any,
    ) -> None:  # fmt: skip
        """`linger_s` and `drain_s` are those of GatewayOptions, `options` uvicorn's. Raises OSError for a certificate
        that cannot be read."""
        config = uvicorn.Config(
            app,
            log_level="error",  # a warning for each bad request would let anybody fill the disk
            access_log=False,  # a path may contain user input
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=drain_s,
            **options,
        )
        config.load()
        super().__init__(config)
        self._connections = connections
        self._ready, self._left = ready, left
        self._linger_s, self._drain_s = linger_s, drain_s
        self._replaced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        # uvicorn's own listener gives a TLS handshake a minute, and has one class of connections for all servers.
        loop = asyncio.get_running_loop()
        for listening in sockets or []:
            self.servers.append(
                await loop.create_server(
                    lambda: Connection(self.config, self.server_state, self.lifespan.state, self._connections),
                    sock=listening,
                    ssl=self.config.ssl,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS if self.config.ssl else None,
                    backlog=self.config.backlog,
                )
            )
        self._ready()

    def leave(self, drain_s: int) -> None:
        """Stop taking requests, since other workers take them; running answers have `drain_s` to end."""
        self.config.timeout_graceful_shutdown = drain_s
        self._replaced = self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._replaced:  # its running answers had more time until now
            seconds = self._linger_s + self._drain_s
            loop = asyncio.get_running_loop()
            loop.call_soon_threadsafe(loop.call_later, seconds, self._end_answers)
        super().handle_exit(sig, frame)

    def _end_answers(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._replaced:
            self._connections.replaced = True
            for server in self.servers:
                server.close()
        else:
            self._connections.leaving, self._connections.lingers = True, self._linger_s > 0
        # Each answer that starts now ends its connection, and says so. uvicorn does not read a request's own field.
        self.server_state.default_headers.append((b"connection", b"close"))
        await asyncio.sleep(SETTLE_SECONDS if self._replaced else self._linger_s)
        # uvicorn stops listening and ends idle connections before anything else runs, and waits 0.1 s then.
        asyncio.get_running_loop().call_later(0.05, self._left)
        await super().shutdown(sockets)
