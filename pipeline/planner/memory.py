"""Memory of a GPU that an engine takes, and tokens of KV cache that the rest holds.

Weights and KV cache are exact, from shapes. Activations, buffers and the runtime are estimates: their coefficients are
in configs/efficiency.yaml, fitted together with the speeds, since the memory that is left bounds the batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from trtpipe.engines import load_backend
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.memory import kv_token_bytes, rank_bytes
from trtpipe.engines.checkpoint.split import check_mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.planner.efficiency import Efficiency

# Share of the memory for the KV cache: of what is left, but where the runtime's MEANS says so of the whole.
SHARE = "serving.kv_cache_free_gpu_mem_fraction"
# A plan asks for each rank several times, and each time all its tensors are listed.
weight_bytes = functools.lru_cache(maxsize=256)(rank_bytes)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA adapters in the GPU's memory at once, of all linears of a layer, in 16 bits. Raises UsageError."""

    number: int
    rank: int = 16

    def __post_init__(self) -> None:
        for name in ("number", "rank"):
            if getattr(self, name) < 1:
                raise UsageError(f"the {name} of adapters is {getattr(self, name)}", remedy="give 1 or more")

    def parameters(self, model: ModelConfig, tp: int) -> int:
        """Parameters of all adapters on one of `tp` GPUs: one of a linear's two factors is divided, as its weights are,
        the other is on every GPU."""
        hidden, head = model.hidden_size, model.head_size
        queries, keys = model.num_attention_heads * head, max(model.num_key_value_heads, tp) * head
        wide = mlp_width(model)
        # Q, K, V, gate and up have their outputs divided; the attention's and the MLP's last have their inputs.
        features = 5 * hidden + (queries + 2 * keys + 2 * wide) // tp + (queries + wide) // tp + 2 * hidden
        return self.number * self.rank * model.num_hidden_layers * features


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes an engine is built for and served with, under trtllm-build's and Triton's names, and its adapters."""

    max_batch_size: int
    max_num_tokens: int
    tokens_per_block: int = 32
    kv_cache_free_gpu_mem_fraction: float = 0.9
    adapters: Adapters | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each GPU.

    total        memory as the driver reports it
    runtime      CUDA context, NCCL, cuBLAS and TensorRT's own memory
    weights      weights of the largest rank
    activations  activations of one step of max_num_tokens
    buffers      logits and decoder state of max_batch_size requests
    adapters     LoRA adapters
    kv_pool      memory of the KV cache, in whole blocks: a share of what remains, or what remains of a share of the
                 whole
    kv_token     KV cache of one token
    """

    total: int
    runtime: int
    weights: int
    activations: int
    buffers: int
    adapters: int
    kv_pool: int
    kv_token: int
    tokens_per_block: int

    @property
    def free(self) -> int:
        """Bytes left for the KV cache before its fraction is taken; where this is negative, nothing fits."""
        return self.total - self.runtime - self.weights - self.activations - self.buffers - self.adapters

    @property
    def kv_tokens(self) -> int:
        return self.kv_pool // self.kv_token

    @property
    def kv_blocks(self) -> int:
        return self.kv_tokens // self.tokens_per_block

    def shortage(self, longest: int, gpus: int, limits: Limits) -> str:
        """Why the memory does not hold an engine of these limits with one request of `longest` tokens; "" where it
        does."""
        have = self.total - self.runtime
        if self.weights >= have:
            return (
                f"does not fit: the weights take {self.weights / 2**30:.1f} GiB of {have / 2**30:.1f} on each of {gpus}"
            )
        if self.free <= 0:
            parts = {"activations": self.activations, "buffers": self.buffers, "adapters": self.adapters}
            others = "".join(f", the {name} {size / 2**30:.1f}" for name, size in parts.items() if size)
            return (
                f"does not fit: the weights take {self.weights / 2**30:.1f} GiB{others} of {have / 2**30:.1f} on each "
                f"of {gpus}"
            )
        if not self.batch(longest):
            takes = longest * self.kv_token
            share = f" with {SHARE}={limits.kv_cache_free_gpu_mem_fraction:g}" if takes <= self.free else ""
            return (
                f"does not fit: {self.kv_pool / 2**30:.1f} GiB are left for the KV cache{share}, "
                f"and a sequence of {longest} tokens takes {takes / 2**30:.1f}"
            )
        return ""

    def batch(self, context: int) -> int:
        """Number of requests of `context` tokens, prompt plus answer, that the pool holds at once."""
        return self.kv_blocks // -(-context // self.tokens_per_block)

    def context(self, batch: int) -> int:
        """Longest sequence of which the pool holds `batch` at once."""
        return self.kv_blocks // batch * self.tokens_per_block


