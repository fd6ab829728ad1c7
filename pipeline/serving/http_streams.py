"""How many answers Triton can stream over HTTP at once before it loses some of their tokens.

A thread of Triton's HTTP server is told of each chunk through a Unix socket (libevhtp's `evthr_defer`), and what the
socket has no room for is dropped without a word: the stream ends short of tokens, or never. A connection that is opened
while the server rests goes to the first thread, so that in practice one thread serves all. What a socket holds is the
kernel's choice, net.core.wmem_default. gRPC, and with it the gateway, has no such queue. Seen with Triton 2.51.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from trtpipe.engines.passport import Passport

SETTING = "net.core.wmem_default"
# Some ten thousand chunks.
ENOUGH = 8 << 20
# A pointer to a function, one to its argument, and a flag.
_MESSAGE = b"\0" * 17


def capacity() -> int:
    """Chunks that may wait for an HTTP thread of a server that is started on this machine now."""
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
    """What to say before engines are served together where `holds` chunks may wait; None where that is enough."""
    streams = sum(passport.build_config["max_batch_size"] for passport in passports)
    if streams <= holds:
        return None
    return (
        f"HTTP generate_stream loses tokens where more than {holds} answers stream at once, and up to {streams} can: "
        f"use gRPC or the gateway, or run `sysctl -w {SETTING}={ENOUGH}` first"
    )
