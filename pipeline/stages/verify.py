"""The accuracy gate: compares the checkpoint with its original on held-out text, before GPU time is paid for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtpipe.engines.base import CalibrationConfig, DataType
from trtpipe.engines.quantization import QuantRecipe
from trtpipe.pipeline.accuracy import gate, page
from trtpipe.pipeline.sources import calibration
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import ON_TORCH, Job, Resources, Stage
from trtpipe.pipeline.store.digests import Digests


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: QuantRecipe
    dtype: DataType
    accept: bool


class Verify(Stage):
    name = "verify"
    makes = "accuracy"
    version = 1
    travels = True

    def applies(self, spec: BuildSpec) -> bool:
        return spec.precision.recipe is not None

    def resources(self, spec: BuildSpec) -> Resources:
        return ON_TORCH

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("model", "checkpoint")

    def settings(self, spec: BuildSpec) -> Settings:
        assert spec.precision.recipe is not None
        return Settings(recipe=spec.precision.recipe, dtype=spec.precision.dtype, accept=spec.accept_accuracy)

    def hashed(self, settings: Settings) -> dict[str, Any]:
        return {
            "thresholds": vars(settings.recipe.thresholds),
            "rows": gate.ROWS,
            "seq_len": gate.SEQ_LEN,
            "accept_accuracy": settings.accept,
        }

    def sources(self, settings: Settings, digests: Digests) -> dict[str, str]:
        return {"heldout": calibration.digest(calibration.HELDOUT, digests)}

    def run(self, job: Job) -> dict[str, Any]:
        """Write accuracy.json and accuracy.html. Raises StageFailed when the gate fails and is not accepted."""
        settings: Settings = job.settings
        model = job.inputs["model"]
        rows = CalibrationConfig(data=calibration.HELDOUT, samples=gate.ROWS, seq_len=gate.SEQ_LEN)
        measured = gate.measure(
            model, job.inputs["checkpoint"], calibration.samples(model, rows), log=job.log, progress=job.progress
        )
        report = gate.Report(recipe=settings.recipe.name, thresholds=settings.recipe.thresholds, measured=measured)
        page.write(report, job.out)
        if report.failures and not settings.accept:
            # The output of a failed stage is deleted, but the user needs this report.
            kept = job.log.with_suffix(".accuracy")
            page.write(report, kept)
            raise report.refusal(kept)
        notices = [f"the accuracy gate failed and is accepted: {failure}" for failure in report.failures]
        return {"notices": [*notices, report.line()]}


VERIFY = Verify()
