"""The first study's questions: is an H100 worth twice the rent of an A100 for Llama 3?"""

from __future__ import annotations

import json
import math

from tests.benchmarks.studies.predictions import (
    curves,
    first_token,
    full,
    geometric,
    head,
    planned,
    ratio,
    stream,
    table,
    text,
    times,
)
from tests.support.paths import ROOT
from tests.support.published import figures as published_figures
from trtpipe.configs import facts
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.planner.advice import Candidate
from trtpipe.pipeline.planner.demand import Demand

MEASURED = ROOT / "docs" / "measurements"
# Prices of a GPU for an hour, of which the ratio matters: the study rented the H100 at twice the A100's price.
PRICES = {"a100": 1.0, "h100": 2.0}
CHAT = (512, 256)
OPTIONS = (("h100", "fp8"), ("h100", "fp16"), ("a100", "fp16"))
# Models, and those of the same shapes in NVIDIA's tables; the one of its releases that has all three options.
MODELS = {"llama3-8b": "llama3.1-8b", "llama3-70b": "llama3.1-70b", "mixtral-8x7b": "mixtral-8x7b"}
RELEASE = "0.14"
OBJECTIVES = ("ttft:p99<1s", "tpot:p99<50ms")


def page(plot: str) -> tuple[str, str]:
    """The page in Markdown, and its plot as SVG."""
    lines = head(
        "H100 or A100, for Llama 3",
        "The study of 2024 rented an H100 80GB PCIe and an A100 80GB PCIe, the first at twice the price, and asked "
        "when it pays.",
        plot, "cost of a million output tokens against the rate of requests",
    )  # fmt: skip
    lines += [*_answer(), *_one_stream(), *_ollama(), *_parallel(), *_claims(), *_pays()]
    lines += [
        "## Out of scope",
        "",
        "Training and fine-tuning (the study's trainer benchmarks, QLoRA, native float8 in PyTorch, Transformer "
        "Engine) are not a matter of trtpipe, and nor are graphics and FP64 benchmarks.",
        "",
    ]
    return "\n".join(lines), _plot()


def _answer() -> list[str]:
    fp8, fp16, old = (_chat(gpu, dtype) for gpu, dtype in (("h100", "fp8"), ("h100", "fp16"), ("a100", "fp16")))
    gains = [ratio(full(one), full(old)) for one in (fp8, fp16)]
    alone = ratio(*(stream(planned(gpu, "llama3-8b", "bf16")) for gpu in ("h100-pcie", "a100-pcie")))
    price = PRICES["h100"] / PRICES["a100"]
    won = [gain is not None and gain > price for gain in gains]
    said = {True: "more than its price", False: "less than its price"}
    return [
        f"**In short**, for Llama 3 8B within {' and '.join(OBJECTIVES)}, {CHAT[0]} tokens in and {CHAT[1]} out, one "
        f"SXM card each: an H100 in FP8 serves {times(gains[0])} what an A100 in FP16 does, {said[won[0]]} of "
        f"{price:g}x; in FP16 {times(gains[1])}, {said[won[1]]}. A single stream gains {times(alone)} where both are "
        "PCIe cards in 16 bits: they read the same bytes at nearly the same speed.",
        "",
    ]


def _chat(gpu: str, dtype: str) -> Candidate:
    return planned(gpu, "llama3-8b", dtype, tokens=CHAT, slo=OBJECTIVES)


