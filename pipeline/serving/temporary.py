"""Temporary folder of a server whose processes leave files behind: vLLM's leave their sockets."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

# Link to it in the server's folder of the store, whose own path may be too long for a socket.
LINK = "temporary"
# Bytes of a socket's path that Linux takes, and of a socket's name with its slash: vLLM's is a UUID.
SOCKET_BYTES, NAME_BYTES = 107, 37


def make(folder: Path) -> dict[str, str]:
    """Make a new temporary folder for the server of `folder`, in place of what an earlier one left, and return the
    environment variables that name it."""
    remove(folder)
    usual = tempfile.gettempdir()
    made = tempfile.mkdtemp(prefix="trtpipe-")
    if len(os.fsencode(made)) + NAME_BYTES > SOCKET_BYTES:
        Path(made).rmdir()
        made = tempfile.mkdtemp(prefix="trtpipe-", dir="/tmp")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LINK).symlink_to(made)
    # What torch compiles is for the next start too.
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{usual}/torchinductor_{os.getuid()}"
    return {"TMPDIR": made, "VLLM_RPC_BASE_PATH": made, "TORCHINDUCTOR_CACHE_DIR": compiled}


def remove(folder: Path) -> None:
    """Remove the temporary folder of the server of `folder`, where it has one."""
    link = folder / LINK
    if link.is_symlink():
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink(missing_ok=True)
