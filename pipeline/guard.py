"""The passport's guard: read before an engine is served or measured, so that no card loads what it cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.errors import ArtefactRefused, UsageError
from engines.passport import NAME, Passport, objections, read_passport, remarks
from pipeline import config, host
from pipeline.runner import RUNS
from triton_repo.render import ENGINE_FOLDER


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether this machine can run an engine: why not, one phrase each, and what else there is to know."""

    passport: Passport
    objections: list[str]
    remarks: list[str]

    def require(self, folder: Path) -> None:
        """Raises ArtefactRefused when there is an objection, with the command that builds for this machine."""
        if self.objections:
            raise ArtefactRefused(
                f"the engine in {folder} does not run on this machine",
                why="; ".join(self.objections),
                remedy=f"serve it on {self.passport.target()}, or build for the GPU here with `trtpipe build --gpu`",
            )


def find_passport(folder: Path) -> Passport:
    """The passport of an engine folder, a model repository or a target. Raises UsageError or ArtefactRefused."""
    for place in (folder, folder / ENGINE_FOLDER, RUNS / folder / "engine", folder / "engine"):
        if (place / NAME).is_file():
            return read_passport(place)
    if not folder.exists():
        raise UsageError(f"there is no folder or target '{folder}'", remedy="see `ls runs`")
    return read_passport(folder)


def examine(passport: Passport) -> Verdict:
    """Compare a passport with this machine."""
    gpus = host.visible_gpus()
    floor = ""
    against: list[str] = []
    if passport.toolchain is not None:
        known = config.load_toolchains().get(passport.toolchain)
        if known is None:
            against.append(f"it was built by TensorRT-LLM {passport.toolchain}, which is no toolchain of this release")
        else:
            floor = known.driver
    against += objections(passport, gpus, floor=floor)
    return Verdict(passport=passport, objections=against, remarks=remarks(passport, gpus))
