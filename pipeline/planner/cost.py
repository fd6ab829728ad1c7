"""Duration of a step of the engine: a roofline with measured efficiencies.

A step computes `context` tokens of prompts and one token of each of `decoding` sequences. On each of tp GPUs:

    products    four per layer, over T = context + decoding tokens: time of 2 x T x parameters operations and time to
                read the weights, joined by a p-norm since neither hides the other completely. Of E experts, k for each
                token, the parameters of k are computed, and those are read that some token picks. Where the GPUs divide
                the experts instead of each expert, all wait for the one with the most to do: see `routing`
    attention   of prompts: 4 x heads x head size x work operations, work = sum of tokens x (those before + half)
    cache       of decoding: bytes of the KV cache that are read. Where every head has keys and values of its own in 8
                bits, the kernel that decodes them before use is bound by values a second instead
    elementwise norms, rotation, activations, quantization, and what prompts' attention reads and writes besides its
                products: passes over T x (hidden + MLP features + heads' features) values of 16 bits. Below 2,000
                tokens of prompt they are most of its attention
    head        product with the vocabulary, for the sequences that get a token
    all-reduce  two per layer, of T x hidden x 2 bytes; one covers all experts, however the ranks divide them. Over
                NVLink TensorRT-LLM and vLLM take the shorter of two: one shot, in which a GPU reads the values of all
                others, (tp - 1) x bytes; or a ring, 2 x (tp - 1) / tp x bytes after a longer start. Over PCIe a ring,
                whose start grows with the number of GPUs
    overhead    per step, per layer (launches, and the time in which a kernel starts and ends), per layer with experts
                (scores, sorting of the rows by expert, and adding up), per product whose kernel decodes INT4 weights,
                per sequence

Sources: the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009); counts of operations as in Kaplan et al.
(arXiv 2001.08361, section 2.1); the ring all-reduce's volume as in NCCL's performance notes (nccl-tests).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.memory import expert_bytes, kv_token_bytes
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.memory import mlp_width, weight_bytes
from trtpipe.pipeline.planner.routing import Routing

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


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one GPU of an engine computes, reads and sends.

    parameters    those that compute a token
    weight_bytes  what every step reads; experts are apart
    expert_bytes  of all experts
    expert_parameters  those of the experts among `parameters`
    routing       experts that a step needs
    int4          products of a layer with INT4 weights, those of experts apart
    values        numbers of the KV cache per token, where every head has its own in 8 bits, else 0
    kind          operand type of the products; `kind16` that of an unquantized model
    """

    layers: int
    parameters: int
    weight_bytes: int
    expert_bytes: int
    expert_parameters: int
    routing: Routing
    head_parameters: int
    head_bytes: int
    token_bytes: int
    int4: int
    values: int
    attention_width: int
    hidden: int
    wide: int
    tp: int
    kind: str
    kind16: str
    kind_attention: str


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Step cost of one engine on one kind of GPU. Made by `of`. Takes numbers or numpy arrays.

    Seconds: of a token's products and the experts' part of them, of reading all weights, of the experts, of a unit of
    the prompts' attention, of a cached token, of a token's elementwise passes, of a step's all-reduces and a token's
    part of them, in one shot and as a ring, of a sequence's row of the head and reading the head, of a sequence
    besides, and of a step whatever it computes.
    """

    counts: Counts
    gpu: GpuSpec
    efficiency: Efficiency
    token_s: float
    expert_token_s: float
    weights_s: float
    experts_s: float
    work_s: float
    cached_s: float
    elementwise_s: float
    head_row_s: float
    head_s: float
    shot_s: float
    shot_token_s: float
    ring_s: float
    ring_token_s: float
    request_s: float
    fixed_s: float

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
        return _under(_count(model, dtype, mapping, quantization, gpu), gpu, efficiency)

    def under(self, efficiency: Efficiency) -> StepCost:
        """The same engine with other efficiencies; shapes are not counted again."""
        return _under(self.counts, self.gpu, efficiency)

    def parts(self, step: Step) -> Parts:
        products, elementwise, allreduce = self.of_tokens(step.context + step.decoding)
        head, overhead = self.of_logits(step.logits)
        return Parts(
            products, step.work * self.work_s, step.cached * self.cached_s, elementwise, head, allreduce, overhead
        )  # fmt: skip

    def of_tokens(self, tokens: Any) -> tuple[Any, Any, Any]:
        """Seconds of a step's products, elementwise passes and all-reduces, which depend on its tokens alone."""
        products = self._roof(self.computing(tokens), self.reading(tokens))
        return products, tokens * self.elementwise_s, self._allreduce(tokens)

    def of_logits(self, logits: Any) -> tuple[Any, Any]:
        """Seconds of the head and the overhead, which depend on the sequences that get a token."""
        return self._roof(logits * self.head_row_s, self.head_s), self.fixed_s + self.request_s * logits

    def computing(self, tokens: Any) -> Any:
        """Seconds in which the products of a step of `tokens` are computed."""
        seconds, routing = tokens * self.token_s, self.counts.routing
        if routing.groups == 1:
            return seconds
        return seconds + (routing.computed(tokens) - tokens) * self.expert_token_s

    def reading(self, tokens: Any) -> Any:
        """Seconds in which the weights are read that a step of `tokens` needs, on average."""
        routing = self.counts.routing
        experts = self.experts_s * routing.read(tokens)
        if self.efficiency.again:
            experts = experts * routing.blocks(tokens) ** self.efficiency.again
        return self.weights_s + experts

    def seconds(self, step: Step) -> Any:
        return sum(self.parts(step))

    def with_kv_share(self, share: float) -> StepCost:
        """The same cost with a KV cache that is read at `share` of the speed."""
        return replace(self, cached_s=self.cached_s / share)

    def _allreduce(self, tokens: Any) -> Any:
        shot, ring = self.shot_s + tokens * self.shot_token_s, self.ring_s + tokens * self.ring_token_s
        return (shot + ring - abs(shot - ring)) / 2  # the less, also of arrays

    def _roof(self, compute: Any, memory: Any) -> Any:
        power = self.efficiency.sharpness
        return (compute**power + memory**power) ** (1 / power)


