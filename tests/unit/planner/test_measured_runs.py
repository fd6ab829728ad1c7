"""Tables of measured runs: how they are read and refused, predictions of them, and overheads refitted to them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.api.plan import against, plan
from trtpipe.pipeline.planner.against import calibrate, compare
from trtpipe.pipeline.planner.demand import closed_loop
from trtpipe.pipeline.planner.efficiency import load_efficiency, own_file
from trtpipe.pipeline.planner.measured_runs import MeasuredRun, option, predict_run, read
from trtpipe.pipeline.planner.predict import Prediction
from trtpipe.pipeline.planner.scheduler import Asked, Places, simulate

RUN = MeasuredRun(
    gpu="h100", model="llama3.1-8b", dtype="fp8-kv", input_tokens=500, output_tokens=200, concurrency=16,
    max_batch_size=64, max_num_tokens=8192,
)  # fmt: skip


def table(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    return file


HEAD = "gpu,model,dtype,input_tokens,output_tokens,concurrency,output_tokens_per_s\n"


def test_a_table_is_read_and_runs_that_cannot_be_planned_say_why(tmp_path: Path) -> None:
    rows = (
        "h100,llama3.1-8b,fp8-kv,500,200,16,3000\nh100,llama3.1-70b,bf16,500,200,16,100\nh99,llama3.1-8b,bf16,5,2,1,9\n"
    )
    found, kept = against(table(tmp_path, HEAD + rows))
    assert kept is None
    assert [figure.output_tokens_per_s for figure, _ in found.predicted] == [3000]
    assert [run.split()[0] for run, _ in found.refused] == ["h100", "h99"]
    assert "does not fit" in found.refused[0][1]
    assert "unknown GPU 'h99'" in found.refused[1][1]
    error = found.errors()["output_tokens_per_s"]
    predicted = found.predicted[0][1].output_tokens_per_s
    assert predicted is not None
    assert error.values == pytest.approx([predicted / 3000 - 1])


def test_lengths_that_are_all_equal_have_a_spread_of_0(tmp_path: Path) -> None:
    head = HEAD.replace("dtype", "requests").replace("concurrency", "length_spread")
    rows = "h100,llama3.1-8b,9,500,200,0,3000\nh100,llama3.1-8b,9,500,200,1.2,3000\n"
    assert [one.length_spread for one in read(table(tmp_path, head + rows))] == [0.0, 1.2]
    with pytest.raises(InputDataError, match="line 2: length_spread is -1"):
        read(table(tmp_path, head + "h100,llama3.1-8b,9,500,200,-1,3000\n"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu,model,input_tokens,ouput_tokens\n", "the column 'ouput_tokens' is not known; .*output_tokens"),
        ("gpu,model,input_tokens,output_tokens_per_s\n", "has no column output_tokens"),
        ("gpu,model,input_tokens,output_tokens\n", "has no measured quantity"),
        (HEAD + "h100,llama3.1-8b,bf16,many,200,16,3000\n", "line 2: input_tokens is 'many'"),
        (HEAD + "h100,llama3.1-8b,bf16,500,200,-1,3000\n", "line 2: concurrency is -1"),
        (HEAD + "h100,llama3.1-8b\n", "line 2 has not as many cells as the head"),
        (HEAD + ",llama3.1-8b,bf16,500,200,1,3000\n", "line 2 has no gpu"),
        (HEAD + "h100,llama3.1-8b,bf16,500,200,,3000\n", "line 2 does not say when requests were sent; give conc"),
        (HEAD.replace("dtype", "clients") + "h100,llama3.1-8b,apart,5,2,1,3\n", "'apart'; give spread or in_step"),
        ("", "has no column gpu"),
    ],
)  # fmt: skip
def test_a_bad_table_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InputDataError, match=why):
        read(table(tmp_path, text))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputDataError, match=r"pipe cannot be read as a CSV table: it is not a regular file; give "):
        read(tmp_path / "pipe")
    with pytest.raises(InputDataError, match=r"none.csv cannot be read .*: No such file or directory; give "):
        read(tmp_path / "none.csv")


def test_tokens_are_counted_when_they_come_and_not_when_their_request_ends() -> None:
    """Eight requests in step, a token a second for 100 s: 8 tokens a second in any window, though none or eight of
    them end within it."""
    places = Places(batch=8, tokens=1000, kv_blocks=1000)
    timeline = simulate([Asked(0.0, 10, 100)] * 8 + [Asked(90.0, 10, 100)] * 8, places, lambda step: 1.0)
    found = Prediction.of(timeline, offered=0.1, front_s=0.0, clients=0)
    assert found.tokens_per_s == pytest.approx(8.0, rel=0.02)


def test_clients_of_a_closed_loop_are_spread_or_in_step() -> None:
    first, follow = closed_loop([Asked(0.0, 10, 1000)] * 200, 100, 0.5, in_step=False)
    outputs = sorted(one.output for one in first)
    assert outputs[0] < 50
    assert 450 < outputs[50] < 550
    assert outputs[-1] > 950
    assert follow(0, 7.0) == Asked(7.5, 10, 1000)
    assert closed_loop([Asked(0.0, 10, 1000)] * 3, 2, 0.5, in_step=True)[0] == [Asked(0.0, 10, 1000)] * 2


def test_a_refit_finds_the_overheads_that_made_the_runs() -> None:
    """Runs as an engine with three times the overheads would have given."""
    how = load_efficiency()
    slower = dataclasses.replace(how, step_s=how.step_s * 3, layer_s=how.layer_s * 3, request_s=how.request_s * 3)
    runs = []
    for clients in (1, 16):
        run = dataclasses.replace(RUN, concurrency=clients)
        true = predict_run(run, slower)
        runs.append(dataclasses.replace(run, output_tokens_per_s=true.output_tokens_per_s, tpot_ms=true.tpot_ms))
    before = compare(runs, how).errors()["tpot_ms"].mean
    found = calibrate(runs, how)
    after = dataclasses.replace(how, runtimes={**how.runtimes, **found})
    assert set(found) == {"tensorrt_llm"}
    assert set(found["tensorrt_llm"]) == {"step_s", "layer_s", "request_s", "allreduce_s", "work", "front_s"}
    assert before > 0.3
    assert compare(runs, after).errors()["tpot_ms"].mean < 0.03


def test_a_refit_to_figures_beyond_the_card_reads_no_faster_than_the_data_sheet() -> None:
    how = load_efficiency()
    runs = [dataclasses.replace(RUN, concurrency=clients) for clients in (1, 16)]
    runs = [
        dataclasses.replace(run, output_tokens_per_s=3 * (predict_run(run, how).output_tokens_per_s or 0.0))
        for run in runs
    ]
    for begin in (how, dataclasses.replace(how, runtimes={**how.runtimes, "tensorrt_llm": {"work": 2.0}})):
        found = calibrate(runs, begin)
        after = dataclasses.replace(begin, runtimes={**begin.runtimes, **found}).of("tensorrt_llm")
        assert after.weights * 0.99 <= after.slower < 1


def test_a_refit_leaves_the_releases_as_far_apart_as_they_were() -> None:
    """Runs of an old release, as a machine with half of the speed would have given: `slower` of 0.14 is 1.14."""
    how = load_efficiency()
    run = dataclasses.replace(RUN, release="0.14")
    half = dataclasses.replace(how, runtimes={**how.runtimes, "tensorrt_llm": {"work": 2.0}})
    true = predict_run(run, half)
    runs = [dataclasses.replace(run, output_tokens_per_s=true.output_tokens_per_s, ttft_ms=true.ttft_ms)]
    # A file that was written before releases were kept apart says `slower` of all of them.
    earlier = dataclasses.replace(how, runtimes={**how.runtimes, "tensorrt_llm": {"slower": 1.5}})
    assert [earlier.of("tensorrt_llm", one).slower for one in ("0.14", None)] == [1.5, 1.5]
    for begin in (how, earlier):
        found = calibrate(runs, begin)
        after = dataclasses.replace(how, runtimes={**how.runtimes, **found})
        factor = found["tensorrt_llm"]["work"]
        assert factor == pytest.approx(2.0, rel=0.1)
        assert after.of("tensorrt_llm", "0.14").slower == pytest.approx(1.14 * factor)
        assert after.of("tensorrt_llm").slower == pytest.approx(factor)


@pytest.mark.parametrize(
    ("gpu", "model", "tp"), [("a100", "mixtral-8x7b", 2), ("h100", "llama3.1-8b-fp8", 1), ("a100", "llama3.1-8b", 1)]
)
def test_a_run_is_predicted_in_the_precision_that_a_plan_takes(gpu: str, model: str, tp: int) -> None:
    run = MeasuredRun(gpu=gpu, model=model, tp=tp, input_tokens=128, output_tokens=64)
    (planned,) = plan(model, gpu=gpu, tp=tp, input_tokens=128, output_tokens=64).candidates
    assert planned.option is not None
    assert option(run).precision == planned.option.precision


def test_a_run_in_a_precision_that_its_model_has_not_is_refused() -> None:
    """As `plan` and `build` refuse it."""
    run = MeasuredRun(gpu="a100", model="mixtral-8x7b", tp=2, input_tokens=128, output_tokens=64)
    assert option(run).precision.name == "int8-wo"
    with pytest.raises(UsageError, match="experts are not quantized with W8A8_SQ"):
        option(dataclasses.replace(run, dtype="int8-sq"))
    stored = MeasuredRun(gpu="h100", model="llama3.1-8b-fp8", dtype="bf16", input_tokens=128, output_tokens=64)
    with pytest.raises(UsageError, match=r"--dtype bf16 is not the precision of llama3\.1-8b-fp8"):
        option(stored)


def test_refitted_overheads_go_before_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTPIPE_HOME", str(tmp_path))
    own_file().write_text("runtimes: {vllm: {step_s: 0.5}}\n")
    assert load_efficiency().of("vllm").step_s == 0.5
    own_file().write_text("runtimes: {tensorrt_llm: {work: 1.5, front_s: 0.1}}\n")
    assert load_efficiency().of("tensorrt_llm", "0.14").slower == pytest.approx(1.14 * 1.5)
    own_file().write_text("runtimes: {tensorrt_llm: {slower: 1.5}}\n")
    assert load_efficiency().of("tensorrt_llm", "0.14").slower == 1.5
    own_file().write_text("runtimes: {vllm: {steps: 0.5}}\n")
    with pytest.raises(Exception, match="steps"):
        load_efficiency()


def test_the_share_of_the_kv_cache_holds_without_a_batch_too() -> None:
    whole, half = (
        option(dataclasses.replace(RUN, max_batch_size=None, max_num_tokens=None, kv_fraction=share))
        for share in (0.9, 0.45)
    )
    assert (whole.limits.max_batch_size, half.limits.max_batch_size) == (1536, 768)
    assert half.memory.kv_pool == pytest.approx(whole.memory.kv_pool / 2, rel=0.01)
    limits = option(dataclasses.replace(RUN, max_batch_size=None, max_num_tokens=4096, kv_fraction=0.45)).limits
    assert (limits.max_num_tokens, limits.kv_cache_free_gpu_mem_fraction) == (4096, 0.45)