def _one_stream() -> list[str]:
    study = {("h100-pcie", "bf16"): 70.0, ("h100-pcie", "fp8"): 112.0}
    rows = []
    for gpu, dtype in (("h100-pcie", "bf16"), ("h100-pcie", "fp8"), ("h100", "bf16"), ("h100", "fp8"),
                       ("a100-pcie", "bf16"), ("a100", "bf16")):  # fmt: skip
        one = planned(gpu, "llama3-8b", dtype)
        seen = study.get((gpu, dtype))
        rows.append([gpu, dtype, text(stream(one)), text(seen), times(ratio(stream(one), seen))])
    gained = ratio(stream(planned("h100-pcie", "llama3-8b", "fp8")), stream(planned("h100-pcie", "llama3-8b", "bf16")))
    lines = [
        "## One stream: Llama 3 8B", "", "128 tokens in and 128 out, output tokens/s of one client.", "",
        *table(["card", "type", "tokens/s", "the study measured", "predicted over measured"], rows),
        f"FP8 gains {times(gained)} over BF16 for one stream; the study saw 1.60x. Its host, of which one core limits "
        "decoding as it says, and its engine of 2024 were slower than what is predicted for today's.", "",
    ]  # fmt: skip
    rows = []
    for gpu in ("h100", "h200"):
        measured = json.loads((MEASURED / f"{gpu}.json").read_text(encoding="utf-8"))["engine"]["result"]
        for dtype in ("bf16", "fp8"):
            option = planned(gpu, "llama3-8b", dtype, runtime="vllm").option
            assert option is not None
            for clients in (1, 64):
                seen = float(measured[dtype]["in_process"][str(clients)]["steady"])
                said = option.together(Demand(Work(input_tokens="128", output_tokens="128")), clients).tokens_per_s
                rows.append([gpu, dtype, str(clients), text(seen), text(said), times(ratio(said, seen))])
    return [
        *lines,
        "Measured by us, vLLM 0.25, a model of Llama 3 8B's shapes and the same lengths, clients out of step "
        "([H100 SXM](../measurements/h100.md), [H200](../measurements/h200.md)):", "",
        *table(["card", "type", "clients", "measured tokens/s", "predicted", "predicted over measured"], rows),
    ]  # fmt: skip


def _ollama() -> list[str]:
    rows = []
    for model, dtype in (("llama3-70b", "int8-wo"), ("llama3-8b", "int8-wo")):
        new, old = (planned(gpu, model, dtype) for gpu in ("h100-pcie", "a100-pcie"))
        rows.append([model, text(stream(new)), text(stream(old)), times(ratio(stream(new), stream(old)))])
    return [
        "## One stream with weights of 8 bits, as Ollama runs it", "",
        "Weights of 8 bits, computed in 16: every token reads all of them, so that only the memory's bandwidth counts, "
        "which is 2.0 and 1.9 TB/s on the two PCIe cards. The study found 70B nearly the same on both.", "",
        *table(["model", "H100 PCIe", "A100 PCIe", "ratio"], rows),
    ]  # fmt: skip


def _parallel() -> list[str]:
    rows = []
    for model, published in MODELS.items():
        for tp in (1, 2, 4, 8):
            figures = [full(planned(gpu, model, dtype, tp)) for gpu, dtype in OPTIONS]
            if any(figures):
                ratios = [ratio(figures[0], figures[2]), ratio(figures[1], figures[2])]
                known = [_published(published, tp, *option) for option in OPTIONS]
                theirs = [ratio(known[0], known[2]), ratio(known[1], known[2])]
                rows.append([model, str(tp), *map(text, figures), *map(times, (*ratios, *theirs))])
    over = ["FP8 over A100", "FP16 over A100"]
    columns = ["model", "tp", "H100 FP8", "H100 FP16", "A100 FP16", *over, *(f"{one}, NVIDIA's" for one in over)]
    return [
        "## Many streams, by the number of GPUs", "",
        "128 tokens in and 128 out, as many clients as the KV cache holds; output tokens/s of all GPUs together, SXM "
        f"cards. A dash: the weights do not fit. NVIDIA's: of what it measured with TensorRT-LLM {RELEASE} (Llama 3.1, "
        "of the same shapes; tests/data/published/SOURCES.md).", "",
        *table(columns, rows),
    ]  # fmt: skip


def _published(model: str, tp: int, gpu: str, dtype: str) -> float | None:
    """Output tokens/s that NVIDIA measured at these lengths; None where it has no such run."""
    wanted = (RELEASE, model, tp, gpu, dtype, 128, 128)
    runs = (
        one.output_tokens_per_s
        for one in published_figures()
        if (one.release, one.model, one.tp, one.gpu, one.dtype, one.input_tokens, one.output_tokens) == wanted
    )
    return next(runs, None)


