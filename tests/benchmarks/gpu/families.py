"""The reference runtime against transformers, a small random model of each family. Runs in the engine's environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu.in_process import Reference
from tests.benchmarks.gpu.steps import greedy

# `model_type` -> its own settings, beside those of all.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
        "head_dim": 128,
    },
}  # fmt: skip


def compare(scratch: str) -> dict[str, Any]:
    """How many of 20 answers of 64 tokens our runtime gives as transformers does in float32, for each of FAMILIES.

    Both on the GPU; our runtime answers all at once, and then the first alone. In bfloat16 it is compared with
    transformers in float32 too: how many tokens come before rounding changes one.
    """
    import torch

    from tests.support.random_models import random_model
    from trtpipe.engines.base import DataType, Mapping
    from trtpipe.engines.checkpoint.convert import convert

    sizes = {
        "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    }  # fmt: skip
    prompts = np.random.default_rng(0).integers(3, 4096, (20, 64)).tolist()
    rows, device = [], "cuda" if torch.cuda.is_available() else "cpu"
    for name, more in FAMILIES.items():
        folder = Path(scratch) / name
        model = random_model(name, **{**sizes, **more})
        model.save_pretrained(folder)
        with torch.no_grad():
            told = model.to(device).generate(torch.tensor(prompts, device=device), max_new_tokens=64, do_sample=False)
        theirs = told[:, 64:].tolist()
        del model
        row: dict[str, Any] = {"family": name, "settings": more}
        for dtype in (DataType.FLOAT32, DataType.BFLOAT16):
            out = Path(scratch) / f"{name}.{dtype.value}"
            out.mkdir()
            convert(folder, out, dtype=dtype, mapping=Mapping())
            config = json.loads((out / "config.json").read_text())
            limits = {
                "max_batch_size": 20, "max_input_len": 128, "max_seq_len": 256, "max_num_tokens": 4096,
                "max_beam_width": 1, "plugin_config": {"tokens_per_block": 32},
            }  # fmt: skip
            whole = {"version": "test", "pretrained_config": config, "build_config": limits}
            (out / "config.json").write_text(json.dumps(whole))
            one = Reference(out, device=device, kv_cache_tokens=20 * 256)
            together = greedy(one, prompts, 64)
            row[dtype.value] = {
                "same": sum(ours == answer for ours, answer in zip(together, theirs, strict=True)),
                "alone": greedy(one, prompts[:1], 64)[0] == theirs[0],
                "before": [
                    next((place for place, pair in enumerate(zip(ours, answer, strict=True)) if pair[0] != pair[1]), 64)
                    for ours, answer in zip(together, theirs, strict=True)
                ],
            }
            del one
        rows.append(row)
    return {"rows": rows}
