"""Engines that are Hugging Face folders: the weights linked, and a settings file for the runtime beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.files import place


def settings_text(settings: dict[str, Any]) -> str:
    """A runtime's settings as a YAML file; None means left out."""
    return yaml.safe_dump({key: value for key, value in settings.items() if value is not None}, sort_keys=False)


def lay_out(checkpoint: Checkpoint, out: Path, rendered: dict[str, str]) -> Engine:
    """Link the folder's files into `out` and write the rendered ones beside them, name -> text."""
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file():
            place(path, out / path.name)
    for name, text in rendered.items():
        (out / name).write_text(text, encoding="utf-8")
    return Engine(path=out)
