"""Rotary angles against transformers', for every kind of scaling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

# transformers imports it, and it runs lscpu, which a unit test may not.
import numpy.testing  # noqa: F401
import pytest
import torch

from tests.support.factories import CHECKPOINT
from trtpipe.engines.checkpoint.config import CheckpointError
from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.reference.rope import inverse_frequencies, rotary_tables

LONGROPE = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0] * 8}


def config(scaling: dict[str, Any] | None, base: float = 10000.0, limit: int = 256) -> CheckpointConfig:
    return replace(
        CHECKPOINT, hidden_size=64, head_size=16, max_position_embeddings=limit, rotary_base=base,
        rotary_scaling=scaling,
    )  # fmt: skip


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, **LONGROPE},
        {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONGROPE},
    ],
    ids=lambda s: "plain" if s is None else s.get("type", s.get("rope_type")),
)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_tables_are_those_of_transformers(scaling: dict[str, Any] | None, base: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": base, "rope_type": "default", **(scaling or {})}
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=parameters)
    )
    positions = 64 if parameters["rope_type"] == "longrope" else 256
    want_cos, want_sin = theirs(torch.zeros(1), torch.arange(positions)[None])
    cos, sin = rotary_tables(config(scaling, base), positions)
    # Angles grow to 256 radians, where float32 resolves 1.5e-5.
    torch.testing.assert_close(cos, want_cos[0], atol=5e-5, rtol=0)
    torch.testing.assert_close(sin[:, 8:], want_sin[0, :, 8:], atol=5e-5, rtol=0)
    torch.testing.assert_close(sin[:, :8], -want_sin[0, :, :8], atol=5e-5, rtol=0)


def test_llama3_falls_back_to_the_values_of_tensorrt_llm() -> None:
    full = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    want, _ = inverse_frequencies(config(full, 500000.0), 16)
    assert torch.equal(inverse_frequencies(config({"type": "llama3"}, 500000.0), 16)[0], want)
    # The longest wavelength is beyond 8192 tokens: divided by 8; the shortest is 2 pi: kept.
    assert want[-1].item() == pytest.approx(500000.0 ** (-14 / 16) / 8)
    assert want[0].item() == 1.0


def test_yarn_multiplies_cos_and_sin() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    cos, _ = rotary_tables(config(scaling), 1)
    assert cos[0, 0].item() == pytest.approx(0.1 * math.log(4.0) + 1)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "mrope"}, "rotary_scaling of type 'mrope' is not supported"),
        ({"factor": 2.0, "rope_type": "ntk"}, "rotary_scaling of type 'ntk' is not supported"),
        ({"type": "linear"}, "has factor None"),
        ({"type": "linear", "factor": -1.0}, "has factor -1.0"),
        ({"type": "llama3", "low_freq_factor": 4.0}, "high_freq_factor 4 not above low_freq_factor 4"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "has `alpha`"),
        ({"type": "longrope", "short_factor": [1.0]}, "has no short_factor of 8 numbers"),
    ],
)
def test_what_cannot_be_computed_is_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        rotary_tables(config(scaling), 256)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"type": "longrope", "original_max_position_embeddings": 64, **LONGROPE}, 64),
    ],
)
def test_angles_that_change_with_length_are_refused_beyond_their_limit(scaling: dict[str, Any], limit: int) -> None:
    rotary_tables(config(scaling), limit)
    with pytest.raises(CheckpointError, match=f"max_seq_len of at most {limit}"):
        rotary_tables(config(scaling), limit + 1)


def test_a_scaling_without_a_type_is_refused_rather_than_ignored() -> None:
    with pytest.raises(CheckpointError, match="of type None"):
        rotary_tables(config({"factor": 2.0}), 16)
