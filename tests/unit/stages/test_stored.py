"""A model that came quantized goes through the pipeline: its precision is its own, and nothing is quantized again."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import QWEN3_MOE, hf_folder
from tests.support.hub_server import Hub
from tests.support.stored_folders import stored_folder, write_config
from tests.unit.stages.conftest import job as stage_job
from tests.unit.test_runner import SIZES, Recorder
from trtpipe.engines.accuracy import job, worker
from trtpipe.engines.errors import HostError, InputDataError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.process import Progress
from trtpipe.pipeline.api.build import layers, resolved
from trtpipe.pipeline.layers import set_layer
from trtpipe.pipeline.resolve import read_spec, resolve
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import stages_of
from trtpipe.pipeline.stages.convert import CONVERT
from trtpipe.pipeline.store.store import Store


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ModelOpt's folder with an FP8 KV cache. Not to be changed."""
    folder = tmp_path_factory.mktemp("stored") / "tiny-fp8"
    stored_folder(folder, "modelopt fp8", cache=0.02)
    return folder


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "tiny-int8"
    stored_folder(folder, "ct int8")
    return folder


def plan(model: Path | str, **options: Any) -> BuildSpec:
    return resolve([("option", {"model": str(model), **options}), set_layer(SIZES)])


def names(spec: BuildSpec) -> list[str]:
    return [stage.name for stage in stages_of(spec)]


def test_the_precision_is_the_folder_s_own_and_is_not_made_again(fp8: Path, int8: Path) -> None:
    spec = plan(fp8, gpu="h100")
    assert (spec.precision.name, spec.precision.stored, spec.quantization.kv_cache_quant_algo) == (
        "fp8-kv", "modelopt", "FP8",
    )  # fmt: skip
    assert spec.target == "tiny-fp8.h100.fp8-kv"
    assert names(spec) == ["download", "tokenizer", "convert", "verify", "build", "package"]
    assert {value.name: value.source for value in spec.values}["dtype"] == "the model is quantized already"
    again = read_spec(json.loads(json.dumps(spec.to_json())), "a record")
    assert (again.model, again.precision) == (spec.model, spec.precision)
    assert plan(fp8, gpu="h100", dtype="fp8-kv", kv_cache="fp8").precision.name == "fp8-kv"
    served = plan(int8, gpu="a100", runtime="vllm")
    assert (served.precision.name, served.precision.stored) == ("int8-pc-pt", "compressed-tensors")
    assert served.target == "tiny-int8.a100.int8-pc-pt.vllm"


