"""Qwen 2, 2.5 and 3: a Llama with biases of q, k and v (2, 2.5), or with norms of each head's queries and keys (3).

TensorRT-LLM's class is QWenForCausalLM; `qwen_type` of a checkpoint's config.json says which of the two it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from trtpipe.engines.checkpoint.experts import moe_block
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.llama import Llama
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, Geometry, ModelConfig

QWEN2 = "qwen2"
# TensorRT-LLM's value where config.json has none; only a scaling that no Qwen 2 or 3 has (logn) reads it.
SEQ_LENGTH = 8192
# Keys without which TensorRT-LLM builds no model, or another one. ModelOpt 0.47's export lacks them.
NEEDED = ("qwen_type", "seq_length", "attn_bias")
# transformers' first layer with a window, where config.json does not say.
FIRST_WINDOWED = 28


class Qwen(Llama):
    architectures: ClassVar[Mapping[str, str]] = {"Qwen2ForCausalLM": QWEN2, "Qwen3ForCausalLM": "qwen3"}
    # trtllm-build turns it off: its list of architectures lacks these.
    reduce_fusion = False

    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        kind = self.architectures[architecture]
        stated = fields.raw.get("model_type", kind)
        if stated != kind:
            raise InputDataError(f"{fields.path}: model_type is {stated!r}", why=f"a {architecture}'s is {kind!r}")
        # transformers' values for absent keys are of one size of the model, and TensorRT-LLM takes them silently.
        for key in ("num_key_value_heads",) if kind == QWEN2 else ("num_key_value_heads", "head_dim"):
            if fields.raw.get(key) is None:
                raise InputDataError(
                    f"{fields.path} lacks {key}", why=f"a {architecture} needs it", remedy="download the model again"
                )
        model = super().read_config(architecture, fields)
        scaling = model.rotary_scaling
        if scaling and "rope_type" not in scaling:
            # transformers adds it, so a checkpoint of TensorRT-LLM's converter has it.
            scaling = {**scaling, "rope_type": scaling["type"]}
        return replace(
            model,
            attn_bias=kind == QWEN2 or model.attn_bias,
            rotary_scaling=scaling,
            attention_windows=_windows(fields, model),
        )

    def checkpoint_config(self, model: ModelConfig, embedding: EmbeddingSharding) -> dict[str, Any]:
        return {
            **super().checkpoint_config(model, embedding),
            "qwen_type": self.architectures[model.architecture],
            "seq_length": SEQ_LENGTH,
            "use_logn_attn": False,
            "num_labels": 1,
            "moe": moe_block(model.experts),
            "moe_intermediate_size": model.experts.intermediate_size if model.experts else 0,
            "moe_shared_expert_intermediate_size": 0,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "disable_weight_only_quant_plugin": False,
            "runtime_defaults": None,
        }

    def checkpoint_fault(self, raw: Mapping[str, Any]) -> str:
        for key in NEEDED:
            if raw.get(key) is None:
                return (
                    f"it lacks {key}, without which TensorRT-LLM cannot load a Qwen (ModelOpt's export leaves it out)"
                )
        kind = self.architectures[raw["architecture"]]
        for key, value in (("qwen_type", kind), ("attn_bias", kind == QWEN2)):
            if raw[key] != value:
                return f"{key} is {raw[key]!r}, a {raw['architecture']}'s is {value!r}"
        if raw.get("use_logn_attn"):
            return "use_logn_attn is set, and logn scaling is not computed here"
        return super().checkpoint_fault(raw)

    def hf_config(self, config: CheckpointConfig) -> dict[str, Any]:
        out = super().hf_config(config)
        # No setting of a Qwen: the type of the model determines the biases.
        del out["attention_bias"], out["mlp_bias"]
        if not config.attention_windows:
            return {**out, "use_sliding_window": False}
        window, layers = min(config.attention_windows), range(config.num_hidden_layers)
        kinds = ["sliding_attention" if config.window(layer) == window else "full_attention" for layer in layers]
        return {**out, "use_sliding_window": True, "sliding_window": window, "layer_types": kinds}

    def biased(self, model: Geometry) -> tuple[str, ...]:
        return self.names.attention_inputs if model.attn_bias else ()

    def head_norms(self, model: Geometry) -> bool:
        return self.architectures[model.architecture] != QWEN2

    def check_source(self, folder: Path, model: ModelConfig) -> None:
        super().check_source(folder, model)
        if not self.head_norms(model):
            return
        if model.attn_bias:
            raise InputDataError(
                f"{folder} has biases in its attention (attention_bias)",
                why=f"a {model.architecture} of TensorRT-LLM has none, and its converter drops them silently",
            )
        if model.num_key_value_heads == model.num_attention_heads > 1:
            raise InputDataError(
                f"{folder} has as many key/value heads as attention heads ({model.num_key_value_heads})",
                why=f"TensorRT-LLM's {model.architecture} then reads queries, keys and values in another order",
            )


def _windows(fields: ConfigFields, model: ModelConfig) -> tuple[int, ...]:
    """`attention_windows` of the model. Layers without a window get the longest sequence."""
    layers, longest = model.num_hidden_layers, model.longest_sequence
    if not fields.flag("use_sliding_window") or fields.raw.get("sliding_window") is None:
        return ()
    first, kinds = fields.raw.get("max_window_layers", FIRST_WINDOWED), fields.raw.get("layer_types")
    if type(first) is not int or first < 0:
        raise InputDataError(f"{fields.path}: max_window_layers is {first!r}, not a number of layers")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers):
        raise InputDataError(f"{fields.path}: layer_types is not a list of {layers} kinds of attention")
    windowed = (
        [layer >= first for layer in range(layers)] if kinds is None else [k == "sliding_attention" for k in kinds]
    )
    window = fields.count("sliding_window") if any(windowed) else longest
    if window >= longest:
        return ()
    return (window,) if all(windowed) else tuple(window if narrow else longest for narrow in windowed)


FAMILY = Qwen()
