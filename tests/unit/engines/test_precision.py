"""Which precision runs where: what was asked for, or a refusal naming what would work; never something else instead."""

from __future__ import annotations

import pytest

from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines.base import DataType
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.stored import Stored
from trtpipe.engines.precision import Precision, find_recipe, parse_float, resolve_precision
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.stored_precision import stored_precision

CPU = GpuSpec(name="cpu", sm=None)
RECIPES = load_quant_recipes()


def gpu(name: str, sm: int) -> GpuSpec:
    return GpuSpec(name=name, sm=sm, memory_gib=80.0)


A100, L40S, H100, B200 = gpu("a100", 80), gpu("l40s", 89), gpu("h100", 90), gpu("b200", 100)


def resolve(requested: str, device: GpuSpec, kv_cache: str | None = None) -> Precision:
    return resolve_precision(requested, device, RECIPES, kv_cache)


def refusal(requested: str, device: GpuSpec, kv_cache: str | None = None) -> str:
    with pytest.raises(UsageError) as error:
        resolve(requested, device, kv_cache)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(
    ("requested", "name", "dtype"),
    [
        ("bf16", "bf16", DataType.BFLOAT16),
        ("bfloat16", "bf16", DataType.BFLOAT16),
        ("fp16", "fp16", DataType.FLOAT16),
        ("float16", "fp16", DataType.FLOAT16),
        ("fp32", "fp32", DataType.FLOAT32),
        ("float32", "fp32", DataType.FLOAT32),
    ],
)
@pytest.mark.parametrize("device", [CPU, A100, H100])
def test_what_is_asked_for_is_given(requested: str, name: str, dtype: DataType, device: GpuSpec) -> None:
    assert resolve(requested, device) == Precision(
        name=name, dtype=dtype, reason="requested", sms=(80, 86, 89, 90, 100, 103, 120)
    )


ALL = "(runtimes tensorrt_llm, trtllm_pytorch, vllm)"


@pytest.mark.parametrize(
    ("device", "name", "reason"),
    [
        (CPU, "bf16", "auto: the CPU computes bfloat16"),
        (A100, "int8-sq", "auto: SM80 has no FP8, and computes INT8 (runtimes tensorrt_llm, vllm)"),
        (gpu("a10", 86), "int8-sq", "auto: SM86 has no FP8, and computes INT8 (runtimes tensorrt_llm, vllm)"),
        (L40S, "fp8-kv", f"auto: SM89 computes FP8, weights and KV cache {ALL}"),
        (H100, "fp8-kv", f"auto: SM90 computes FP8, weights and KV cache {ALL}"),
        (B200, "fp8-kv", f"auto: SM100 computes FP8, weights and KV cache {ALL}"),
    ],
)
def test_auto_says_why(device: GpuSpec, name: str, reason: str) -> None:
    found = resolve("auto", device)
    assert (found.name, found.reason) == (name, reason)


@pytest.mark.parametrize(
    ("runtime", "name"), [("tensorrt_llm", "int8-sq"), ("vllm", "int8-sq"), ("trtllm_pytorch", "bf16")]
)
def test_auto_takes_what_the_runtime_reads(runtime: str, name: str) -> None:
    assert resolve_precision("auto", A100, RECIPES, runtime=runtime).name == name
    assert resolve_precision("auto", H100, RECIPES, runtime=runtime).name == "fp8-kv"


@pytest.mark.parametrize(
    ("requested", "device", "algo"),
    [
        ("fp8", L40S, QuantAlgo.FP8),
        ("fp8", B200, QuantAlgo.FP8),
        ("int8", A100, QuantAlgo.W8A8_SQ_PER_CHANNEL),
        ("int8-sq", H100, QuantAlgo.W8A8_SQ_PER_CHANNEL),
        ("fp8-pc-pt", H100, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN),
        ("fp8-block", H100, QuantAlgo.FP8_BLOCK_SCALES),
        ("nvfp4", B200, QuantAlgo.NVFP4),
        # Only vLLM, with the weights alone.
        ("nvfp4", H100, QuantAlgo.NVFP4),
        ("int4-awq", A100, QuantAlgo.W4A16_AWQ),
        ("w4a8-awq", L40S, QuantAlgo.W4A8_AWQ),
        ("w4a8-awq", CPU, QuantAlgo.W4A8_AWQ),
    ],
)
def test_a_recipe_is_a_dtype(requested: str, device: GpuSpec, algo: QuantAlgo) -> None:
    recipe = resolve(requested, device).recipe
    assert recipe is not None
    assert recipe.quant_algo is algo


