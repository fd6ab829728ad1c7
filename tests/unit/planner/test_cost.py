"""The roofline by hand: each part of a step against the formula worked out with round numbers."""

from __future__ import annotations

import dataclasses

import pytest

from trtpipe.configs.facts import find_shape
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec, Measured
from trtpipe.engines.quantization import UNQUANTIZED, QuantAlgo, Quantization
from trtpipe.pipeline.planner.cost import Step, StepCost
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency

BF16 = DataType.BFLOAT16
# Nothing is lost, and of compute and reading the larger counts.
IDEAL = Efficiency(
    products={"90.fp16": 1.0, "90.fp8": 1.0}, attention=1.0, weights=1.0, kv=1.0, sharpness=30.0, elementwise=0.0,
    step_s=0.0, layer_s=0.0, request_s=0.0, nvlink=1.0, pcie=0.5, allreduce_s=0.0, front_s=0.0, activations=1.0,
    runtime_gib=1.0, probed={"bandwidth": 0.9, "bf16": 0.8, "nvlink": 0.7},
    runtimes={},
)  # fmt: skip
GPU = GpuSpec(
    name="round", sm=90, memory_gib=80, bandwidth_gbs=1000, tflops={"fp16": 1000, "bf16": 1000, "fp8": 2000},
    nvlink_gbs=100, nvlink_gpus=2, pcie_gbs=20,
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
    assert cost().parameters == LINEAR
    norms = (2 * 32 + 1) * 4096 * 2
    assert parts.products == pytest.approx((LINEAR * 2 + norms) / 1e12)
    assert parts.cache == pytest.approx(1000 * 131_072 / 1e12)
    assert parts.head == pytest.approx(HEAD * 2 / 1e12)
    assert parts.attention == parts.elementwise == parts.allreduce == parts.overhead == 0
    assert parts.total == pytest.approx(sum(parts))


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
    # Four are more than the bridge joins: half of PCIe's 20 GB/s.
    assert cost(tp=4).parts(step).allreduce == pytest.approx(2 * 32 * 1.5 * 1000 * 4096 * 2 / 10e9)


def test_overheads_add_up() -> None:
    how = dataclasses.replace(IDEAL, step_s=1e-3, layer_s=1e-5, request_s=1e-6, allreduce_s=1e-5)
    step = Step(context=0, decoding=100, cached=0, work=0, logits=100)
    assert cost(how=how).parts(step).overhead == pytest.approx(1e-3 + 32 * 1e-5 + 100 * 1e-6)
    assert cost(2, how=how).parts(step).allreduce == pytest.approx(64 * (1e-5 + 100 * 4096 * 2 / 100e9))


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
    assert cost(tp=2, gpu=probed).link == pytest.approx(35e9 / 0.7)


def test_what_is_not_known_is_not_guessed() -> None:
    bare = dataclasses.replace(GPU, bandwidth_gbs=None)
    with pytest.raises(UsageError, match=r"bandwidth_gbs of round is not known; write it into gpus/round\.yaml"):
        cost(gpu=bare)
    with pytest.raises(UsageError, match=r"tflops\.fp8 of round is not known"):
        cost(gpu=dataclasses.replace(GPU, tflops={"bf16": 1.0}), quantization=Quantization(quant_algo=QuantAlgo.FP8))


def test_the_shipped_efficiencies_are_shares() -> None:
    how = load_efficiency()
    shares = [*how.products.values(), how.attention, how.weights, how.kv, how.nvlink, how.pcie, *how.probed.values()]
    assert all(0.2 <= share < 1 for share in shares)
    with pytest.raises(UsageError, match="no efficiency of int4 is known"):
        how.product(90, "int4")
    assert how.product(100, "fp8") == how.product(90, "fp8")  # the nearest that was fitted


def experts(tokens: int, **mapping: int) -> float:
    """Seconds that a step of Mixtral 8x7B takes for its products, in bytes read at 1 TB/s, less the experts' part."""
    step = Step(context=0, decoding=tokens, cached=0, work=0, logits=0)
    made = StepCost.of(find_shape("mixtral-8x7b")[1], BF16, Mapping(**mapping), UNQUANTIZED, GPU, IDEAL)
    return float(made.parts(step).products) * 1e12 - made.weight_bytes


def test_experts_that_no_token_picks_are_not_read() -> None:
    all_of_them = 32 * 8 * 3 * 4096 * 14336 * 2
    # Of eight experts a token takes two: 1 - (3/4)^n of them are read for n tokens.
    assert experts(1) == pytest.approx(all_of_them * 2 / 8, rel=1e-6)
    assert experts(2) == pytest.approx(all_of_them * 7 / 16, rel=1e-6)
    assert experts(3) == pytest.approx(all_of_them * 37 / 64, rel=1e-6)
    for mapping in ({"tp_size": 2}, {"tp_size": 2, "moe_ep_size": 2}):
        assert experts(2, **mapping) == pytest.approx(all_of_them / 2 * 7 / 16, rel=1e-6)


def test_a_prompt_is_computed_by_the_experts_that_it_picks() -> None:
    made = StepCost.of(find_shape("mixtral-8x7b")[1], BF16, Mapping(), UNQUANTIZED, GPU, IDEAL)
    # Attention, two experts and the router of each layer: with two tables of 32000 x 4096 the 12.9 billion that a token
    # takes.
    attention, pair, router = 4096 * (6144 + 4096), 2 * 3 * 4096 * 14336, 8 * 4096
    assert made.parameters == 32 * (attention + pair + router)
    assert made.parameters + 2 * 32_000 * 4096 == pytest.approx(12.88e9, rel=1e-3)
    parts = made.parts(Step(context=100_000, decoding=0, cached=0, work=0, logits=0))
    assert parts.products == pytest.approx(2 * 100_000 * made.parameters / 1e15)
