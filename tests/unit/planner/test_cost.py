"""The roofline by hand: each part of a step against the formula worked out with round numbers."""

from __future__ import annotations

import dataclasses

import pytest

from trtpipe.configs.facts import find_gpu, find_shape
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec, Measured
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.pipeline.planner.cost import Step, StepCost, all_reduce
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency

BF16 = DataType.BFLOAT16
# Nothing is lost, and of compute and reading the larger counts.
IDEAL = Efficiency(
    products={"90.fp16": 1.0, "90.fp8": 1.0}, attention={"90.fp16": 1.0}, weights=1.0, kv=1.0, own_heads=1.0,
    sharpness=30.0, elementwise=0.0, routing_s=0.0, int4_s={}, step_s=0.0, layer_s=0.0, request_s=0.0, one_shot=1.0,
    ring_s=0.0, nvlink=1.0, allreduce_share=1.0, pcie={2: 0.6, 4: 0.5, 8: 0.4}, starts={90: 1.0}, allreduce_s=0.0,
    front_s=0.0, activations=1.0, runtime_gib=1.0,
    probed={"bandwidth": 0.9, "bf16": 0.8, "nvlink": 0.7}, runtimes={"other": {"step_s": 2e-3}},
    releases={"tensorrt_llm": {"0.14": 1.25, "0.17": 1.0, "1.2": 0.9}},
    errors={"output_tokens_per_s": {"tensorrt_llm 90.fp8": 0.1, "tensorrt_llm 90.fp16": 0.2}},
)  # fmt: skip
GPU = GpuSpec(
    name="round", sm=90, memory_gib=80, bandwidth_gbs=1000, tflops={"fp16": 1000, "bf16": 1000, "fp8": 2000},
    nvlink_gbs=100, pcie_gbs=20,
)  # fmt: skip
# Llama 3 8B: 32 layers of 4096 x (6144 + 4096) and 3 x 4096 x 14336 parameters, and two tables of 128256 x 4096.
LINEAR = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
HEAD = 128_256 * 4096


def cost(
    tp: int = 1, quantization: Quantization = UNQUANTIZED, how: Efficiency = IDEAL, gpu: GpuSpec = GPU
) -> StepCost:
    return StepCost.of(find_shape("llama3-8b")[1], BF16, Mapping(tp_size=tp), quantization, gpu, how)


def test_one_token_reads_the_weights_and_the_cache() -> None:
    parts = cost().parts(Step(context=0, decoding=1, cached=1000, work=0, logits=1))
    assert cost().counts.parameters == LINEAR
    norms = (2 * 32 + 1) * 4096 * 2
    assert parts.products == pytest.approx((LINEAR * 2 + norms) / 1e12)
    assert parts.cache == pytest.approx(1000 * 131_072 / 1e12)
    assert parts.head == pytest.approx(HEAD * 2 / 1e12)
    assert parts.attention == parts.elementwise == parts.allreduce == parts.overhead == 0


def test_a_prompt_is_computed() -> None:
    step = Step(context=8192, decoding=0, cached=0, work=8192 * 4096, logits=1)
    parts = cost().parts(step)
    assert parts.products == pytest.approx(2 * 8192 * LINEAR / 1e15)
    # 32 layers of 32 heads of 128, two products of two operations for each pair of tokens.
    assert parts.attention == pytest.approx(4 * 32 * 4096 * 8192 * 4096 / 1e15)
    fp8 = cost(quantization=Quantization(quant_algo=QuantAlgo.FP8)).parts(step)
    assert fp8.products == pytest.approx(parts.products / 2)
    assert fp8.attention == parts.attention


def test_two_gpus_halve_the_work_and_send_the_activations() -> None:
    step = Step(context=1000, decoding=0, cached=0, work=0, logits=0)
    one, two = cost().parts(step), cost(tp=2).parts(step)
    assert two.products == pytest.approx(one.products / 2, rel=1e-3)
    # Two all-reduces a layer, each 2 (tp - 1) / tp of 1000 x 4096 values of two bytes, over 100 GB/s.
    assert two.allreduce == pytest.approx(2 * 32 * 1 * 1000 * 4096 * 2 / 100e9)
    # Without NVLink, half of PCIe's 20 GB/s for four.
    pcie = dataclasses.replace(GPU, nvlink_gbs=None)
    assert cost(tp=4, gpu=pcie).parts(step).allreduce == pytest.approx(2 * 32 * 1.5 * 1000 * 4096 * 2 / 10e9)