def mlp_width(model: ModelConfig) -> int:
    """Features that the MLP computes for a token: with experts, those of all that compute it."""
    return model.intermediate_size if model.experts is None else model.experts.top_k * model.experts.intermediate_size


def memory(
    model: ModelConfig,
    dtype: DataType,
    mapping: Mapping,
    quantization: Quantization,
    gpu: GpuSpec,
    limits: Limits,
    efficiency: Efficiency,
) -> Memory:
    """Memory with the runtime of `efficiency`. Raises UsageError for an impossible mapping, and for a GPU of unknown
    memory."""
    check_mapping(model, mapping, quantization=quantization)
    total = gpu.memory_bytes
    if total is None:
        raise UsageError(f"the memory of {gpu.name} is not known", remedy="name a GPU, as `trtpipe gpus` lists them")
    tp = mapping.tp_size
    # The largest layer holds at once: both halves of the MLP, the attention's inputs, and the residual stream.
    widest = (
        2 * mlp_width(model) // tp
        + (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_size // tp
        + 2 * model.hidden_size
    )
    weights = weight_bytes(model, dtype, mapping, quantization)
    activations = round(efficiency.activations * limits.max_num_tokens * widest * 2)
    # Logits are kept in float32.
    buffers = limits.max_batch_size * model.vocab_size * 4
    runtime = round(efficiency.runtime_gib * 2**30)
    token = kv_token_bytes(model, dtype, mapping, quantization)
    adapters = 0 if limits.adapters is None else 2 * limits.adapters.parameters(model, tp)
    free = total - runtime - weights - activations - buffers - adapters
    block, share = token * limits.tokens_per_block, limits.kv_cache_free_gpu_mem_fraction
    of_whole = SHARE in load_backend(efficiency.runtime).MEANS
    pool = max(0, int(share * total - (total - free) if of_whole else share * free)) // block * block
    return Memory(
        total=total, runtime=runtime, weights=weights, activations=activations, buffers=buffers,
        adapters=adapters, kv_pool=pool, kv_token=token, tokens_per_block=limits.tokens_per_block,
    )  # fmt: skip


def smallest_tp(
    model: ModelConfig,
    dtype: DataType,
    quantization: Quantization,
    gpu: GpuSpec,
    limits: Limits,
    efficiency: Efficiency,
    context: int,
    *,
    pp: int = 1,
    moe_tp: int | None = None,
    moe_ep: int | None = None,
) -> int | None:
    """The fewest GPUs of a host on which one request of `context` tokens fits, each with a part of every layer of one
    of `pp` stages; None where no number will do. `moe_tp` and `moe_ep` are those that are given."""
    for tp in (tp for tp in (1, 2, 4, 8, 16, 32, 64) if tp <= gpu.ranks_of_host):
        try:
            mapping = Mapping.of(tp, pp, moe_tp, moe_ep)
            found = memory(model, dtype, mapping, quantization, gpu, limits, efficiency)
        except UsageError:
            continue
        if found.free > 0 and found.batch(context):
            return tp
    return None
