"""SHA-256 of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.json_input import open_regular

_BLOCK = 1 << 20


def digest(file: Path) -> str:
    """SHA-256 in hexadecimal digits of a regular file of any size. Raises InputDataError."""
    found = hashlib.sha256()
    try:
        with open_regular(file) as opened:
            while block := opened.read(_BLOCK):
                found.update(block)
    except (OSError, ValueError) as error:
        raise InputDataError(f"{file} cannot be read", why=getattr(error, "strerror", None) or str(error)) from None
    return found.hexdigest()
