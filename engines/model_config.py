"""The two configs of a model: a Hugging Face folder's and a TensorRT-LLM checkpoint's, under TensorRT-LLM's names."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

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


class Geometry(Protocol):
    """Values that determine tensor names and shapes; both ModelConfig and CheckpointConfig have them."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def attn_bias(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Content of an HF config.json under TensorRT-LLM's field names.

    `rotary_scaling` is the unchanged HF dictionary without the base, or None. `dtype` is None when the
    folder does not state it. A TensorRT-LLM checkpoint has no field for `sliding_window`.
    """

    architecture: str
    dtype: DataType | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    hidden_act: str
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    attn_bias: bool
    mlp_bias: bool
    sliding_window: int | None = None

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the model takes, as trtllm-build computes it: `max_position_embeddings`,
        times the factor of a rotary scaling that does not include it."""
        scaling = self.rotary_scaling or {}
        factor = scaling.get("factor")
        if scaling.get("rope_type", scaling.get("type")) in ("llama3", "longrope", "su") or not factor:
            return self.max_position_embeddings
        return int(self.max_position_embeddings * factor)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Content of a checkpoint's config.json, as the loaders read it."""

    architecture: str
    dtype: DataType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    attn_bias: bool
    mapping: Mapping
    embedding: EmbeddingSharding = EmbeddingSharding.NONE
    tie_word_embeddings: bool = False
    quantization: Quantization = UNQUANTIZED
