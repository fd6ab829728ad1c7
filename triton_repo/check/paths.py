"""Paths in a configuration: maps paths of the serving container to this machine where possible."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trtpipe.triton_repo.check.faults import Location, Report
from trtpipe.triton_repo.check.models import Model

# OWNER/NAME on the Hugging Face hub.
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REMOTE = re.compile(r"\w+://")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Result of locating a path.

    path    file or folder on this machine; None when it is not here
    absent  whether it is missing: a relative path, or one inside the repository, must exist here; an absolute path may
            exist only in the container
    mapped  whether the path is a container's mount of the repository, and `path` is the folder in the repository
    why     what is absent, for a message
    """

    path: Path | None = None
    absent: bool = False
    mapped: bool = False
    why: str = ""


def locate(text: str, repository: Path, models: dict[str, Model]) -> Place:
    """Locate the path of a parameter. A relative path is relative to the folder where tritonserver is started: usually
    the repository or its parent folder, or the current folder."""
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
        return Place(absent=True, why="it is not a path")
    why = f"there is none in {repository.name or repository}, nor in the folder above it, nor here"
    return Place(absent=True, why="the server expands no ~" if text.startswith("~") else why)


def tell_not_here(at: Location, text: str, report: Report, *, hub: bool = False) -> None:
    """Say that a path that may be right was not looked into; with `hub` it may be a name on the Hugging Face hub."""
    what = "may be a name on the Hugging Face hub" if hub else "is not on this machine"
    remedy = "fetch it and name its folder to have it checked" if hub else "run the check where it is"
    report.warning("not-here", at, f"is '{text}', which {what}", "what it holds is not checked", remedy)


def may_be_hub_id(text: str, repository: Path) -> bool:
    """Whether `text` may be a model's name on the hub: its first part must not be a folder beside the models."""
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