def _claims() -> list[str]:
    rows = []
    for model in ("llama2-7b", "llama3-8b"):
        for tokens in ((128, 128), (2048, 128)):
            new, old = (planned(g, model, d, tokens=tokens) for g, d in (("h100", "fp8"), ("a100", "fp16")))
            rows.append([
                model, f"{tokens[0]} / {tokens[1]}", times(ratio(full(new), full(old))), text(first_token(new)),
                text(first_token(old)), times(ratio(first_token(old), first_token(new))),
            ])  # fmt: skip
    return [
        "## NVIDIA's 4.6x and 4.4x", "",
        "The study quotes 4.6 times the throughput and a first token 4.4 times as early, H100 in FP8 over A100, from a "
        "model of 6 billion parameters (GPT-J). The nearest that the planner knows:", "",
        *table(
            ["model", "in / out", "throughput", "first token H100, ms", "A100, ms", "as early"], rows
        ),
        "Where attention has keys and values for every head (Llama 2 7B, GPT-J), FP8 also doubles the requests that "
        f"fit. By the data sheets an H100 has {times(_sheet('fp16'))} an A100's products in FP16, "
        f"{times(_sheet('fp8'))} in FP8, and {times(_sheet(None))} its bandwidth, which FP8 halves the bytes for.", "",
    ]  # fmt: skip


def _sheet(kind: str | None) -> float | None:
    """An H100's products of this type over an A100's of 16 bits; their bandwidths for None."""
    new, old = facts.find_gpu("h100"), facts.find_gpu("a100")
    return ratio(new.bandwidth_gbs, old.bandwidth_gbs) if kind is None else ratio(new.tflops[kind], old.tflops["fp16"])


def _cost(one: Candidate, gpu: str, rate: float) -> float | None:
    """Price of a million output tokens at `rate`, with as many cards as are needed."""
    if not one.rate:
        return None
    return math.ceil(rate / one.rate) * PRICES[gpu] / (rate * CHAT[1] * 3600) * 1e6


def _pays() -> list[str]:
    options = [("a100", "fp16"), ("h100", "fp16"), ("h100", "fp8")]
    columns = ["requests/s", *(f"{gpu.upper()} {dtype.upper()}" for gpu, dtype in options)]
    rows = []
    for rate in (0.5, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0):
        cells = []
        for gpu, dtype in options:
            one = _chat(gpu, dtype)
            cards = math.ceil(rate / one.rate) if one.rate else None
            cells.append(f"{text(_cost(one, gpu, rate))} ({cards})")
        rows.append([f"{rate:g}", *cells])
    most = {option: _chat(*option).rate for option in options}
    old, price = most["a100", "fp16"], PRICES["h100"] / PRICES["a100"]
    shares = [ratio(price * (old or 0), most["h100", dtype]) for dtype in ("fp8", "fp16")]
    said = [
        "never, at this price" if share is None or share > 1 else f"above {share:.0%} of its time" for share in shares
    ]
    breaks = [ratio(most["h100", dtype], old) for dtype in ("fp8", "fp16")]
    return [
        "## When the dearer card pays", "",
        f"Cost of a million output tokens, and the number of cards, within {' and '.join(OBJECTIVES)}, Llama 3 8B, "
        f"{CHAT[0]} tokens in and {CHAT[1]} out; an hour of an A100 costs 1, of an H100 {price:g}.", "",
        *table(columns, rows),
        f"Below about {text(old)} requests/s one A100 is enough, and the second price buys nothing but time to the "
        f"first token. Beside an A100 that is always busy, an H100 pays when it is busy in FP8 {said[0]}, in FP16 "
        f"{said[1]}. It pays up to {times(breaks[0])} of an A100's price in FP8, and up to "
        f"{times(breaks[1])} in FP16.", "",
        "Short or occasional work that leaves either card idle costs its rent: there the cheaper card is right, as the "
        "study says. Ask with your own prices, load and objectives: "
        "`trtpipe plan --model llama3-8b --gpu a100,h100 --dtype fp16,fp8 --price a100=1 --price h100=2 --rate 20 "
        "--slo 'ttft:p99<1s' --slo 'tpot:p99<50ms'`.", "",
    ]  # fmt: skip


def _plot() -> str:
    found = []
    for gpu, dtype in (("a100", "fp16"), ("h100", "fp16"), ("h100", "fp8")):
        one = _chat(gpu, dtype)
        rates = geometric(0.5, 200, 60)
        points = [(rate, cost) for rate in rates if (cost := _cost(one, gpu, rate)) is not None]
        found.append((f"{gpu.upper()} {dtype.upper()}, {PRICES[gpu]:g} an hour", points))
    return curves(
        "Llama 3 8B: the cheaper card until it is full, then the faster one", "requests/s",
        "cost of a million output tokens", found,
    )  # fmt: skip
