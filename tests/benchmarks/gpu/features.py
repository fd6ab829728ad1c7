"""Sections of `make gpu-e2e`: what LoRA adapters, guides, speculation and a KV cache in the host's memory cost or gain.

Each is served behind the gateway, and the same load is measured with it and without it. The model's weights are random:
nothing in its answers repeats, so that a guide repeats where drafts are to be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.benchmarks.gpu import front_load
from tests.benchmarks.gpu.loop import OUTPUT_TOKENS, PROMPT_TOKENS
from tests.benchmarks.gpu.place import Place
from tests.benchmarks.gpu.sections import Keep
from tests.support.adapters import write_adapter
from tests.support.long_list import SCHEMA

# What a server's row of `ps` and a target give: the figures of its loads.
Loads = Callable[[Mapping[str, Any], str], dict[str, Any]]
DTYPE = "bf16"
BATCH, WAVES = 64, 3
ADAPTERS, RANK = (0, 1, 8, 32), 16
DRAFTED = (1, 16, 64)
# In the reference runtime a step has room for every place's token and its drafts.
DRAFTS = ("build.speculative_decoding_mode=ngram", "build.max_draft_len=4", "build.max_num_tokens=4096")
VARIANTS: dict[str, tuple[str, ...]] = {"plain": (), "ngram": DRAFTS, "lora": ()}
# One answer alone fits it: each digit is one token in any byte-level vocabulary without merges of digits.
REPEATING = {"structured_outputs": {"regex": "(0123456789){50}"}}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "items", "schema": SCHEMA}}}
# Tokens of prompts are below it.
VOCABULARY = 20_000
DRAWN = {"temperature": 0.8, "top_p": 1.0}
# Prompt starts: their tokens, and how many there are; a GPU's cache that holds the fewer alone; tokens after them.
PREFIX, FEW, MANY, SUFFIX, ANSWER, IN_FLIGHT = 4096, 8, 32, 64, 32, 8
CACHE = 65536
HOST_BYTES = 24 << 30


def features(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """Adapters, guides and n-gram drafts in vLLM."""
    _in_runtime("vllm", place, model, out, keep)


def reference_features(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """The same in the reference runtime."""
    _in_runtime("reference", place, model, out, keep)


def _in_runtime(runtime: str, place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    there = out.setdefault(runtime, {})
    for name, settings in VARIANTS.items():
        adapters = adapter_words(place, model, max(ADAPTERS)) if name == "lora" else ()
        _measure(place, model, runtime, settings, adapters, there, name, _VARIANT_LOADS[name])
        keep()
    place.forget()


def _measure(
    place: Place, model: Path, runtime: str, settings: Sequence[str], words: Sequence[str], out: dict[str, Any],
    name: str, loads: Loads,
) -> None:  # fmt: skip
    """Build and serve a target, and put what `loads` gives of it, or the reason why there is nothing, into `out`."""
    if name in out:
        return
    try:
        run = place.build(model, DTYPE, runtime, *settings, words=words)
        with place.front(run.name) as entry:
            out[name] = loads(entry, run.name)
    except (RuntimeError, httpx.HTTPError) as error:
        out.setdefault("reasons", {})[name] = str(error)[:500] or type(error).__name__


def adapter_words(place: Place, model: Path, count: int) -> tuple[str, ...]:
    """Words of `build` for adapters a00, a01, ... All have the same weights: to a runtime each name is an adapter of
    its own."""
    folder = place.scratch / "adapter"
    if not folder.is_dir():
        write_adapter(folder, model, rank=RANK, size=0.05, dtype="BF16")
    return tuple(word for n in range(count) for word in ("--lora", f"a{n:02}={folder}"))


def _plain(entry: Mapping[str, Any], target: str) -> dict[str, Any]:
    found: dict[str, Any] = {str(n): _measured(entry, n, _body(target, "greedy")) for n in DRAFTED}
    found["repeating"] = {str(n): _measured(entry, n, _body(target, "repeating", **REPEATING)) for n in DRAFTED}
    found["drawn"] = _measured(entry, BATCH, _body(target, "drawn", **DRAWN))
    found["json"] = _measured(entry, BATCH, _body(target, "json", **DRAWN, **JSON))
    return found


def _lora(entry: Mapping[str, Any], target: str) -> dict[str, Any]:
    found = {}
    for count in ADAPTERS:
        names = [f"{target}:a{n:02}" for n in range(count)] or [target]
        found[str(count)] = _measured(entry, BATCH, _body(names, f"lora {count}"))
    return found


def _ngram(entry: Mapping[str, Any], target: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern, more in (("greedy", {}), ("repeating", REPEATING)):
        found[pattern] = {}
        for concurrency in DRAFTED:
            before = front_load.speculation(entry["metrics"])
            row = _measured(entry, concurrency, _body(target, pattern, **more))
            after = front_load.speculation(entry["metrics"])
            counts = {name: after[name] - before.get(name, 0.0) for name in after}
            found[pattern][str(concurrency)] = {**row, **counts}
    return found


_VARIANT_LOADS: dict[str, Loads] = {"plain": _plain, "ngram": _ngram, "lora": _lora}


def _measured(entry: Mapping[str, Any], concurrency: int, body: front_load.Body) -> dict[str, float]:
    return front_load.waves(entry["openai"], body, concurrency, WAVES)


def _body(names: str | list[str], case: str, **more: Any) -> front_load.Body:
    """Requests of random prompts, others in each case, to each of the models `names` in turn; greedy by default."""
    models = [names] if isinstance(names, str) else names

    def body(number: int) -> dict[str, Any]:
        random = np.random.default_rng([number, *case.encode()])
        end = {} if "structured_outputs" in more or "response_format" in more else {"ignore_eos": True}
        return {
            "model": models[number % len(models)], "prompt": random.integers(3, VOCABULARY, PROMPT_TOKENS).tolist(),
            "max_tokens": OUTPUT_TOKENS, "temperature": 0, "seed": number, **end, **more,
        }  # fmt: skip

    return body


def offload(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """Long prompt starts that come again: more than the GPU's cache holds, with the host's memory behind it and
    without."""
    longest = PREFIX + SUFFIX + ANSWER
    sizes = (
        f"build.max_input_len={longest}", f"build.max_seq_len={longest + 64}",
        f"serving.max_tokens_in_paged_kv_cache={CACHE}",
    )  # fmt: skip
    for name, settings in (("gpu", ()), ("host", (f"serving.kv_cache_host_memory_bytes={HOST_BYTES}",))):
        _measure(place, model, "vllm", (*sizes, *settings), (), out, name, _starts)
        keep()
    place.forget()


def _starts(entry: Mapping[str, Any], target: str) -> dict[str, Any]:
    return {
        str(groups): front_load.waves(entry["openai"], _again(target, groups), IN_FLIGHT, 2 * groups // IN_FLIGHT)
        for groups in (FEW, MANY)
    }


def _again(target: str, groups: int) -> front_load.Body:
    """Requests that begin with each of `groups` texts in turn."""

    def body(number: int) -> dict[str, Any]:
        start = np.random.default_rng([groups, number % groups]).integers(3, VOCABULARY, PREFIX)
        own = np.random.default_rng([groups, groups + number]).integers(3, VOCABULARY, SUFFIX)
        return {
            "model": target, "prompt": [*start.tolist(), *own.tolist()], "max_tokens": ANSWER, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip

    return body
