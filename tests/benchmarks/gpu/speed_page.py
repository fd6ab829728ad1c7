"""Parts of `make gpu-e2e`'s page about speed: engines alone and behind fronts, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.benchmarks.gpu import comparison
from tests.benchmarks.gpu.page_parts import commands, where

PROTOCOLS = {
    "grpc": "Triton gRPC", "http": "Triton `generate_stream`", "completions": "gateway", "native": "`vllm serve`",
}  # fmt: skip


def engine(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    room = section["machine"]["http_streams"]
    return "\n".join(
        [
            "## Speed: vLLM from our folders, alone and behind our fronts\n",
            where(section),
            "A Llama of Llama 3 8B's shapes and random weights, 128 tokens in and 128 out, a closed loop of so many "
            "requests\nin flight. Waves: all start, and so end, together. Steady: they are spread over a request's "
            "time, as the load tester\nspreads them, so that prompts are computed beside the tokens of others.\n",
            *_speeds(result, "bf16"),
            *comparison.predictions(_predicted(result)),
            "The same engine served: tritonserver, our backend, the load tester on the same machine. Triton's HTTP "
            f"server\nhad room for {room:,} chunks (docs/serving.md). `vllm serve` is what `trtpipe serve --front "
            "native` starts: one API server\nprocess, vLLM's default; the gateway had six workers. An engine holds 512 "
            "requests at once: of 1,512 in flight a thousand wait.\n",
            *fronts(result),
            commands(section),
        ]
    )


def kv_cache(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## Speed: vLLM with an FP8 KV cache\n",
            where(section),
            "The same model and loads; the same FP8 weights with a cache of 8 and of 16 bits.\n",
            *_speeds(result, "fp8"),
            *comparison.predictions(_predicted(result)),
            "Served:\n",
            *fronts(result),
            commands(section),
        ]
    )


def reference(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    theirs = result["transformers"]
    bandwidth = section["machine"]["bandwidth_gbs"] * 1e9
    alone, together = theirs["generate"]["1"]["waves"], theirs["batching"]["256"]["waves"]
    rows = [f"| transformers, bf16 | {alone:,.0f} | | | {together:,.0f} | | |"]
    for name, one in result.items():
        if name == "transformers":
            continue
        speed = {level: ways["waves"] for level, ways in one["in_process"].items()}
        bound = bandwidth / one["bytes_a_token"]
        rows.append(
            f"| reference, {name} | {speed['1']:,.0f} | {bound:,.0f} | {speed['64']:,.0f} | {speed['256']:,.0f} "
            f"| {speed['1'] / alone:.1f} / {speed['256'] / together:.1f} | {speed['1'] / bound:.0%} |"
        )
    served = "; ".join(
        f"{row['tokens_per_s']:,.0f} at {row['concurrency']}" for row in result.get("int8", {}).get("served", [])
    )
    return "\n".join(
        [
            "## Speed: the reference runtime from our TensorRT-LLM checkpoints\n",
            where(section),
            "The same model and lengths, in waves, tokens a second. Of transformers: `generate` for one stream, "
            "`generate_batch`\n(continuous batching) for 256. The bound is the copy's rate over the bytes of the "
            "weights that every token reads.\n",
            "| engine | one stream | bound | 64 | 256 | over transformers, 1 / 256 | of the bound |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"INT8 served by tritonserver, over gRPC: {served} tok/s.\n" if served else "",
            commands(section),
        ]
    )


def study(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## Kernels and other precisions\n",
            where(section),
            "The matrix products of one layer of Llama 3 8B, as vLLM executes them (CUTLASS with a scale a row; cuBLAS "
            "in bf16), by\nrows that are multiplied at once: medians of CUDA graphs. Then its attention by "
            "FlashAttention 3, of prompts, and of one\ntoken of each sequence that decodes: medians of single runs.\n",
            *comparison.kernels(result),
            *comparison.predictions(_predicted(result)),
            commands(section),
        ]
    )


def _predicted(result: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return {name: (one["predicted"], one["in_process"]) for name, one in result.items() if "predicted" in one}


def _speeds(result: Mapping[str, Any], plain: str) -> list[str]:
    """In the engine's own process, beside those of `plain`."""
    rows = []
    for name, one in result.items():
        for level, speed in one["in_process"].items():
            beside = result.get(plain, {}).get("in_process", {}).get(level)
            ratio = [f"{speed[way] / beside[way]:.2f}" if beside else "" for way in ("waves", "steady")]
            rows.append(
                f"| {name} | {level} | {speed['waves']:,.0f} | {ratio[0]} | {speed['steady']:,.0f} | {ratio[1]} |"
            )
    return [
        f"In the engine's process, without a server, tokens a second and over {plain}'s:\n",
        f"| precision | in flight | waves | over {plain} | steady | over {plain} |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def fronts(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, one in result.items():
        for row in one["served"]:
            alone = one["in_process"].get(str(row["concurrency"]))
            kept = f"{row['tokens_per_s'] / alone[row['pattern']]:.1%}" if alone else ""
            native = [
                other["tokens_per_s"]
                for other in one["served"]
                if (other["protocol"], other["concurrency"]) == ("native", row["concurrency"])
            ]
            over = f"{row['tokens_per_s'] / native[0]:.1%}" if native else ""
            gaps = f"{_ms(row['itl_p50_ms'])} / {_ms(row['itl_p99_ms'])}"
            ttft = f"{row['ttft_p50_ms']:.0f} / {_whole_ms(row.get('ttft_p99_ms'))}"
            rows.append(
                f"| {name} | {PROTOCOLS[row['protocol']]} | {row['concurrency']} | {row['pattern']} "
                f"| {row['tokens_per_s']:,.0f} | {kept} | {over} | {ttft} | {gaps} | {_doubts(row)} |"
            )
    return [
        "| precision | front | in flight | | tok/s | of in-process | of `vllm serve` | TTFT p50 / p99 ms "
        "| ITL p50 / p99 ms | |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _doubts(row: Mapping[str, Any]) -> str:
    client = ["INVALID: the client was the limit"] if not row["valid"] else []
    return ", ".join([*client, *([f"{row['failed']} failed"] if row["failed"] else [])])


def _ms(value: float | None) -> str:
    """None where chunks do not tell how many tokens they hold."""
    return "-" if value is None else f"{value:.1f}"


def _whole_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
