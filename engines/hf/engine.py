"""Engine folders of Hugging Face format: linked weights and a settings file for the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.files import copy_files, place
from trtpipe.engines.hf.chat_template import TOOL_TEMPLATE
from trtpipe.engines.hf.layout import place_config


def settings_text(settings: dict[str, Any]) -> str:
    """Text of a YAML file with a runtime's settings; None values are left out."""
    return yaml.safe_dump({key: value for key, value in settings.items() if value is not None}, sort_keys=False)


def lay_out(checkpoint: Checkpoint, out: Path, rendered: dict[str, str]) -> Engine:
    """Link the checkpoint's files into `out`, its config.json with the older names too, and write the files `rendered`,
    name -> text, beside them."""
    for path in sorted(checkpoint.path.iterdir()):
        if path.name == "config.json":
            place_config(path, out / path.name)
        elif path.is_file():
            place(path, out / path.name)
    copy_files(checkpoint.path, out, (TOOL_TEMPLATE,))
    for name, text in rendered.items():
        (out / name).write_text(text, encoding="utf-8")
    return Engine(path=out)
