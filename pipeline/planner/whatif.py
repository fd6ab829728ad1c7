"""What-if analysis: single changes to an option, and their effect on memory, latency and throughput under its load.

KV cache off      every step computes all earlier tokens again, which shows what a byte of cache saves
KV heads          every attention head with keys and values of its own (no grouped-query attention)
weights, cache    other quantization recipes that the GPU supports
chunked context   without it a prompt is computed in one step, for which decoding sequences wait
KV reuse          half of the requests find half of their prompt in the cache
streaming window  attention over the last 1024 tokens and the first few
speculation       draft tokens of prompt lookup, which cost nothing to make, at a given share of them that is accepted
adapters          LoRA adapters in the GPU's memory, which takes room from the KV cache, and is read in each step
host's memory     KV cache that the GPU has no room for comes back over PCIe, instead of being computed again
multi-block       without it few multiprocessors read a sequence's cache, which matters at small batches
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trtpipe.engines.errors import UsageError
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.bench.load.work import SharedPrefix
from trtpipe.pipeline.planner.advice import Question, planned_target
from trtpipe.pipeline.planner.cost import Step
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.memory import Adapters
from trtpipe.pipeline.planner.predict import Option, quantization

WINDOW = 1024
# Draft tokens of a step, and the share of them that is accepted where none has been measured.
DRAFTS, ACCEPTANCE = 4, 0.5
# LoRA adapters that are served at once.
ADAPTERS = Adapters(number=8, rank=16)
# KV cache in the host's memory, in GiB.
HOST_GIB = 64
# Share of PCIe's data-sheet rate that a copy from the host's memory reaches: 55.5 of 64 GB/s on an H200, by `probe`.
HOST_SHARE = 0.87
# Thread blocks that keep a GPU's memory busy: about one per multiprocessor, of which data-centre cards have a hundred.
BLOCKS = 100


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change. `said` explains an effect that the figures do not show, or why there is no figure.

    kv_tokens  tokens of KV cache: (of the option, with the change)
    ttft, tpot  p50 in ms for a single client, likewise; no TPOT where an answer is one token
    tokens_per_s  output tokens per second with as many clients as can be served, likewise
    """

    name: str
    said: str = ""
    kv_tokens: tuple[int, int] | None = None
    ttft: tuple[float, float] | None = None
    tpot: tuple[float, float] | None = None
    tokens_per_s: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return vars(self)


class Figures(NamedTuple):
    """Figures of an option, as a WhatIf pairs them."""

    ttft: float
    tpot: float | None
    tokens_per_s: float


def what_ifs(option: Option, question: Question, acceptance: float | None = None) -> list[WhatIf]:
    """All changes of an option of the question, in the order above. `acceptance` is a measured share of draft tokens
    that is accepted.

    Raises UsageError for a share that is none.
    """
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise UsageError(
            f"an acceptance rate of {acceptance:g} is not possible",
            why="it is a share of the draft tokens",
            remedy="give a number from 0 to 1, as `trtpipe bench` measures it",
        )
    share = ACCEPTANCE if acceptance is None else acceptance
    demand = question.demand
    lengths = demand.lengths()
    now = _figures(option, demand)

    def against(name: str, other: Callable[[], tuple[Option, Demand]], said: str = "") -> WhatIf:
        try:
            changed, asked = other()
            changed.require_fit(lengths.longest)
        except UsageError as error:
            return WhatIf(name=name, said=str(error))
        then = _figures(changed, asked)
        return WhatIf(
            name=name, said=said, kv_tokens=(option.memory.kv_tokens, changed.memory.kv_tokens),
            ttft=(now.ttft, then.ttft), tpot=_pair(now.tpot, then.tpot),
            tokens_per_s=(now.tokens_per_s, then.tokens_per_s),
        )  # fmt: skip

    return [
        without_cache(option, lengths, now),
        against(
            "every head with its own keys and values", lambda: (_ungrouped(option, lengths), demand),
            f"{option.model.num_attention_heads // option.model.num_key_value_heads} times the cache",
        ),
        *(
            against(_named(name, cache), partial(_requantized, option, question, name, cache))
            for name, cache in _recipes(option, question)
        ),
        against("prompts in one piece (no chunked context)", lambda: (replace(option, chunked=False), demand)),
        against(
            "KV-cache reuse: half of the requests share half of their prompt",
            lambda: (option, _sharing(demand, lengths)),
        ),
        against(
            f"streaming window of {WINDOW} tokens", lambda: (replace(option, window=WINDOW), demand),
            f"a sequence holds {WINDOW} tokens, not {lengths.mean}; what the model forgets is not in these figures"
            if lengths.mean > WINDOW else f"a sequence of {lengths.mean} tokens, the mean, fits it: nothing changes",
        ),
        against(
            f"prompt lookup of {DRAFTS} draft tokens",
            lambda: (replace(option, drafts=DRAFTS, acceptance=share), demand),
            f"{1 + DRAFTS * share:.1f} tokens a step: {'an assumed' if acceptance is None else 'the given'} "
            f"{100 * share:.0f} % of the drafts are accepted",
        ),
        *(
            [
                against(
                    f"{ADAPTERS.number} LoRA adapters of rank {ADAPTERS.rank}",
                    lambda: (_adapted(option, lengths), demand),
                    "read in each step; the kernels that apply them are not in these figures",
                )
            ]
            if option.limits.adapters is None
            else []
        ),
        in_host_memory(option, lengths, now),
        unsplit(option, demand, now),
    ]  # fmt: skip


