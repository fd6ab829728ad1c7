"""Memory by hand and by published numbers: weights and KV cache to the byte, and what fits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.support.factories import hf_folder
from trtpipe.configs.facts import find_gpu, find_shape
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.memory import kv_token_bytes, rank_bytes
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.memory import Adapters, Limits, Memory, memory, smallest_tp, weight_bytes

BF16 = DataType.BFLOAT16
FP8 = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)
LIMITS = Limits(max_batch_size=64, max_num_tokens=8192)


@pytest.mark.parametrize(
    ("name", "sixteen", "eight"),
    [
        ("llama2-7b", 524_288, 262_144),
        ("llama3-8b", 131_072, 65_536),
        ("llama3.2-1b", 32_768, 16_384),
        ("llama3.2-3b", 114_688, 57_344),
        ("llama3.1-70b", 327_680, 163_840),
        ("qwen2.5-7b", 57_344, 28_672),
        # Heads of 128, where hidden_size / heads is 64.
        ("qwen3-0.6b", 114_688, 57_344),
    ],
)
def test_bytes_of_a_token_in_the_kv_cache(name: str, sixteen: int, eight: int) -> None:
    model = find_shape(name)[1]
    assert kv_token_bytes(model, BF16, Mapping(), UNQUANTIZED) == sixteen
    assert kv_token_bytes(model, BF16, Mapping(), FP8) == eight
    assert kv_token_bytes(model, BF16, Mapping(pp_size=2), UNQUANTIZED) == sixteen // 2


def test_kv_heads_are_copied_beyond_one_a_rank() -> None:
    model = find_shape("llama3.1-70b")[1]
    found = [kv_token_bytes(model, BF16, Mapping(tp_size=tp), UNQUANTIZED) for tp in (1, 2, 4, 8, 16)]
    assert found == [327_680, 163_840, 81_920, 40_960, 40_960]


def test_the_often_quoted_cache_of_llama2_70b_is_that_of_a_model_without_grouped_queries() -> None:
    grouped = find_shape("llama2-70b")[1]
    every = dataclasses.replace(grouped, num_key_value_heads=grouped.num_attention_heads)
    quoted = 2 * 80 * 8192 * 4096 * 8 * 2  # keys and values, layers, hidden, tokens, requests, bytes
    assert kv_token_bytes(every, BF16, Mapping(), UNQUANTIZED) * 4096 * 8 == quoted == 85_899_345_920
    assert kv_token_bytes(grouped, BF16, Mapping(), UNQUANTIZED) * 4096 * 8 == quoted // 8


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As Hugging Face counts them: a Qwen 2.5 with its biases, a Qwen 3 with the norms of its heads.
    [
        ("llama3-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("phi3-mini-4k", 3_821_079_552),
        ("phi3-medium-4k", 13_960_238_080),
        ("phi4", 14_659_507_200),
    ],
)
def test_weights_are_the_parameters(name: str, parameters: int) -> None:
    assert rank_bytes(find_shape(name)[1], BF16, Mapping(), UNQUANTIZED) == 2 * parameters


def test_a_folder_with_scaled_rotary_positions_has_the_weights_of_one_without(tmp_path: Path) -> None:
    plain = read_model_config(hf_folder(tmp_path / "plain"))
    scaled = read_model_config(hf_folder(tmp_path / "scaled", rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert scaled != plain
    assert weight_bytes(scaled, BF16, Mapping(), UNQUANTIZED) == weight_bytes(plain, BF16, Mapping(), UNQUANTIZED)


def test_what_is_left_is_the_pool() -> None:
    model, gpu, how = find_shape("llama3-8b")[1], find_gpu("h100"), load_efficiency()
    found = memory(model, BF16, Mapping(), UNQUANTIZED, gpu, LIMITS, how)
    assert found.total == 81559 * 2**20
    assert found.weights == 2 * 8_030_261_248
    assert found.buffers == 64 * 128_256 * 4
    assert found.free == found.total - found.runtime - found.weights - found.activations - found.buffers
    block = 131_072 * 32
    assert found.kv_pool == int(0.9 * found.free) // block * block
    assert found.kv_blocks == found.kv_pool // block
    assert found.kv_tokens == found.kv_blocks * 32


@pytest.mark.parametrize(("share", "gib"), [(0.9, 1.2), (0.95, 5.2), (0.5, 0.0)])
def test_vllm_takes_a_share_of_the_whole_memory(share: float, gib: float) -> None:
    """0.9 of 79.65 GiB are 71.68, of which an engine of 70 billion FP8 weights takes 70.48 without its KV cache."""
    model, gpu = find_shape("llama3.1-70b")[1], find_gpu("h100")
    limits = dataclasses.replace(LIMITS, kv_cache_free_gpu_mem_fraction=share)
    found, other = (
        memory(model, BF16, Mapping(), FP8, gpu, limits, load_efficiency().of(runtime))
        for runtime in ("vllm", "tensorrt_llm")
    )
    assert found.kv_pool / 2**30 == pytest.approx(gib, abs=0.05)
    assert found.free == other.free
    assert other.kv_pool / 2**30 == pytest.approx(share * 9.17, abs=0.05)


def test_batches_and_contexts_come_in_whole_blocks() -> None:
    found = Memory(
        total=0, runtime=0, weights=0, activations=0, buffers=0, adapters=0, kv_pool=100 * 32 * 7, kv_token=7,
        tokens_per_block=32,
    )  # fmt: skip
    assert found.kv_blocks == 100
    assert [found.batch(context) for context in (1, 32, 33, 3200, 3201)] == [100, 100, 50, 1, 0]
    assert [found.context(batch) for batch in (1, 3, 100)] == [3200, 33 * 32, 32]


@pytest.mark.parametrize(
    ("name", "quantization", "gpu", "tp"),
    [
        ("llama3-8b", UNQUANTIZED, "l4", 1),
        ("llama3.1-70b", UNQUANTIZED, "h100", 2),
        ("llama3.1-70b", FP8, "h100", 1),
        ("llama3.1-70b", UNQUANTIZED, "l4", 8),
    ],
)
def test_the_fewest_gpus(name: str, quantization: Quantization, gpu: str, tp: int) -> None:
    model = find_shape(name)[1]
    found = smallest_tp(model, BF16, quantization, find_gpu(gpu), LIMITS, load_efficiency(), 2048)
    assert found == tp
    far = 10**8
    assert smallest_tp(model, BF16, quantization, find_gpu(gpu), LIMITS, load_efficiency(), far) is None


def test_the_fewest_gpus_are_those_of_one_host() -> None:
    def fewest(model: str, gpu: GpuSpec, **sizes: int) -> int | None:
        return smallest_tp(find_shape(model)[1], BF16, UNQUANTIZED, gpu, LIMITS, load_efficiency(), 2048, **sizes)

    h100 = find_gpu("h100")
    assert fewest("llama3.1-405b", h100) is None
    assert fewest("llama3.1-405b", h100, pp=2) == 8
    assert fewest("llama3.1-405b", dataclasses.replace(h100, host_gpus=16)) == 16
    assert fewest("llama3-8b", find_gpu("a100-mig-1g.10gb")) is None
    assert fewest("llama3-8b", find_gpu("a100-mig-3g.40gb")) == 1
    assert fewest("mixtral-8x7b", h100) == 2
    assert fewest("mixtral-8x7b", h100, moe_ep=4) == 4
    assert fewest("mixtral-8x7b", h100, moe_tp=4) == 4


def test_a_mapping_that_cannot_be_and_a_gpu_without_memory() -> None:
    model, how = find_shape("llama3-8b")[1], load_efficiency()
    with pytest.raises(UsageError, match="the memory of cpu is not known"):
        memory(model, BF16, Mapping(), UNQUANTIZED, find_gpu("cpu"), LIMITS, how)
    with pytest.raises(UsageError):
        memory(model, BF16, Mapping(tp_size=3), UNQUANTIZED, find_gpu("h100"), LIMITS, how)


def test_adapters_take_room_from_the_kv_cache() -> None:
    """A rank of an adapter of all linears of Llama 3 8B: 32 layers of factors of 4096 + 4096 for Q and O, 4096 + 1024
    for K and V, 4096 + 14336 for gate, up and down. Two GPUs hold the undivided factor of each both."""
    model, how = find_shape("llama3-8b")[1], load_efficiency()
    four = dataclasses.replace(LIMITS, adapters=Adapters(number=4, rank=16))
    rank = 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    halved = 32 * (2 * (4096 + 2048) + 2 * (4096 + 512) + 2 * (4096 + 7168) + (4096 + 7168))
    for tp, features in ((1, rank), (2, halved)):
        plain, found = (
            memory(model, BF16, Mapping(tp_size=tp), UNQUANTIZED, find_gpu("h100"), limits, how)
            for limits in (LIMITS, four)
        )
        assert found.adapters == 4 * 16 * features * 2
        assert found.free == plain.free - found.adapters
        assert found.kv_blocks < plain.kv_blocks
    many = dataclasses.replace(LIMITS, adapters=Adapters(number=100_000, rank=16))
    full = memory(model, BF16, Mapping(), UNQUANTIZED, find_gpu("h100"), many, how)
    told = full.shortage(768, 1, many)
    assert re.fullmatch(
        r"does not fit: the weights take [\d.]+ GiB, .*, the adapters [\d.]+ of 78.1 on each of 1", told
    )
    with pytest.raises(UsageError, match="the rank of adapters is 0"):
        Adapters(number=1, rank=0)


def test_what_a_real_engine_said_of_its_pool() -> None:
    """Llama 2 7B with SmoothQuant on an A100 of 80 GB: "Allocate 69524783104 bytes for k/v cache", "Using 132608 tokens
    in paged KV cache" (TensorRT-LLM 0.8, github.com/NVIDIA/TensorRT-LLM issue 1400).
    """
    model, int8 = find_shape("llama2-7b")[1], Quantization(quant_algo=QuantAlgo.W8A8_SQ_PER_CHANNEL)
    assert kv_token_bytes(model, DataType.FLOAT16, Mapping(), int8) * 132_608 == 69_524_783_104
    limits = Limits(max_batch_size=1, max_num_tokens=4096, tokens_per_block=128)
    found = memory(model, DataType.FLOAT16, Mapping(), int8, find_gpu("a100"), limits, load_efficiency())
    assert found.kv_tokens == pytest.approx(132_608, rel=0.02)
