"""Tables of `make gpu-e2e`'s page over several sections: stacks side by side, their kernels, and what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LEVELS = ("1", "64", "256")
WAYS = {
    "bf16": "torch, compiled, bf16",
    "float8": "torch, compiled, torchao float8",
    "float8-weights": "torch, compiled, torchao float8 weights",
}


def stacks(kept: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """(name, figures by requests in flight, bytes that a token reads) of every stack measured."""

    def result(section: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = kept.get(section, {}).get("result", {})
        return found

    reference = result("reference")
    read = {name: one.get("bytes_a_token", 0) for name, one in reference.items()}
    for name, title in (("generate", "generate"), ("batching", "continuous batching")):
        if figures := reference.get("transformers", {}).get(name):
            yield f"transformers, {title}, bf16", figures, read.get("bf16", 0)
    for way, title in WAYS.items():
        if figures := result("study").get(way):
            yield title, figures, read.get("bf16" if way == "bf16" else "fp8", 0)
    for name in ("bf16", "fp8", "int8"):
        if name in reference:
            yield f"reference runtime, {name}", reference[name]["in_process"], read[name]
    for section, names in (
        ("engine", ("bf16", "fp8")),
        ("kv_cache", ("fp8-kv",)),
        ("study", ("int8-pc-pt", "int4-awq")),
    ):
        for name in names:
            if one := result(section).get(name):
                yield f"vLLM, {name}", one["in_process"], one.get("bytes_a_token", 0)


def table(kept: Mapping[str, Any], bandwidth_gbs: float) -> list[str]:
    rows = []
    for name, figures, read in stacks(kept):
        speeds = [_speed(figures.get(level)) for level in LEVELS]
        ttft = " / ".join(_figure(figures.get(level), "ttft_p50_ms", ".0f") for level in LEVELS)
        joules = " / ".join(_figure(figures.get(level), "joules_per_token", ".2f") for level in LEVELS)
        alone, many = (figures.get(level, {}).get("waves") for level in ("1", "256"))
        share = f"{alone * read / bandwidth_gbs / 1e9:.0%}" if alone and read else ""
        hours = f"{1e6 / many / 3600:.3f}" if many else ""
        rows.append(f"| {name} | {' | '.join(speeds)} | {ttft} | {joules} | {share} | {hours} |")
    reasons = [
        f"- {name}, {level} in flight: {one['reason']}"
        for name, figures, _ in stacks(kept)
        for level, one in figures.items()
        if "reason" in one
    ]
    return [
        "| stack | tok/s, one stream | 64 | 256 | TTFT p50 ms, 1 / 64 / 256 | joules a token, 1 / 64 / 256 "
        "| of the memory bound | GPU hours per million tokens |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *(["Not measured:\n", *reasons, ""] if reasons else []),
    ]


def _speed(one: Mapping[str, Any] | None) -> str:
    return "" if one is None else f"{one['waves']:,.0f}" if "waves" in one else "none"


def _figure(one: Mapping[str, Any] | None, name: str, form: str) -> str:
    value = (one or {}).get(name)
    return "-" if value is None else format(value, form)


def kernels(result: Mapping[str, Any]) -> list[str]:
    """Of a layer, by precision and size, with what 8 bits gain."""
    lines = []
    products, attention = result.get("products", {}), result.get("attention", {})
    for name, reason in (("Matrix products", products.get("reason")), ("Attention", attention.get("reason"))):
        if reason:
            lines += [f"{name} were not measured: {reason}.\n"]
    if "bf16" in products:
        lines += ["| rows | bf16 us | fp8 us | int8 us | fp8 over bf16 | int8 over bf16 |", "|---|---|---|---|---|---|"]
        for rows, plain in products["bf16"].items():
            fp8, int8 = products["fp8"][rows], products["int8"][rows]
            lines.append(
                f"| {rows} | {plain:,.0f} | {fp8:,.0f} | {int8:,.0f} | {plain / fp8:.2f} | {plain / int8:.2f} |"
            )
        lines.append("")
    if "prompts" in attention:
        lines += ["| attention | sequences x tokens | bf16 us | fp8 us | fp8 over bf16 |", "|---|---|---|---|---|"]
        for phase, kinds in attention.items():
            for size, plain in kinds["bf16"].items():
                fp8 = kinds["fp8"][size]
                lines.append(f"| {phase} | {size} | {plain:,.0f} | {fp8:,.0f} | {plain / fp8:.2f} |")
        lines.append("")
    return lines


def predictions(measured: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """measured: (predicted, measured) by name, each by requests in flight."""
    rows = []
    for name, (predicted, found) in measured.items():
        for level, said in predicted.items():
            speed, ttft = found[level]["waves"], found[level].get("ttft_p50_ms")
            waited = "" if ttft is None else f"{said['ttft_p50_ms']:.0f} / {ttft:.0f}"
            rows.append(
                f"| {name} | {level} | {said['tokens_per_s']:,.0f} | {speed:,.0f} "
                f"| {said['tokens_per_s'] / speed - 1:+.1%} | {waited} |"
            )
    if not rows:
        return []
    return [
        "What the planner predicted before the run, of all requests starting together:\n",
        "| precision | in flight | predicted tok/s | measured, waves | error | TTFT p50 ms, predicted / measured |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
