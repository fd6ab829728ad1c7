"""`quant_method: fp8` of a Hugging Face folder: FP8 weights with 128x128 blocks of scales, as DeepSeek and Qwen publish
them, or with one scale a tensor and static inputs, as vLLM's AutoFP8 wrote them.

With blocks, a linear has `weight` in e4m3 and `weight_scale_inv`, which despite its name is the factor of the codes;
inputs get a scale for each token and 128 features, found as the model runs. Source: the method's reader in vLLM 0.32
(model_executor/layers/quantization/fp8.py), and the config.json of the published models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.hf.layout import linear_names, whole
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import QuantAlgo, Quantization

BLOCK = 128
# Keys that list modules without quantization.
_EXCLUDED = ("modules_to_not_convert", "ignored_layers")


def parse(raw: dict[str, Any], where: str, names: SourceNames) -> Quantization:
    """Parse a `quantization_config` of this method; messages begin with `where`.

    Raises InputDataError for what is damaged, and for what no algorithm here computes.
    """
    if raw.get("fmt", "e4m3") != "e4m3":
        raise _unread(where, f"its fmt is {raw['fmt']!r}", "other types than e4m3")
    if raw.get("scale_fmt") not in (None, "float"):
        raise _unread(where, f"its scale_fmt is {raw['scale_fmt']!r}", "scales of inputs that are rounded")
    if raw.get("kv_cache_scheme") is not None:
        raise _unread(where, "it has a kv_cache_scheme", "KV caches of this method")
    for key in _EXCLUDED:
        _check_excluded(raw.get(key), f"{where}: {key}", names)
    block, scheme = raw.get("weight_block_size"), raw.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        raise InputDataError(f"{where}: activation_scheme is {scheme!r}", why="it is static or dynamic")
    if block is None and scheme == "static":
        return Quantization(quant_algo=QuantAlgo.FP8)
    if block is None:
        why = "it has a scale a tensor and dynamic inputs, which each runtime scales in its own way"
        raise _unread(where, why, "such inputs")
    if block != [BLOCK, BLOCK]:
        raise _unread(where, f"its weight_block_size is {block!r}", f"other blocks than {BLOCK}x{BLOCK}")
    if scheme == "static":
        raise _unread(where, "it has blocks of weights and static inputs", "such inputs")
    return Quantization(quant_algo=QuantAlgo.FP8_BLOCK_SCALES, group_size=BLOCK)


def plan(model: ModelConfig, quantization: Quantization) -> Iterator[TensorPlan]:
    """Plans of all tensors of a folder."""
    linears, block = linear_names(model), quantization.quant_algo is not QuantAlgo.FP8
    for name, shape in source_shapes(model).items():
        yield whole(name, shape, "F8_E4M3" if name in linears else None)
        if name not in linears:
            continue
        if block:
            yield whole(f"{name}_scale_inv", tuple(-(-size // BLOCK) for size in shape), "F32")
        else:
            yield whole(f"{name}_scale", (), "F32")
            yield whole(name.removesuffix("weight") + "input_scale", (), "F32")


def _check_excluded(excluded: Any, where: str, names: SourceNames) -> None:
    excluded = [] if excluded is None else excluded
    if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
        raise InputDataError(f"{where} is not a list of names")
    for name in excluded:
        # A linear, by its whole name or the end of it, or a module that holds linears.
        inner = re.sub(rf"^{re.escape(names.layers)}\d+\.?", "", name)
        if names.layers.startswith(f"{name}.") or any(
            not inner or linear == inner or linear.startswith(f"{inner}.") or linear.endswith(f".{inner}")
            for linear in names.linears
        ):
            raise _unread(where, f"it has {name!r}", "layers of mixed precision")


def _unread(where: str, why: str, what: str) -> InputDataError:
    return InputDataError(f"{where} cannot be read", why=f"{why}, and {what} are not read here")