class Stopwatch:
    """Seconds of steps of one engine. What depends on the tokens or the sequences of a step alone is computed once for
    each number of them: simulations ask for the same ones again and again."""

    def __init__(self, cost: StepCost) -> None:
        self._cost, self._work_s, self._cached_s = cost, cost.work_s, cost.cached_s
        self._of_tokens: dict[float, tuple[float, float, float]] = {}
        self._of_logits: dict[float, tuple[float, float]] = {}

    def __call__(self, step: Step) -> float:
        context, decoding, cached, work, logits = step
        tokens = context + decoding
        of_tokens, of_logits = self._of_tokens.get(tokens), self._of_logits.get(logits)
        if of_tokens is None:
            products, elementwise, allreduce = map(float, self._cost.of_tokens(tokens))
            of_tokens = self._of_tokens[tokens] = products, elementwise, allreduce
        if of_logits is None:
            head, overhead = map(float, self._cost.of_logits(logits))
            of_logits = self._of_logits[logits] = head, overhead
        products, elementwise, allreduce = of_tokens
        head, overhead = of_logits
        # In the order of `Parts`, so that the sum is the same to the last digit.
        seconds: float = products + work * self._work_s + cached * self._cached_s + elementwise + head + allreduce
        return seconds + overhead


def _count(
    model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization, gpu: GpuSpec
) -> Counts:  # fmt: skip
    tp, layers = mapping.tp_size, model.num_hidden_layers
    heads = (model.num_attention_heads + 2 * max(model.num_key_value_heads, tp)) * model.head_size
    attention = heads + model.num_attention_heads * model.head_size
    experts = model.experts
    scores = 0 if experts is None else experts.count
    parameters = layers * model.hidden_size * (attention + 3 * mlp_width(model) + scores) // tp
    of_pair = 0 if experts is None else 3 * layers * model.hidden_size * mlp_width(model) // tp
    head = model.vocab_size * model.hidden_size // tp
    wide = 4 if dtype is DataType.FLOAT32 else 2
    # Embedding rows are looked up, so the table is not read; a tied table is read as the head.
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * wide
    of_experts = expert_bytes(model, dtype, mapping, quantization)
    weights = weight_bytes(model, dtype, mapping, quantization) - table - head * wide - of_experts
    algo = quantization.quant_algo
    assert gpu.sm is not None
    # Without tensor cores for the operands the weights are decoded first.
    coded = algo is not None and (not algo.row.native or gpu.sm in algo.row.native)
    kind = (algo.row.operands if algo is not None and coded else "") or KIND[dtype]
    token = kv_token_bytes(model, dtype, mapping, quantization)
    own = quantization.kv_cache_quant_algo is not None and model.num_attention_heads == model.num_key_value_heads
    return Counts(
        layers=layers,
        parameters=parameters,
        weight_bytes=max(weights, 1),
        expert_bytes=of_experts,
        expert_parameters=of_pair,
        routing=Routing.of(model, mapping),
        head_parameters=head,
        head_bytes=head * wide,
        token_bytes=token,
        int4=0 if algo is None or algo.row.operands or algo.row.scale != "group" else 4 if experts is None else 2,
        values=token if own else 0,
        attention_width=layers * model.num_attention_heads * model.head_size // tp,
        hidden=model.hidden_size,
        wide=(mlp_width(model) + heads) // tp,
        tp=tp,
        kind=kind,
        kind16=KIND[dtype],
        # The prompts' attention is in FP8 where the products and the cache are.
        kind_attention="fp8" if kind in ("fp8", "fp4") and quantization.kv_cache_quant_algo else KIND[dtype],
    )