def test_a_bridge_counts_where_it_was_measured() -> None:
    """A card that can be bridged is not: NVIDIA's own A100 PCIe runs of Llama 70B on two were over PCIe."""
    bridged = dataclasses.replace(GPU, nvlink_gpus=2)
    probed = Measured(date="2026-01-01", host="", driver="", bandwidth_gbs=900, tflops={}, nvlink_gbs=35)
    # A GPU of two passes each byte once, one of four one and a half times.
    assert all_reduce(bridged, 2, IDEAL).ring_byte_s == pytest.approx(1 / (0.6 * 20e9))
    assert all_reduce(dataclasses.replace(bridged, measured=probed), 2, IDEAL).ring_byte_s == pytest.approx(0.7 / 35e9)
    assert all_reduce(dataclasses.replace(bridged, measured=probed), 4, IDEAL).ring_byte_s == pytest.approx(1.5 / 10e9)


@pytest.mark.parametrize(
    ("gpu", "tp", "size", "microseconds"),
    [
        ("h100", 2, 2**17, 3.3), ("h100", 4, 2**19, 7.9), ("h100", 8, 2**18, 10.2), ("h200", 4, 2**24, 99.8),
        ("h100", 2, 2**28, 889), ("h100", 4, 2**28, 1190),
    ],
)  # fmt: skip
def test_all_reduces_over_nvlink_as_measured(gpu: str, tp: int, size: int, microseconds: float) -> None:
    """TensorRT-LLM's all-reduce in AIConfigurator 0.12's tables, whose sizes are numbers of 16-bit values: one shot
    where it is small, else a ring. The last two are NCCL's on our own H100s."""
    found = all_reduce(find_gpu(gpu), tp, load_efficiency()).seconds(size)
    assert 1e6 * found == pytest.approx(microseconds, rel=0.2)


def test_overheads_add_up() -> None:
    how = dataclasses.replace(IDEAL, step_s=1e-3, layer_s=1e-5, request_s=1e-6, allreduce_s=1e-5)
    step = Step(context=0, decoding=100, cached=0, work=0, logits=100)
    assert cost(how=how).parts(step).overhead == pytest.approx(1e-3 + 32 * 1e-5 + 100 * 1e-6)
    longer = dataclasses.replace(how, ring_s=1.0)
    assert cost(2, how=longer).parts(step).allreduce == pytest.approx(64 * (1e-5 + 100 * 4096 * 2 / 100e9))


def test_compute_and_reading_join_smoothly() -> None:
    how = dataclasses.replace(IDEAL, sharpness=1.0)
    step = Step(context=0, decoding=64, cached=0, work=0, logits=0)
    reading = cost().parts(step._replace(decoding=0)).products
    compute = 2 * 64 * LINEAR / 1e15
    assert cost(how=how).parts(step).products == pytest.approx(reading + compute)


def test_a_probed_card_goes_by_what_it_did() -> None:
    """As fast as one whose data sheet says what the fit's own probe makes of it."""
    measured = Measured(
        date="2026-01-01", host="test", driver="1", bandwidth_gbs=450, tflops={"bf16": 400, "int8": 1}, nvlink_gbs=35
    )
    probed = dataclasses.replace(GPU, measured=measured)
    assert IDEAL.bandwidth(probed) == pytest.approx(450e9 / 0.9)
    assert IDEAL.flops(probed, "bf16") == pytest.approx(400e12 / 0.8)
    assert IDEAL.flops(probed, "fp8") == 2000e12  # nobody measured it
    assert all_reduce(probed, 2, IDEAL).ring_byte_s == pytest.approx(0.7 / 35e9)


def test_what_is_not_known_is_not_guessed() -> None:
    bare = dataclasses.replace(GPU, bandwidth_gbs=None)
    with pytest.raises(UsageError, match=r"bandwidth_gbs of round is not known; write it into gpus/round\.yaml"):
        cost(gpu=bare)
    with pytest.raises(UsageError, match=r"tflops\.fp8 of round is not known"):
        cost(gpu=dataclasses.replace(GPU, tflops={"bf16": 1.0}), quantization=Quantization(quant_algo=QuantAlgo.FP8))


def test_the_shipped_efficiencies_are_shares() -> None:
    how = load_efficiency()
    shares = [
        *how.products.values(),
        *how.attention.values(),
        how.weights,
        how.kv,
        how.nvlink,
        how.one_shot,
        how.allreduce_share,
    ]
    shares += how.pcie.values()
    shares += how.probed.values()
    assert all(0.2 <= share < 1 for share in shares)
    with pytest.raises(UsageError, match="no efficiency of int4 is known"):
        how.product(90, "int4")
    assert how.product(120, "fp8") == how.product(100, "fp8")  # the nearest that was fitted


