"""Parts of `make gpu-e2e`'s page about ranks: two on one GPU, and one on each of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.benchmarks.gpu import comparison
from tests.benchmarks.gpu.page_parts import commands, where


def shared_gpu(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## Two ranks on one GPU\n",
            where(section),
            "Our checkpoint of two ranks, executed by the reference runtime with a process a rank, over NCCL; both on "
            "the one GPU, where\nthey wait for each other's turn, so that nothing of it is a speed. Eight prompts and "
            "greedy answers.\n",
            *_agreement(result),
            commands(section),
        ]
    )


def parallel(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    speeds = []
    for name in ("bf16", "fp8"):
        one = result[name]
        for level in one["tokens_per_s"]:
            two, alone = one["tokens_per_s"][level]["waves"], one["tokens_per_s_of_one"][level]["waves"]
            speeds.append(f"| {name} | {level} | {two:,.0f} | {alone:,.0f} | {two / alone:.2f} |")
    measured = result.get("vllm_fp8", {})
    vllm = ", ".join(f"{ways['waves']:,.0f} at {level}" for level, ways in measured.items())
    return "\n".join(
        [
            "## Two GPUs\n",
            where(section),
            "Our checkpoint of two ranks, executed by the reference runtime with a process and a GPU a rank, over "
            "NCCL. Eight prompts and\ngreedy answers.\n",
            *_agreement(result),
            "| precision | in flight | tok/s on two | tok/s on one | ratio |",
            "|---|---|---|---|---|",
            *speeds,
            "",
            f"vLLM on two GPUs from the FP8 folder: {vllm} tok/s.\n"
            if vllm
            else "vLLM on two GPUs from the FP8 folder was not measured: the machine was given back before its turn.\n",
            *comparison.predictions({"vLLM fp8, tp 2": (result.get("vllm_fp8_predicted", {}), measured)}),
            "What `trtpipe probe` measured:\n",
            "```yaml",
            *[text.rstrip() for text in result["probe"]],
            "```\n",
            commands(section),
        ]
    )


def _agreement(result: Mapping[str, Any]) -> list[str]:
    """Of ranks apart with the same shards one after the other in one process, and with the checkpoint of one rank."""
    rows = []
    for name in ("bf16", "fp8"):
        if name in result:
            rows += [
                f"| {name} | {pair['to']} | {pair['kl']:.6f} | {pair['top1']:.2%} | {pair['largest']:.3g} "
                f"| {_decoded(pair['decoded'])} | {pair['answers']} of {pair['of']} |"
                for pair in result[name]["pairs"]
            ]
            rows.append(f"| {name} | itself, once more | | | | {_decoded(result[name]['again'])} | |")
    return [
        "The first three figures are of the logits behind every token of prompts and answers, all read at once; then "
        "those of\ndecoding, up to where two answers part. The weights are random and many logits nearly equal: "
        "rounding alone, which\ntwo ways to split a sum do not share, changes likeliest tokens. That is no reason "
        "for the same shards to differ.\n",
        "| precision | against | mean KL | same likeliest token | largest difference of a logit | equal when decoded "
        "| same answers |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _decoded(steps: Mapping[str, Any]) -> str:
    if steps["equal"] == steps["steps"]:
        return f"all {steps['steps']:,} steps"
    return f"{steps['equal']:,} of {steps['steps']:,} steps, else {steps['largest']:.3g} at most"
