"""Engines that are Hugging Face folders: the weights linked, and a settings file for the runtime beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from engines.base import Checkpoint, Engine
from engines.files import place


def lay_out(checkpoint: Checkpoint, out: Path, name: str, settings: dict[str, Any]) -> Engine:
    """Link the folder's files into `out` and write `settings` as the YAML file `name`; None means left out."""
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file():
            place(path, out / path.name)
    chosen = {key: value for key, value in settings.items() if value is not None}
    (out / name).write_text(yaml.safe_dump(chosen, sort_keys=False), encoding="utf-8")
    return Engine(path=out)
