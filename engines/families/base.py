"""Interface of a model family: everything that differs between families when a model is read, converted and quantized.

The checkpoint format (`engines.checkpoint`) asks a family for its config and for the tensors of one layer. What all
families share is not asked: the embedding, the final norm and the head.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from trtpipe.engines.base import Mapping as Ranks
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, Geometry, ModelConfig


@dataclass(frozen=True, kw_only=True)
class SourceNames:
    """Names of a Hugging Face folder's tensors, without `.weight`; the defaults are Llama's.

    layers            prefix before the number of a layer
    attention         prefix of the names of the KV cache's scales within a layer
    q, k, v, o        linears of the attention, by their names within a layer, as all names that follow
    qkv               one linear of the rows of q, k and v; "" where they are three
    gate, up, down    linears of the MLP; gate is the activated one. Of an expert, their names within it
    gate_up           one linear of the rows of gate and up; "" where they are two
    experts           prefix before the number of an expert; "" for a dense model
    router            linear whose outputs are the experts' scores
    num_experts       experts of a layer, where they are known: see `engines.families.names_of`
    q_norm, k_norm    norms of each head's queries and keys, in families that have them
    input_norm        norm before q, k and v
    post_norm         norm before gate and up
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers."
    attention: str = "self_attn."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    qkv: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_up: str = ""
    experts: str = ""
    router: str = "mlp.gate"
    num_experts: int = 0
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"

    def layer(self, index: int) -> str:
        """Prefix of the tensor names of layer `index`."""
        return f"{self.layers}{index}."

    @property
    def attention_inputs(self) -> tuple[str, ...]:
        """Linears that share the attention's input."""
        return (self.qkv,) if self.qkv else (self.q, self.k, self.v)

    @functools.lru_cache(maxsize=8)  # noqa: B019  # few and small
    def of_experts(self, count: int) -> SourceNames:
        """The same names, with those of `count` experts."""
        return replace(self, num_experts=count)

    @functools.cached_property
    def mlps(self) -> tuple[tuple[str, ...], ...]:
        """(gate, up, down) of the MLP, or of each expert; (gate_up, down) where gate and up are one linear."""
        places = [f"{self.experts}{number}." for number in range(self.num_experts)] if self.experts else [""]
        linears = (self.gate_up, self.down) if self.gate_up else (self.gate, self.up, self.down)
        return tuple(tuple(place + linear for linear in linears) for place in places)

    @functools.cached_property
    def mlp_inputs(self) -> tuple[str, ...]:
        """Linears that share the MLP's input."""
        return tuple(name for *inputs, _ in self.mlps for name in inputs)

    @functools.cached_property
    def matrices(self) -> tuple[tuple[str, ...], ...]:
        """Groups of linears of one input that engines join into one matrix: q, k and v; gate and up, of each expert."""
        return self.attention_inputs, *(tuple(inputs) for *inputs, _ in self.mlps)

    @functools.cached_property
    def linears(self) -> tuple[str, ...]:
        """The linears of a layer, which are quantized; a router is not."""
        return *self.attention_inputs, self.o, *(name for mlp in self.mlps for name in mlp)

    def norm_before(self, linear: str) -> str | None:
        """Norm whose output `linear` reads; None when it reads something else."""
        return (
            self.input_norm
            if linear in self.attention_inputs
            else self.post_norm
            if linear in self.mlp_inputs
            else None
        )


class Family(ABC):
    """A model family.

    architectures  the Hugging Face `architectures` entries that it covers, each with its `model_type`
    names          names of its source tensors
    reduce_fusion  whether trtllm-build can fuse its all-reduce with the norm after it (`build.reduce_fusion`)
    stages         whether TensorRT-LLM can divide its layers over pipeline stages
    expert_size    key of an expert's features in the config.json of both kinds; "" for a family without experts
    """

    architectures: ClassVar[Mapping[str, str]]
    names: ClassVar[SourceNames] = SourceNames()
    reduce_fusion: ClassVar[bool]
    stages: ClassVar[bool] = True
    expert_size: ClassVar[str] = ""

    @abstractmethod
    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        """Normalise a Hugging Face config.json. Raises InputDataError for a model that TensorRT-LLM cannot compute."""

    @abstractmethod
    def checkpoint_config(self, model: ModelConfig, embedding: EmbeddingSharding) -> dict[str, Any]:
        """The keys of a checkpoint's config.json that describe the model, in the order of TensorRT-LLM's converter."""

    @abstractmethod
    def checkpoint_fault(self, raw: Mapping[str, Any]) -> str:
        """Why the config.json of a checkpoint does not belong to this family; "" when it does."""

    @abstractmethod
    def hf_config(self, config: CheckpointConfig) -> dict[str, Any]:
        """Content of the Hugging Face config.json that a checkpoint was made from."""

    @abstractmethod
    def layer_shapes(self, model: Geometry) -> dict[str, tuple[int, ...]]:
        """Tensors of a layer of the Hugging Face folder, name within the layer -> shape."""

    @abstractmethod
    def plan_layer(self, model: Geometry, mapping: Ranks, tp_rank: int, ours: str, theirs: str) -> Iterator[TensorPlan]:
        """Plans of a layer's unquantized tensors in a rank file, in file order.

        ours, theirs  prefixes of the layer's tensor names in the checkpoint and in the Hugging Face folder
        """

    def check_source(self, folder: Path, model: ModelConfig) -> None:  # noqa: B027  # most families refuse nothing
        """Raises InputDataError for a model in `folder` that a checkpoint cannot hold."""

    def notices(self, model: ModelConfig) -> list[str]:
        """Notices for the user about a conversion that keeps all weights."""
        if not model.attention_windows:
            return []
        window, every = min(model.attention_windows), len(set(model.attention_windows)) == 1
        remedy = f"; for its engines in Triton set max_attention_window_size {window} too" if every else ""
        return [
            f"{'the model attends' if every else 'some layers attend'} within a sliding window of {window} tokens, "
            f"as runtime_defaults of config.json says: TensorRT-LLM takes it where serving sets no other{remedy}"
        ]
