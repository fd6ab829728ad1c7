"""Paths in a configuration, which are the serving container's: found on this machine where that is possible."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trtpipe.triton_repo.check.models import Model

# OWNER/NAME on the Hugging Face hub.
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REMOTE = re.compile(r"\w+://")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a path leads.

    path    the file or folder on this machine; None when it is not here
    absent  it should be here and is not: a relative path, or one inside the repository. An absolute one may exist in
            the container alone
    mapped  the repository is mounted somewhere else there, and this is its own folder
    why     what is absent, for a message
    """

    path: Path | None = None
    absent: bool = False
    mapped: bool = False
    why: str = ""


def locate(text: str, repository: Path, models: dict[str, Model]) -> Place:
    """Find what a parameter names. A relative path counts from where tritonserver is started: the repository or the
    folder above it, most of the time, or here."""
    if _REMOTE.match(text):
        return Place()
    try:
        path = Path(text)
        if path.is_absolute():
            return _locate_absolute(path, repository, models)
        for base in (repository, repository.parent, Path.cwd()):
            if (base / path).exists():
                return Place(path=base / path)
    except (OSError, ValueError):  # a null byte, or a name too long
        return Place(absent=True, why="it is no path")
    why = f"there is none in {repository.name or repository}, nor in the folder above it, nor here"
    return Place(absent=True, why="the server expands no ~" if text.startswith("~") else why)


def may_be_hub_id(text: str, repository: Path) -> bool:
    """Could this be a model's name on the hub? Not when its first part is a folder beside the models."""
    return HUB_ID.fullmatch(text) is not None and not (repository / text.split("/")[0]).exists()


def _locate_absolute(path: Path, repository: Path, models: dict[str, Model]) -> Place:
    if path.exists():
        return Place(path=path)
    root = repository.resolve()
    if root in path.parents:
        return Place(absent=True, why=f"{path.relative_to(root)} is not in the repository")
    parts = PurePosixPath(path).parts
    for start in range(1, len(parts)):
        if parts[start] in models:
            inside = repository.joinpath(*parts[start:])
            if inside.exists():
                return Place(path=inside, mapped=True)
    return Place()
