"""A quantized model from the command line to an answer, and what goes wrong on the way.

`make test` takes the first four layers of SmolLM2, `make test-slow` all of it.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import CAPITALS, FP8, Cli, Finished, Served
from trtpipe.configs.facts import CONFIGS
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.pipeline.cli import app

# A comparison takes many minutes on a processor without 16-bit products.
pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

STAGES = ["download", "tokenizer", "calibrate", "quantize", "verify", "build", "package"]


def reused(build: Finished) -> dict[str, bool]:
    """Each stage of a build, and whether it had nothing to do."""
    return {stage: how == "reused" for stage, how in re.findall(r"^(\w+) +(reused|\d+\.\d s) ", build.err, re.M)}


@pytest.fixture(scope="module", params=["four layers", pytest.param("SmolLM2", marks=pytest.mark.slow)])
def whole(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "SmolLM2")


@pytest.fixture(scope="module")
def build(whole: bool, request: pytest.FixtureRequest) -> list[str]:
    """`trtpipe build` of FP8 weights and KV cache, as its words."""
    if whole:
        return ["build", "--model", "smollm2-135m", *FP8, "--tasks", str(CAPITALS)]
    words: list[str] = request.getfixturevalue("quantized_build")
    return words


@pytest.fixture(scope="module")
def run(cli: Cli, build: list[str]) -> Path:
    """The folder of that build."""
    cli.ok(*build, "--until", "quantize")
    done = cli.ok(*build)
    assert list(reused(done)) == STAGES
    target = done.out.rstrip().rpartition("next: trtpipe serve ")[2]
    return cli.folder / "runs" / target


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    """The unquantized model, as a folder."""
    return (run / "model").resolve()


def test_an_engine_says_how_it_is_quantized_and_what_that_has_cost(run: Path) -> None:
    passport = json.loads((run / "engine" / "passport.json").read_text())
    assert (passport["quant_algo"], passport["kv_cache_quant_algo"]) == ("FP8", "FP8")
    accuracy = passport["accuracy"]
    assert (accuracy["passed"], accuracy["failures"]) == (True, [])
    # Eight bits cost something, and no more than a few percent.
    assert 1.0 < accuracy["perplexity_ratio"] < 1.1
    report = json.loads((run / "accuracy" / "accuracy.json").read_text())
    assert {key: report[key] for key in accuracy} == accuracy
    page = (run / "accuracy" / "accuracy.html").read_text()
    assert "<svg" in page
    assert [(one["task"], one["metric"], one["documents"]) for one in accuracy["tasks"]] == [
        ("capitals", "acc", 16),
        ("capitals", "acc_norm", 16),
    ]
    for one in accuracy["tasks"]:
        assert f"{one['metric']} of capitals" in page
        for side in ("original", "quantized"):
            share = one[side]
            # Of shares of right and wrong answers the deviation is known.
            assert one[f"{side}_stderr"] == pytest.approx((share * (1 - share) / 15) ** 0.5)


@pytest.mark.slow  # test_several serves the four layers
def test_a_quantized_model_answers(cli: Cli, run: Path, serve: Callable[[str], Served], whole: bool) -> None:
    served = serve(run.name)
    try:
        chat = cli.ok("generate", "What is the capital of France?", "--server", served.name, "--max-tokens", "32")
        assert chat.out.strip(), "how well so small a model says it in 8 bits is not the point"
        raw = cli.ok("generate", "The capital of France is", "--raw", "--max-tokens", "3", "--server", served.name)
        assert raw.out.startswith(" Paris") or not whole
    finally:
        cli.kill_server(served.name)


@pytest.mark.slow
def test_scales_are_found_once_for_every_mapping(cli: Cli, run: Path, build: list[str]) -> None:
    assert reused(cli.ok(*build)) == dict.fromkeys(STAGES, True)
    # 9 heads and 3 of keys and values: three ranks of 3 and 1.
    states = json.loads(cli.ok("status", *build[1:], "--tp", "3", "--json").out)
    assert [state["stage"] for state in states if state["state"] == "current"] == ["download", "tokenizer", "calibrate"]
    cut = cli.ok(*build, "--tp", "3", "--until", "quantize")
    assert reused(cut) == {"download": True, "tokenizer": True, "calibrate": True, "quantize": False}
    checkpoint = run.with_name(f"{run.name}.tp3") / "checkpoint"
    assert len(list(checkpoint.glob("rank*.safetensors"))) == 3
    assert cli.ok("inspect", str(checkpoint)).out.endswith("no problem found\n")


def test_one_wrong_scale_fails_the_gate_and_its_layer_is_named(
    cli: Cli, run: Path, model: Path, tmp_path: Path
) -> None:
    broken, report = tmp_path / "broken", tmp_path / "report"
    shutil.copytree((run / "checkpoint").resolve(), broken)
    weights = broken / "rank0.safetensors"
    weights.chmod(0o644)  # artefacts may be write-protected
    scale = read_header(weights).tensors["transformer.layers.2.mlp.proj.weights_scaling_factor"]
    with weights.open("r+b") as file:
        file.seek(scale.offset)
        (value,) = struct.unpack("<f", file.read(4))
        file.seek(scale.offset)
        file.write(struct.pack("<f", 8 * value))
    assert cli.ok("inspect", str(broken)).out.endswith("no problem found\n"), "its form tells nothing"

    done = cli.run(
        "verify", str(model), str(broken), "--rows", "2", "--seq-len", "64", "--report", str(report), "--json"
    )
    assert done.status == 5
    last = done.err.splitlines()[-1]
    # What four layers say is far from any text, so that their divergence fails before their perplexity.
    assert re.match(r"error: the accuracy gate failed: (perplexity|the mean KL divergence) .*, fp8-kv allows ", last)
    assert " most goes wrong in layer 2, " in last
    assert f"see {report / 'accuracy.html'}" in last
    told = json.loads(done.out)
    assert (told["passed"], told["recipe"], told["worst_layers"][0]) == (False, "fp8-kv", 2)
    assert json.loads((report / "accuracy.json").read_text()) == told
    assert "layer 2" in (report / "accuracy.html").read_text()


@pytest.mark.slow
def test_scales_kept_from_one_format_write_the_other(cli: Cli, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shutil.copyfile(CONFIGS / "calibration" / "demo.txt", text)
    ranks, folder, scales = tmp_path / "ranks", tmp_path / "folder", tmp_path / "scales.safetensors"
    int8 = ["--quant", "int8-sq"]
    few = ["--calib", str(text), "--samples", "8", "--seq-len", "64"]
    cli.ok("quantize", str(model), str(ranks), *int8, *few, "--save-scales", str(scales))
    assert sorted(path.name for path in ranks.iterdir()) == ["config.json", "rank0.safetensors"]
    cli.ok("quantize", str(model), str(folder), *int8, "--scales", str(scales), "--format", "hf")
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()

    looked = cli.ok("inspect", str(folder)).out
    assert "quantization: quant_method modelopt, quant_algo W8A8_SQ_PER_CHANNEL\nnote: transformers does not" in looked
    cli.ok("convert", str(folder), str(tmp_path / "again"))
    assert (tmp_path / "again" / "rank0.safetensors").read_bytes() == (ranks / "rank0.safetensors").read_bytes()
    refused = cli.run("quantize", "--quant", "fp8", str(folder), str(tmp_path / "no"))
    assert (refused.status, "describes an already quantized model" in refused.err) == (3, True), refused.err
    # On the text it was calibrated with: so few rows would be too few for any other.
    measured = cli.ok(
        "verify", str(model), str(folder), "--text", str(text), "--rows", "4", "--seq-len", "128", "--json"
    )
    told = json.loads(measured.out)
    assert (told["passed"], told["quant_algo"], told["kv_cache_quant_algo"]) == (True, "W8A8_SQ_PER_CHANNEL", None)


@pytest.mark.parametrize(
    ("options", "status", "telling"),
    [
        (["--quant", "fp9"], 2, "unknown quantization 'fp9' in --quant; did you mean 'fp8'?"),
        (
            ["--quant", "fp8", "--calib", "nowhere"],
            2,
            "no text 'nowhere': it is neither a file nor a data set",
        ),
        (["--quant", "fp8", "--calib", "SHORT"], 3, "SHORT gives 0 rows of 512 tokens, not 512; give"),
        (["--quant", "fp8", "--format", "onnx"], 2, "unknown format 'onnx'; known: trtllm, hf"),
        (["--quant", "int4-awq"], 2, "groups of 128 do not divide the 576 and 1536 input features"),
        # Groups of 64 do: it is the text that is found wanting now.
        (["--quant", "int4-awq", "--group-size", "64", "--calib", "SHORT"], 3, "SHORT gives 0 rows"),
        (["--quant", "fp8", "--group-size", "64"], 2, "fp8 has no groups"),
        (["--quant", "fp8", "--tp", "2"], 2, "tp_size 2 does not divide the 9 attention heads; tp sizes that fit: "),
    ],
)
def test_a_wrong_request_is_one_line_and_leaves_nothing(
    model: Path, tmp_path: Path, options: list[str], status: int, telling: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Within this process: a command takes a second to start."""
    short = tmp_path / "short.txt"
    short.write_text("Too little to calibrate with.\n")
    given = [str(short) if option == "SHORT" else option for option in options]
    monkeypatch.setattr(sys, "argv", ["trtpipe", "quantize", str(model), str(tmp_path / "out"), *given])
    with pytest.raises(SystemExit) as ended:
        app.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (status, "", 1)
    assert err.startswith("error: " + telling.replace("SHORT", str(short)))
    assert list(tmp_path.iterdir()) == [short]