def experts(tokens: int, **mapping: int) -> float:
    """Seconds that a step of Mixtral 8x7B takes for its products, in bytes read at 1 TB/s, less the experts' part."""
    step = Step(context=0, decoding=tokens, cached=0, work=0, logits=0)
    made = StepCost.of(find_shape("mixtral-8x7b")[1], BF16, Mapping(**mapping), UNQUANTIZED, GPU, IDEAL)
    return float(made.parts(step).products) * 1e12 - made.counts.weight_bytes


def test_experts_that_no_token_picks_are_not_read() -> None:
    all_of_them = 32 * 8 * 3 * 4096 * 14336 * 2
    # Of eight experts a token takes two: 1 - (3/4)^n of them are read for n tokens.
    assert experts(1) == pytest.approx(all_of_them * 2 / 8, rel=1e-6)
    assert experts(2) == pytest.approx(all_of_them * 7 / 16, rel=1e-6)
    assert experts(3) == pytest.approx(all_of_them * 37 / 64, rel=1e-6)
    assert experts(2, tp_size=2) == pytest.approx(all_of_them / 2 * 7 / 16, rel=1e-6)
    # The GPU with the most of the experts that are picked: see test_routing.
    assert experts(2, tp_size=2, moe_ep_size=2) == pytest.approx(all_of_them / 2 * 2.34 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("runtime", "dtype", "mapping", "tokens", "microseconds"),
    [
        ("trtllm_pytorch", "bf16", (1, 1), 1, 260), ("trtllm_pytorch", "bf16", (1, 1), 64, 975),
        ("trtllm_pytorch", "bf16", (1, 1), 8192, 7084), ("trtllm_pytorch", "bf16", (4, 1), 1, 82),
        ("trtllm_pytorch", "bf16", (4, 1), 8192, 1964), ("trtllm_pytorch", "fp8", (1, 1), 1, 149),
        ("trtllm_pytorch", "fp8", (2, 1), 64, 276), ("trtllm_pytorch", "fp8", (4, 4), 1, 92),
        ("trtllm_pytorch", "fp8", (4, 4), 64, 157), ("vllm", "bf16", (1, 1), 1, 259),
        ("vllm", "bf16", (2, 1), 64, 497), ("vllm", "bf16", (2, 1), 320, 616), ("vllm", "bf16", (1, 1), 8192, 11203),
        ("vllm", "bf16", (2, 1), 8192, 4383), ("vllm", "bf16", (4, 1), 8192, 2482),
    ],
)  # fmt: skip
def test_a_layer_of_experts(
    runtime: str, dtype: str, mapping: tuple[int, int], tokens: int, microseconds: float
) -> None:
    """Mixtral 8x7B's on an H100, with (tp, ep), in AIConfigurator 0.12's tables: TensorRT-LLM 1.3's CUTLASS kernels,
    and vLLM 0.24's in Triton."""
    ranks = Mapping(tp_size=mapping[0], moe_ep_size=mapping[1])
    coded = Quantization(quant_algo=QuantAlgo.FP8) if dtype == "fp8" else UNQUANTIZED
    how = load_efficiency().of(runtime)
    made = StepCost.of(find_shape("mixtral-8x7b")[1], BF16, ranks, coded, find_gpu("h100"), how)
    alone = dataclasses.replace(made, weights_s=0.0, token_s=made.expert_token_s)
    took = alone.of_tokens(tokens)[0] / made.counts.layers + how.routing_s
    assert took == pytest.approx(microseconds * 1e-6, rel=0.25)


def test_a_prompt_is_computed_by_the_experts_that_it_picks() -> None:
    made = StepCost.of(find_shape("mixtral-8x7b")[1], BF16, Mapping(), UNQUANTIZED, GPU, IDEAL)
    # Attention, two experts and the router of each layer: with two tables of 32000 x 4096 the 12.9 billion that a token
    # takes.
    attention, pair, router = 4096 * (6144 + 4096), 2 * 3 * 4096 * 14336, 8 * 4096
    assert made.counts.parameters == 32 * (attention + pair + router)
    assert made.counts.parameters + 2 * 32_000 * 4096 == pytest.approx(12.88e9, rel=1e-3)
    parts = made.parts(Step(context=100_000, decoding=0, cached=0, work=0, logits=0))
    assert parts.products == pytest.approx(2 * 100_000 * made.counts.parameters / 1e15)


