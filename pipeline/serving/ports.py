"""Addresses on which a server listens, and free ports for them."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import HostError, UsageError

# The first of the ports that are chosen here, and how often one is drawn.
LOWEST, TRIES = 10_000, 100


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses on which a server listens."""

    host: str
    http: int
    grpc: int
    metrics: int

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.grpc}"

    @property
    def ready_url(self) -> str:
        return f"{self.http_url}/v2/health/ready"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.host}:{self.metrics}/metrics"


def choose_endpoints(host: str, http: int, grpc: int, metrics: int, openai: int | None = None) -> Endpoints:
    """Check that the ports are free; 0 takes a free one. Raises HostError for a port in use, UsageError for no port.

    openai  the gateway's port, checked with the others although the gateway binds it
    """
    chosen = free_ports(host, http=http, grpc=grpc, metrics=metrics, **({} if openai is None else {"openai": openai}))
    return Endpoints(host=host, http=chosen["http"], grpc=chosen["grpc"], metrics=chosen["metrics"])


def free_ports(host: str, **ports: int) -> dict[str, int]:
    """The ports by name, 0 replaced by a free one. Raises HostError for a port in use, UsageError for no port."""
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as probes:  # held together, or one free port could be chosen twice
        for name, port in ports.items():
            if not 0 <= port < 1 << 16:
                raise UsageError(f"--{name}-port {port} is not a port", remedy="give a number from 0 to 65535")
            if port in chosen.values():
                raise UsageError(f"port {port} is asked for twice", remedy=f"pass --{name}-port 0 to choose a free one")
            probe = probes.enter_context(socket.socket())
            if port:
                # As the server does it: a port whose last connection is only closing counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                if port or not _bind_outside_ephemeral(probe, host):
                    probe.bind((host, port))
            except OSError as error:
                raise HostError(
                    f"{f'port {port}' if port else 'a free port'} on {host} cannot be taken",
                    why=error.strerror or str(error),
                    remedy=f"stop what listens there, or pass --{name}-port 0 to choose a free one"
                    if error.errno in (errno.EADDRINUSE, errno.EACCES)
                    else "pass an IPv4 address of this machine as --host",
                ) from None
            chosen[name] = probe.getsockname()[1]
    return chosen


def _bind_outside_ephemeral(probe: socket.socket, host: str) -> bool:
    """Bind the socket to a free port that the kernel gives to no client; False where there is none.

    A server binds its ports minutes after they were chosen, when its models are loaded. A port of the range of which
    the kernel chooses (Linux: net.ipv4.ip_local_port_range) may be a client's by then.
    """
    try:
        above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except OSError:
        return False
    for _ in range(TRIES if above > LOWEST else 0):
        with contextlib.suppress(OSError):
            probe.bind((host, random.randrange(LOWEST, above)))
            return True
    return False
