"""Read a file of a registry in a process of its own, or a list or an index, and say how much memory that took.

    python -m tests.attacks.registry_child URL WHAT [SHA256 SIZE]

WHAT is `read`, `targets` or `index`. Prints JSON: the most megabytes above what the process had before it asked for it,
seconds, and the error if there was one.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from trtpipe.engines.errors import TrtpipeError
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.registry.base import Blob


def memory_mb(name: str) -> float:
    """VmRSS (now) or VmHWM (at most) of this program alone: getrusage begins with the peak of whoever started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def main(url: str, what: str, sha256: str = "", size: str = "0") -> None:
    if url.startswith("oci:"):
        import trtpipe.pipeline.registry.oci  # noqa: F401
    else:
        open_registry(url).has(Blob("0" * 64, 1))  # which loads what is loaded on first use
    before, begun, error = memory_mb("VmRSS:"), time.monotonic(), ""
    try:
        registry = open_registry(url)
        if what == "read":
            digest = hashlib.sha256()
            for piece in registry.read(Blob(sha256, int(size))):
                digest.update(piece)
            assert digest.hexdigest() == sha256
        elif what == "targets":
            registry.targets()
        else:
            registry.index("one")
    except TrtpipeError as raised:
        error = str(raised)
    print(json.dumps({"mb": memory_mb("VmHWM:") - before, "seconds": time.monotonic() - begun, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