def test_a_release_scales_the_work_and_not_the_overheads() -> None:
    """The nearest at or before the one that is asked for; a toolchain's name is a release too."""
    slower = {one: IDEAL.of("tensorrt_llm", one).slower for one in ("0.9", "0.15", "0.21.0", "1.3.0rc29", None)}
    assert slower == {"0.9": 1.25, "0.15": 1.25, "0.21.0": 1.0, "1.3.0rc29": 0.9, None: 0.9}
    assert IDEAL.of("other").step_s == 2e-3
    # What a user's runs told of the work counts in each release.
    own = dataclasses.replace(IDEAL, runtimes={"tensorrt_llm": {"work": 2.0, "step_s": 1e-3}})
    assert [own.of("tensorrt_llm", one).slower for one in ("0.9", "0.21.0", None)] == [2.5, 2.0, 1.8]
    assert own.of("tensorrt_llm", "0.9").step_s == 1e-3
    step = Step(context=8192, decoding=0, cached=0, work=8192 * 4096, logits=1)
    how = dataclasses.replace(IDEAL, step_s=1e-3)
    now, before = cost(how=how).parts(step), cost(how=how.of("tensorrt_llm", "0.14")).parts(step)
    assert before.products == pytest.approx(1.25 * now.products, rel=1e-3)
    assert before.overhead == now.overhead


def test_a_product_with_int4_weights_starts_slowly_where_that_was_measured() -> None:
    awq, step = Quantization(quant_algo=QuantAlgo.W4A16_AWQ), Step(context=0, decoding=1, cached=0, work=0, logits=1)
    how = dataclasses.replace(IDEAL, int4_s={"other 90": 1e-5})
    assert cost(quantization=awq, how=how).parts(step).overhead == 0
    there = dataclasses.replace(how, runtime="other")
    assert cost(quantization=awq, how=there).parts(step).overhead == pytest.approx(32 * 4 * 1e-5)
    assert cost(how=there).parts(step).overhead == 0


def test_confidence_is_of_held_out_figures_and_wide_without_them() -> None:
    assert IDEAL.confidence(90, "bf16") == ({"output_tokens_per_s": 0.2}, True)
    assert IDEAL.confidence(89, "fp8") == ({"output_tokens_per_s": 0.4}, False)


MHA = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)


@pytest.mark.parametrize(
    ("gpu", "sequences", "length", "microseconds"),
    [("h100", 64, 4096, 838), ("h100", 128, 2048, 841), ("h200", 64, 4096, 762), ("l40s", 64, 4096, 2980)],
)
def test_decode_attention_in_fp8_with_every_head_its_own(
    gpu: str, sequences: int, length: int, microseconds: float
) -> None:
    """Measured by AIConfigurator 0.12 in TensorRT-LLM 1.3: one layer of 32 heads, each with its own keys and values."""
    card, shape = find_gpu(gpu), find_shape("llama2-7b")[1]
    made = StepCost.of(shape, BF16, Mapping(), MHA, card, load_efficiency())
    parts = made.parts(Step(context=0, decoding=sequences, cached=sequences * length, work=0, logits=sequences))
    assert parts.cache / shape.num_hidden_layers == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "length", "microseconds"),
    [("h100", 8192, 879), ("h100", 16384, 3002), ("h200", 8192, 861), ("l40s", 8192, 2208)],
)
def test_prompt_attention_in_fp8(gpu: str, length: int, microseconds: float) -> None:
    """The same source: one layer of Llama 3 8B's 32 heads and 8 of keys and values, one prompt. Small prompts are
    bound by what `elementwise` counts."""
    card, shape = find_gpu(gpu), find_shape("llama3-8b")[1]
    made = StepCost.of(shape, BF16, Mapping(), MHA, card, load_efficiency())
    parts = made.parts(Step(context=length, decoding=0, cached=0, work=length**2 / 2, logits=1))
    heads = (32 + 2 * 8) * 128 / (4096 + 14336 + (32 + 2 * 8) * 128)
    took = (parts.attention + heads * parts.elementwise) / shape.num_hidden_layers
    assert took == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "tokens", "microseconds"),
    [("h100", 4096, 674), ("h200", 4096, 693), ("a100", 4096, 2116), ("a100", 256, 158)],
)
def test_a_product_in_bf16(gpu: str, tokens: int, microseconds: float) -> None:
    """The same source: tokens x 8192 x 8192."""
    card, how = find_gpu(gpu), load_efficiency()
    made = StepCost.of(find_shape("llama3-8b")[1], BF16, Mapping(), UNQUANTIZED, card, how)
    seconds = made.token_s / (2 * made.counts.parameters) * 2 * 8192 * 8192 * tokens
    reading = made.weights_s / made.counts.weight_bytes * 8192 * 8192 * 2
    assert made._roof(seconds, reading) == pytest.approx(microseconds * 1e-6, rel=0.2)


def test_a_switch_joins_the_gpus_of_a_host() -> None:
    with pytest.raises(UsageError, match=r"16 round are more than the 8 of a host: the network between hosts is not"):
        all_reduce(GPU, 16, IDEAL)
    wide = dataclasses.replace(GPU, host_gpus=16)
    assert all_reduce(wide, 16, IDEAL).ring_byte_s == pytest.approx(2 * 15 / 16 / 100e9)
