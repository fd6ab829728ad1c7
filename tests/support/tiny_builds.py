"""Checkpoints of a tiny model as the project writes them, and builds of them by the double of trtllm-build."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import factories
from tests.support.doubles import trtllm_build
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import config_json
from trtpipe.engines.checkpoint.layout import plan_rank
from trtpipe.engines.hf.safetensors_file import header_bytes
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization

# Sizes that INT4 in groups of 64 can be cut in two by; three layers, which two stages share unevenly.
MODEL = replace(factories.MODEL, hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_size=32)
ONE, TWO = Mapping(), Mapping(tp_size=2)
FP8 = Quantization(quant_algo=QuantAlgo.FP8)
FP8_KV = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)
ROWWISE = Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)
SMOOTH = Quantization(quant_algo=QuantAlgo.W8A8_SQ_PER_CHANNEL)
INT8_WEIGHTS = Quantization(quant_algo=QuantAlgo.W8A16)
AWQ = Quantization(quant_algo=QuantAlgo.W4A16_AWQ, group_size=64)
W4A8 = Quantization(quant_algo=QuantAlgo.W4A8_AWQ)
INT8_KV = Quantization(kv_cache_quant_algo=KvCacheQuantAlgo.INT8)
FP8_KV_ALONE = Quantization(kv_cache_quant_algo=KvCacheQuantAlgo.FP8)

NO_FP8 = "AssertionError: Engine building failed, please check the error log."

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Change = Callable[[Tensors], object]


def rank_file(path: Path, tensors: Tensors) -> None:
    header, _ = header_bytes((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    data = sum(end - begin for begin, end in (s["data_offsets"] for s in json.loads(header[8:]).values()))
    path.write_bytes(header + bytes(data))


def checkpoint(
    folder: Path,
    quantization: Quantization = UNQUANTIZED,
    mapping: Mapping = ONE,
    *,
    model: ModelConfig = MODEL,
    toolchain: str | None = None,
    change: Change = lambda tensors: None,
    config: dict[str, Any] | None = None,
) -> Path:
    """The project's checkpoint of a model of zeros; `change` alters every rank's tensors, `config` replaces keys.

    What is written for 0.21.0 names no more of a mapping than every release needs.
    """
    folder.mkdir()
    written = config_json(model, DataType.BFLOAT16, mapping, quantization=quantization, toolchain=toolchain)
    written.update(config or {})
    (folder / "config.json").write_text(json.dumps(written))
    for rank in range(mapping.world_size):
        pp_rank, tp_rank = divmod(rank, mapping.tp_size)
        plans = plan_rank(model, mapping, tp_rank=tp_rank, pp_rank=pp_rank, quantization=quantization)
        tensors: Tensors = {plan.name: (plan.dtype or "BF16", plan.shape) for plan in plans}
        change(tensors)
        rank_file(folder / f"rank{rank}.safetensors", tensors)
    return folder


def build(source: Path, *flags: str) -> int:
    out = source.parent / "engine"
    cache = source.parent / "model.cache"
    arguments = ["--checkpoint_dir", str(source), "--output_dir", str(out), "--output_timing_cache", str(cache)]
    return trtllm_build.main([*arguments, "--max_input_len", "200", *flags])


def engine_config(source: Path) -> Any:
    return json.loads((source.parent / "engine" / "config.json").read_text())


Output = pytest.CaptureFixture[str]


def refusal(capsys: Output, source: Path, *flags: str) -> str:
    """The last line of a build that must fail, and leave no engine."""
    assert build(source, *flags) == 1
    assert not list(source.parent.glob("engine/*.engine"))
    return capsys.readouterr().err.splitlines()[-1]


def warnings(capsys: Output, source: Path, *flags: str) -> list[str]:
    """Warnings of a build that must work, without those of every build."""
    assert build(source, *flags) == 0
    lines = [line.split("] [W] ")[1] for line in capsys.readouterr().out.splitlines() if "] [W] " in line]
    usual = ("Option --gather_generation_logits", "padding removal and fMHA", "Implicitly setting")
    return [line for line in lines if not line.startswith(usual)]
