"""The stages. `STAGES` is the pipeline: its order is the order of work, each names the stages whose output it reads."""

from __future__ import annotations

from pipeline.stages.base import Job, Stage
from pipeline.stages.build import BUILD
from pipeline.stages.convert import CONVERT
from pipeline.stages.download import DOWNLOAD
from pipeline.stages.package import PACKAGE

__all__ = ["STAGES", "Job", "Stage"]

STAGES: tuple[Stage, ...] = (DOWNLOAD, CONVERT, BUILD, PACKAGE)
