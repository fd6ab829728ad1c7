"""Parts of `make gpu-e2e`'s page about features by cost, a KV cache in the host's memory, long load and tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import Any

from trtpipe.pipeline.pages.plots import Line, Panel, timeline

RUNTIMES = {"vllm": "vLLM", "reference": "reference runtime"}
VARIANTS = {
    "plain": "the baseline", "lora": "LoRA", "ngram": "speculation", "gpu": "the GPU's memory alone",
    "host": "the host's memory",
}  # fmt: skip
# Colours of a drawing that stands alone; on HTML pages the style sheet has them.
STYLE = (
    "<style>text{fill:#555;font:10.5px sans-serif}.label{fill:#111}.grid{stroke:#ddd;fill:none}"
    ".line{stroke:#2a7de1;fill:none;stroke-width:1.4}.line.s1{stroke:#e07b39}.line.s2{stroke:#3a9a5b}"
    ".line.s3{stroke:#8a5bb5}.name.s0{fill:#2a7de1}.name.s1{fill:#e07b39}.name.s2{fill:#3a9a5b}.name.s3{fill:#8a5bb5}"
    "</style>"
)


def _said(words: str) -> str:
    """A paragraph in lines that a page's source has."""
    return fill(words, 120) + "\n"


def features(result: Mapping[str, Any]) -> list[str]:
    lines = [
        _said(
            "The same model in bfloat16, behind the gateway: whole answers, 128 tokens in and 128 out, four waves "
            "after one that does not count. The baseline of each figure is the same load in this run: for adapters an "
            "engine built without them, for structured output the same sampling without a schema, for speculation an "
            "engine without drafts."
        ),
        *[line for name, one in result.items() for line in _reasons(one, f" in the {RUNTIMES[name]}")],
    ]
    lora = [row for name, one in result.items() if {"lora", "plain"} <= one.keys() for row in _lora(name, one)]
    if lora:
        lines += [
            _said(
                "LoRA, 64 in flight, adapters of rank 16 on all linears. None: the engine takes adapters and no "
                "request has one."
                + (" vLLM computes with at most 8 in a step, so that requests of 32 take turns." * ("vllm" in result))
            ),
            "| runtime | adapters | tok/s | without LoRA | ratio |",
            "|---|---|---|---|---|",
            *lora,
            "",
        ]
    guided = [
        f"| {RUNTIMES[name]} | {json['tokens_per_s']:,.0f} | {free['tokens_per_s']:,.0f} | {_ratio(json, free)} |"
        for name, one in result.items()
        if "plain" in one
        for json, free in [(one["plain"]["json"], one["plain"]["drawn"])]
    ]
    if guided:
        lines += [
            "Structured output, 64 in flight, sampled at temperature 0.8: a JSON schema of a list of objects.\n",
            "| runtime | tok/s with the schema | without | ratio |",
            "|---|---|---|---|",
            *guided,
            "",
        ]
    ngram = [row for name, one in result.items() if {"ngram", "plain"} <= one.keys() for row in _ngram(name, one)]
    if ngram:
        lines += [
            _said(
                "Speculation by n-grams, 4 draft tokens. The weights are random, and so is what a free answer says: "
                "its figures are the cost of drafts that are of little use. Repeating answers are those of a regular "
                "expression that one text alone fits, ten digits over and over: nearly every draft is accepted, the "
                "most that speculation can give. Real text lies between the two."
            ),
            "| runtime | answers | in flight | tok/s with drafts | without | ratio | drafts accepted | tokens a step |",
            "|---|---|---|---|---|---|---|---|",
            *ngram,
            "",
        ]
    return lines


def _reasons(one: Mapping[str, Any], where: str = "") -> list[str]:
    reasons = one.get("reasons", {}).items()
    return [f"- Not measured: {VARIANTS[name]}{where}: {reason}\n" for name, reason in reasons if name not in one]


def _ratio(one: Mapping[str, float], other: Mapping[str, float], name: str = "tokens_per_s") -> str:
    return f"{one[name] / other[name]:.2f}"


def _lora(runtime: str, one: Mapping[str, Any]) -> Iterator[str]:
    plain = one["plain"]["64"]
    for count, found in one["lora"].items():
        yield (
            f"| {RUNTIMES[runtime]} | {count if int(count) else 'none'} | {found['tokens_per_s']:,.0f} "
            f"| {plain['tokens_per_s']:,.0f} | {_ratio(found, plain)} |"
        )


