"""Mistral: a Llama with an optional sliding window, which a checkpoint cannot state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from trtpipe.engines.families.llama import Llama
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import ModelConfig


class Mistral(Llama):
    architectures: ClassVar[Mapping[str, str]] = {"MistralForCausalLM": "mistral"}
    # trtllm-build turns it off: its list of architectures lacks this one.
    reduce_fusion = False

    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        window = None if fields.raw.get("sliding_window") is None else fields.count("sliding_window")
        return replace(super().read_config(architecture, fields), sliding_window=window)

    def notices(self, model: ModelConfig) -> list[str]:
        window = model.sliding_window
        if window is None or window >= model.max_position_embeddings:
            return []
        return [
            f"the model attends within a sliding window of {window} tokens, which a checkpoint cannot say: "
            f"set max_attention_window_size {window} when serving sequences longer than that"
        ]


FAMILY = Mistral()
