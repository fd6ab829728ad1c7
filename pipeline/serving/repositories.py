"""What a server can serve: a model repository is found by its target, its engine is judged, a server is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.errors import ArtefactRefused, InputDataError, UsageError
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.pipeline import compatibility
from trtpipe.pipeline.run_folder import RUNS, SEE_TARGETS, RunFolder, find_run
from trtpipe.triton_repo.layout import ENGINE_FOLDER

SERVERS = ("auto", "local", "docker")


class Found(NamedTuple):
    """A repository to serve.

    name    of its target, or of its folder
    source  run folder that has it, or the folder itself: `reload` finds the target's next repository there
    """

    name: str
    folder: Path
    source: Path | None = None


def find_repository(target: str | None) -> Found:
    """The repository to serve: of a target in ./runs, in a folder, or of the newest run.

    Raises UsageError, or InputDataError for a link that leads nowhere.
    """
    if target is None:
        links = [link for run in RUNS.glob("*") if (link := run / "repository").is_symlink() or link.is_dir()]
        # A target with broken links sorts first, so the last one is a broken one only where all are.
        runs = sorted(links, key=lambda link: (link.exists(), link.lstat().st_mtime))
        # Where no target has a repository, `linked` says of the newest how it gets one.
        runs = runs or sorted(RUNS.glob("*/plan.json"), key=lambda plan: plan.stat().st_mtime)
        if not runs:
            raise UsageError(
                "there is nothing to serve in ./runs", remedy="run `trtpipe build --recipe smollm2-cpu` first"
            )
        target = runs[-1].parent.name
    run = find_run(target)
    if run is not None:
        return Found(run.path.name, run.linked("repository"), run.path.absolute())
    folder = Path(target)
    if folder.is_symlink() and not folder.exists():
        raise InputDataError(
            f"{target} leads to no repository",
            why=f"it is a link to {folder.readlink()}, which is not there: the store was moved or removed, or is "
            "outside this container",
            remedy=f"where the store is, copy the files themselves: `cp -rL {target} FOLDER`, and name that folder",
        )
    if (folder / "repository").is_dir():
        return Found(folder.resolve().name, (folder / "repository").resolve(), folder.absolute())
    if (folder / "tensorrt_llm" / "config.pbtxt").is_file():
        return Found(folder.resolve().name, folder.resolve(), folder.absolute())
    raise UsageError(
        f"'{target}' is neither a target in ./runs nor a model repository",
        remedy=SEE_TARGETS,
    )


def imports(found: Found) -> tuple[str, ...]:
    """A phrase for each artefact of a run folder that was made elsewhere; none for another folder."""
    if found.source is None:
        return ()
    run = RunFolder(found.source)
    own = (run.path / "repository").is_dir() and run.linked("repository") == found.folder.resolve()
    return tuple(run.imports()) if own else ()


def called(name: str, repository: Path) -> str:
    """How messages call a repository: by its target in ./runs, else by its folder."""
    return name if (RUNS / name / "repository").is_dir() else str(repository)


def check_passport(name: str, repository: Path, gpus: tuple[int, ...] | None = None) -> Passport:
    """Refuse an engine that this machine cannot run, or its GPUs of these indices. Raises ArtefactRefused."""
    passport = read_passport(repository / ENGINE_FOLDER)
    compatibility.examine(passport, gpus).require(called(name, repository))
    return passport


def served_by(passport: Passport) -> ServedBy:
    return load_backend(passport.runtime).SERVED_BY


def choose_server(asked: str, passport: Passport) -> str:
    """The server that runs the engine: local or docker. Raises ArtefactRefused for one that cannot run it."""
    usual = "local" if served_by(passport) is ServedBy.ENGINE_PROCESS else "docker"
    if asked == "docker" and usual == "local":
        raise ArtefactRefused(
            f"this engine is for the {passport.runtime} runtime",
            why="NVIDIA's image does not hold it",
            remedy="serve it with --server local",
        )
    if asked == "local" and usual == "docker":
        raise ArtefactRefused(
            f"this engine is for the {passport.runtime} runtime on {passport.target()}",
            why="the tritonserver of this environment runs reference and vllm engines",
            remedy=f"serve it with --server docker, from {passport.image or 'an image given as --image'}",
        )
    return usual


def require_alike(names: Sequence[str], passports: Sequence[Passport]) -> None:
    """Refuse targets that one server cannot hold. Raises UsageError for a target named twice, ArtefactRefused."""
    if len(set(names)) < len(names):
        raise UsageError("a target is named twice", remedy="name each once")
    first = passports[0]
    for name, passport in zip(names, passports, strict=True):
        if (passport.runtime, passport.image) != (first.runtime, first.image):
            raise ArtefactRefused(
                f"{name} is for {passport.runtime} {passport.image or ''}".rstrip(),
                why=f"{names[0]} is for {first.runtime} {first.image or ''}".rstrip() + ", and a server is of one kind",
                remedy="serve them by two commands, on ports of their own",
            )
        if len(names) > 1 and served_by(passport) is ServedBy.TENSORRTLLM and passport.world_size > 1:
            raise ArtefactRefused(
                f"{name} is an engine of {passport.world_size} ranks",
                why="its ranks are servers of their own, which would load the other models as well",
                remedy="serve it alone",
            )