@pytest.mark.parametrize(
    ("requested", "device"),
    [
        ("fp8-block", L40S), ("fp8-block", gpu("rtx5090", 120)), ("fp8-pc-pt", B200),
        ("int4-awq", gpu("rtx5090", 120)), ("int8-wo", B200),
    ],
)  # fmt: skip
def test_vllm_has_kernels_that_tensorrt_llm_has_not(requested: str, device: GpuSpec) -> None:
    found = resolve_precision(requested, device, RECIPES, runtime="vllm")
    assert device.sm in found.sms
    for runtime in ("tensorrt_llm", "trtllm_pytorch"):
        with pytest.raises(UsageError, match=f"{requested} does not run on {device.name}"):
            resolve_precision(requested, device, RECIPES, runtime=runtime)
    # What a passport said of the recipe's own GPUs stays.
    recipe = RECIPES[requested]
    own = resolve_precision(requested, gpu("own", recipe.sms[0]), RECIPES, runtime="vllm")
    assert own.sms == recipe.sms
    with pytest.raises(UsageError, match="a KV cache in FP8 does not run on a100"):
        resolve_precision("int4-awq", A100, RECIPES, "fp8", runtime="vllm")


def stored(algo: QuantAlgo, cache: KvCacheQuantAlgo | None = None) -> Stored:
    coded = Quantization(quant_algo=algo, kv_cache_quant_algo=cache)
    return Stored(method="fp8", quantization=coded, dtype=DataType.BFLOAT16)


def test_a_model_that_came_quantized_runs_where_its_runtime_has_kernels() -> None:
    blocks = stored(QuantAlgo.FP8_BLOCK_SCALES)
    assert 89 in stored_precision("m", blocks, "auto", L40S, RECIPES, runtime="vllm").sms
    with pytest.raises(UsageError, match="fp8-block does not run on l40s"):
        stored_precision("m", blocks, "auto", L40S, RECIPES, runtime="trtllm_pytorch")


def test_a_recipe_of_the_weights_names_a_model_that_came_quantized_with_a_cache() -> None:
    cached, plain = stored(QuantAlgo.FP8, KvCacheQuantAlgo.FP8), stored(QuantAlgo.FP8)
    for requested in ("fp8", "fp8-kv", "auto"):
        assert stored_precision("m", cached, requested, H100, RECIPES).name == "fp8-kv"
    assert stored_precision("m", cached, "fp8", H100, RECIPES, "fp8").name == "fp8-kv"
    with pytest.raises(UsageError, match="--kv-cache none is not the precision of m"):
        stored_precision("m", cached, "fp8", H100, RECIPES, "none")
    with pytest.raises(UsageError, match="--dtype fp8-kv is not the precision of m"):
        stored_precision("m", plain, "fp8-kv", H100, RECIPES)


@pytest.mark.parametrize("requested", ["auto", "fp16", "fp8", "int8"])
def test_gpus_older_than_sm80_are_refused(requested: str) -> None:
    assert refusal(requested, gpu("t4", 75)).startswith("t4 (SM75) cannot run TensorRT-LLM engines")