def without_cache(option: Option, lengths: Lengths, now: Figures) -> WhatIf:
    """Each step computes all tokens of its sequence again. The batch is one sequence, since that alone is compute-bound
    and more would gain nothing. A byte of cache saves 2 x parameters / (bytes of a token) operations.
    """
    tokens = lengths.mean_input + lengths.mean_output / 2
    cost = option.cost
    counts = cost.counts
    operations = 2.0 * counts.parameters * counts.tp
    again = float(cost.seconds(Step(context=tokens, decoding=0, cached=0, work=tokens**2 / 2, logits=1)))
    return WhatIf(
        name="no KV cache", kv_tokens=(option.memory.kv_tokens, 0), ttft=(now.ttft, now.ttft),
        tpot=_pair(now.tpot, 1e3 * again), tokens_per_s=(now.tokens_per_s, 1 / again),
        said=f"each token of an answer computes {tokens:.0f} tokens instead of one: {operations / 1e9:.3g} billion "
        "operations for each token that is kept, "
        f"{operations / (counts.token_bytes * counts.tp):,.0f} for each byte of cache",
    )  # fmt: skip


def in_host_memory(option: Option, lengths: Lengths, now: Figures) -> WhatIf:
    """A prompt whose first half is in the host's memory: each GPU reads its part of the KV cache, instead of computing
    those tokens."""
    name = f"{HOST_GIB} GiB of KV cache in the host's memory"
    speed, half = option.gpu.pcie_gbs, max(1, round(lengths.mean_input / 2))
    if speed is None:
        return WhatIf(name=name, said=f"the speed of {option.gpu.name}'s link to its host is not known")
    cost, token = option.cost, option.memory.kv_token
    kept = HOST_GIB * 2**30 // (token * option.tp)
    loading = half * token / (speed * 1e9 * HOST_SHARE)
    computing = float(cost.seconds(Step(context=half, decoding=0, cached=0, work=half**2 / 2, logits=0)))
    saved = 1e3 * (computing - loading)
    return WhatIf(
        name=name, kv_tokens=(option.memory.kv_tokens, option.memory.kv_tokens + kept),
        ttft=(now.ttft, now.ttft - saved),
        said=f"{kept:,} tokens more are kept for reuse: a prompt whose first {half} tokens are among them reads them "
        f"in {1e3 * loading:.1f} ms instead of computing them in {1e3 * computing:.1f}; no sequence gets longer",
    )  # fmt: skip


def unsplit(option: Option, demand: Demand, now: Figures) -> WhatIf:
    """Without multi-block decoding, as many thread blocks read one sequence's cache as it has KV heads on a GPU; a full
    batch has enough thread blocks.
    """
    readers = max(1, option.model.num_key_value_heads // option.tp)
    slower = replace(option, cost=option.cost.with_kv_share(min(1.0, readers / BLOCKS)))
    return WhatIf(
        name="no multi-block decoding", tpot=_pair(now.tpot, _median(slower.together(demand, 1).tpot)),
        said=f"one client's cache is read by {readers} thread blocks a layer; a full batch is as fast as before",
    )  # fmt: skip


def _figures(option: Option, demand: Demand) -> Figures:
    single = option.together(demand, 1)
    full = option.full(demand)
    return Figures(float(np.median(single.ttft)), _median(single.tpot), full.tokens_per_s)


def _median(values: Any) -> float | None:
    return float(np.median(values)) if len(values) else None


def _pair(now: float | None, then: float | None) -> tuple[float, float] | None:
    return None if now is None or then is None else (now, then)


def _adapted(option: Option, lengths: Lengths) -> Option:
    return Option.make(
        option.model, option.gpu, option.precision, option.mapping, lengths, option.cost.efficiency,
        chunked=option.chunked, adapters=ADAPTERS,
    )  # fmt: skip


def _ungrouped(option: Option, lengths: Lengths) -> Option:
    model = replace(option.model, num_key_value_heads=option.model.num_attention_heads)
    return Option.make(
        model, option.gpu, option.precision, option.mapping, lengths, option.cost.efficiency, chunked=option.chunked,
        adapters=option.limits.adapters,
    )  # fmt: skip


def _recipes(option: Option, question: Question) -> list[tuple[str, str | None]]:
    """Other quantization recipes to compare: unquantized, FP8 with and without its cache, INT8. None for a model that
    came quantized."""
    if question.stored is not None:
        return []
    every: list[tuple[str, str | None]] = [("bf16", None), ("fp8", "none"), ("fp8", "fp8"), ("int8", None)]
    return [one for one in every if _quantization(option, question, *one) != quantization(option.precision)]


def _quantization(option: Option, question: Question, name: str, cache: str | None) -> Quantization | None:
    try:
        return quantization(planned_target(question, option.gpu, name, cache)[0])
    except UsageError:
        return None


def _named(name: str, cache: str | None) -> str:
    return f"--dtype {name}" + (f" --kv-cache {cache}" if cache else "")


def _requantized(option: Option, question: Question, name: str, cache: str | None) -> tuple[Option, Demand]:
    """Raises UsageError for a precision that the model, the GPU or the runtime cannot have."""
    precision, _ = planned_target(question, option.gpu, name, cache)
    made = Option.make(
        option.model, option.gpu, precision, option.mapping, question.demand.lengths(), option.cost.efficiency,
        adapters=option.limits.adapters,
    )  # fmt: skip
    return made, question.demand


def _sharing(demand: Demand, lengths: Lengths) -> Demand:
    work = replace(
        demand.work, shared_prefix=SharedPrefix(share=0.5, tokens=max(1, round(lengths.mean_input / 2))), sessions=None
    )
    return Demand(work, reuse=True)
