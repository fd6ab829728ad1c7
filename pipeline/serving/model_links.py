"""Folder of links to the models of a server: its path stays the same when the models change."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
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
        shutil.rmtree(left, ignore_errors=True)
    return models


def folders(served: Sequence[Served], folder: Path) -> dict[str, Path]:
    """New folders of the models in `folder`/linked, by name, with the adapters that were added to the models that are
    served now. Raises ArtefactRefused for one that a new engine does not take."""
    out: dict[str, Path] = {}
    made: list[Path] = []
    try:
        for one in served:
            made.append(Path(tempfile.mkdtemp(dir=folder / "linked")))
            out |= link_models(one.repository, one.prefix, made[-1])
        for one in served:
            adapters.keep_added(folder / "models" / one.model(ENGINE_MODEL), out[one.model(ENGINE_MODEL)], folder)
    except BaseException:
        for left in made:
            shutil.rmtree(left, ignore_errors=True)
        raise
    for name, path in out.items():
        if (folder / "models" / name).exists():
            renew(path, folder / "models" / name)
    return out


def renew(model: Path, loaded: Path) -> None:
    """Date the versions of a model now, and after all that is in `loaded`, the folder that the server has loaded under
    its name: Triton loads only what is newer, and the clock may have been set back since."""
    now = max(time.time_ns(), _newest(loaded) + 10**9)
    for version in model.glob("[0-9]*"):
        # The scripts too: the folder is dated anew when Python writes their bytecode beside them.
        for path in (version, *version.iterdir()):
            with contextlib.suppress(OSError):
                if not path.is_symlink():
                    os.utime(path, ns=(now, now))


def _newest(folder: Path) -> int:
    """Time of the last change in a folder and in what its links lead to, in nanoseconds."""
    times = [0]
    for parent, _, files in os.walk(folder, followlinks=True):
        for path in (Path(parent), *(Path(parent, name) for name in files)):
            with contextlib.suppress(OSError):  # a broken link
                times.append(path.stat().st_mtime_ns)
    return max(times)


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
