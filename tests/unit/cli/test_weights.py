"""`trtpipe convert`, `inspect`, `restore`, `quantize` and `verify` on plain folders."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.factories import hf_folder, write_safetensors
from tests.unit.cli.conftest import Run, fill_the_disk
from tests.unit.cli.damages import DAMAGES, missing_tensor
from trtpipe.engines.accuracy.job import Alone
from trtpipe.engines.errors import HostError, StageFailed
from trtpipe.pipeline.accuracy import gate
from trtpipe.pipeline.sources import calibration, hub


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["quantize", "MODEL", "out", "--quant", "fp8", "--samples", "0"], "--samples is 0; give a positive number"),
        (
            ["quantize", "MODEL", "out", "--quant", "fp8", "--calib", "demo", "--seq-len", "999999999"],
            "--seq-len is 999999999, and the model takes 256 tokens; use --seq-len 256 or less",
        ),
        (
            ["quantize", "MODEL", "out", "--quant", "fp8", "--calib", "short.txt", "--samples", "9", "--seq-len", "4"],
            "short.txt gives 2 rows of 4 tokens, not 9; use --samples 2, or a longer file",
        ),
        (
            ["verify", "MODEL", "MODEL", "--text", "short.txt", "--rows", "9", "--seq-len", "4"],
            "short.txt gives 2 rows of 4 tokens, not 9; use --rows 2, or a longer file",
        ),
        (
            ["verify", "MODEL", "MODEL", "--text", "nowhere"],
            "no text 'nowhere': it is neither a file nor a data set; known: cnn_dailymail, demo, heldout, wikitext2",
        ),
        (
            ["quantize", "MODEL", "out", "--quant", "int8-qs"],
            "unknown quantization 'int8-qs' in --quant; did you mean 'int8-sq'?",
        ),
        (
            ["quantize", "MODEL", "out", "--quant", "fp8", "--calib", "absent", "--device", "tpu"],
            "unknown device 'tpu'; known: auto, cpu, cuda",
        ),
        (
            ["verify", "MODEL", "MODEL", "--tasks", "task.yaml"],
            "task.yaml: there is no data file absent.jsonl; put it there, or correct data_files",
        ),
        (["verify", "MODEL", "MODEL", "--rows", "0"], "--rows is 0; give a positive number"),
        (
            ["restore", "MODEL", "out"],
            "MODEL is a Hugging Face folder; give a TensorRT-LLM checkpoint, as `trtpipe convert` makes it",
        ),
    ],
)
def test_a_remedy_names_an_option_that_the_command_has(
    run: Run, model: Path, in_folder: Path, words: list[str], line: str
) -> None:
    (in_folder / "short.txt").write_text("eleven char")
    task = {"task": "a", "dataset_path": "json", "dataset_kwargs": {"data_files": "absent.jsonl"},
            "doc_to_text": "q", "doc_to_target": "a"}  # fmt: skip
    (in_folder / "task.yaml").write_text(json.dumps(task))
    done = run(*(word.replace("MODEL", str(model)) for word in words))
    assert done.error() == line.replace("MODEL", str(model))


def test_verify_tells_a_wrong_order_and_a_missing_tokenizer(run: Run, model: Path, in_folder: Path) -> None:
    assert run("convert", model, "out").status == 0
    for given, right in ((["out", model], model), (["out"], "HF_DIR"), (["out", "out"], "HF_DIR")):
        assert run("verify", *given).error() == (
            "out is a TensorRT-LLM checkpoint: the first folder is the original, a Hugging Face folder; "
            f"use `trtpipe verify {right} out`"
        )
    for command in (["convert", "out", "other"], ["quantize", "out", "other", "--quant", "fp8"]):
        assert run(*command).error() == (
            "out is a TensorRT-LLM checkpoint; give the Hugging Face folder that it was made of"
        )
    assert run("restore", "out", "back").status == 0
    assert run("verify", "back", "out").error() == (
        "back has no tokenizer.json: text cannot be tokenized; "
        "copy tokenizer.json from the original model, or download the model again"
    )


def test_the_remedy_for_a_data_set_names_options_of_quantize(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: str) -> Path:
        raise HostError("no data", remedy="--set calibration.data=demo --set calibration.samples=128")

    monkeypatch.setattr(hub, "download_data", unreachable)
    assert run("quantize", model, "out", "--quant", "fp8", "--seq-len", "64").error() == (
        "no data; --calib demo --samples 128"
    )


def test_quantize_tells_what_it_does_not_read(
    run: Run, model: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtpipe.engines.quantize.job.quantize", lambda *given, **more: [])
    (in_folder / "mine.jsonl").write_text(json.dumps({"prompt": "why? " * 20, "response": "so"}))
    words = ("--quant", "fp8", "--calib", "mine.jsonl", "--samples", "1", "--seq-len", "32")
    done = run("quantize", model, "out", *words)
    assert done.status == 0, done.err
    assert "note: mine.jsonl: of its objects only 'prompt' is read, not 'response'" in " ".join(done.err.split())


def test_convert_writes_a_checkpoint(run: Run, model: Path, in_folder: Path) -> None:
    done = run("convert", model, "out", "--dtype", "bfloat16", "--tp", "2", "--pp", "1")
    assert done.status == 0, done.err
    next_step = f"trtpipe inspect out --verify-against {model}"
    assert done.out == f"out: config.json and 2 rank file(s)\nnext: {next_step}\n"
    assert run(*next_step.split()[1:]).status == 0
    assert sorted(path.name for path in (in_folder / "out").iterdir()) == [
        "config.json", "rank0.safetensors", "rank1.safetensors",
    ]  # fmt: skip
    config = json.loads((in_folder / "out" / "config.json").read_text())
    assert (config["dtype"], config["mapping"]["tp_size"]) == ("bfloat16", 2)
    assert run("convert", model, "same", "--dtype", "bf16", "--tp", "2").status == 0
    for name in ("rank0.safetensors", "rank1.safetensors"):
        assert (in_folder / "same" / name).read_bytes() == (in_folder / "out" / name).read_bytes()
    assert run("convert", model, "auto").status == 0
    assert json.loads((in_folder / "auto" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not Path("runs").exists()


def test_inspect_proves_a_checkpoint_and_restore_gives_the_folder_back(run: Run, model: Path, in_folder: Path) -> None:
    out, back = in_folder / "out", in_folder / "back"
    embedding = ["--use-parallel-embedding", "--embedding-sharding-dim", "1"]
    assert run("convert", model, out, "--tp", "2", *embedding, "--toolchain", "0.21.0").status == 0
    proof = run("inspect", out, "--verify-against", model)
    assert (proof.status, "no problem found" in proof.out) == (0, True)
    assert proof.err == f"{out} equals {model}: every tensor, bit for bit\n"
    listed = json.loads(run("inspect", out, "--json").out)
    assert (listed["kind"], listed["mapping"]["tp_size"], listed["problems"]) == ("tensorrt_llm", 2, [])
    assert listed["bytes"] == sum(tensor["nbytes"] for tensor in listed["tensors"])
    assert run("restore", out, back).status == 0
    assert (back / "model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size
    other = hf_folder(in_folder / "other", seed=1)
    wrong = run("inspect", out, "--verify-against", other)
    assert wrong.status == 3
    assert wrong.error().startswith(f"{out} has ")
    assert "problem: tensor 'transformer.vocab_embedding.weight' in rank0.safetensors: differs" in wrong.out


def test_restore_names_a_missing_rank_file_and_leaves_the_checkpoint_alone(
    run: Run, model: Path, in_folder: Path
) -> None:
    assert run("convert", model, "out", "--tp", "2").status == 0
    inside = run("restore", "out", "out/back")
    assert (inside.status, inside.error()) == (
        2,
        "out/back is in the checkpoint's folder; name a new folder outside it",
    )
    (in_folder / "out" / "rank1.safetensors").unlink()
    done = run("restore", "out", "back")
    assert (done.status, done.error()) == (
        3,
        "out/rank1.safetensors is missing: the mapping of config.json has 2 ranks; copy the checkpoint's whole folder, "
        "or convert the model again",
    )
    assert sorted(path.name for path in in_folder.iterdir() if path.name in ("out", "back")) == ["out"]


def test_a_cast_is_told_when_it_is_made_and_when_it_is_proved(run: Run, in_folder: Path) -> None:
    model = hf_folder(in_folder / "wide", dtype="F32", torch_dtype="float32")
    made = run("convert", model, "out")
    assert "note: F32 becomes F16, as with TensorRT-LLM; --dtype writes another\n" in made.err
    proof = run("inspect", "out", "--verify-against", model)
    assert proof.err == f"out equals {model}, F32 as F16: every tensor, bit for bit after that cast\n"
    assert run("convert", hf_folder(in_folder / "narrow"), "wider", "--dtype", "float32").status == 0
    proof = run("inspect", "wider", "--verify-against", "narrow")
    assert proof.err == "wider equals narrow, BF16 as F32: every tensor, bit for bit after that cast\n"
    assert "note:" not in run("convert", model, "same", "--dtype", "float32").err
    assert run("inspect", "same", "--verify-against", model).err == f"same equals {model}: every tensor, bit for bit\n"


def test_convert_never_overwrites(run: Run, model: Path, in_folder: Path) -> None:
    (in_folder / "out").mkdir()
    (in_folder / "out" / "mine").write_text("mine")
    done = run("convert", model, "out")
    assert (done.status, done.error()) == (
        2,
        f"{in_folder}/out already exists and is not an empty folder; name a new folder",
    )
    assert [path.name for path in (in_folder / "out").iterdir()] == ["mine"]
    assert run("convert", model, model / "config.json" / "out").status == 4
    assert run("convert", model, model / "config.json").status == 2


@pytest.mark.parametrize(("damage", "message"), [*DAMAGES, (missing_tensor, "tensor 'model.layers.2.")])
def test_convert_that_fails_leaves_nothing(
    run: Run, model: Path, in_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(model)
    done = run("convert", model, "out")
    assert done.status == 3
    assert done.error().startswith(message.format(model))
    assert list(in_folder.iterdir()) == [model]


@pytest.mark.parametrize("command", ["convert", "restore"])
def test_a_full_disk_is_named_and_nothing_is_left(
    run: Run, model: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Also by restore, which writes through memory: without its blocks the file would end the process by SIGBUS."""
    assert run("convert", model, "checkpoint").status == 0
    before = sorted(in_folder.iterdir())
    fill_the_disk(monkeypatch)
    done = run(command, model if command == "convert" else "checkpoint", "out")
    assert done.status == 4
    assert done.error().startswith(f"the disk of {in_folder} is full: No space left on device; ")
    assert done.error().endswith(" are free; free some space there, or name another folder")
    assert sorted(in_folder.iterdir()) == before


