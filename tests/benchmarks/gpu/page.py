"""The page of `make gpu-e2e`, from its JSON and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.benchmarks.gpu import comparison, served_page, several_page

PROTOCOLS = {
    "grpc": "Triton gRPC", "http": "Triton `generate_stream`", "completions": "gateway", "native": "`vllm serve`",
}  # fmt: skip
# What could not be run on any machine so far, and what stands in for it.
ABSENT = """\
## What was not run

- **TensorRT engines.** tensorrt-llm cannot be installed where this was measured: no `trtllm-build`, no C++ backend. In
  its place: the reference runtime executes the very checkpoint files that `trtllm-build` would compile; vLLM, an engine
  nobody here wrote, executes the same quantization from the Hugging Face folder; and the Triton repository is the one
  that goes to production but for its backend directory.
- **NVIDIA's Triton images.** The server is the one inside PyPI's nvidia-pytriton.
- **Transformer Engine and llama.cpp on the GPU.** Both are compiled on the machine that runs them, which was held for
  half an hour and reaches no package index: Transformer Engine 2.20 is a library of 277 MB and an extension for the
  torch that is there; llama-cpp-python 0.3.36 is 77 MB of source, and needs a GGUF file of these shapes, which the
  project reads and does not write.
- **The newest vLLM.** The machines have torch 2.11. On PyPI vLLM 0.26.0 is the last that requires it; 0.27 requires
  2.13 and 0.33 requires 2.14, whose wheel is 555 MB without the CUDA libraries that it needs.
"""
# The same of sections that are not there yet.
MISSING = {
    "accuracy": """\
- **Correctness with real weights** in vLLM. On an H200: [h200.md](h200.md).
""",
    "quantize": """\
- **FP8 calibration and write**, timed beside ModelOpt's flow. On an H200: [h200.md](h200.md).
""",
    "folders": """\
- **INT8 and 4-bit weights in vLLM**, from compressed-tensors folders. `trtpipe build` writes them, `verify` computes
  with them, and a test compares their bytes with llm-compressor's; what vLLM computes from them was measured with small
  models of random weights alone ([vllm.md](vllm.md)).
""",
    "kv_cache": """\
- **The speed of an FP8 KV cache** at these sizes. On an H200: [h200.md](h200.md).
""",
    "features": """\
- **LoRA, structured output and speculation** by cost at these sizes.
""",
    "offload": """\
- **A KV cache in the host's memory**, which needs a GPU.
""",
    "tune": """\
- **Tuning** on a GPU. On a CPU: [tuning.md](../tuning.md).
""",
    "long": """\
- **Load for long** on a GPU. On a CPU, an hour of it: [soak.md](soak.md).
""",
    "parallel": """\
- **Two GPUs** of this kind. On two H200s: [h200.md](h200.md). On a CPU, in every run of the tests: ranks in processes
  of their own over gloo against the same shards in one process, and these against transformers.
