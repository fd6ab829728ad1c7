"""Mistral: a Llama with an optional sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from trtpipe.engines.families.llama import Llama
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig


class Mistral(Llama):
    architectures: ClassVar[Mapping[str, str]] = {"MistralForCausalLM": "mistral"}
    # trtllm-build turns it off: its list of architectures lacks this one.
    reduce_fusion = False

    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        model = super().read_config(architecture, fields)
        longest = model.longest_sequence
        window = longest if fields.raw.get("sliding_window") is None else fields.count("sliding_window")
        return replace(model, attention_windows=(window,) if window < longest else ())

    def hf_config(self, config: CheckpointConfig) -> dict[str, Any]:
        return super().hf_config(config) | {"sliding_window": config.window(0)}


FAMILY = Mistral()