def test_convert_refuses_what_cannot_be(run: Run, model: Path, in_folder: Path) -> None:
    for options, message in (
        (["--dtype", "bfloat"], "unknown dtype 'bfloat'; did you mean 'bfloat16'?"),
        (
            ["--dtype", "fp8"],
            "--dtype fp8 is a quantization, not a type of unquantized weights; "
            f"run `trtpipe quantize {model} out --quant fp8`",
        ),
        (["--tp", "0"], "tp_size 0 and pp_size 1 must both be at least 1; pass --tp and --pp as positive numbers"),
    ):
        done = run("convert", model, "out", *options)
        assert (done.status, done.error()) == (2, message)
    assert run("convert", model, "out", "--tp", "3").status == 2  # 4 heads
    assert run("quantize", model, "out", "--quant", "fp8", "--dtype", "fp8").error() == (
        "--dtype fp8 is a quantization, not a type of unquantized weights; give --quant fp8"
    )
    assert list(in_folder.iterdir()) == [model]


def test_convert_needs_no_tokenizer(run: Run, in_folder: Path) -> None:
    folder = hf_folder(in_folder / "bare", tokenizer=False)
    assert run("convert", folder, "out").status == 0


def test_inspect_begins_with_the_summary(run: Run, model: Path) -> None:
    short = run("inspect", model).out.splitlines()
    assert short[0].startswith("huggingface LlamaForCausalLM, ")
    assert "; --tensors lists them" in short[1]
    assert short[-1] == "no problem found"
    long = run("inspect", model, "--tensors").out.splitlines()
    assert long[len(short)].split() == ["file", "tensor", "dtype", "shape", "bytes"]
    assert len(long) > len(short) + 10
    assert run("convert", model, "out").status == 0
    assert "quantization: none" in run("inspect", "out").out.splitlines()
    os.truncate(model / "model.safetensors", 4)
    damaged = run("inspect", model)
    assert damaged.out.splitlines()[:2] == ["huggingface LlamaForCausalLM, bfloat16", "tensors: none that can be read"]
    assert damaged.status == 3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["quantize", "MODEL", "out", "--quant", "fp8", "--save-scales", "folder"],
            "folder is a folder; give the name of a file",
        ),
        (
            ["quantize", "MODEL", "out", "--quant", "fp8", "--save-scales", "file/scales"],
            "file/scales cannot be written: file is not a folder; give another place for it",
        ),
        (
            ["verify", "MODEL", "--report", "file"],
            "file/accuracy.json cannot be written: file is not a folder; give another place for it",
        ),
        (["verify", "MODEL", "--report", "folder"], "folder/accuracy.html is a folder; give the name of a file"),
    ],
)
def test_the_place_of_a_result_is_looked_at_before_the_work(
    run: Run, model: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    (in_folder / "folder" / "accuracy.html").mkdir(parents=True)
    (in_folder / "file").touch()
    monkeypatch.setattr(calibration, "samples", lambda *_: pytest.fail("the work has begun"))
    assert run(*(word.replace("MODEL", str(model)) for word in words)).error() == line


def test_verify_prints_what_it_cannot_write(
    run: Run, model: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_alone(*_: object, **__: object) -> Alone:
        (in_folder / "report").touch()  # meanwhile by someone else
        return Alone(
            rows=16, seq_len=128, device="cpu", vocab_size=300, quant_algo=None, kv_cache_quant_algo=None,
            quantized_dtype="bfloat16", quantized_nll=math.log(27.4), saturation=(),
        )  # fmt: skip

    monkeypatch.setattr(gate, "measure_alone", measure_alone)
    done = run("verify", model, "--rows", "2", "--seq-len", "32", "--report", "report")
    assert (done.status, done.error()) == (
        4, "the accuracy report cannot be written to report: File exists; give another place for it",
    )  # fmt: skip
    assert "27.4" in done.out


@pytest.mark.parametrize("fails", [True, False])
def test_the_log_of_a_failure_stays_and_no_other(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    def quantize(*arguments: object, log: Path, **more: object) -> list[str]:
        log.write_text("what happened\n")
        if fails:
            raise StageFailed("quantizing failed", remedy=f"the log is {log}")
        return []

    monkeypatch.setattr("trtpipe.engines.quantize.job.quantize", quantize)
    scales = tmp_path / "scales.safetensors"
    write_safetensors(scales, {}, "BF16")
    done = run("quantize", model, "out", "--quant", "fp8", "--scales", scales)
    assert done.status == 5 * fails, done.err
    logs = list((tmp_path / "home" / "logs").iterdir())
    assert len(logs) == fails
    if fails:
        assert done.error() == f"quantizing failed; the log is {logs[0]}"
        assert logs[0].read_text() == "what happened\n"