@pytest.mark.parametrize(
    ("requested", "device", "line"),
    [
        (
            "fp8", A100,
            "fp8 does not run on a100 (SM80): it is known to run on SM89, SM90, SM100, SM103, SM120; "
            "use --dtype int4-awq, int8-pc-pt, int8-sq, int8-wo or bf16 here",
        ),
        (
            "int8", B200,
            "int8-sq does not run on b200 (SM100): it is known to run on SM80, SM86, SM89, SM90; "
            "use --dtype fp8, fp8-block, fp8-kv, nvfp4 or bf16 here",
        ),
        (
            "fp8-block", gpu("rtx5090", 120),
            "fp8-block does not run on rtx5090 (SM120): it is known to run on SM90, SM100, SM103; "
            "use --dtype fp8, fp8-kv, nvfp4 or bf16 here",
        ),
        (
            "w4a8-awq", A100,
            "w4a8-awq does not run on a100 (SM80): it is known to run on SM89, SM90; "
            "use --dtype int4-awq, int8-pc-pt, int8-sq, int8-wo or bf16 here",
        ),
    ],
)  # fmt: skip
def test_an_impossible_pair_is_refused_naming_what_works(requested: str, device: GpuSpec, line: str) -> None:
    assert refusal(requested, device) == line


def test_the_kv_cache_is_the_users_choice() -> None:
    found = resolve("fp8", H100, "fp8")
    assert found.name == "fp8-kvfp8"
    assert found.recipe is not None
    assert found.recipe.kv_cache_quant_algo is KvCacheQuantAlgo.FP8
    assert found.recipe.thresholds == RECIPES["fp8-kv"].thresholds
    assert resolve("fp8-kv", H100, "none").name == "fp8-kv-kvnone"
    plain = resolve("fp8-kv", H100, "none").recipe
    assert plain is not None
    assert plain.kv_cache_quant_algo is None


def test_weights_as_they_are_may_have_a_quantized_cache() -> None:
    found = resolve("bf16", A100, "int8")
    assert found.name == "bf16-kvint8"
    assert found.recipe is not None
    assert (found.recipe.quant_algo, found.recipe.kv_cache_quant_algo) == (None, KvCacheQuantAlgo.INT8)
    assert resolve("bf16", A100, "none").recipe is None
    assert resolve("none", A100, "int8") == found


def test_the_recipe_that_quantizes_nothing_is_bfloat16() -> None:
    assert resolve("none", H100) == resolve("none", H100, "none") == resolve("bf16", H100)


@pytest.mark.parametrize(
    ("kv_cache", "device", "line"),
    [
        ("fp8", A100, "a KV cache in FP8 does not run on a100 (SM80): it is known to run on SM89, "),
        ("int8", B200, "a KV cache in INT8 does not run on b200 (SM100): it is known to run on SM80, "),
        ("fp4", H100, "unknown KV cache type 'fp4'; known: none, "),
        ("nvfp4", H100, "a KV cache in NVFP4 does not run on h100 (SM90): it is known to run on SM100, SM103; use "),
        ("nvfp4", gpu("rtx5090", 120), "a KV cache in NVFP4 does not run on rtx5090 (SM120)"),
    ],
)
def test_an_impossible_kv_cache_is_refused(kv_cache: str, device: GpuSpec, line: str) -> None:
    assert refusal("bf16", device, kv_cache).startswith(line)


@pytest.mark.parametrize(
    ("requested", "remedy"),
    [
        ("bfloat", "did you mean 'bfloat16'?"),
        ("BF16", "did you mean 'bf16'?"),
        ("int8-qs", "did you mean 'int8-sq'?"),
        (
            "q4_k_m",
            "known: auto, bf16, bfloat16, float16, float32, fp16, fp32, fp8, fp8-block, fp8-kv, fp8-pb, "
            "fp8-pc-pt, int4-awq, int8, int8-pc-pt, int8-sq, int8-wo, none, nvfp4, w4a8-awq",
        ),
    ],
)
def test_an_unknown_name_gets_the_nearest(requested: str, remedy: str) -> None:
    assert refusal(requested, CPU) == f"unknown dtype '{requested}'; {remedy}"


def test_parse_float_takes_no_quantized_name() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'fp8'"):
        parse_float("fp8")


def test_every_recipe_excludes_the_head_and_says_what_it_may_lose() -> None:
    for recipe in RECIPES.values():
        embedding = ("transformer.vocab_embedding",) if recipe.quant_algo is QuantAlgo.W8A16 else ()
        assert recipe.exclude_modules == (("lm_head", *embedding) if recipe.quant_algo else ())
        assert 1 < recipe.thresholds.perplexity_ratio < 2
        assert find_recipe(recipe.name, RECIPES) is recipe
