"""The stages of a plan, in the order of work; each names what it makes and what it reads."""

from __future__ import annotations

from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Stage
from trtpipe.pipeline.stages.build import BUILD, BUILD_VERIFIED
from trtpipe.pipeline.stages.calibrate import CALIBRATE
from trtpipe.pipeline.stages.convert import CONVERT
from trtpipe.pipeline.stages.download import DOWNLOAD
from trtpipe.pipeline.stages.package import PACKAGE
from trtpipe.pipeline.stages.quantize import QUANTIZE, QUANTIZE_CALIBRATED
from trtpipe.pipeline.stages.tokenizer import TOKENIZER
from trtpipe.pipeline.stages.verify import VERIFY

__all__ = ["MAKES", "Job", "Stage", "stages_of"]

# What each stage makes.
MAKES = {
    stage.name: stage.makes for stage in (DOWNLOAD, TOKENIZER, CONVERT, CALIBRATE, QUANTIZE, VERIFY, BUILD, PACKAGE)
}


def stages_of(plan: BuildSpec) -> tuple[Stage, ...]:
    """The pipeline for a plan: its precision decides how the checkpoint is made."""
    recipe = plan.precision.recipe
    # The tokenizer comes before the engine, which may have to wait for another machine.
    if recipe is None:
        return (DOWNLOAD, TOKENIZER, CONVERT, BUILD, PACKAGE)
    quantize = (CALIBRATE, QUANTIZE_CALIBRATED) if recipe.quantization.calibrated else (QUANTIZE,)
    return (DOWNLOAD, TOKENIZER, *quantize, VERIFY, BUILD_VERIFIED, PACKAGE)