def _under(counts: Counts, gpu: GpuSpec, how: Efficiency) -> StepCost:
    assert gpu.sm is not None
    layers, tp, slower = counts.layers, counts.tp, how.slower
    flops16 = how.flops(gpu, counts.kind16)
    bandwidth = how.bandwidth(gpu)
    reading = bandwidth * how.weights
    cached = counts.token_bytes / (bandwidth * how.kv)
    if counts.values:
        cached = max(cached, counts.values / (flops16 * how.own_heads))
    reduce, number = all_reduce(gpu, tp, how), 2 * layers
    sent = number * counts.hidden * 2 * slower / (how.allreduce_share if linked(gpu, tp) else 1.0)
    products = how.flops(gpu, counts.kind) * how.product(gpu.sm, counts.kind)
    return StepCost(
        counts=counts, gpu=gpu, efficiency=how,
        token_s=2 * counts.parameters / products * slower,
        expert_token_s=2 * counts.expert_parameters / products * slower,
        weights_s=counts.weight_bytes / reading,
        experts_s=counts.expert_bytes / reading,
        work_s=4 * counts.attention_width / (flops16 * how.prompt(gpu.sm, counts.kind_attention)) * slower,
        cached_s=cached * slower,
        elementwise_s=layers * (counts.hidden + counts.wide) * 2 * how.elementwise / bandwidth * slower,
        head_row_s=2 * counts.head_parameters / (flops16 * how.product(gpu.sm, counts.kind16)) * slower,
        head_s=counts.head_bytes / reading,
        shot_s=number * reduce.shot_s,
        shot_token_s=sent * reduce.shot_byte_s,
        ring_s=number * reduce.ring_s,
        ring_token_s=sent * reduce.ring_byte_s,
        request_s=how.request_s * slower,
        fixed_s=how.step_s
        + (how.layer_s + (how.routing_s if counts.expert_bytes else 0.0) + counts.int4 * how.int4(gpu.sm)) * layers,
    )  # fmt: skip


class AllReduce(NamedTuple):
    """Seconds of an all-reduce in one shot and as a ring: its start, and a byte of what each GPU has."""

    shot_s: float
    shot_byte_s: float
    ring_s: float
    ring_byte_s: float

    def seconds(self, size: float) -> float:
        """Of `size` bytes on each GPU."""
        return min(self.shot_s + size * self.shot_byte_s, self.ring_s + size * self.ring_byte_s)


def all_reduce(gpu: GpuSpec, tp: int, efficiency: Efficiency) -> AllReduce:
    """All-reduce over tp GPUs. A bridge over two cards is not part of a card: it counts where `trtpipe probe` measured
    it. Raises UsageError where there is no link, or one between hosts.
    """
    gpu.require_ranks(tp)
    if tp == 1:
        return AllReduce(0.0, 0.0, 0.0, 0.0)
    if tp > gpu.ranks_of_host:
        raise UsageError(
            f"{tp} {gpu.name} are more than the {gpu.ranks_of_host} of a host",
            why="the network between hosts is not predicted",
            remedy=f"`trtpipe settings --tp {gpu.ranks_of_host} --pp 2` says whether it fits two hosts; host_gpus in "
            f"gpus/{gpu.name}.yaml of TRTPIPE_HOME says how many one switch joins",
        )
    passes = 2 * (tp - 1) / tp
    if linked(gpu, tp):
        assert gpu.sm is not None
        link = efficiency.nvlink_bandwidth(gpu)
        return AllReduce(
            efficiency.allreduce_s * efficiency.starting(gpu.sm), (tp - 1) / (link * efficiency.one_shot),
            efficiency.ring_s, passes / (link * efficiency.nvlink),
        )  # fmt: skip
    start = efficiency.ring_s * tp / 2
    each = passes / (gpu.require("pcie_gbs") * efficiency.pcie_share(tp) * 1e9)
    return AllReduce(start, each, start, each)


def linked(gpu: GpuSpec, tp: int) -> bool:
    """Whether `tp` GPUs are connected by NVLink."""
    bridged = gpu.measured is not None and gpu.measured.nvlink_gbs is not None
    return gpu.nvlink_gbs is not None and (gpu.nvlink_gpus is None or (bridged and tp <= gpu.nvlink_gpus))
