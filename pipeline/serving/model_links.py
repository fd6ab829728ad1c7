"""Folder of links to the models of a server: its path stays the same when the models change."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtpipe.pipeline.serving import adapters
from trtpipe.pipeline.serving.servers import Served
from trtpipe.triton_repo.combine import link_models
from trtpipe.triton_repo.launch import ENGINE_MODEL


def lay_out(served: Sequence[Served], folder: Path) -> Path:
    """Make `folder`/models, links to every model: the served path stays the same when its content changes."""
    models, linked = folder / "models", folder / "linked"
    models.mkdir(parents=True, exist_ok=True)
    linked.mkdir(exist_ok=True)
    stale = list(linked.iterdir())
    link(folders(served, folder), folder)
    for left in stale:
        shutil.rmtree(left)
    return models


def folders(served: Sequence[Served], folder: Path) -> dict[str, Path]:
    """New folders of the models in `folder`/linked, by name, with the adapters that were added to the models that are
    served now. Raises ArtefactRefused for one that a new engine does not take."""
    out: dict[str, Path] = {}
    for one in served:
        out |= link_models(one.repository, one.prefix, Path(tempfile.mkdtemp(dir=folder / "linked")))
    for one in served:
        adapters.keep_added(folder / "models" / one.model(ENGINE_MODEL), out[one.model(ENGINE_MODEL)], folder)
    return out


def link(wanted: Mapping[str, Path], folder: Path) -> None:
    """Let `folder`/models hold links to these folders by these names, and nothing else."""
    models = folder / "models"
    for there in models.iterdir():
        if there.name not in wanted:
            there.unlink()
    for name, path in wanted.items():
        partial = folder / f".{name}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(path)
        partial.replace(models / name)
