"""What people use instead, on the same shapes and lengths: transformers, torch compiled with torchao's float8, and the
kernels that vLLM executes. Runs in the engine's environment: `python -m tests.benchmarks.gpu.inside stacks:WHAT ..`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.gpu import loop

# Rows that are multiplied at once: one stream, streams in flight, prompts.
ROWS = (1, 16, 64, 256, 1024, 4096)
# (outputs, inputs) of a layer's matrices in Llama 3 8B: q, k and v, o, gate and up, down.
LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 32
# (sequences, tokens of each): prompts, and what sequences that decode have in the cache.
PROMPTS = ((1, 128), (16, 128), (1, 2048), (4, 2048), (1, 8192))
CACHED = ((1, 1024), (64, 256), (64, 1024), (256, 256), (256, 1024))


def transformers(model: str, generate: list[int], batching: list[int], new: int) -> dict[str, Any]:
    """transformers' own `generate` for so many requests at once, and its continuous batching."""
    from transformers import GenerationConfig

    loaded = _load(model)
    out: dict[str, Any] = {"generate": {str(n): _generated(loaded, n, new) for n in generate}, "batching": {}}
    random = np.random.default_rng(0)
    many = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for streams in batching:
        for _ in range(2):  # the first time it sets itself up
            prompts = random.integers(0, loaded.config.vocab_size, (streams, loop.PROMPT_TOKENS)).tolist()
            with loop.metered() as joules:
                results = list(loaded.generate_batch(prompts, generation_config=many, progress_bar=False).values())
            taken = max(one.lifespan[1] for one in results) - min(one.created_time for one in results)
            made = sum(len(one.generated_tokens) for one in results)
            spent = joules()
            out["batching"][str(streams)] = {
                "waves": made / taken, **({} if spent is None else {"joules_per_token": spent / made})
            }  # fmt: skip
    return out


def compiled(model: str, way: str, streams: int, new: int) -> dict[str, float]:
    """`generate` over a static cache, which transformers has torch compile, with torchao's float8 or in bfloat16.

    way  bf16, float8 (inputs are rounded as they come) or float8-weights
    """
    import torch

    loaded = _load(model)
    if way != "bf16":
        from torchao.quantization import (  # type: ignore[import-not-found,unused-ignore]
            Float8DynamicActivationFloat8WeightConfig,
            Float8WeightOnlyConfig,
            PerRow,
            quantize_,
        )

        rounded = way == "float8"
        chosen = (
            Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()) if rounded else Float8WeightOnlyConfig()
        )
        # As in our recipes, the head stays as it is.
        quantize_(loaded, chosen, lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")
    return _generated(loaded, streams, new, cache_implementation="static")


def _load(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map=device)


def _generated(loaded: Any, streams: int, new: int, **settings: Any) -> dict[str, float]:
    """The best of three runs of `generate`, after one that sets it up; the time to one token alone is the first's."""
    import torch
    from transformers import GenerationConfig

    ids = torch.tensor(
        np.random.default_rng(streams).integers(0, loaded.config.vocab_size, (streams, loop.PROMPT_TOKENS)),
        device=loaded.device,
    )

    def run(tokens: int) -> float:
        config = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **settings
        )
        began = time.perf_counter()
        made = loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        made.cpu()
        assert made.shape[1] == loop.PROMPT_TOKENS + tokens
        return time.perf_counter() - began

    run(new)
    first = min(run(1) for _ in range(3))
    runs = []
    for _ in range(3):
        with loop.metered() as joules:
            seconds = run(new)
        runs.append((seconds, joules()))
    seconds, spent = min(runs, key=lambda one: one[0])
    return {"waves": streams * new / seconds, **loop.told(streams * new, [first], spent)}


def products() -> dict[str, Any]:
    """Microseconds of a layer's matrix products by precision and rows, each as vLLM executes it."""
    import torch
    from vllm import _custom_ops as ops  # type: ignore[import-not-found,unused-ignore]

    def eight_bits(kind: Any, rows: int) -> Callable[[], None]:
        def made(*shape: int) -> Any:
            return torch.randint(-100, 100, shape, dtype=torch.int8, device="cuda").to(kind)

        parts = [(made(rows, inputs), made(outputs, inputs).t()) for outputs, inputs in LAYER]
        scales = [
            (torch.rand(rows, 1, device="cuda"), torch.rand(outputs, 1, device="cuda").view(1, -1))
            for outputs, _ in LAYER
        ]

        def run() -> None:
            for (x, w), (a, b) in zip(parts, scales, strict=True):
                ops.cutlass_scaled_mm(x, w, a, b, torch.bfloat16)

        return run

    def plain(rows: int) -> Callable[[], None]:
        def made(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        parts = [(made(rows, inputs), made(outputs, inputs)) for outputs, inputs in LAYER]

        def run() -> None:
            for x, w in parts:
                torch.nn.functional.linear(x, w)

        return run

    ways: dict[str, Callable[[int], Callable[[], None]]] = {
        "bf16": plain,
        "fp8": lambda rows: eight_bits(torch.float8_e4m3fn, rows),
        "int8": lambda rows: eight_bits(torch.int8, rows),
    }
    return {name: {str(rows): _microseconds(make(rows)) for rows in ROWS} for name, make in ways.items()}


def attention() -> dict[str, Any]:
    """Microseconds of a layer's attention (FlashAttention 3) in 16 and 8 bits: prompts, then a token of each sequence.

    Keys and values are paged, as in vLLM.
    """
    import torch
    from triton.testing import do_bench
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    def made(kind: Any, *shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(kind)

    def run(kind: Any, sequences: int, tokens: int, asked: int) -> float:
        blocks = -(-tokens // BLOCK)
        q = made(kind, sequences * asked, HEADS, HEAD_SIZE)
        k, v = (made(kind, sequences * blocks, BLOCK, KV_HEADS, HEAD_SIZE) for _ in range(2))
        scale = {
            f"{name}_descale": torch.ones(sequences, KV_HEADS, device="cuda") for name in "qkv"
        } if kind is not torch.bfloat16 else {}  # fmt: skip
        given: dict[str, Any] = {
            "max_seqlen_q": asked, "max_seqlen_k": tokens, "causal": True, "fa_version": 3,
            "cu_seqlens_q": torch.arange(0, sequences * asked + 1, asked, dtype=torch.int32, device="cuda"),
            "seqused_k": torch.full((sequences,), tokens, dtype=torch.int32, device="cuda"),
            "block_table": torch.arange(sequences * blocks, dtype=torch.int32, device="cuda").view(sequences, blocks),
        }  # fmt: skip
        out = torch.empty(sequences * asked, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
        # Without a graph: replayed from one, these calls ended in an illegal memory access.
        asked_for = do_bench(lambda: flash_attn_varlen_func(q, k, v, out=out, **given, **scale), return_mode="median")
        return float(asked_for) * 1e3

    kinds = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    return {
        phase: {
            name: {f"{n} x {tokens}": run(kind, n, tokens, tokens if phase == "prompts" else 1) for n, tokens in sizes}
            for name, kind in kinds.items()
        }
        for phase, sizes in (("prompts", PROMPTS), ("decoding", CACHED))
    }


def _microseconds(run: Callable[[], Any]) -> float:
    """Of one replay of a CUDA graph of it, the median."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(run, rep=40, return_mode="median")) * 1e3