def _ngram(runtime: str, one: Mapping[str, Any]) -> Iterator[str]:
    for pattern, title in (("greedy", "free"), ("repeating", "repeating")):
        for level, found in one["ngram"][pattern].items():
            plain = one["plain"]["repeating"][level] if pattern == "repeating" else one["plain"][level]
            drafts, accepted, steps = (
                found.get(name, 0.0) for name in ("draft_tokens", "accepted_draft_tokens", "decode_steps")
            )
            yield (
                f"| {RUNTIMES[runtime]} | {title} | {level} | {found['tokens_per_s']:,.0f} "
                f"| {plain['tokens_per_s']:,.0f} | {_ratio(found, plain)} "
                f"| {f'{accepted / drafts:.0%} of {drafts:,.0f}' if drafts else 'none made'} "
                f"| {f'{1 + accepted / steps:.2f}' if steps else ''} |"
            )


def offload(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for groups in result.get("gpu", {}):
        gpu, host = result["gpu"][groups], result.get("host", {}).get(groups)
        beside = f"{host['requests_per_s']:.1f} | {_ratio(host, gpu, 'requests_per_s')}" if host else " | "
        latency = f"{gpu['latency_s']:.2f} / " + (f"{host['latency_s']:.2f}" if host else "-")
        rows.append(f"| {groups} | {int(groups) * 4096:,} | {gpu['requests_per_s']:.1f} | {beside} | {latency} |")
    return [
        _said(
            "vLLM in bfloat16 whose cache on the GPU is set to 65,536 tokens, with 24 GiB of the host's memory behind "
            "it (`serving.kv_cache_host_memory_bytes`) and without. Requests begin with one of so many texts of 4,096 "
            "tokens in turn, then 64 tokens of their own and 32 of answer, 8 in flight. Without the host's memory a "
            "text that the GPU's cache has no room for is computed again."
        ),
        *_reasons(result),
        "| texts | their tokens | requests/s without | with the host's memory | ratio | latency s, without / with |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def long(result: Mapping[str, Any], figure: str) -> list[str]:
    rows, growth, leaks, largest = [], [], [], ""
    for number, one in enumerate(result["rounds"], 1):
        ended = one["ended"]
        others = ", ".join(f"{count} {kind}" for kind, count in ended.items() if kind not in _KNOWN)
        known = " | ".join(f"{ended.get(kind, 0):,}" for kind in _KNOWN)
        tail = " / ".join(f"{one['ttft_ms'][name]:,.0f}" for name in ("p50", "p99", "p99.9", "max"))
        gone = "not again" if one["back_s"] is None else f"{one['back_s'] - one['killed_s']:.0f}"
        balanced = sum(count for kind, count in ended.items() if kind != "sent")
        rows.append(f"| {number} | {known} | {others or 'none'} | {balanced:,} | {gone} | {tail} |")
        growth += [
            f"| {number} | {name} | {a:,.1f} | {b:,.1f} | {most:,.1f} |" for name, a, b, most in one["growth"]["rows"]
        ]
        leaks += [f"Round {number}: {leak}.\n" for leak in one["growth"]["leaks"]]
        name, a, b, _ = max(one["growth"]["rows"], key=lambda row: row[2] - row[1])
        largest += f" In round {number} {name.removesuffix(' PSS MiB')} grew most, by {b - a:,.1f} MiB."
    gpu = _gpu_memory(result)
    left = result.get("left_over")
    return [
        _said(
            f"vLLM in bfloat16 with four LoRA adapters behind the gateway, twice {result['minutes']:g} minutes at "
            f"{result['rate']:g} requests a second: prompts of about 256 tokens and answers of about 128, both "
            "lognormal; three of ten with an adapter, three of ten with a JSON schema, one of five left in mid-stream "
            "by its client, three of a hundred impossible. A fifth into each round the engine process is killed. What "
            "is in flight then is cut short with an error; until the engine is there again, requests get an error at "
            "once (unavailable). Each request counts once: the sum of all outcomes is the number sent."
        ),
        "| round | sent | answered | left | refused, as they had to be | unavailable | others | sum | engine gone, s "
        "| TTFT ms, p50 / p99 / p99.9 / max, but for that time |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *([f"![tails over time]({figure})\n"] if figure else []),
        *([f"GPU memory, median of the last third of each round: {gpu} MiB.\n"] if gpu else []),
        *(
            [f"Ten seconds after the load {left['requests']} requests and {left['kv_blocks']} KV blocks were left.\n"]
            if left
            else []
        ),
        "Memory of each process since the engine was there again, the second half's median against the first's:"
        f"{largest}\n",
        *leaks,
        "<details><summary>All processes: the two medians, and the growth that counts as a leak</summary>\n",
        "| round | process | MiB | MiB | growth allowed |",
        "|---|---|---|---|---|",
        *growth,
        "\n</details>\n",
    ]


_KNOWN = ("sent", "answered", "left", "refused", "unavailable")


def _gpu_memory(result: Mapping[str, Any]) -> str:
    medians = []
    for one in result["rounds"]:
        start, end = one["began_s"] + 40 * result["minutes"], one["began_s"] + 60 * result["minutes"]
        there = sorted(mib for at, mib in result.get("gpu_mib", ()) if start <= at <= end)
        medians += [f"{there[len(there) // 2]:,.0f}"] if there else []
    return ", then ".join(medians)


def long_figure(result: Mapping[str, Any]) -> str:
    """SVG of the time to the first token, requests and memory over both rounds."""
    seconds: list[float] = []
    columns: dict[str, list[float | None]] = {
        name: [] for name in ("p50", "p99", "max", "sent", "failed", "host", "engine")
    }
    for number, one in enumerate(result["rounds"]):
        for window in one["windows"]:
            seconds.append(60 * result["minutes"] * number + window["at"])
            ended = window["ended"]
            for name in ("p50", "p99", "max"):
                columns[name].append(window.get(name))
            columns["sent"].append(window["sent"])
            columns["failed"].append(
                window["sent"] - sum(ended.get(kind, 0) for kind in ("answered", "left", "refused"))
            )
            near = [sample for sample in one["samples"] if abs(sample["at"] - window["at"]) < 5 and sample["host_mib"]]
            columns["host"].append(near[0]["host_mib"] if near else None)
            columns["engine"].append(near[0]["engine_mib"] if near else None)
    panels = [
        Panel(
            label="TTFT of requests sent in 5 s, ms",
            lines=[Line(name=name, style=i, values=columns[name]) for i, name in enumerate(("p50", "p99", "max"))],
        ),
        Panel(
            label="Requests in 5 s",
            lines=[
                Line(name="sent", style=0, values=columns["sent"]),
                Line(name="failed", style=1, values=columns["failed"]),
            ],
        ),
        Panel(label="Memory of Triton and gateway, MiB", lines=[Line(name="host", style=0, values=columns["host"])]),
        Panel(
            label="Memory of the engine process, MiB", lines=[Line(name="engine", style=0, values=columns["engine"])]
        ),
    ]
    drawing = str(timeline("Long load", seconds, panels).drawing)
    head, _, rest = drawing.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{STYLE}<rect width="100%" height="100%" fill="#fff"/>{rest}\n'


def tune(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for run in result["runs"]:
        best = run["best"]
        name = ", ".join(f"{key} {value}" for key, value in run["candidate"].items()) or "defaults"
        rate = run["told"] if run["rate"] is None else f"{run['rate']:.2f}"
        tokens = f"{best['tokens_per_s']:,.0f}" if best.get("tokens_per_s") else ""
        rows.append(
            f"| {name} | {run['round'] + 1} | {rate} | {tokens} | {run['start_s']:.0f} | {run['seconds']:.0f} |"
        )
    return [
        _said(
            f"`trtpipe tune` of the {result['dtype']} target in vLLM, {result['minutes']:g} minutes: requests/s of "
            "which nine of ten keep TTFT p99 under 500 ms and ITL p99 under 50 ms, prompts of about 256 tokens and "
            f"answers of 128, over gRPC. Result: {result['said']}."
        ),
        "| settings | round | requests/s | tok/s | start s | seconds in all |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        *[f"- Not measured: {name}: {reason}." for name, reason in result["not_measured"].items()],
        "",
    ]
