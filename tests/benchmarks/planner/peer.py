"""AIConfigurator's predictions of the measured runs that it can express: its rows, and a call of its own Python."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtpipe.configs import facts
from trtpipe.pipeline.planner.measured_runs import MeasuredRun, option

SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm", "l40s": "l40s", "b200": "b200_sxm"}
SEED = 0
TABLES = "tables.json"


def peers(
    figures: Sequence[MeasuredRun], python: Path, scratch: Path, minutes: float
) -> dict[MeasuredRun, dict[str, float]]:
    """Its predictions, as many as it makes in `minutes` besides those that `scratch` has from earlier; `python` is that
    of an environment where it is installed. SCRATCH/TABLES gets its tables of single operations."""
    scratch.mkdir(parents=True, exist_ok=True)
    rows = {one: _row(one, scratch) for one in in_turn([one for one in figures if expressed(one)])}
    given, out = scratch / "rows.json", scratch / "predicted.jsonl"
    given.write_text(json.dumps(list(rows.values())))
    worker = Path(__file__).with_name("peer_worker.py")
    subprocess.run([python, worker, given, out, scratch / TABLES, str(minutes)], check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {json.dumps(line["row"]): line["predicted"] for line in lines}
    made = {one: found.get(json.dumps(row), {}) for one, row in rows.items()}
    return {one: predicted for one, predicted in made.items() if "tokens_per_s" in predicted}


def expressed(figure: MeasuredRun) -> bool:
    """Whether AIConfigurator can express a run."""
    return figure.gpu in SYSTEMS and figure.requests_per_s is None and figure.output_tokens > 1


def in_turn(figures: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The runs in an order drawn by a seed, one of each GPU and model in turn: its beginning is a stratified sample."""
    groups: dict[tuple[str, str], list[MeasuredRun]] = {}
    for one in random.Random(SEED).sample(list(figures), len(figures)):
        groups.setdefault((one.gpu, one.model), []).append(one)
    return [one for turn in itertools.zip_longest(*groups.values()) for one in turn if one is not None]


def write_config(name: str, scratch: Path) -> None:
    """SCRATCH/NAME/config.json, from which AIConfigurator takes a model's shapes."""
    shape, folder = facts.find_shape(name)[1], scratch / name
    folder.mkdir(exist_ok=True)
    experts = shape.experts
    config = {
        "architectures": [shape.architecture], "model_type": "llama" if experts is None else "mixtral",
        "hidden_size": shape.hidden_size, "num_hidden_layers": shape.num_hidden_layers, "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size if experts is None else experts.intermediate_size,
        "num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.num_key_value_heads,
        "vocab_size": shape.vocab_size, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if experts is not None:
        config |= {"num_local_experts": experts.count, "num_experts_per_tok": experts.top_k}
    (folder / "config.json").write_text(json.dumps(config))


def _row(figure: MeasuredRun, scratch: Path) -> dict[str, Any]:
    made, experts = option(figure), facts.find_shape(figure.model)[1].experts
    write_config(figure.model, scratch)
    held = made.memory.batch(figure.input_tokens + figure.output_tokens)
    batch_size = figure.concurrency or min(made.limits.max_batch_size, held)
    return {
        "model": figure.model, "system": SYSTEMS[figure.gpu], "tp": figure.tp, "batch": batch_size,
        "isl": figure.input_tokens, "osl": figure.output_tokens, "dtype": figure.dtype, "experts": experts is not None,
    }  # fmt: skip
