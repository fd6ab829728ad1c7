"""Parts of `make gpu-e2e`'s page about correctness and quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.benchmarks.gpu.page_parts import commands, where


def families(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        exact, half = row["float32"], row["bfloat16"]
        settings = ", ".join(f"{name} {value}" for name, value in row["settings"].items() if value is not None)
        parted = sum(half["before"]) / len(half["before"])
        rows.append(
            f"| {row['family']} | {settings} | {exact['same']} of {len(exact['before'])} "
            f"| {'yes' if exact['alone'] else 'no'} | {half['same']} | {parted:.0f} |"
        )
    return "\n".join(
        [
            "## Families in the reference runtime\n",
            where(section),
            "A model of 4 layers of random weights, 20 prompts of 64 tokens, 64 new tokens each, greedy: the reference "
            "runtime's\nanswers and transformers' in float32, both on the GPU.\n",
            "| family | its settings | float32: the same answers | one request alone too | bfloat16: the same answers "
            "| tokens before they part |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            commands(section),
        ]
    )


def accuracy(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    rows = _pairs(result)
    greedy = [
        f"| {one['precision']} | {one['vllm_method'] or 'none'}, KV cache {one['vllm_kv_cache']} "
        f"| {one['same']} of {one['answers']} | {one['same_tokens']:.1%} |"
        for one in result["greedy"]
    ]
    return "\n".join(
        [
            "## Correctness: SmolLM2-135M-Instruct, real weights\n",
            where(section),
            f"Distributions over {result['rows']} x {result['length']} tokens of held-out text; vLLM runs our Hugging "
            "Face folder,\nthe reference runtime our TensorRT-LLM checkpoint of the same quantization. KL in nats a "
            "token; where vLLM is one side,\nit tells its 64 likeliest tokens and all others count as one, so that it "
            "is a lower bound. Folder: our\narithmetic on the folder that vLLM runs, a matrix at a time. What float32 "
            "in place of bfloat16 moves there is rounding's\nown noise, and no two implementations can be nearer. FP8 "
            "KV: vLLM and our arithmetic on the folder read a prompt's own\nkeys through the cache, the reference "
            "runtime, as TensorRT-LLM, takes them as they were computed.\n",
            "| of | to | mean KL | same likeliest token | places |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Greedy answers, vLLM's against the reference runtime's:\n",
            "| precision | how vLLM took the folder | same to the end | tokens before they part |",
            "|---|---|---|---|",
            *greedy,
            "",
            commands(section),
        ]
    )


def folders(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    answers = [f"| {one['precision']} | {one['vllm_method']} | {one['text'].strip()!r} |" for one in result["answers"]]
    return "\n".join(
        [
            "## Other precisions in vLLM: SmolLM2-135M-Instruct\n",
            where(section),
            f"As above, over {result['rows']} x {result['length']} tokens: vLLM against our arithmetic on the folder "
            "that it runs, and against the\nunquantized model. INT8 with a scale a token and 4-bit groups of 64 are "
            "compressed-tensors folders, as llm-compressor\nwrites them.\n",
            "| of | to | mean KL | same likeliest token | places |",
            "|---|---|---|---|---|",
            *_pairs(result),
            "",
            f"Greedy answers to the same prompt; unquantized: {result['plain'].strip()!r}\n",
            "| precision | how vLLM took the folder | answer |",
            "|---|---|---|",
            *answers,
            "",
            commands(section),
        ]
    )


def _pairs(result: Mapping[str, Any]) -> list[str]:
    return [
        f"| {pair['of']} | {pair['to']} | {pair['kl']:.5f} | {pair['top1']:.2%} | {pair['places']:,} |"
        for pair in result["pairs"]
    ]


def quantize(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## FP8 calibration and write\n",
            where(section),
            "512 samples of 512 tokens, model to Hugging Face folder: ModelOpt's own flow "
            f"{result['modelopt_s']:.1f} s, ours {result['ours_s']:.1f} s:\n"
            f"{result['modelopt_s'] / result['ours_s']:.2f} times as fast, in {result['ours_peak_gib']:.1f} GiB of the "
            "GPU's memory. [More of it](quantize.md).\n",
            commands(section),
        ]
    )
