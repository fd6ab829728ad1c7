"""Rotary position embedding: angles of all positions, for each kind of scaling that a checkpoint may have.

The formulas are from the papers and from transformers, against which they are tested. Cached keys are rotated
once, so kinds of scaling whose angles change with the sequence's length (dynamic, longrope) are refused beyond the
length where the angles start to change.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trtpipe.engines.backends.reference import ROTARY
from trtpipe.engines.checkpoint.config import CheckpointError
from trtpipe.engines.model_config import CheckpointConfig


def rotary_tables(config: CheckpointConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of positions 0 to `positions` - 1, each [positions, head_size] float32.

    The second half of a row repeats the first half, and the first half of sin is negated, so that rotated x is
    x * cos + roll(x, head_size / 2) * sin.

    Raises CheckpointError for a scaling that is unknown, incomplete or not constant up to `positions`.
    """
    inv_freq, magnitude = inverse_frequencies(config, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inv_freq)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(config: CheckpointConfig, positions: int) -> tuple[torch.Tensor, float]:
    """Radians per position, [head_size / 2] float32, and the factor of cos and sin."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    plain = 1.0 / config.rotary_base**exponents
    scaling = _Scaling(config)
    if scaling.kind == "default" or not config.rotary_scaling:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.number("factor"), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, config)
    if scaling.kind == "dynamic":
        if scaling.has("alpha"):
            raise scaling.error("has `alpha`, a variant that is not supported")
        scaling.check_constant(positions, config.max_position_embeddings, "max_position_embeddings")
        return plain, 1.0
    if scaling.kind == "longrope":
        return _longrope(exponents, scaling, config, positions)
    raise scaling.error("is not supported", remedy="supported: " + ", ".join(ROTARY))


class _Scaling:
    """Typed access to `rotary_scaling`."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._values: dict[str, Any] = config.rotary_scaling or {}
        self.kind = self._values.get("type", self._values.get("rope_type"))

    def error(self, why: str, remedy: str = "") -> CheckpointError:
        return CheckpointError(f"rotary_scaling of type {self.kind!r} {why}", remedy=remedy)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.error(f"has {key} {value!r}, not a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> torch.Tensor:
        value = self._values.get(key)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(v, (int, float)) for v in value):
            raise self.error(f"has no {key} of {count} numbers")
        return torch.tensor(value, dtype=torch.float32)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._values.get(key, default))

    def check_constant(self, positions: int, limit: int, name: str) -> None:
        if positions > limit:
            raise self.error(
                f"changes its angles beyond {name} {limit}, while cached keys keep theirs",
                remedy=f"build with max_seq_len of at most {limit} instead of {positions}",
            )


def _llama3(plain: torch.Tensor, scaling: _Scaling) -> torch.Tensor:
    """Divide frequencies of long wavelengths by `factor`, keep short ones, blend between. TensorRT-LLM's defaults."""
    factor = scaling.number("factor", 8.0)
    low, high = scaling.number("low_freq_factor", 1.0), scaling.number("high_freq_factor", 4.0)
    original = scaling.number("original_max_position_embeddings", 8192)
    if high <= low:
        raise scaling.error(f"has high_freq_factor {high:g} not above low_freq_factor {low:g}")
    wavelength = 2 * math.pi / plain
    kept = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain


def _yarn(plain: torch.Tensor, scaling: _Scaling, config: CheckpointConfig) -> tuple[torch.Tensor, float]:
    """Interpolate dimensions with less than beta_slow turns in the original length; keep those above beta_fast."""
    original = scaling.number("original_max_position_embeddings", config.max_position_embeddings)
    factor = scaling.number("factor", config.max_position_embeddings / original)
    dims = config.head_size

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    low, high = dimension(scaling.number("beta_fast", 32)), dimension(scaling.number("beta_slow", 1))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    # Equal bounds would cause a division by zero.
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(dims // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.has("attention_factor"):
        attention = scaling.number("attention_factor")
    elif scaling.has("mscale") and scaling.has("mscale_all_dim"):
        attention = magnitude(scaling.number("mscale")) / magnitude(scaling.number("mscale_all_dim"))
    else:
        attention = magnitude(1.0)
    return plain / factor * interpolated + plain * (1 - interpolated), attention


def _longrope(
    exponents: torch.Tensor, scaling: _Scaling, config: CheckpointConfig, positions: int
) -> tuple[torch.Tensor, float]:
    """Frequencies by the short factors, which are valid up to the original length."""
    original = scaling.number("original_max_position_embeddings", config.max_position_embeddings)
    scaling.check_constant(positions, int(original), "original_max_position_embeddings")
    factor = scaling.number("factor", config.max_position_embeddings / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if scaling.has("attention_factor"):
        attention = scaling.number("attention_factor")
    short = scaling.numbers("short_factor", config.head_size // 2)
    return 1.0 / (short * config.rotary_base**exponents), attention
