"""Llama: pre-norm decoder, RMSNorm, rotary embedding in the "neox" half-split layout, gated SiLU feed-forward,
optional grouped-query attention. TensorRT-LLM's class is LLaMAForCausalLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from trtpipe.engines.base import Mapping as Ranks
from trtpipe.engines.checkpoint.experts import expert_shapes, plan_experts
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan, kv_head_rows, share
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import Family
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, Geometry, ModelConfig

# `hidden_act` of a checkpoint whose gate and up are one matrix. With another, TensorRT-LLM expects half as many rows.
SWIGLU = "swiglu"


class Llama(Family):
    architectures: ClassVar[Mapping[str, str]] = {"LlamaForCausalLM": "llama"}
    reduce_fusion = True

    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        path = fields.path
        heads = fields.count("num_attention_heads")
        hidden = fields.count("hidden_size")
        if fields.raw.get("head_dim") is None and hidden % heads:
            raise InputDataError(
                f"{path}: hidden_size {hidden} is not divisible by num_attention_heads {heads}, and head_dim is absent"
            )
        kv_heads = fields.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise InputDataError(
                f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        base, scaling = fields.rotary()
        act = fields.raw.get("hidden_act", "silu")
        if act != "silu":
            raise InputDataError(
                f"{path}: hidden_act is {act!r}", why=f"a {architecture} of TensorRT-LLM computes silu"
            )
        return ModelConfig(
            architecture=architecture,
            dtype=fields.dtype(),
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            num_hidden_layers=fields.count("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_size=fields.count("head_dim", hidden // heads),
            hidden_act="silu",
            norm_epsilon=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=fields.count("max_position_embeddings"),
            rotary_base=base,
            rotary_scaling=scaling,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attn_bias=fields.flag("attention_bias") or fields.flag("bias"),
            mlp_bias=fields.flag("mlp_bias"),
        )

    def checkpoint_config(self, model: ModelConfig, embedding: EmbeddingSharding) -> dict[str, Any]:
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_hidden_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_size": model.head_size,
            "hidden_act": SWIGLU if self.one_matrix else model.hidden_act,
            "norm_epsilon": model.norm_epsilon,
            "position_embedding_type": "rope_gpt_neox",
            "max_position_embeddings": model.max_position_embeddings,
            "rotary_base": model.rotary_base,
            "rotary_scaling": model.rotary_scaling,
            "rotary_embedding_dim": model.head_size,
            **embedding.settings,
            "tie_word_embeddings": model.tie_word_embeddings,
            "qk_layernorm": False,
            "attn_bias": model.attn_bias,
            "mlp_bias": False,
        }

    def checkpoint_fault(self, raw: Mapping[str, Any]) -> str:
        act, usual = raw.get("hidden_act"), (SWIGLU,) if self.one_matrix else ("silu", None)
        return "" if act in usual else f"hidden_act is {act!r}, not {usual[0]}"

    @property
    def one_matrix(self) -> bool:
        """Whether a checkpoint has gate and up, of the MLP or of each expert, in one matrix."""
        return bool(self.expert_size or self.names.gate_up)

    def biased(self, model: Geometry) -> tuple[str, ...]:
        """Linears of a layer that have a bias."""
        return (*self.names.attention_inputs, self.names.o) if model.attn_bias else ()

    def head_norms(self, model: Geometry) -> bool:
        """Whether each head's queries and keys are normalised before they are rotated."""
        return False

    def hf_config(self, config: CheckpointConfig) -> dict[str, Any]:
        return {
            "architectures": [config.architecture],
            "model_type": self.architectures[config.architecture],
            "hidden_act": "silu",
            "torch_dtype": config.dtype.value,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_size,
            "rms_norm_eps": config.norm_epsilon,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_theta": config.rotary_base,
            "rope_scaling": config.rotary_scaling,
            "tie_word_embeddings": config.tie_word_embeddings,
            "attention_bias": config.attn_bias,
            "mlp_bias": False,
        }

    def layer_shapes(self, model: Geometry) -> dict[str, tuple[int, ...]]:
        names, hidden, ffn = self.names, model.hidden_size, model.intermediate_size
        q_out, kv_out = model.num_attention_heads * model.head_size, model.num_key_value_heads * model.head_size
        out: dict[str, tuple[int, ...]] = {
            f"{names.input_norm}.weight": (hidden,),
            f"{names.post_norm}.weight": (hidden,),
        }
        fused = (q_out + 2 * kv_out,) if names.qkv else (q_out, kv_out, kv_out)
        attention = [(name, rows, hidden) for name, rows in zip(names.attention_inputs, fused, strict=True)]
        for name, rows, cols in (*attention, (names.o, hidden, q_out)):
            out[f"{name}.weight"] = (rows, cols)
            if name in self.biased(model):
                out[f"{name}.bias"] = (rows,)
        if self.head_norms(model):
            out |= {f"{name}.weight": (model.head_size,) for name in (names.q_norm, names.k_norm)}
        if model.experts is not None:
            return out | expert_shapes(model.experts, hidden, names)
        ((*inputs, down),) = names.mlps
        out |= {f"{name}.weight": (2 * ffn // len(inputs), hidden) for name in inputs}
        out[f"{down}.weight"] = (hidden, ffn)
        return out

    def plan_layer(self, model: Geometry, mapping: Ranks, tp_rank: int, ours: str, theirs: str) -> Iterator[TensorPlan]:
        names, hidden, ffn, tp = self.names, model.hidden_size, model.intermediate_size, mapping.tp_size
        q_rows = share(model.num_attention_heads * model.head_size, tp, tp_rank)
        kv_rows = kv_head_rows(model, tp, tp_rank)
        ffn_rows = share(ffn, tp, tp_rank)
        qkv = [(names.q, q_rows), (names.k, kv_rows), (names.v, kv_rows)]
        if names.qkv:
            keys, values = (_moved(kv_rows, (model.num_attention_heads + past) * model.head_size)
                            for past in (0, model.num_key_value_heads))  # fmt: skip
            qkv = [(names.qkv, q_rows), (names.qkv, keys), (names.qkv, values)]
        qkv_out = sum(stop - start for _, (start, stop) in qkv)

        def fused(suffix: str) -> tuple[Piece, ...]:
            return tuple(Piece(f"{theirs}{name}.{suffix}", rows) for name, rows in qkv)

        def weight(name: str, rows: tuple[int, int], cols: tuple[int, int] | None = None) -> tuple[Piece, ...]:
            return (Piece(f"{theirs}{name}.weight", rows, cols),)

        yield TensorPlan(ours + "input_layernorm.weight", (hidden,), weight(names.input_norm, (0, hidden)))
        yield TensorPlan(ours + "attention.qkv.weight", (qkv_out, hidden), fused("weight"))
        if names.attention_inputs[0] in self.biased(model):
            yield TensorPlan(ours + "attention.qkv.bias", (qkv_out,), fused("bias"))
        dense = weight(names.o, (0, hidden), q_rows)
        yield TensorPlan(ours + "attention.dense.weight", (hidden, q_rows[1] - q_rows[0]), dense)
        if names.o in self.biased(model):
            # The bias of a row-parallel linear is whole on every rank and added once after the all-reduce.
            yield TensorPlan(ours + "attention.dense.bias", (hidden,), (Piece(f"{theirs}{names.o}.bias", (0, hidden)),))
        if self.head_norms(model):
            # One vector for all heads, whole on every rank.
            size = model.head_size
            yield TensorPlan(ours + "attention.q_layernorm.weight", (size,), weight(names.q_norm, (0, size)))
            yield TensorPlan(ours + "attention.k_layernorm.weight", (size,), weight(names.k_norm, (0, size)))
        yield TensorPlan(ours + "post_layernorm.weight", (hidden,), weight(names.post_norm, (0, hidden)))
        if model.experts is not None:
            yield from plan_experts(model.experts, hidden, names, mapping, tp_rank, ours, theirs)
            return
        if names.gate_up:
            # One matrix: a rank's rows of up, then its rows of gate, to which the activation is applied.
            gate, up = weight(names.gate_up, ffn_rows), weight(names.gate_up, _moved(ffn_rows, ffn))
            yield TensorPlan(ours + "mlp.fc.weight", (2 * ffn // tp, hidden), (*up, *gate))
            yield TensorPlan(ours + "mlp.proj.weight", (hidden, ffn // tp), weight(names.down, (0, hidden), ffn_rows))
            return
        # TensorRT-LLM computes act(fc(x)) * gate(x): its fc is gate_proj, its gate is up_proj.
        yield TensorPlan(ours + "mlp.fc.weight", (ffn // tp, hidden), weight(names.gate, ffn_rows))
        yield TensorPlan(ours + "mlp.gate.weight", (ffn // tp, hidden), weight(names.up, ffn_rows))
        yield TensorPlan(ours + "mlp.proj.weight", (hidden, ffn // tp), weight(names.down, (0, hidden), ffn_rows))

    def check_source(self, folder: Path, model: ModelConfig) -> None:
        if model.mlp_bias:
            raise InputDataError(
                f"{folder} has biases in its feed-forward layers (mlp_bias)",
                why=f"a {model.architecture} of TensorRT-LLM has none, and its converter drops them silently",
            )


def _moved(rows: tuple[int, int], by: int) -> tuple[int, int]:
    return rows[0] + by, rows[1] + by


FAMILY = Llama()
