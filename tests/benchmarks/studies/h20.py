"""The second study's questions: H20 or A800, for inference?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.benchmarks.studies.predictions import (
    curves,
    first_token,
    full,
    head,
    planned,
    ratio,
    stream,
    table,
    text,
    times,
)
from trtpipe.configs import facts
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.memory import kv_token_bytes, rank_bytes
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED
from trtpipe.pipeline.bench.load.lengths import parse
from trtpipe.pipeline.bench.load.seeds import generator
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.planner.advice import Candidate, Question
from trtpipe.pipeline.planner.cost import Step
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.predict import Option
from trtpipe.pipeline.planner.whatif import WhatIf, what_ifs

MODEL, TP = "llama2-70b", 2
LONG = (3072, 512)
CHAT = (1024, 256)
OBJECTIVES = ("ttft:p99<4s", "tpot:p99<100ms")
CARDS = (("h20", "fp8"), ("a800", "fp16"))
# The study's example of a KV cache.
BATCH, CONTEXT = 8, 4096


def page(plot: str) -> tuple[str, str]:
    """The page in Markdown, and its plot as SVG."""
    lines = head(
        "H20 or A800, for inference",
        "The review of 2024 compared the two cards by their data sheets, H20 in FP8 and A800, which has no FP8, in "
        "FP16.",
        plot, "tokens/s of a GPU against tokens/s of one client",
    )  # fmt: skip
    lines += [*_sheets(), *_speeds(), *_cache(), *_bounds(), *_optimisations()]
    lines += [
        "## Out of scope", "",
        "Training, for which the review finds H20 in FP8 about equal to A800 in FP16, is not a matter of trtpipe.", "",
    ]  # fmt: skip
    return "\n".join(lines), _plot()


def _sheets() -> list[str]:
    new, old = facts.find_gpu("h20"), facts.find_gpu("a800")
    rows = [
        ("FP16 TFLOPS", new.tflops["fp16"], old.tflops["fp16"], "148 / 312"),
        ("FP8 TFLOPS", new.tflops["fp8"], None, "296 / none"),
        ("memory, GiB", new.memory_gib, old.memory_gib, "96 / 80"),
        ("memory bandwidth, GB/s", new.bandwidth_gbs, old.bandwidth_gbs, "nearly 2x"),
        ("NVLink, both ways, GB/s", 2 * (new.nvlink_gbs or 0), 2 * (old.nvlink_gbs or 0), "900 / 400"),
    ]
    gains = _gains()
    return [
        f"**In short**, for Llama 2 70B on {TP} cards each, H20 in FP8 over A800 in FP16: "
        f"{', '.join(f'{what} {times(gain)}' for what, gain in gains.items())}. H20 is {_judged(gains)}. "
        "Bandwidth alone misleads: in 16 bits A800's products are the faster ones, and they bound a full batch.", "",
        "## Data sheets", "",
        *table(
            ["", "H20", "A800", "ratio", "the review"],
            [[name, text(a), text(b), times(ratio(a, b)), said] for name, a, b, said in rows],
        ),
        "`trtpipe gpus h20` and `trtpipe gpus a800` name the source of each figure. None of it was measured by us: no "
        "H20 and no A800 was at hand.", "",
    ]  # fmt: skip


def _gains() -> dict[str, float | None]:
    """What H20 in FP8 gains over A800 in FP16, by what counts."""
    new, old = (planned(gpu, MODEL, dtype, TP) for gpu, dtype in CARDS)
    prompt, prompt_base = (first_token(planned(gpu, MODEL, dtype, TP, tokens=(2048, 128))) for gpu, dtype in CARDS)
    chat, chat_base = (full(_chat(gpu, dtype)) for gpu, dtype in CARDS)
    return {
        "prompts": ratio(prompt_base, prompt),
        "one client's tokens": ratio(stream(new), stream(old)),
        f"tokens within {' and '.join(OBJECTIVES)}": ratio(chat, chat_base),
        "tokens of all clients that fit": ratio(full(new), full(old)),
    }


def _chat(gpu: str, dtype: str) -> Candidate:
    return planned(gpu, MODEL, dtype, TP, tokens=CHAT, slo=OBJECTIVES)


def _judged(gains: dict[str, float | None]) -> str:
    ahead = [what for what, gain in gains.items() if gain is not None and gain > 1.1]
    behind = [what for what, gain in gains.items() if gain is not None and gain < 0.9]
    even = [what for what in gains if what not in ahead and what not in behind]
    parts = (("ahead in", ahead), ("about even in", even), ("behind in", behind))
    return ", ".join(f"{word} {' and '.join(which)}" for word, which in parts if which)


def _speeds() -> list[str]:
    rows = []
    for model, tp in (("llama3-8b", 1), (MODEL, TP), ("llama3-70b", TP)):
        new, old = planned("h20", model, "fp8", tp), planned("a800", model, "fp16", tp)
        prompts = [
            planned(gpu, model, dtype, tp, tokens=(2048, 128)) for gpu, dtype in (("h20", "fp8"), ("a800", "fp16"))
        ]
        speeds: list[tuple[str, float | None, float | None]] = [
            ("first token of 2,048, ms", first_token(prompts[0]), first_token(prompts[1])),
            ("one client, tokens/s", stream(new), stream(old)),
            ("all clients that fit, tokens/s", full(new), full(old)),
        ]
        for what, a, b in speeds:
            gain = ratio(b, a) if what.startswith("first") else ratio(a, b)
            rows.append([f"{model}, tp {tp}", what, text(a), text(b), times(gain)])
    chat = [_chat(gpu, dtype) for gpu, dtype in CARDS]
    within = f"{CHAT[0]:,} in and {CHAT[1]} out, within {' and '.join(OBJECTIVES)}, tokens/s"
    rows.append([f"{MODEL}, tp {TP}", within, *(text(full(one)) for one in chat), times(ratio(*map(full, chat)))])
    return [
        "## Prompts and tokens", "",
        "H20 in FP8, A800 in FP16; 128 tokens in and out but for the first token. A gain above 1 is H20's.", "",
        *table(["model", "", "H20 FP8", "A800 FP16", "gain"], rows),
        "Prompts, and a full batch of short sequences, are bound by products, where H20 in FP8 has nearly what A800 "
        "has in FP16; one client's tokens by bandwidth, where H20 has twice as much and reads half the bytes.", "",
    ]  # fmt: skip


def _cache() -> list[str]:
    model = facts.find_shape(MODEL)[1]
    alone = replace(model, num_key_value_heads=model.num_attention_heads)
    fp8 = planned("h20", MODEL, "fp8", TP, kv_cache="fp8").option
    assert fp8 is not None
    tokens = BATCH * CONTEXT
    rows = [
        ["FP16, every head its own (the review's 80 GB)", _gib(_token_bytes(alone) * tokens)],
        ["FP16, grouped queries, as the model is", _gib(_token_bytes(model) * tokens)],
        ["FP8, grouped queries", _gib(fp8.memory.kv_token * TP * tokens)],
    ]
    operations = 2.0 * _parameters(model)
    products = 2.0 * 2 * model.hidden_size**2 * model.num_hidden_layers * tokens
    return [
        "## The KV cache", "",
        f"Llama 2 70B, a batch of {BATCH} with {CONTEXT:,} tokens each:", "",
        *table(["cache", "GiB"], rows),
        f"Without a cache each new token computes all earlier ones again: {operations:.3g} operations for each of "
        f"them, {operations / _token_bytes(alone):,.0f} for each byte of the review's cache, and "
        f"{operations / _token_bytes(model):,.0f} for each byte of the model's own. The review counts the "
        f"products of keys and values alone: {2 * model.hidden_size:,} operations for each number that is kept, "
        f"{products / 2**40:.0f} x 2^40 in all; it says 16,000 and 640 T.", "",
    ]  # fmt: skip


def _token_bytes(model: ModelConfig) -> int:
    return kv_token_bytes(model, DataType.FLOAT16, Mapping(), UNQUANTIZED)


def _parameters(model: ModelConfig) -> float:
    """Those of the layers, which compute every token."""
    every = rank_bytes(model, DataType.FLOAT16, Mapping(), UNQUANTIZED) / 2
    return every - 2 * model.vocab_size * model.hidden_size  # embeddings and head


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def _bounds() -> list[str]:
    model = facts.find_shape(MODEL)[1]
    hidden = model.hidden_size
    rows = []
    for gpu in ("h20", "a800"):
        spec = facts.find_gpu(gpu)
        assert spec.nvlink_gbs is not None
        compute = 2 * _parameters(model) / model.num_hidden_layers / (spec.tflops["fp16"] * 1e12)
        # Two all-reduces, of which each sends and gets twice the hidden values of 16 bits.
        link = 2 * 2 * hidden * 2 / (spec.nvlink_gbs * 1e9)
        rows.append(
            [gpu.upper(), f"{compute / link:.0f}", f"{2 * compute / link:.0f}", {"h20": "148", "a800": "31"}[gpu]]
        )
    shares = []
    for tp in (2, 4, 8):
        cells = [f"{tp}"]
        for gpu, dtype in (("h20", "fp8"), ("a800", "fp16")):
            one = planned(gpu, MODEL, dtype, tp)
            share = None if one.best is None else one.best.shares["all-reduce"]
            cells += [text(one.per_gpu or None), "–" if share is None else f"{share:.0%}"]
        shares.append(cells)
    return [
        "## How many cards may share a layer", "",
        "The rule of the review: the number of cards at which a layer's all-reduces take as long as its products. By "
        "the data sheet's FP16 products, for Llama 2 70B:", "",
        *table(["card", "one direction of NVLink", "both, as the review counts", "the review"], rows),
        "An engine meets its limit earlier, since an all-reduce has a latency, and each card's part of a product "
        "becomes small. Predicted, 128 tokens in and out, all clients that fit:", "",
        *table(["tp", "H20 FP8, tokens/s of a GPU", "in all-reduces", "A800 FP16", "in all-reduces"], shares),
    ]  # fmt: skip


def _long() -> Candidate:
    return planned("h20", MODEL, "fp8", TP, tokens=LONG)


def _optimisations() -> list[str]:
    option = _long().option
    assert option is not None
    demand = Demand(Work(input_tokens=str(LONG[0]), output_tokens=str(LONG[1])))
    changes = what_ifs(option, Question(model=MODEL, shape=option.model, gpus=(option.gpu,), demand=demand))
    rows = [_effect(name, changes, begins) for name, begins in (
        ("StreamingLLM (window with sinks)", "streaming window"),
        ("multi-block mode", "no multi-block"),
        ("chunked context", "prompts in one piece"),
        ("KV-cache reuse", "KV-cache reuse"),
        ("FP8 products", "--dtype bf16"),
        ("FP8 KV cache", "--dtype fp8 --kv-cache fp8"),
        ("grouped queries", "every head"),
        ("the KV cache itself", "no KV cache"),
    )]  # fmt: skip
    batch = min(option.limits.max_batch_size, 64)
    work = LONG[0] ** 2 / 2
    parts = option.cost.parts(Step(context=LONG[0], decoding=0, cached=0, work=work, logits=1))
    attention = float(parts.attention / sum(parts))
    slower = _held(option, 512)[1] / _held(option, LONG[0])[1]
    return [
        "## The review's optimisations", "",
        f"Llama 2 70B in FP8 on {TP} H20, {LONG[0]:,} tokens in and {LONG[1]} out. Each row changes one thing; figures "
        "are with it, over those without it.", "",
        *table(["optimisation", "TTFT, one client", "TPOT, one client", "tokens/s, all that fit", "KV cache, tokens"],
               [row for row in rows if row is not None]),
        f"- In-flight batching: a static batch of {batch} waits for its longest answer. Where answers vary as chats' "
        f"do (lognormal, 0.6), the longest of {batch} is {_longest(batch):.1f} times the mean, and so are a static "
        "batch's steps for the same tokens; padding comes on top.",
        f"- Chunked context: in one piece such a prompt holds up the tokens of all others by "
        f"{_held(option, LONG[0])[0]:.0f} ms, in chunks of 512 by {_held(option, 512)[0]:.0f} ms at most. All chunks "
        f"take {slower:.2f}x as long, since each reads the earlier ones again.",
        f"- FP8 attention of prompts (FMHA): a prompt of {LONG[0]:,} tokens spends {attention:.0%} of its time there. "
        f"At twice the speed its first token comes {1 / (1 - attention / 2):.2f}x as early. The planner takes 16 bits.",
        "- What a window forgets is a matter of answers, not of speed: none of these figures says it.", "",
    ]  # fmt: skip


def _effect(name: str, changes: list[WhatIf], begins: str) -> list[str] | None:
    """A row of what an optimisation does; a change of the planner's is with it, or without it."""
    found = next((one for one in changes if one.name.startswith(begins)), None)
    if found is None:
        return None
    without = not begins.startswith(("streaming", "KV-cache reuse", "--dtype fp8"))

    def gain(pair: tuple[float, float] | None, show: Callable[[float | None], str]) -> str:
        if pair is None:
            return "–"
        now, then = pair
        return show(ratio(now, then) if without else ratio(then, now))

    return [name, *(gain(pair, times) for pair in (found.ttft, found.tpot, found.tokens_per_s, found.kv_tokens))]