""",
}


def render(kept: Mapping[str, Any], figure: str = "", tails: str = "") -> str:
    """figure, tails: names of the files that `comparison.figure` and `served_page.long_figure` were written to."""
    kept = {name: section for name, section in kept.items() if section["result"]}
    parts = ["# Measured on a GPU, end to end\n"]
    parts.append(
        "Written by `make gpu-e2e`, which says what each section does; the same figures are in the JSON beside this "
        "page. Every\nratio is of one run on one machine.\n"
    )
    for name, writer in WRITERS.items():
        if name in kept:
            parts.append(writer(kept[name], kept[name]["result"]))
        if name == "reference" and "engine" in kept:
            drawn = [f"![tokens a second of each stack]({figure})\n"] if figure else []
            parts += ["## Which one, when\n", _STACKS, *drawn, *comparison.table(kept, _bandwidth(kept["engine"]))]
    parts += [_served(name, kept[name], tails) for name in SERVED if name in kept]
    if "sums" in kept:
        parts.append(_said("Sums over several GPUs", kept["sums"], several_page.sums(kept["sums"]["result"])))
    several = [kept[name] for name in ("pairs", "fours") if name in kept]
    for model, (title, said) in several_page.MODELS.items():
        if found := {key: one for section in several for key, one in section["result"].get(model, {}).items()}:
            parts.append(_said(title, several[0], said(found)))
    if "large_served" in kept:
        section = kept["large_served"]
        lines = several_page.large_served(section["result"], _fronts)
        parts.append(_said("Llama 3 70B's shapes behind our fronts", section, lines))
    if several:
        return "\n".join([*parts, ABSENT]) + several_page.ABSENT
    return "\n".join([*parts, ABSENT]) + "".join(words for name, words in MISSING.items() if name not in kept)


def _said(title: str, section: Mapping[str, Any], lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}\n", _where(section), *lines, _commands(section)])


# Section -> its title and what it says.
SERVED: dict[str, tuple[str, Callable[..., list[str]]]] = {
    "features": ("Features by cost", served_page.features),
    "offload": ("A KV cache in the host's memory", served_page.offload),
    "tune": ("What tuning wins", served_page.tune),
    "long": ("Under load for long", served_page.long),
}


def _served(name: str, section: Mapping[str, Any], tails: str) -> str:
    title, said = SERVED[name]
    lines = said(section["result"], *([tails] if name == "long" else []))
    return _said(title, section, lines)


_STACKS = """\
All stacks of the sections of this page, each in its own process without a server: Llama 3 8B's shapes, 128 tokens in
and 128 out, all requests starting together. What a front takes is above. The memory bound is the copy's rate over the
bytes of the weights that a token reads, for one stream. GPU hours per million output tokens are those of 256 in flight:
times a card's price for an hour they are the cost.
"""


def _bandwidth(section: Mapping[str, Any]) -> float:
    return float(section["machine"]["bandwidth_gbs"])


def _where(section: Mapping[str, Any]) -> str:
    machine, versions = section["machine"], section["versions"]
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    gpus = f"{machine['gpus']} x " if machine["gpus"] > 1 else ""
    beside = f" Meanwhile the host's other GPUs ran: {section['beside']}." if section.get("beside") else ""
    return (
        f"{section['date']}, {gpus}{machine['gpu']} (SM{machine['sm']}), driver {machine['driver']}, CUDA "
        f"{machine['cuda']}, {machine['cores']} cores; {named}. A copy within the GPU moves "
        f"{_bandwidth(section):,.0f} GB/s. {section['seconds']:.0f} s.{beside}\n"
    )


def _commands(section: Mapping[str, Any]) -> str:
    return "\n".join(["<details><summary>Commands</summary>\n", "```", *section["commands"], "```\n", "</details>\n"])


def _ms(value: float | None) -> str:
    """None where chunks do not tell how many tokens they hold."""
    return "-" if value is None else f"{value:.1f}"


def _whole_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _families(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
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
            _where(section),
            "A model of 4 layers of random weights, 20 prompts of 64 tokens, 64 new tokens each, greedy: the reference "
            "runtime's\nanswers and transformers' in float32, both on the GPU.\n",
            "| family | its settings | float32: the same answers | one request alone too | bfloat16: the same answers "
            "| tokens before they part |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            _commands(section),
        ]
    )


def _accuracy(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    rows = _pairs(result)
    greedy = [
        f"| {one['precision']} | {one['vllm_method'] or 'none'}, KV cache {one['vllm_kv_cache']} "
        f"| {one['same']} of {one['answers']} | {one['same_tokens']:.1%} |"
        for one in result["greedy"]
    ]
    return "\n".join(
        [
            "## Correctness: SmolLM2-135M-Instruct, real weights\n",
            _where(section),
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
            _commands(section),
        ]
    )


def _folders(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    answers = [f"| {one['precision']} | {one['vllm_method']} | {one['text'].strip()!r} |" for one in result["answers"]]
    return "\n".join(
        [
            "## Other precisions in vLLM: SmolLM2-135M-Instruct\n",
            _where(section),
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
            _commands(section),
        ]
    )


def _pairs(result: Mapping[str, Any]) -> list[str]:
    return [
        f"| {pair['of']} | {pair['to']} | {pair['kl']:.5f} | {pair['top1']:.2%} | {pair['places']:,} |"
        for pair in result["pairs"]
    ]


def _engine(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    room = section["machine"]["http_streams"]
    return "\n".join(
        [
            "## Speed: vLLM from our folders, alone and behind our fronts\n",
            _where(section),
            "A Llama of Llama 3 8B's shapes and random weights, 128 tokens in and 128 out, a closed loop of so many "
            "requests\nin flight. Waves: all start, and so end, together. Steady: they are spread over a request's "
            "time, as the load tester\nspreads them, so that prompts are computed beside the tokens of others.\n",
            *_speeds(result, "bf16"),
            *comparison.predictions(_predicted(result)),
            "The same engine served: tritonserver, our backend, the load tester on the same machine. Triton's HTTP "
            f"server\nhad room for {room:,} chunks (docs/serving.md). `vllm serve` is what `trtpipe serve --front "
            "native` starts: one API server\nprocess, vLLM's default; the gateway had six workers. An engine holds 512 "
            "requests at once: of 1,512 in flight a thousand wait.\n",
            *_fronts(result),
            _commands(section),
        ]
    )


def _kv_cache(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## Speed: vLLM with an FP8 KV cache\n",
            _where(section),
            "The same model and loads; the same FP8 weights with a cache of 8 and of 16 bits.\n",
            *_speeds(result, "fp8"),
            *comparison.predictions(_predicted(result)),
            "Served:\n",
            *_fronts(result),
            _commands(section),
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


def _fronts(result: Mapping[str, Any]) -> list[str]:
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


def _reference(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
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
            _where(section),
            "The same model and lengths, in waves, tokens a second. Of transformers: `generate` for one stream, "
            "`generate_batch`\n(continuous batching) for 256. The bound is the copy's rate over the bytes of the "
            "weights that every token reads.\n",
            "| engine | one stream | bound | 64 | 256 | over transformers, 1 / 256 | of the bound |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"INT8 served by tritonserver, over gRPC: {served} tok/s.\n" if served else "",
            _commands(section),
        ]
    )


def _study(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## Kernels and other precisions\n",
            _where(section),
            "The matrix products of one layer of Llama 3 8B, as vLLM executes them (CUTLASS with a scale a row; cuBLAS "
            "in bf16), by\nrows that are multiplied at once: medians of CUDA graphs. Then its attention by "
            "FlashAttention 3, of prompts, and of one\ntoken of each sequence that decodes: medians of single runs.\n",
            *comparison.kernels(result),
            *comparison.predictions(_predicted(result)),
            _commands(section),
        ]
    )


def _quantize(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## FP8 calibration and write\n",
            _where(section),
            "512 samples of 512 tokens, model to Hugging Face folder: ModelOpt's own flow "
            f"{result['modelopt_s']:.1f} s, ours {result['ours_s']:.1f} s:\n"
            f"{result['modelopt_s'] / result['ours_s']:.2f} times as fast, in {result['ours_peak_gib']:.1f} GiB of the "
            "GPU's memory. [More of it](quantize.md).\n",
            _commands(section),
        ]
    )


def _shared_gpu(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            "## Two ranks on one GPU\n",
            _where(section),
            "Our checkpoint of two ranks, executed by the reference runtime with a process a rank, over NCCL; both on "
            "the one GPU, where\nthey wait for each other's turn, so that nothing of it is a speed. Eight prompts and "
            "greedy answers.\n",
            *_agreement(result),
            _commands(section),
        ]
    )


def _parallel(section: Mapping[str, Any], result: Mapping[str, Any]) -> str:
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
            _where(section),
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
            _commands(section),
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


WRITERS = {
    "families": _families, "accuracy": _accuracy, "folders": _folders, "engine": _engine, "kv_cache": _kv_cache,
    "reference": _reference, "study": _study, "quantize": _quantize, "shared_gpu": _shared_gpu, "parallel": _parallel,
}  # fmt: skip
