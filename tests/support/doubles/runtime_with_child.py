"""A runtime that has started a process, as vLLM's does: it lives on by itself, and says its number in `child`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


class Runtime:
    has_work = False

    def __init__(self, folder: Path, **options: Any) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
