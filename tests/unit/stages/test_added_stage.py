"""A stage is added in its module and in STAGES, and appears wherever stages do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder
from tests.unit.test_runner import build, plan
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline import stages
from trtpipe.pipeline.cluster.needs import Needs, needs
from trtpipe.pipeline.registry.provenance import statement
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import stages_until, status
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import GIB, Job, Resources, Stage
from trtpipe.pipeline.store.store import Store


class Count(Stage):
    """Counts the bytes of a checkpoint, of float32 targets only."""

    name = "count"
    makes = "census"
    version = 1
    travels = True

    def applies(self, spec: BuildSpec) -> bool:
        return spec.precision.dtype.value == "float32"

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("checkpoint",)

    def resources(self, spec: BuildSpec) -> Resources:
        return Resources(cores=3, memory=2 * GIB, gpu="faster")

    def run(self, job: Job) -> dict[str, Any]:
        size = sum(path.stat().st_size for path in job.inputs["checkpoint"].iterdir())
        (job.out / "size.json").write_text(json.dumps(size))
        return {}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Stage:
    at = [stage.name for stage in stages.STAGES].index("convert") + 1
    stage = Count()
    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES[:at], stage, *stages.STAGES[at:]))
    return stage


@pytest.mark.parametrize(
    ("machines", "cpus", "memory", "gpus"),
    [
        # The head has the cores, the other machine the GPU.
        ([{"CPU": 64.0, "memory": 256.0 * GIB}, {"CPU": 2.0, "memory": 32.0 * GIB, "GPU": 1.0}], 2, 2 * GIB, 1),
        ([{"CPU": 64.0, "memory": 256.0 * GIB}, {"CPU": 2.0, "memory": 2.0 * GIB, "GPU": 1.0}], 2, GIB, 1),
        ([{"CPU": 64.0, "memory": 256.0 * GIB}, {"CPU": 2.0, "memory": 32.0 * GIB}], 3, 2 * GIB, 0),
        # None has both the cores and the memory.
        ([{"CPU": 64.0, "memory": 2.0 * GIB}, {"CPU": 1.0, "memory": 32.0 * GIB}], 1, 2 * GIB, 0),
        ([{"memory": 1.0 * GIB}], 0, GIB // 2, 0),
    ],
)
def test_no_stage_asks_a_cluster_for_more_than_one_machine_has(
    in_folder: Path, machines: list[dict[str, float]], cpus: int, memory: int, gpus: int
) -> None:
    asked = needs(Count(), plan(hf_folder(in_folder / "tiny")), machines)
    assert asked == Needs(cpus=cpus, memory=memory, gpus=gpus)
    assert any(map(asked.met, machines))


def test_a_build_on_the_gpu_that_a_spec_names_asks_for_that_gpus_machine(in_folder: Path) -> None:
    spec = plan(hf_folder(in_folder / "tiny"), gpu="h100", dtype="bf16")
    (stage,) = (one for one in stages.STAGES if one.name == "build")
    h100 = {"CPU": 1.0, "memory": 64.0 * GIB, "GPU": 8.0, "accelerator_type:H100": 1.0}
    machines = [{"CPU": 64.0, "memory": 256.0 * GIB}, {"CPU": 64.0, "memory": 64.0 * GIB, "GPU": 1.0}, h100]
    asked = needs(stage, spec, machines)
    assert asked == Needs(cpus=1, memory=GIB // 4, gpus=1, accelerator="H100")
    assert [asked.met(one) for one in machines] == [False, False, True]
    assert needs(stage, spec, machines[:1]).accelerator == "H100", "the command says that no machine has it"


def test_a_stage_is_run_reused_and_told(added: Stage, in_folder: Path, tmp_path: Path) -> None:
    spec, store = plan(hf_folder(in_folder / "tiny")), Store(tmp_path / "home")
    assert build(spec, store, until="count")["count"] == ("made", "first run")
    assert build(spec, store)["count"] == ("reused", "same inputs and settings")
    run = RunFolder.of(spec.target)
    size = sum(path.stat().st_size for path in (run.path / "checkpoint").iterdir())
    assert json.loads((run.path / "census" / "size.json").read_text()) == size
    assert [(one.stage, one.state) for one in status(spec, store)][2:4] == [
        ("convert", "current"),
        ("count", "current"),
    ]
    made = [entry["name"] for entry in statement(run, store)["predicate"]["runDetails"]["byproducts"]]
    assert made == ["model", "tokenizer", "checkpoint", "census", "engine", "repository"]


def test_a_stage_says_when_it_applies(added: Stage, in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny")
    assert [stage.name for stage in stages.stages_of(plan(model, gpu="h100", dtype="bf16"))] == [
        "download", "tokenizer", "convert", "build", "package",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="unknown stage 'cont'; did you mean 'count'"):
        stages_until(stages.stages_of(plan(model)), "cont")


def test_a_stage_says_what_it_uses_of_a_machine_and_whether_its_artefact_travels(
    added: Stage, in_folder: Path
) -> None:  # fmt: skip
    spec = plan(hf_folder(in_folder / "tiny"))
    machine = {"CPU": 8.0, "memory": 64.0 * GIB, "GPU": 1.0}
    assert needs(added, spec, [machine]) == Needs(cpus=3, memory=2 * GIB, gpus=1)
    assert stages.carried() == (
        "tokenizer",
        "adapters",
        "draft",
        "checkpoint",
        "census",
        "scales",
        "accuracy",
        "engine",
    )
