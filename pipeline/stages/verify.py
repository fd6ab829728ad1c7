"""The accuracy gate: compares the checkpoint with its original on held-out text, before GPU time is paid for.

A model that came quantized has no original here: a TensorRT-LLM checkpoint of it is compared with the folder that it
was made of, and a folder that is served as it is is run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.base import CalibrationConfig, DataType
from trtpipe.engines.precision import QuantRecipe
from trtpipe.engines.process import require_torch
from trtpipe.pipeline.accuracy import gate, page
from trtpipe.pipeline.accuracy.tasks import check_task, score_tasks
from trtpipe.pipeline.sources import calibration
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import ON_TORCH, Job, Resources, Stage
from trtpipe.pipeline.store.digests import Digests

# Raised when tasks are scored otherwise.
TASK_SCORING = "3"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the gate.

    stored  whether the model came quantized
    alone   whether the checkpoint is the model itself, so that there is nothing to compare it with
    tasks   files of tasks that both models are scored on
    """

    recipe: QuantRecipe
    dtype: DataType
    accept: bool
    stored: bool
    alone: bool
    tasks: tuple[str, ...]


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
        return Settings(
            recipe=spec.precision.recipe, dtype=spec.precision.dtype, accept=spec.accept_accuracy,
            stored=spec.precision.stored != "",
            alone=spec.precision.stored != "" and load_backend(spec.runtime).FORM == "hf", tasks=spec.tasks,
        )  # fmt: skip

    def hashed(self, settings: Settings) -> dict[str, Any]:
        alone = {"alone": True} if settings.alone else {}
        return {
            **alone,
            "thresholds": vars(settings.recipe.thresholds),
            "rows": gate.ROWS,
            "seq_len": gate.SEQ_LEN,
            "accept_accuracy": settings.accept,
        }

    def sources(self, settings: Settings, digests: Digests) -> dict[str, str]:
        files = [Path(file) for file in settings.tasks]
        tasks = {
            f"task {number}": f"{digests.file(file)} {digests.file(data)}"
            for number, file, data in ((n, file, check_task(file).data(file)) for n, file in enumerate(files))
        }
        return {"heldout": calibration.digest(calibration.HELDOUT, digests), **tasks}

    def tools(self, settings: Settings) -> dict[str, str]:
        return {"task_scoring": TASK_SCORING} if settings.tasks else {}

    def require(self, settings: Settings) -> None:
        require_torch("the accuracy gate")

    def run(self, job: Job) -> dict[str, Any]:
        """Write accuracy.json and accuracy.html. Raises StageFailed when the gate fails and is not accepted."""
        settings: Settings = job.settings
        model, checkpoint, name = job.inputs["model"], job.inputs["checkpoint"], settings.recipe.name
        rows = CalibrationConfig(data=calibration.HELDOUT, samples=gate.ROWS, seq_len=gate.SEQ_LEN)
        ids = calibration.samples(model, rows)
        report: gate.Report | gate.AloneReport
        if settings.alone:
            alone = gate.measure_alone(checkpoint, ids, log=job.log, progress=job.progress)
            report = gate.AloneReport(recipe=name, measured=alone)
        else:
            measured = gate.measure(model, checkpoint, ids, log=job.log, progress=job.progress)
            report = gate.Report(recipe=name, thresholds=settings.recipe.thresholds, measured=measured)
        if settings.tasks:
            files, other = [Path(file) for file in settings.tasks], None if settings.alone else checkpoint
            report = replace(report, tasks=score_tasks(files, model, other, log=job.log, progress=job.progress))
        page.write(report, job.out)
        if report.failures and not settings.accept:
            # The output of a failed stage is deleted, but the user needs this report.
            kept = job.log.with_suffix(".accuracy")
            page.write(report, kept)
            raise report.refusal(kept)
        notices = [f"the accuracy gate failed and is accepted: {failure}" for failure in report.failures]
        if isinstance(report, gate.AloneReport):
            notices += report.unjudged
        if settings.stored and not settings.alone:
            notices.append("the original below is the quantized folder that the checkpoint was made of")
        return {"notices": [*notices, report.line()]}


VERIFY = Verify()
