"""The stages that quantize, in every checkpoint format that a runtime reads."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

# ModelOpt imports it, and it runs lscpu, which a unit test may not.
import numpy.testing  # noqa: F401
import pytest

from tests.support.factories import MIXTRAL, hf_folder
from tests.unit.stages.conftest import job as stage_job
from tests.unit.test_runner import Recorder, plan
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines import BACKENDS
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf.stored import read_stored
from trtpipe.engines.process import Progress
from trtpipe.engines.quantize import job, worker
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.calibrate import CALIBRATE
from trtpipe.pipeline.stages.quantize import QUANTIZE
from trtpipe.pipeline.store.store import Store

# Blocks of 128 and tiles of 64 divide it.
EVEN: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
CALIBRATION = ("calibration.data=demo", "calibration.samples=4", "calibration.seq_len=32")
DENSE: dict[str, Any] = {}
# Precisions that calibrate, and that no TensorRT-LLM checkpoint holds.
CASES = [
    (MIXTRAL, "nvfp4", None, "vllm", ("modelopt", "NVFP4", None)),
    (DENSE, "fp8-block", "fp8", "vllm", ("modelopt", "FP8_BLOCK_SCALES", "FP8")),
    (DENSE, "fp8-block", "fp8", "trtllm_pytorch", ("modelopt", "FP8_BLOCK_SCALES", "FP8")),
    (DENSE, "int8-pc-pt", "fp8", "vllm", ("compressed-tensors", "INT8_PER_CHANNEL_PER_TOKEN", "FP8")),
]


@pytest.mark.filterwarnings("ignore")  # of ModelOpt
@pytest.mark.parametrize(
    ("family", "dtype", "cache", "runtime", "made"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_calibrated_precision_that_no_checkpoint_of_tensorrt_llm_holds(
    in_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: dict[str, Any],
    dtype: str,
    cache: str | None,
    runtime: str,
    made: tuple[str, str, str | None],
) -> None:
    def run_worker(module: str, spec: dict[str, Any], log: Path, *, what: str, progress: Progress) -> None:
        """The worker's work in this process: each of its own takes seconds to import torch."""
        assert module == "trtpipe.engines.quantize.worker"
        worker.work(json.loads(json.dumps(spec)), progress)

    monkeypatch.setattr(job, "run_worker", run_worker)
    folder = hf_folder(in_folder / "tiny", **EVEN, **family)
    caches = {} if cache is None else {"kv_cache": cache}
    spec = plan(folder, *CALIBRATION, gpu="h100", dtype=dtype, runtime=runtime, **caches)
    results = execute(spec, Store(in_folder / "home"), Recorder(), until="quantize")
    assert [result.stage for result in results] == ["download", "tokenizer", "calibrate", "quantize"]
    stored = read_stored(results[-1].artefact.path)
    assert stored is not None
    found = stored.quantization
    assert (stored.method, found.quant_algo, found.kv_cache_quant_algo) == made


def test_what_calibration_could_not_do_is_a_notice_of_its_stage(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "quantize", lambda *given, **options: ["no sample reached expert 2 of layer 0"])
    folder = hf_folder(in_folder / "tiny", **EVEN)
    data = in_folder / "mine.jsonl"
    data.write_text(json.dumps({"prompt": "why? " * 20, "response": "so"}))
    own = (f"calibration.data={data}", "calibration.samples=1", "calibration.seq_len=32")
    settings = CALIBRATE.settings(plan(folder, *own, gpu="h100", dtype="fp8"))
    assert CALIBRATE.run(stage_job(settings, in_folder / "out", model=folder))["notices"] == [
        f"{data}: of its objects only 'prompt' is read, not 'response'", "no sample reached expert 2 of layer 0"
    ]  # fmt: skip


@pytest.mark.parametrize("family", [DENSE, MIXTRAL], ids=["llama", "mixtral"])
def test_what_settings_accept_the_stages_accept(in_folder: Path, family: dict[str, Any]) -> None:
    folder = hf_folder(in_folder / "tiny", **EVEN, **family)
    accepted: set[tuple[str, str | None, str]] = set()
    for dtype in load_quant_recipes():
        for cache in (None, "fp8", "int8", "nvfp4"):
            for runtime in BACKENDS:
                for spec in specs(folder, dtype, cache, runtime):
                    accepted.add((dtype, cache, runtime))
                    for stage in (CALIBRATE, QUANTIZE):
                        if stage.applies(spec):
                            settings = stage.settings(spec)
                            job.check(folder, settings.recipe, settings.layout)
    assert accepted >= {(dtype, cache, runtime) for of, dtype, cache, runtime, _ in CASES if of is family}


def specs(folder: Path, dtype: str, cache: str | None, runtime: str) -> list[BuildSpec]:
    """What settings accept, of GPUs that have kernels for other precisions, and of a CPU."""
    out = []
    options = {"dtype": dtype, "runtime": runtime} | ({} if cache is None else {"kv_cache": cache})
    for gpu, tp in (("cpu", 1), ("h100", 2), ("b200", 1)):
        with contextlib.suppress(UsageError):
            out.append(plan(folder, gpu=gpu, tp=tp, **options))
    return out