def test_a_template_for_tools_stays_with_the_folder(fp8: Path, tmp_path: Path) -> None:
    given, made, template = tmp_path / "given", tmp_path / "made", "additional_chat_templates/tool_use.jinja"
    shutil.copytree(fp8, given)
    made.mkdir()
    (given / template).parent.mkdir()
    (given / template).write_text("{{ tools }}")
    CONVERT.run(stage_job(CONVERT.settings(plan(given, gpu="h100", runtime="vllm")), made, model=given))
    files = [sorted(path.relative_to(one) for path in one.rglob("*")) for one in (given, made)]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("runtime", "line"),
    [
        ("tensorrt_llm", "converting a quantized model needs torch"),
        ("vllm", "the accuracy gate needs torch"),  # whose checkpoint is the folder itself
    ],
)
def test_torch_is_looked_for_before_the_download(
    fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, line: str
) -> None:
    real, store = importlib.util.find_spec, Store(tmp_path / "home")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(HostError, match=line):
        execute(plan(fp8, gpu="h100", runtime=runtime), store, Recorder(), until="verify")
    assert list(store.artefacts()) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"gpu": "h100", "dtype": "bf16"},
            "--dtype bf16 is not the precision of tiny-fp8: it is already quantized: FP8 ",
        ),
        ({"gpu": "h100", "kv_cache": "none"}, "--kv-cache none is not the precision of tiny-fp8"),
        (
            {"gpu": "a100"},
            "fp8-kv does not run on a100 (SM80)",
        ),
    ],
)
def test_another_precision_and_a_gpu_without_it_are_refused(fp8: Path, options: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(fp8, **options)
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("runtime", "line"),
    [
        ("tensorrt_llm", "cannot become a TensorRT-LLM checkpoint: of quantized folders only FP8, "),
        (
            "trtllm_pytorch",
            "the trtllm_pytorch runtime does not read tiny-int8: it is already quantized: INT8_PER_CHANNEL",
        ),
    ],
)
def test_a_runtime_that_cannot_execute_it_is_refused_before_anything(int8: Path, runtime: str, line: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(int8, gpu="a100", runtime=runtime)
    assert line in str(error.value)
    assert "use --runtime vllm" in str(error.value)


@pytest.mark.loopback
def test_of_a_hub_model_the_config_says_that_it_has_experts(server: Hub, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in hf_folder(tmp_path / "tiny", **QWEN3_MOE).iterdir()}
    server.add("acme/tiny-moe", content)
    spec = resolved([*layers(model="acme/tiny-moe", gpu="a100"), set_layer(SIZES)])
    assert spec.precision.name == "int8-wo"
    assert spec.settings["dtype"] == "int8-wo"
    assert server.fetched() == ["config.json"]


@pytest.mark.loopback
def test_of_a_hub_model_the_configs_come_first_and_say_it(server: Hub, fp8: Path, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in fp8.iterdir()}
    raw = json.loads(content["config.json"])
    method = raw.pop("quantization_config")
    # As ModelOpt wrote it before 0.29: in a file of its own alone.
    details = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": method["ignore"]}
    content["hf_quant_config.json"] = json.dumps({"quantization": details}).encode()
    server.add("acme/tiny-fp8", {**content, "config.json": json.dumps(raw).encode()})
    options: dict[str, Any] = {"model": "acme/tiny-fp8", "gpu": "cpu"}
    given = [*layers(**options), set_layer(SIZES)]
    spec = resolved(given)
    assert (spec.precision.name, spec.precision.stored) == ("fp8-kv", "modelopt")
    assert server.fetched() == ["config.json", "hf_quant_config.json"]
    with pytest.raises(UsageError, match="--dtype bf16 is not the precision of tiny-fp8"):
        resolved([*given, ("option", {"dtype": "bf16"})])
    # Settings that were resolved without a look at the hub do not fit; nothing more is fetched.
    with pytest.raises(
        InputDataError,
        match=r"tiny-fp8 is not quantized as the settings say: its files are FP8 .*call `trtpipe\.build`",
    ):
        execute(
            resolve([*given, ("option", {"dtype": "bf16"})]), Store(tmp_path / "home"), Recorder(), until="download"
        )
    assert server.fetched() == ["config.json", "hf_quant_config.json"]
    execute(spec, Store(tmp_path / "home"), Recorder(), until="tokenizer")
    assert {"model.safetensors", "hf_quant_config.json"} <= set(server.fetched())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is none of bfloat16, float16, float32"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}}, "lm_head"),
    ],
)
def test_a_folder_that_is_not_what_it_says_makes_nothing(
    fp8: Path, tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    shutil.copytree(fp8, tmp_path / "tiny")
    write_config(tmp_path / "tiny", torch_dtype=None, **change)
    with pytest.raises(TrtpipeError) as error:
        execute(plan(tmp_path / "tiny", gpu="cpu"), Store(tmp_path / "home"), Recorder(), until="convert")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "home").glob("artefacts/*"))


@pytest.mark.process
def test_verify_compares_the_checkpoint_with_the_folder_and_runs_the_folder_alone(
    fp8: Path, int8: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(module: str, spec: dict[str, Any], log: Path, *, what: str, progress: Progress) -> None:
        """The worker's work in this process: each of its own takes seconds to import torch."""
        assert module == "trtpipe.engines.accuracy.worker"
        worker.work(json.loads(json.dumps(spec)), progress)

    monkeypatch.setattr(job, "run_worker", compare)
    store = Store(in_folder / "home")
    made = execute(plan(fp8, gpu="cpu"), store, Recorder(), until="verify")
    report = json.loads((made[-1].artefact.path / "accuracy.json").read_text())
    assert (report["passed"], report["quant_algo"], report["kv_cache_quant_algo"]) == (True, "FP8", "FP8")
    # The checkpoint has one scale for q, k and v.
    assert 0 < report["mean_kl"] < 1e-4
    served = {"gpu": "a100", "runtime": "vllm"}
    # Weights at random predict no better than a guess.
    with pytest.raises(
        StageFailed, match=r"perplexity \d+\.\d+ is that of a guess among 300 tokens, or worse: the model"
    ):
        execute(plan(int8, **served), store, Recorder(), until="verify")
    results = execute(plan(int8, **served, accept_accuracy=True), store, Recorder(), until="build")
    found = {result.makes: result.artefact.path for result in results}
    for name in ("config.json", "model.safetensors"):
        assert (found["engine"] / name).read_bytes() == (int8 / name).read_bytes()
    assert "quantization" not in (found["engine"] / "engine_args.yaml").read_text()
    passport = json.loads((found["engine"] / "passport.json").read_text())
    assert (passport["quant_algo"], passport["accuracy"]["perplexity_ratio"]) == ("INT8_PER_CHANNEL_PER_TOKEN", None)
