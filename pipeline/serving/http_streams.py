"""Number of answers that Triton can stream over HTTP at once before it loses some of their tokens.

A thread of Triton's HTTP server learns of each chunk through a Unix socket (libevhtp's `evthr_defer`). A chunk that
does not fit into the socket is dropped silently: the stream lacks tokens, or never ends. A connection that is opened
while the server is idle goes to the first thread, so that in practice one thread serves all. A socket's capacity is
set by the kernel, net.core.wmem_default. gRPC, and with it the gateway, has no such queue. Seen with Triton 2.51.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from trtpipe.engines.passport import Passport

SETTING = "net.core.wmem_default"
# Sufficient value of SETTING in bytes: some ten thousand chunks.
ENOUGH = 8 << 20
# Size of a message: a pointer to a function, one to its argument, and a flag.
_MESSAGE = b"\0" * 17


def capacity() -> int:
    """Number of chunks that may wait for an HTTP thread of a server that is started on this machine now."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        count = 0
        try:
            while True:
                writer.send(_MESSAGE)
                count += 1
        except BlockingIOError:
            return count


def warning(passports: Sequence[Passport], holds: int) -> str | None:
    """A warning before engines are served together where `holds` chunks may wait; None where that is enough."""
    streams = sum(passport.build_config["max_batch_size"] for passport in passports)
    if streams <= holds:
        return None
    return (
        f"HTTP generate_stream loses tokens where more than {holds} answers stream at once, and up to {streams} can: "
        f"use gRPC or the gateway, or run `sysctl -w {SETTING}={ENOUGH}` first"
    )
