"""Room for a load on this machine: memory for its requests, file descriptors for its connections."""

from __future__ import annotations

import math
import resource
from pathlib import Path

from trtpipe.engines.errors import UsageError

# Bytes of a request besides its message.
REQUEST_BYTES = 1500
# Share of the free memory that requests may take; answers and the report need the rest.
MEMORY_SHARE = 0.6
# Descriptors of this process that are not connections of a load.
OTHER_FILES = 64


def free_memory() -> float:
    """Bytes that this process may still take; infinite where the system does not say."""
    free = math.inf
    if (known := Path("/proc/meminfo")).is_file():
        lines = known.read_text(encoding="ascii").splitlines()
        free = min((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), default=free)
    group = Path("/sys/fs/cgroup")
    if (limit := group / "memory.max").is_file() and (most := limit.read_text(encoding="ascii").strip()).isdigit():
        free = min(free, int(most) - int((group / "memory.current").read_text(encoding="ascii")))
    return free


def check_memory(count: int, message_bytes: float) -> None:
    """Raises UsageError where `count` requests of this mean length have no room in memory."""
    needed, free = count * (message_bytes + REQUEST_BYTES), free_memory()
    if needed > MEMORY_SHARE * free:
        raise UsageError(
            f"{count:,} requests need {needed / 1e9:,.1f} GB of memory before the first is sent",
            why=f"of the {free / 1e9:,.1f} GB that are free here they may take {MEMORY_SHARE:.0%}",
            remedy="give fewer requests, or a shorter duration",
        )


def check_connections(count: int) -> None:
    """Allow this process `count` connections at a time. Raises UsageError where the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{count:,} requests in flight over HTTP need as many connections",
            why=f"this process may have {hard:,} files open",
            remedy=f"raise the limit (`ulimit -Hn {needed}` as root), measure over gRPC, or give more --workers",
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
