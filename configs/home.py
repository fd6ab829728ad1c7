"""Home folder of trtpipe, with the artefacts and the user's own facts."""

from __future__ import annotations

import os
from pathlib import Path


def default_home() -> Path:
    """TRTPIPE_HOME, else ~/.cache/trtpipe. The path is absolute, since run folders link into it."""
    return Path(os.environ.get("TRTPIPE_HOME") or "~/.cache/trtpipe").expanduser().absolute()
