"""Tables of `make gpu-e2e`'s page over several sections: stacks side by side, their kernels, and what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LEVELS = ("1", "64", "256")
WAYS = {
    "bf16": "torch, compiled, bf16",
    "float8": "torch, compiled, torchao float8",
    "float8-weights": "torch, compiled, torchao float8 weights",
}


VLLM = (("engine", ("bf16", "fp8")), ("kv_cache", ("fp8-kv",)), ("study", ("int8-pc-pt", "int4-awq")))
REFERENCE = ("bf16", "fp8", "int8")
# All that `stacks` names where every section has run to its end.
EXPECTED = (
    *WAYS.values(),
    *(f"reference runtime, {name}" for name in REFERENCE),
    *(f"vLLM, {name}" for _, names in VLLM for name in names),
)


def stacks(kept: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """(name, figures by requests in flight, bytes that a token reads) of every stack measured."""

    def result(section: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = kept.get(section, {}).get("result", {})
        return found

    reference = result("reference")
    # A Hugging Face folder of the same precision is as large, but for scales.
    read = {
        name: one.get("bytes_a_token", 0)
        for section in (result("engine"), reference)
        for name, one in section.items()
        if name in REFERENCE
    }
    for name, title in (("generate", "generate"), ("batching", "continuous batching")):
        if figures := reference.get("transformers", {}).get(name):
            yield f"transformers, {title}, bf16", figures, read.get("bf16", 0)
    for way, title in WAYS.items():
        if figures := result("study").get(way):
            yield title, figures, read.get("bf16" if way == "bf16" else "fp8", 0)
    for name in REFERENCE:
        if name in reference:
            yield f"reference runtime, {name}", reference[name]["in_process"], read[name]
    for section, names in VLLM:
        for name in names:
            if one := result(section).get(name):
                yield f"vLLM, {name}", one["in_process"], one.get("bytes_a_token", 0)


def table(kept: Mapping[str, Any], bandwidth_gbs: float) -> list[str]:
    found = list(stacks(kept))
    rows = []
    for name, figures, read in found:
        speeds = [_speed(figures.get(level)) for level in LEVELS]
        ttft = " / ".join(_figure(figures.get(level), "ttft_p50_ms", ".0f") for level in LEVELS)
        joules = " / ".join(_figure(figures.get(level), "joules_per_token", ".3g") for level in LEVELS)
        alone, many = (figures.get(level, {}).get("waves") for level in ("1", "256"))
        share = f"{alone * read / bandwidth_gbs / 1e9:.0%}" if alone and read else ""
        hours = f"{1e6 / many / 3600:.3f}" if many else ""
        rows.append(f"| {name} | {' | '.join(speeds)} | {ttft} | {joules} | {share} | {hours} |")
    return [
        *_best(found),
        "| stack | tok/s, one stream | 64 | 256 | TTFT p50 ms, 1 / 64 / 256 | joules a token, 1 / 64 / 256 "
        "| of the memory bound | GPU hours per million tokens |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *_absent(found),
    ]


def _best(found: Sequence[tuple[str, Mapping[str, Any], int]]) -> list[str]:
    """The answer in a sentence for each load."""
    said = []
    for level in LEVELS:
        speeds = sorted(((one[level]["waves"], name) for name, one, _ in found if "waves" in one.get(level, {})))[::-1]
        spent = sorted(
            (one[level]["joules_per_token"], name) for name, one, _ in found if "joules_per_token" in one.get(level, {})
        )
        if len(speeds) > 1:
            (best, name), (second, other) = speeds[:2]
            line = f"- {level} in flight: {name} is the fastest, {best / second:.2f} times {other}"
            said.append(
                f"{line}; {spent[0][1]} takes the fewest joules, {spent[0][0]:.3g} a token." if spent else f"{line}."
            )
    return [*said, ""]


def _absent(found: Sequence[tuple[str, Mapping[str, Any], int]]) -> list[str]:
    there = {name: figures for name, figures, _ in found}
    reasons = [
        f"- {name}, {level} in flight: {one['reason']}."
        for name, figures in there.items()
        for level, one in figures.items()
        if "reason" in one
    ]
    missing = [name for name in EXPECTED if name not in there]
    if missing:
        reasons.append(f"- No section of this page has figures yet of {'; '.join(missing)}.")
    return ["Not measured on this card:\n", *reasons, ""] if reasons else []


def figure(kept: Mapping[str, Any], card: str) -> str:
    """The same as bars, as SVG: a panel for each number of requests in flight."""
    bar, left, width, gap = 18, 270, 400, 34
    parts: list[str] = []
    y = 30
    for level in LEVELS:
        speeds = [(name, one[level]["waves"]) for name, one, _ in stacks(kept) if "waves" in one.get(level, {})]
        if not speeds:
            continue
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{level} in flight, tokens a second</text>')
        most = max(speed for _, speed in speeds)
        for name, speed in sorted(speeds, key=lambda one: -one[1]):
            y += bar
            colour = "#2a7de1" if name.startswith("vLLM") else "#e07b39" if name.startswith("ref") else "#8a8a8a"
            parts += [
                f'<text x="{left - 6}" y="{y}" text-anchor="end">{name}</text>',
                f'<rect x="{left}" y="{y - 11}" width="{width * speed / most:.1f}" height="13" fill="{colour}"/>',
                f'<text x="{left + width * speed / most + 5:.1f}" y="{y}">{speed:,.0f}</text>',
            ]
        y += gap
    size = f"{left + width + 70} {y}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">',
            f"<title>{card}: Llama 3 8B's shapes, 128 tokens in and 128 out</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


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
            lines += [f"{name}: not measured ({reason}).\n"]
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
