"""Report of an exception that no table knows: a defect of trtpipe."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import time
from pathlib import Path
from traceback import format_exception

from trtpipe import __version__
from trtpipe.configs.home import default_home

EXIT_CODE = 1


def describe(error: BaseException) -> str:
    """Write the command and the traceback to a file that only the user reads, and name it in one line."""
    lines = [
        f"trtpipe {__version__}, Python {platform.python_version()}, {sys.platform} {platform.machine()}",
        f"command: {shlex.join(['trtpipe', *sys.argv[1:]])}",
        "",
        "".join(format_exception(error)),
    ]
    report = "\n".join(lines).encode(errors="backslashreplace")
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    try:
        path = _write(default_home() / "logs", report)
    except OSError:
        path = _write(Path(tempfile.gettempdir()), report)
    return f"this is a defect of trtpipe: {' '.join(what.split())}; please report it with {path}, which tells the rest"


def _write(folder: Path, report: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=time.strftime("defect-%Y%m%d-%H%M%S-"), suffix=".log", dir=folder)
    with os.fdopen(handle, "wb") as file:
        file.write(report)
    return Path(name)
