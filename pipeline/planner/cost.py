"""Duration of a step of the engine: a roofline with measured efficiencies.

A step computes `context` tokens of prompts and one token of each of `decoding` sequences. On each of tp GPUs:

    products    four per layer, over T = context + decoding tokens: time of 2 x T x parameters operations and time to
                read the weights, joined by a p-norm since neither hides the other completely. Of E experts, k for each
                token, the parameters of k are computed, and those are read that some token picks: where tokens pick
                independently, E x (1 - (1 - k / E)^T) on average
    attention   of prompts: 4 x heads x head size x work operations, work = sum of tokens x (those before + half);
                of decoding: bytes of the KV cache that are read
    elementwise norms, activations, quantization: passes over T x (hidden + intermediate / tp) values of 16 bits
    head        product with the vocabulary, for the sequences that get a token
    all-reduce  two per layer: 2 x (tp - 1) / tp x T x hidden x 2 bytes over the link, and a latency; one covers all
                experts, however the ranks divide them
    overhead    per step, per layer, per sequence

Sources: the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009); counts of operations as in Kaplan et al.
(arXiv 2001.08361, section 2.1); the ring all-reduce's volume as in NCCL's performance notes (nccl-tests).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.memory import expert_bytes, kv_token_bytes, rank_bytes
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.memory import mlp_width

# Operand type of matrix products of an unquantized model.
KIND = {DataType.BFLOAT16: "bf16", DataType.FLOAT16: "fp16", DataType.FLOAT32: "fp16"}


class Step(NamedTuple):
    """Work of one step. A tuple, since a simulation makes thousands.

    context   tokens of prompts
    decoding  sequences that get one more token
    cached    tokens of KV cache that the decoding sequences read, all together
    work      work of the prompts' attention: sum over chunks of tokens x (tokens before + tokens / 2)
    logits    sequences that get a token: decoding ones, and prompts that end in this step
    """

    context: Any
    decoding: Any
    cached: Any
    work: Any
    logits: Any


class Parts(NamedTuple):
    """Seconds of a step by cause."""

    products: Any
    attention: Any
    cache: Any
    elementwise: Any
    head: Any
    allreduce: Any
    overhead: Any

    @property
    def total(self) -> Any:
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Step cost of one engine on one kind of GPU. Made by `of`. Counts are per GPU; takes numbers or numpy arrays.

    parameters    those that compute a token
    weight_bytes  what every step reads; experts are apart
    expert_bytes  of all experts
    picked        share of the experts that compute a token
    """

    layers: int
    parameters: int
    weight_bytes: int
    expert_bytes: int
    picked: float
    head_parameters: int
    head_bytes: int
    token_bytes: int
    attention_width: int
    hidden: int
    wide: int
    tp: int
    flops: float
    flops16: float
    bandwidth: float
    link: float
    latency: float
    share: float
    share16: float
    efficiency: Efficiency

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        dtype: DataType,
        mapping: Mapping,
        quantization: Quantization,
        gpu: GpuSpec,
        efficiency: Efficiency,
    ) -> StepCost:
        """Raises UsageError for a GPU that lacks a figure needed here."""
        tp, layers = mapping.tp_size, model.num_hidden_layers
        heads = (model.num_attention_heads + 2 * max(model.num_key_value_heads, tp)) * model.head_size
        attention = heads + model.num_attention_heads * model.head_size
        experts = model.experts
        scores = 0 if experts is None else experts.count
        parameters = layers * model.hidden_size * (attention + 3 * mlp_width(model) + scores) // tp
        head = model.vocab_size * model.hidden_size // tp
        wide = 4 if dtype is DataType.FLOAT32 else 2
        # Embedding rows are looked up, so the table is not read; a tied table is read as the head.
        table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * wide
        of_experts = expert_bytes(model, dtype, mapping, quantization)
        weights = rank_bytes(model, dtype, mapping, quantization) - table - head * wide - of_experts
        algo = quantization.quant_algo
        assert gpu.sm is not None
        # Without tensor cores for the operands the weights are decoded first.
        coded = algo is not None and (not algo.row.native or gpu.sm in algo.row.native)
        kind = (algo.row.operands if algo is not None and coded else "") or KIND[dtype]
        return cls(
            layers=layers,
            parameters=parameters,
            weight_bytes=max(weights, 1),
            expert_bytes=of_experts,
            picked=1.0 if experts is None else experts.top_k / experts.count,
            head_parameters=head,
            head_bytes=head * wide,
            token_bytes=kv_token_bytes(model, dtype, mapping, quantization),
            attention_width=layers * model.num_attention_heads * model.head_size // tp,
            hidden=model.hidden_size,
            wide=mlp_width(model) // tp,
            tp=tp,
            flops=efficiency.flops(gpu, kind),
            flops16=efficiency.flops(gpu, KIND[dtype]),
            bandwidth=efficiency.bandwidth(gpu),
            link=link_bandwidth(gpu, tp, efficiency),
            latency=efficiency.allreduce_s,
            share=efficiency.product(gpu.sm, kind),
            share16=efficiency.product(gpu.sm, "fp16"),
            efficiency=efficiency,
        )

    def parts(self, step: Step) -> Parts:
        how, tokens = self.efficiency, step.context + step.decoding
        allreduce = 0.0
        if self.tp > 1:
            sent = 2 * (self.tp - 1) / self.tp * tokens * self.hidden * 2
            allreduce = 2 * self.layers * (self.latency + sent / self.link)
        return Parts(
            products=self._roof(
                2 * tokens * self.parameters / (self.flops * self.share), self.read(tokens) / self._reading
            ),
            attention=4 * self.attention_width * step.work / (self.flops16 * how.attention),
            cache=step.cached * self.token_bytes / (self.bandwidth * how.kv),
            elementwise=self.layers * tokens * (self.hidden + self.wide) * 2 * how.elementwise / self.bandwidth,
            head=self._roof(
                2 * step.logits * self.head_parameters / (self.flops16 * self.share16), self.head_bytes / self._reading
            ),
            allreduce=allreduce,
            overhead=how.step_s + how.layer_s * self.layers + how.request_s * step.logits,
        )

    def read(self, tokens: Any) -> Any:
        """Bytes of the weights that a step of `tokens` reads, on average."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.picked) ** tokens)

    def seconds(self, step: Step) -> Any:
        return self.parts(step).total

    def with_kv_share(self, share: float) -> StepCost:
        """The same cost with a KV cache that is read at `share` of the speed."""
        return replace(self, efficiency=replace(self.efficiency, kv=self.efficiency.kv * share))

    @property
    def _reading(self) -> float:
        return self.bandwidth * self.efficiency.weights

    def _roof(self, compute: Any, memory: Any) -> Any:
        power = self.efficiency.sharpness
        return (compute**power + memory**power) ** (1 / power)


def link_bandwidth(gpu: GpuSpec, tp: int, efficiency: Efficiency) -> float:
    """Bytes per second of an all-reduce over tp GPUs, in one direction. Raises UsageError where there is no link."""
    gpu.require_ranks(tp)
    if tp == 1:
        return 1.0
    joined = gpu.nvlink_gbs is not None and (gpu.nvlink_gpus is None or tp <= gpu.nvlink_gpus)
    if joined:
        return efficiency.nvlink_bandwidth(gpu) * efficiency.nvlink
    return gpu.require("pcie_gbs") * efficiency.pcie * 1e9
