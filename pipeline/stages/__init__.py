"""The stages of the pipeline, in the order of work. Each says itself when it applies, and what it reads and makes."""

from __future__ import annotations

from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.adapters import ADAPTERS
from trtpipe.pipeline.stages.base import Job, Resources, Stage
from trtpipe.pipeline.stages.build import BUILD
from trtpipe.pipeline.stages.calibrate import CALIBRATE
from trtpipe.pipeline.stages.convert import CONVERT
from trtpipe.pipeline.stages.download import DOWNLOAD
from trtpipe.pipeline.stages.draft import DRAFT
from trtpipe.pipeline.stages.package import PACKAGE
from trtpipe.pipeline.stages.quantize import QUANTIZE
from trtpipe.pipeline.stages.tokenizer import TOKENIZER
from trtpipe.pipeline.stages.verify import VERIFY

__all__ = ["STAGES", "Job", "Resources", "Stage", "carried", "stages_of", "to_finish", "to_serve"]

# What an engine and its repository are made of comes before the engine, which may have to wait for another machine.
STAGES: tuple[Stage, ...] = (DOWNLOAD, TOKENIZER, ADAPTERS, DRAFT, CONVERT, CALIBRATE, QUANTIZE, VERIFY, BUILD, PACKAGE)


def stages_of(spec: BuildSpec) -> tuple[Stage, ...]:
    """The pipeline of a spec."""
    return tuple(stage for stage in STAGES if stage.applies(spec))


def to_serve(spec: BuildSpec) -> frozenset[str]:
    """Names of the artefacts from which a target's repository is made, with the report on its accuracy."""
    return frozenset({*PACKAGE.inputs(spec), VERIFY.makes})


def to_finish(spec: BuildSpec) -> frozenset[str]:
    """Names of the artefacts from which a target's engine and repository are made."""
    return frozenset({*BUILD.inputs(spec), *PACKAGE.inputs(spec)} - {BUILD.makes})


def carried() -> tuple[str, ...]:
    """Names of the artefacts that travel."""
    return tuple(dict.fromkeys(stage.makes for stage in STAGES if stage.travels))