def _held(option: Option, chunk: int) -> tuple[float, float]:
    """Longest step of a prompt that is computed in chunks, and all of them, in ms."""
    steps = [
        1e3 * option.seconds(Step(context=chunk, decoding=0, cached=0, work=chunk * (before + chunk / 2), logits=1))
        for before in range(0, LONG[0], chunk)
    ]
    return max(steps), sum(steps)


def _longest(batch: int) -> float:
    """Longest of `batch` answers over their mean, on average."""
    drawn = parse("lognormal:256,0.6", "answers").tokens(generator((0, 4)), 1000 * batch).reshape(1000, batch)
    return float(drawn.max(axis=1).mean() / drawn.mean())


def _plot() -> str:
    demand = Demand(Work(input_tokens="1024", output_tokens="256"))
    found = []
    for gpu, dtype in (("h20", "fp8"), ("h20", "fp16"), ("a800", "fp16")):
        option = planned(gpu, MODEL, dtype, TP, tokens=(1024, 256)).option
        if option is None:
            continue
        points, clients = [], 1
        while clients <= option.limits.max_batch_size:
            at = option.together(demand, clients)
            points.append((1e3 / float(np.median(at.tpot)), at.tokens_per_s / TP))
            clients *= 2
        found.append((f"{gpu.upper()} {dtype.upper()}, 1 to {clients // 2} clients", points))
    return curves(
        f"Llama 2 70B on {TP} cards, 1,024 tokens in and 256 out", "tokens/s of one client", "tokens/s of a GPU", found
    )
