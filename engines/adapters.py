"""Folder of the LoRA adapters of a served model: one subfolder for each adapter, named by the adapter's number.

Gateway and runtime read the folder at each request that names an adapter, so an adapter is added to a running server by
renaming a folder into it, and removed by renaming that folder away. The names are decimal numbers, since TensorRT-LLM
loads adapters from folders of such names (`lora_prefetch_dir`). A number depends on the adapter's name and content, so
KV cache that was computed with one adapter is not reused for another.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import UsageError
from trtpipe.engines.json_input import load_json

# Name of the folder beside an engine's files, and of the file in an adapter's folder that has its name and rank.
FOLDER, INFO = "lora", "adapter.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Two changes within this time may leave the same modification time, so a folder that is so new is read again.
_TICK_NS = 50_000_000
_MOST_INFO_BYTES = 4096


def check_name(name: str) -> None:
    """Raises UsageError for a name that cannot be part of a model's name, MODEL:ADAPTER, and of a path."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot be the name of an adapter",
            why="it is part of a model's name and of a path",
            remedy="use up to 64 letters, digits, dots, dashes and underscores, a letter or a digit first",
        )


@dataclass(frozen=True)
class InstalledAdapter:
    """An adapter in the folder: its name, number, rank and own folder."""

    name: str
    number: int
    rank: int
    path: Path


class AdapterFolder:
    """The adapters in the folder `path`, which is read again when it has changed; None stands for an empty folder."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._changed = -1
        self._found: tuple[InstalledAdapter, ...] = ()

    def all(self) -> tuple[InstalledAdapter, ...]:
        """All adapters, by name."""
        if self.path is None:
            return ()
        try:
            changed = self.path.stat().st_mtime_ns
        except OSError:
            return ()
        if changed != self._changed:
            self._found = tuple(sorted(_read(self.path), key=lambda one: one.name))
            self._changed = changed if abs(time.time_ns() - changed) > _TICK_NS else -1
        return self._found

    def find(self, name: str) -> InstalledAdapter | None:
        return next((one for one in self.all() if one.name == name), None)

    def numbered(self, number: int) -> InstalledAdapter | None:
        return next((one for one in self.all() if one.number == number), None)


def _read(folder: Path) -> list[InstalledAdapter]:
    out = []
    for path in folder.iterdir():
        if path.name.isdigit():
            try:
                info = load_json(path / INFO, max_bytes=_MOST_INFO_BYTES)
                one = InstalledAdapter(str(info["name"]), int(path.name), int(info["rank"]), path)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it has been removed since, or is no adapter
            if NAME.fullmatch(one.name) and 0 < one.number < 1 << 31:
                out.append(one)
    return out
