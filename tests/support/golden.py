"""Golden files: what a reviewer has read once and wants to see change only on purpose. `make golden` rewrites them."""

from __future__ import annotations

import difflib
import os

from tests.support.paths import GOLDEN


def check_golden(name: str, text: str) -> None:
    """Compare `text` with tests/golden/`name`; with UPDATE_GOLDEN=1 write it there instead."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    diff = "".join(difflib.unified_diff(before.splitlines(True), text.splitlines(True), f"golden/{name}", "now"))
    assert before == text, f"\n{diff}\n`make golden` accepts it"
