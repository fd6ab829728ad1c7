"""The two configs of a model: a Hugging Face folder's and a TensorRT-LLM checkpoint's, under TensorRT-LLM's names."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.quantization import UNQUANTIZED, Quantization


class EmbeddingSharding(enum.Enum):
    """How tensor-parallel ranks store the embedding table: whole, by rows (vocabulary), or by columns (hidden).

    In config.json: use_parallel_embedding, and embedding_sharding_dim 0 or 1.
    """

    NONE = "none"
    VOCABULARY = 0
    HIDDEN = 1

    @classmethod
    def of(cls, parallel: bool, dim: int) -> EmbeddingSharding:
        """Value for TensorRT-LLM's two settings of the embedding. Raises UsageError for another dimension."""
        if dim not in (0, 1):
            raise UsageError(f"embedding_sharding_dim is {dim}", remedy="use 0 for the vocabulary, 1 for hidden size")
        return cls(dim) if parallel else cls.NONE

    @property
    def settings(self) -> dict[str, Any]:
        """TensorRT-LLM's two settings of the embedding, by their names in config.json."""
        parallel = self is not EmbeddingSharding.NONE
        return {"use_parallel_embedding": parallel, "embedding_sharding_dim": self.value if parallel else 0}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts that stand for the MLP of every layer; a router picks some for each token.

    count              experts of a layer
    top_k              experts that compute a token
    normalize          whether the shares of a token's experts are made to sum to 1
    intermediate_size  MLP features of one expert
    """

    count: int
    top_k: int
    normalize: bool
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Values that determine tensor names and shapes, and what a layer attends to.

    experts            None for a dense model
    attention_windows  most tokens that a token attends to, itself included, in each layer; the layers repeat the
                       pattern. () where all layers attend to all tokens
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    attn_bias: bool
    tie_word_embeddings: bool
    experts: Experts | None = None
    attention_windows: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """Most tokens that a token attends to in a layer, itself included; None for all."""
        return self.attention_windows[layer % len(self.attention_windows)] if self.attention_windows else None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Geometry):
    """Content of an HF config.json under TensorRT-LLM's field names.

    `rotary_scaling` is the unchanged HF dictionary without the base, or None. `dtype` is None when the
    folder does not state it.
    """

    dtype: DataType | None
    hidden_act: str
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None = field(hash=False)
    mlp_bias: bool

    @property
    def rotary_kind(self) -> str | None:
        """Name of the rotary scaling in config.json, with a variant that has no name of its own: "dynamic with alpha";
        None where there is none."""
        scaling = self.rotary_scaling or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        return "dynamic with alpha" if kind == "dynamic" and scaling.get("alpha") is not None else kind

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the model takes, as trtllm-build computes it: `max_position_embeddings`,
        times the factor of a rotary scaling that does not include it."""
        factor = (self.rotary_scaling or {}).get("factor")
        if self.rotary_kind in ("llama3", "longrope", "su") or not factor:
            return self.max_position_embeddings
        return int(self.max_position_embeddings * factor)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Geometry):
    """Content of a checkpoint's config.json, as the loaders read it."""

    dtype: DataType
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    mapping: Mapping
    embedding: EmbeddingSharding = EmbeddingSharding.NONE
    quantization: Quantization = UNQUANTIZED
