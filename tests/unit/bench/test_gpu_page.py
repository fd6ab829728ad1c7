"""The page of `make gpu-e2e`, from figures whose ratios are known, and the loads that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from tests.benchmarks.gpu import comparison, features, long_load, page, predicted, served_page
from tests.benchmarks.gpu.__main__ import left_out
from tests.benchmarks.gpu.cards import merged
from tests.benchmarks.gpu.place import write_load
from tests.benchmarks.gpu.steps import compare_steps
from trtpipe.engines.engine_process.request import Output
from trtpipe.pipeline.bench.load.files import find_load
from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.load.work import Work

MACHINE = {
    "gpu": "NVIDIA H200", "gpus": 1, "sm": 90, "memory_mib": 143771, "driver": "580.1", "cores": 16,
    "python": "3.12.3", "bandwidth_gbs": 4000.0, "cuda": "13.0", "http_streams": 278,
}  # fmt: skip


def section(result: dict[str, Any], **machine: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-22", "seconds": 61.0, "machine": MACHINE | machine, "versions": {"vllm": "0.25.0"},
        "commands": ["trtpipe build --dtype fp8"], "result": result,
    }  # fmt: skip


def test_accuracy() -> None:
    pairs = [{"of": "vLLM fp8", "to": "reference fp8", "kl": 0.0123, "top1": 0.95, "places": 4080}]
    greedy = [
        {
            "precision": "fp8", "vllm_method": "modelopt", "vllm_kv_cache": "auto", "answers": 16, "same": 9,
            "same_tokens": 0.75, "text": "a", "ours": "a",
        }
    ]  # fmt: skip
    text = page.render({"accuracy": section({"pairs": pairs, "greedy": greedy, "rows": 16, "length": 256})})
    assert "| vLLM fp8 | reference fp8 | 0.01230 | 95.00% | 4,080 |" in text
    assert "| fp8 | modelopt, KV cache auto | 9 of 16 | 75.0% |" in text
    assert "2026-11-22, NVIDIA H200 (SM90), driver 580.1, CUDA 13.0, 16 cores; vllm 0.25.0." in text
    assert "trtpipe build --dtype fp8" in text


def test_speed_of_an_engine_and_what_is_left_of_it_behind_a_front() -> None:
    row = {
        "protocol": "grpc", "concurrency": 256, "tokens_per_s": 9500.0, "ttft_p50_ms": 41.0, "itl_p50_ms": None,
        "itl_p99_ms": 12.25, "failed": 2, "valid": False, "pattern": "steady", "ttft_p99_ms": 80.0,
    }  # fmt: skip
    native = {**row, "protocol": "native", "tokens_per_s": 9000.0, "failed": 0, "valid": True}
    waves = {**row, "pattern": "waves", "tokens_per_s": 19_000.0, "failed": 0, "valid": True}
    result = {
        "fp8": {"in_process": {"256": {"waves": 20000.0, "steady": 10000.0}}, "served": [row, waves, native]},
        "bf16": {"in_process": {"256": {"waves": 16000.0, "steady": 8000.0}}, "served": []},
    }
    text = page.render({"engine": section(result)})
    assert "| precision | in flight | waves | over bf16 | steady | over bf16 |" in text
    assert "| fp8 | 256 | 20,000 | 1.25 | 10,000 | 1.25 |" in text
    steady = "| fp8 | Triton gRPC | 256 | steady | 9,500 | 95.0% | 105.6% | 41 / 80 | - / 12.2 |"
    assert f"{steady} INVALID: the client was the limit, 2 failed |" in text
    assert "| fp8 | `vllm serve` | 256 | steady | 9,000 | 90.0% | 100.0% | 41 / 80 | - / 12.2 |  |" in text
    assert "had room for 278 chunks" in text


def test_a_cache_of_8_bits_beside_the_same_weights_without() -> None:
    result = {
        name: {"in_process": {"256": {"waves": speed, "steady": speed}}, "served": []}
        for name, speed in (("fp8-kv", 21_000.0), ("fp8", 20_000.0))
    }
    text = page.render({"kv_cache": section(result)})
    assert "| precision | in flight | waves | over fp8 | steady | over fp8 |" in text
    assert "| fp8-kv | 256 | 21,000 | 1.05 | 21,000 | 1.05 |" in text


def test_the_reference_runtime_beside_transformers_and_the_bound() -> None:
    speeds = {
        load_point: {"waves": speed, "steady": 1.0}
        for load_point, speed in (("1", 150.0), ("64", 4000.0), ("256", 9000.0))
    }
    served = [{"tokens_per_s": 100.0, "concurrency": 1}]
    result = {
        "transformers": {"generate": {"1": {"waves": 50.0}}, "batching": {"256": {"waves": 1500.0}}},
        "bf16": {"in_process": speeds, "bytes_a_token": 16_000_000_000},
        "int8": {"in_process": speeds, "bytes_a_token": 8_000_000_000, "served": served},
    }
    text = page.render({"reference": section(result)})
    assert "| reference, bf16 | 150 | 250 | 4,000 | 9,000 | 3.0 / 6.0 | 60% |" in text
    assert "INT8 served by tritonserver, over gRPC: 100 at 1 tok/s." in text


def test_quantizing() -> None:
    result = {"modelopt_s": 30.0, "ours_s": 12.0, "ours_peak_gib": 6.8}
    assert "2.50 times as fast, in 6.8 GiB" in page.render({"quantize": section(result)})


def test_two_gpus() -> None:
    pair = {
        "to": "one rank", "kl": 0.00012, "top1": 0.999, "places": 1536, "largest": 0.0625, "answers": 7, "of": 8,
        "decoded": {"steps": 230, "equal": 12, "largest": 0.125},
    }  # fmt: skip
    speed = {"1": {"waves": 200.0, "steady": 1.0}}
    again = {"steps": 256, "equal": 256, "largest": 0.0}
    one = {
        "pairs": [pair],
        "again": again,
        "tokens_per_s": speed,
        "tokens_per_s_of_one": {"1": {"waves": 160.0, "steady": 1.0}},
    }
    result = {"probe": ["name: h200\n"], "bf16": one, "fp8": one, "vllm_fp8": speed}
    text = page.render({"parallel": section(result, gpus=2)})
    assert "2 x NVIDIA H200 (SM90)" in text
    assert "| fp8 | one rank | 0.000120 | 99.90% | 0.0625 | 12 of 230 steps, else 0.125 at most | 7 of 8 |" in text
    assert "| fp8 | itself, once more | | | | all 256 steps | |" in text
    assert "| bf16 | 1 | 200 | 160 | 1.25 |" in text
    assert "vLLM on two GPUs from the FP8 folder: 200 at 1 tok/s." in text


def test_two_ranks_on_one_gpu() -> None:
    pair = {
        "to": "the same shards in one process", "kl": 0.0, "top1": 1.0, "places": 1280, "largest": 0.0, "answers": 8,
        "of": 8, "decoded": {"steps": 256, "equal": 255, "largest": 0.25},
    }  # fmt: skip
    again = {"steps": 1256, "equal": 1256, "largest": 0.0}
    text = page.render({"shared_gpu": section({"bf16": {"pairs": [pair], "again": again, "tokens_per_s": {}}})})
    told = "255 of 256 steps, else 0.25 at most"
    assert f"| bf16 | the same shards in one process | 0.000000 | 100.00% | 0 | {told} | 8 of 8 |" in text
    assert "| bf16 | itself, once more | | | | all 1,256 steps | |" in text


def test_steps_are_compared_up_to_where_answers_part() -> None:
    def answer(*steps: tuple[int, float]) -> list[Output]:
        return [Output(id=0, tokens=[t], generation_logits=np.full((1, 4), v, np.float32)) for t, v in steps]

    ours = [answer((1, 0.0), (2, 0.5), (3, 1.0)), answer((7, 2.0), (8, 2.0))]
    theirs = [answer((1, 0.0), (4, 0.25), (3, 9.0)), answer((7, 2.0), (8, 2.0))]
    assert compare_steps(ours, theirs) == {"steps": 4, "equal": 3, "largest": 0.25}


def test_what_was_not_run_is_always_told() -> None:
    nothing = page.render({})
    assert "TensorRT engines" in nothing
    assert "**Several GPUs**" in nothing
    speeds: dict[str, Any] = {"fp8": {"in_process": {}, "served": []}}
    there = page.render({"kv_cache": section(speeds)})
    assert "**The speed of an FP8 KV cache**" in nothing
    assert "**The speed of an FP8 KV cache**" not in there


def test_what_cannot_run_on_a_machine_is_left_out_with_the_reason() -> None:
    assert left_out("parallel", 1, [2, 30, 3]) == "this machine has one GPU"
    assert left_out("parallel", 2, [2, 28, 9]) == ""
    assert left_out("shared_gpu", 1, [2, 30, 3]) == ""
    assert left_out("shared_gpu", 1, [2, 28, 9]) == "NCCL 2.28.9 lets no ranks share a GPU, 2.30 does"
    assert left_out("shared_gpu", 2, [2, 30, 3]) == "this machine has a GPU for each rank"
    assert left_out("engine", 1, [2, 28, 9]) == ""


def test_stacks_side_by_side_and_what_was_predicted() -> None:
    speeds = {"1": {"waves": 150.0, "ttft_p50_ms": 11.0, "joules_per_token": 3.0}, "256": {"waves": 10_000.0}}
    faster = {"1": {"waves": 300.0, "ttft_p50_ms": 9.0, "joules_per_token": 1.5}}
    predicted = {"1": {"tokens_per_s": 165.0, "ttft_p50_ms": 8.4}}
    result = {
        "fp8": {"in_process": faster, "served": [], "bytes_a_token": 8_000_000_000},
        "bf16": {"in_process": speeds, "served": [], "bytes_a_token": 16_000_000_000, "predicted": predicted},
    }
    study = {"float8": {"1": {"reason": "not within 200 s"}}}
    for one in (*speeds.values(), *faster.values()):
        one["steady"] = 1.0
    kept = {"engine": section(result), "reference": section({}), "study": section(study)}
    text = "\n".join(comparison.table(kept, 4000.0))
    assert (
        "- 1 in flight: vLLM, fp8 is the fastest, 2.00 times vLLM, bf16; vLLM, fp8 takes the fewest joules, 1.5 a"
        in text
    )
    assert "| vLLM, bf16 | 150 |  | 10,000 | 11 / - / - | 3 / - / - | 60% | 0.028 |" in text
    assert "| torch, compiled, torchao float8 | none |  |  | - / - / - | - / - / - |  |  |" in text
    assert "- torch, compiled, torchao float8, 1 in flight: not within 200 s." in text
    assert "- No section of this page has figures yet of torch, compiled, bf16; " in text
    assert ">10,000</text>" in comparison.figure(kept, "NVIDIA H100")
    assert "| bf16 | 1 | 165 | 150 | +10.0% | 8 / 11 |" in page.render({"engine": section(result)})


def test_features_beside_the_same_load_without() -> None:
    def row(speed: float, **counts: float) -> dict[str, float]:
        return {"tokens_per_s": speed, **counts}

    counts = {"draft_tokens": 400.0, "accepted_draft_tokens": 300.0, "decode_steps": 100.0}
    plain = {"64": row(8000.0), "repeating": {"64": row(7000.0)}, "drawn": row(6000.0), "json": row(4500.0)}
    vllm = {
        "plain": plain,
        "lora": {"0": row(7600.0), "8": row(4000.0)},
        "ngram": {"greedy": {"64": row(6000.0)}, "repeating": {"64": row(14_000.0, **counts)}},
    }
    text = page.render({"features": section({"vllm": vllm, "reference": {"plain": plain}})})
    assert "| vLLM | none | 7,600 | 8,000 | 0.95 |" in text
    assert "| vLLM | 8 | 4,000 | 8,000 | 0.50 |" in text
    assert "| reference runtime | 4,500 | 6,000 | 0.75 |" in text
    assert "| vLLM | free | 64 | 6,000 | 8,000 | 0.75 | none made |  |" in text
    assert "| vLLM | repeating | 64 | 14,000 | 7,000 | 2.00 | 75% of 400 | 4.00 |" in text
    cache = {"8": {"requests_per_s": 10.0, "latency_s": 0.5}, "32": {"requests_per_s": 2.0, "latency_s": 4.0}}
    text = page.render({"offload": section({"gpu": cache, "host": {"32": {"requests_per_s": 6.0, "latency_s": 1.5}}})})
    assert "| 8 | 32,768 | 10.0 |  |  | 0.50 / - |" in text
    assert "| 32 | 131,072 | 2.0 | 6.0 | 3.00 | 4.00 / 1.50 |" in text


def test_answers_that_repeat_are_the_only_ones_that_their_guide_allows() -> None:
    body = features._body("m", "repeating", **features.REPEATING)(7)
    assert body["structured_outputs"] == {"regex": "(0123456789){50}"}
    # Never whole, so that no answer ends before its length.
    assert body["max_tokens"] < 500
    assert "ignore_eos" not in body
    assert [features._body(["m:a", "m:b"], "x")(number)["model"] for number in range(3)] == ["m:a", "m:b", "m:a"]
    first, second = (features._again("m", 4)(number)["prompt"] for number in (1, 5))
    assert first[: features.PREFIX] == second[: features.PREFIX]
    assert first != second


def test_every_request_of_the_long_load_is_counted_once() -> None:
    Sent = long_load.Sent  # noqa: N806
    sent = [
        Sent(at=0.0, first=0.1, ended="answered"),
        Sent(at=1.0, first=1.3, ended="left"),
        Sent(at=2.0, ended="cut short"),
        Sent(at=3.0, ended="status 503"),
        Sent(at=4.0, ended="refused", possible=False),
        Sent(at=5.5, ended="refused"),
        Sent(at=6.0, ended="ReadTimeout"),
        Sent(at=7.0, first=7.1, ended="answered", possible=False),
    ]
    ended = long_load._ended(sent)
    assert ended == {
        "sent": 8, "answered": 1, "left": 1, "cut short": 1, "unavailable": 1, "refused": 1, "wrong": 2,
        "ReadTimeout": 1,
    }  # fmt: skip
    assert round(long_load._tail(sent)["max"]) == 300
    windows = long_load._windows(sent, 10.0)
    assert [one["sent"] for one in windows] == [5, 3]
    growth = {"rows": [["engine PSS MiB", 9000.0, 9001.0, 200.0]], "leaks": []}
    one = {
        "began_s": 100.0, "killed_s": 2.0, "back_s": 8.0, "ended": ended, "growth": growth, "windows": windows,
        "ttft_ms": {"p50": 50.0, "p99": 200.0, "p99.9": 250.0, "max": 300.0},
        "samples": [{"at": 1.0, "host_mib": 500.0, "engine_mib": 9000.0}],
    }  # fmt: skip
    result = {
        "minutes": 0.25, "rate": 2.0, "rounds": [one], "gpu_mib": [[111.0, 70_000.0]],
        "left_over": {"requests": 0, "kv_blocks": 0},
    }  # fmt: skip
    text = page.render({"long": section(result)}, tails="tails.svg")
    others = "1 cut short, 2 wrong, 1 ReadTimeout"
    assert f"| 1 | 8 | 1 | 1 | 1 | 1 | {others} | 8 | 6 | 50 / 200 / 250 / 300 |" in text
    assert "each round: 70,000 MiB" in text
    assert "(tails.svg)" in text
    ElementTree.fromstring(served_page.long_figure(result))


def test_what_tuning_wins() -> None:
    runs = [
        {"candidate": {}, "round": 0, "seconds": 90.0, "start_s": 60.0, "rate": 40.0, "told": "",
         "best": {"tokens_per_s": 5000.0}},
        {"candidate": {"build.max_num_tokens": 16384}, "round": 0, "seconds": 90.0, "start_s": 60.0, "rate": None,
         "told": "not measured", "best": {}},
    ]  # fmt: skip
    result = {
        "said": "it serves best as it is",
        "not_measured": {"a": "no time"},
        "runs": runs,
        "minutes": 7,
        "dtype": "fp8",
    }
    text = page.render({"tune": section(result)})
    assert "| defaults | 1 | 40.00 | 5,000 | 60 | 90 |" in text
    assert "| build.max_num_tokens 16384 | 1 | not measured |  | 60 | 90 |" in text
    assert "- Not measured: a: no time." in text


def test_sections_of_several_gpus_become_one_file() -> None:
    kept = {"engine": {"result": 1, "whole": True}, "tune": {"result": 2, "whole": True}, "reference": {"result": 3}}
    found = [{"tune": {"result": 4, "whole": False}, "engine": {"result": 5, "whole": True}},
             {"long": {"result": 6, "whole": False}, "reference": {"result": 7, "whole": False}}]  # fmt: skip
    whole = merged(kept, found, ["tune", "long,reference"])
    # What was cut off replaces nothing whole, and a list gives its own sections only.
    assert {name: one["result"] for name, one in whole.items()} == {"engine": 1, "tune": 2, "reference": 7, "long": 6}


def test_kernels_and_what_8_bits_gain() -> None:
    products = {"bf16": {"64": 180.0}, "fp8": {"64": 90.0}, "int8": {"64": 120.0}}
    attention = {"prompts": {"bf16": {"1 x 128": 15.0}, "fp8": {"1 x 128": 12.0}}}
    text = "\n".join(comparison.kernels({"products": products, "attention": attention}))
    assert "| 64 | 180 | 90 | 120 | 2.00 | 1.50 |" in text
    assert "| prompts | 1 x 128 | 15 | 12 | 1.25 |" in text
    assert "Attention: not measured (no kernel)." in "\n".join(
        comparison.kernels({"attention": {"reason": "no kernel"}})
    )


def test_the_loads_that_it_asks_for_are_load_files(tmp_path: Path) -> None:
    steady = find_load(str(write_load(tmp_path, 256, 6.0)))
    assert steady.load_points == (Closed(concurrency=256, duration_s=6.0),)
    assert steady.work == Work(input_tokens="128", output_tokens="128", folder=tmp_path)


def test_what_the_planner_says_of_a_load() -> None:
    said = predicted.together("h200", "fp8", "vllm", [1, 64])
    assert list(said) == ["1", "64"]
    # Within a fifth of what was measured there (docs/measurements/h200.md): 307 and 12,098.
    assert 250 < said["1"]["tokens_per_s"] < 370
    assert 9_700 < said["64"]["tokens_per_s"] < 14_500


def test_several_gpus_beside_one_and_what_sums_leave() -> None:
    by_bytes = {"nccl": {"16384": 10.0}, "one_shot": {"16384": 9.0}, "in_order": {"nccl": False, "one_shot": True}}
    steps = {"steps": 256, "equal": 256, "largest": 0.0}
    engines = {
        "reference bf16, tp 1": {"in_process": {"1": {"waves": 200.0, "model_share": 0.9}}, "again": steps},
        "reference bf16, tp 2": {
            "in_process": {"1": {"waves": 240.0, "model_share": 0.9}}, "nccl": {"1": {"waves": 250.0}},
            "again": steps, "one_process": {**steps, "equal": 255, "largest": 0.5}, "nccl_below": 1 << 20,
        },
    }  # fmt: skip
    text = page.render({"sums": section({"2": {"by_bytes": by_bytes}}), "pairs": section({"llama3-8b": engines})})
    assert "| 16,384 | 10.0 | 9.0 |" in text
    assert "order of the ranks: one-shot." in text
    assert "| bf16 | 1 | 2 | 240 | 1.20 | 250 | 1.25 |" in text
    assert "| reference bf16, tp 2 | 255 of 256, else 0.5 at most | 256 of 256 |" in text
    # 4 ms a token, of which 64 sums of 10 us are 0.64: 3.36 beside 5 ms.
    assert "take 0.64. If sums took no time, two GPUs would be 1.49 times as fast as one." in text
    assert "llama3-70b: vLLM fp8, tp 2" in text


def test_models_larger_than_one_gpu_of_which_one_was_not_measured() -> None:
    fast = {"1": {"waves": 150.0, "ttft_p50_ms": 20.0}, "64": {"waves": 3000.0, "ttft_p50_ms": 220.0}}
    slow = {level: {**one, "waves": one["waves"] / 6, "model_share": 0.99} for level, one in fast.items()}
    said = {"64": {"tokens_per_s": 4000.0, "ttft_p50_ms": 400.0}}
    steps = {"steps": 256, "equal": 256, "largest": 0.0}
    engines = {
        "vLLM fp8, tp 1": {"in_process": fast, "predicted": {"64": {"tokens_per_s": 3300.0, "ttft_p50_ms": 187.0}}},
        "reference fp8, tp 2": {"in_process": slow, "again": steps, "one_process": steps},
    }
    text = page.render({"pairs": section({"mixtral-8x7b": engines}), "large_served": section({"predicted": said})})
    assert "| vLLM fp8, tp 4 | 64 | 4,000 | 400 |" in text
    assert "llama3-70b: vLLM fp8, tp 4, alone and behind the fronts" in text
    assert "shapes behind our fronts" not in text
    assert "| vLLM fp8, tp 1 | 64 | 3,300 | 3,000 | +10.0% | 187 / 220 |" in text
    assert "is 6.0 times as fast as the reference runtime on two, and with 64\n6.0 times." in text
    assert "no expert parallelism" not in text
