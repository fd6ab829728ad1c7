"""Folder of the adapters of a served model: a folder for each, named by the number under which runtimes know it.

The folder is the truth: a gateway and a runtime look into it at each request that names an adapter, so that one can be
added to a running server by renaming a folder into it, and removed by renaming it away. The numbers are decimal, since
TensorRT-LLM loads adapters from folders of such names (`lora_prefetch_dir`), and they depend on the content, so that
what was computed with one adapter is never taken for another's.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import UsageError
from trtpipe.engines.json_input import load_json

# Name of the folder beside an engine's files, and of the file in an adapter's folder with its name.
FOLDER, INFO = "lora", "adapter.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A change within this time of the last reading may leave the folder's time as it was.
_TICK_NS = 50_000_000
_MOST_INFO_BYTES = 4096


def check_name(name: str) -> None:
    """Raises UsageError for a name that clients could not write after a model's name and a colon."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot be the name of an adapter",
            why="it is part of a model's name and of a path",
            remedy="use up to 64 letters, digits, dots, dashes and underscores, a letter or a digit first",
        )


@dataclass(frozen=True)
class Placed:
    """An adapter in the folder."""

    name: str
    number: int
    rank: int
    path: Path


class AdapterFolder:
    """The adapters in `path`, read again when the folder has changed; None is a folder without any."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._changed = -1
        self._found: tuple[Placed, ...] = ()

    def all(self) -> tuple[Placed, ...]:
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

    def find(self, name: str) -> Placed | None:
        return next((one for one in self.all() if one.name == name), None)

    def numbered(self, number: int) -> Placed | None:
        return next((one for one in self.all() if one.number == number), None)


def _read(folder: Path) -> list[Placed]:
    out = []
    for path in folder.iterdir():
        if path.name.isdigit():
            try:
                info = load_json(path / INFO, max_bytes=_MOST_INFO_BYTES)
                one = Placed(str(info["name"]), int(path.name), int(info["rank"]), path)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # removed meanwhile
            if NAME.fullmatch(one.name) and 0 < one.number < 1 << 31:
                out.append(one)
    return out
