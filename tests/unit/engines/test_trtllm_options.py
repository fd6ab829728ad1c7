"""BuildConfig to trtllm-build's words: the whole list, the choices left open, and what is refused with its reason."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from trtpipe.configs.facts import find_toolchain, load_toolchains
from trtpipe.engines.backends.base import Target
from trtpipe.engines.base import Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.trtllm_options import BARE, arguments, check_architecture, resolve
from trtpipe.triton_repo.serving import ServingConfig, resolve_serving

H100 = GpuSpec(name="h100", sm=90, memory_gib=80.0)
B200 = GpuSpec(name="b200", sm=100, memory_gib=180.0)
A100 = GpuSpec(name="a100", sm=80, memory_gib=80.0)
FP8, INT8, FP8_KV, INT8_KV = QuantAlgo.FP8, QuantAlgo.W8A8_SQ_PER_CHANNEL, KvCacheQuantAlgo.FP8, KvCacheQuantAlgo.INT8


def target(
    gpu: GpuSpec = H100,
    algo: QuantAlgo | None = None,
    cache: KvCacheQuantAlgo | None = None,
    tp: int = 1,
    release: str | None = None,
) -> Target:
    quantization = Quantization(quant_algo=algo, kv_cache_quant_algo=cache)
    return Target(gpu=gpu, mapping=Mapping(tp_size=tp), quantization=quantization, toolchain=find_toolchain(release))


def words(build: BuildConfig, at: Target) -> list[str]:
    return arguments(Path("checkpoint"), Path("engine"), resolve(build, at)[0], at.toolchain.flags)


def test_every_setting_is_passed() -> None:
    config = BuildConfig(
        max_batch_size=16, max_input_len=100, max_seq_len=200, max_num_tokens=300, tokens_per_block=64,
        max_beam_width=2, gather_context_logits=True, logits_dtype="float32", lora_plugin="auto",
        lora_dir=("first", "second"), workers=2,
    )  # fmt: skip
    assert words(config, target()) == [
        "--checkpoint_dir", "checkpoint",
        "--output_dir", "engine",
        "--output_timing_cache", "engine/model.cache",
        "--max_batch_size", "16",
        "--max_input_len", "100",
        "--max_seq_len", "200",
        "--max_num_tokens", "300",
        "--max_beam_width", "2",
        "--max_prompt_embedding_table_size", "0",
        "--kv_cache_type", "paged",
        "--tokens_per_block", "64",
        "--remove_input_padding", "enable",
        "--context_fmha", "enable",
        "--use_paged_context_fmha", "enable",
        "--use_fp8_context_fmha", "disable",
        "--gpt_attention_plugin", "auto",
        "--gemm_plugin", "auto",
        "--gemm_swiglu_plugin", "disable",
        "--low_latency_gemm_plugin", "disable",
        "--low_latency_gemm_swiglu_plugin", "disable",
        "--gemm_allreduce_plugin", "disable",
        "--nccl_plugin", "auto",
        "--use_fused_mlp", "enable",
        "--reduce_fusion", "disable",
        "--user_buffer", "disable",
        "--multiple_profiles", "disable",
        "--streamingllm", "disable",
        "--lora_plugin", "auto",
        "--dora_plugin", "disable",
        "--lora_dir", "first", "second",
        "--max_lora_rank", "64",
        "--lora_ckpt_source", "hf",
        "--max_draft_len", "0",
        "--gather_context_logits",
        "--logits_dtype", "float32",
        "--profiling_verbosity", "layer_names_only",
        "--workers", "2",
        "--log_level", "info",
    ]  # fmt: skip


def test_a_flag_that_a_release_lacks_is_not_passed_and_not_taken() -> None:
    at = target()
    without = replace(at, toolchain=replace(at.toolchain, name="1.9.9", flags={"max_batch_size": 2048}))
    assert words(BuildConfig(), without)[6:] == ["--max_batch_size", "64"]
    with pytest.raises(UsageError) as error:
        resolve(BuildConfig(user_buffer=True, reduce_fusion=True), without)
    assert str(error.value) == (
        "build.reduce_fusion is not for toolchain 1.9.9: its trtllm-build has no --reduce_fusion; "
        "see `trtpipe toolchains`"
    )


def test_every_flag_of_every_release_is_a_setting_and_the_other_way_round() -> None:
    names = {one.name for one in fields(BuildConfig)}
    assert set(BARE) < names
    built = [one for one in load_toolchains().values() if "tensorrt_llm" in one.runtimes]
    assert [one.name for one in built] == ["1.2.1", "1.1.0", "1.0.0", "0.21.0"]
    # Draft models have engines of their own there.
    assert all(set(one.flags) | {"speculative_model"} == names for one in built)
    assert all(one.metadata["meaning"] for one in fields(BuildConfig))


@pytest.mark.parametrize(
    ("gpu", "algo", "cache", "paged", "fp8", "gemm", "fused"),
    [
        (H100, None, None, True, False, "auto", True),
        (H100, FP8, FP8_KV, True, True, "disable", True),
        (H100, FP8, None, True, False, "disable", True),
        (H100, None, FP8_KV, False, False, "auto", True),
        (H100, None, INT8_KV, False, False, "auto", True),
        (A100, INT8, None, True, False, "auto", False),
        (A100, INT8, INT8_KV, False, False, "auto", False),
        (H100, QuantAlgo.W4A8_AWQ, FP8_KV, True, True, "auto", False),
        (H100, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN, None, True, False, "auto", False),
        (B200, QuantAlgo.NVFP4, FP8_KV, True, True, "auto", False),
    ],
)
def test_open_choices_follow_weights_cache_and_gpu(
    gpu: GpuSpec, algo: Any, cache: Any, paged: bool, fp8: bool, gemm: str, fused: bool
) -> None:
    made, reasons = resolve(BuildConfig(), target(gpu, algo, cache))
    found = (made.use_paged_context_fmha, made.use_fp8_context_fmha, made.gemm_plugin, made.use_fused_mlp)
    assert found == (paged, fp8, gemm, fused)
    assert reasons.keys() == {"use_paged_context_fmha", "use_fp8_context_fmha", "gemm_plugin", "use_fused_mlp"}
    serving, _ = resolve_serving(ServingConfig(), made)
    assert (serving.enable_chunked_context, serving.enable_kv_cache_reuse) == (paged, paged)


def test_a_choice_that_is_made_is_kept() -> None:
    asked = BuildConfig(
        use_paged_context_fmha=False, use_fp8_context_fmha=False, gemm_plugin="fp8", use_fused_mlp=False
    )
    assert resolve(asked, target(algo=FP8, cache=FP8_KV)) == (asked, {})


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"use_paged_context_fmha": True},
        {"algo": INT8, "cache": INT8_KV},
        "build.use_paged_context_fmha is not possible here: prompt attention cannot read an INT8 KV cache; "
        "leave it out",
    ),
    (
        {"use_fp8_context_fmha": True},
        {"gpu": A100},
        "build.use_fp8_context_fmha is not possible here: for FP8, W4A8_AWQ or NVFP4 weights on SM89 and above, not "
        "unquantized on a100 (SM80); leave it out",
    ),
    (
        {"use_fp8_context_fmha": True},
        {"algo": FP8},
        "build.use_fp8_context_fmha is not possible here: on a paged cache it needs an FP8 KV cache; leave it out",
    ),
    (
        {"use_fused_mlp": True},
        {"algo": INT8},
        "build.use_fused_mlp is not possible here: W8A8_SQ_PER_CHANNEL weights are not fused; leave it out",
    ),
    (
        {"gemm_swiglu_plugin": "fp8"},
        {},
        "build.gemm_swiglu_plugin is not possible here: it is a kernel for FP8 weights on SM90, not unquantized on "
        "h100 (SM90); leave it out",
    ),
    ({"gemm_plugin": "fp8"}, {}, "build.gemm_plugin=fp8 is for FP8 weights: these are unquantized; leave it out"),
    (
        {"reduce_fusion": True},
        {},
        "build.reduce_fusion needs --tp above 1: with one rank nothing is reduced; leave it out",
    ),
    (
        {"use_fp8_context_fmha": False},
        {"algo": FP8, "cache": FP8_KV},
        "build.use_fp8_context_fmha=false does not go with an FP8 KV cache: prompt attention on a paged cache in FP8 "
        "computes in FP8, and trtllm-build would turn it on; leave it out, or set build.use_paged_context_fmha=false "
        "too",
    ),
    (
        {"max_batch_size": 2, "max_seq_len": 1200, "max_num_tokens": 4096},
        {},
        "build.max_num_tokens 4096 exceeds the 2400 tokens of a full batch: trtllm-build would lower it to 2 requests "
        "of 1200 tokens; pass --set build.max_num_tokens=2400, or raise build.max_batch_size or build.max_seq_len",
    ),
    (
        {"reduce_fusion": True, "user_buffer": True},
        {"tp": 2},
        "build.user_buffer is for FP8 weights: these are unquantized; leave it out",
    ),
    (
        {"streamingllm": True},
        {},
        "build.streamingllm is not for toolchain 1.2.1: trtllm-build ends with an assertion on streamingllm "
        "(TensorRT-LLM pull request #6379); use a sliding window without sinks, serving.max_attention_window_size",
    ),
]


@pytest.mark.parametrize(("settings", "at", "message"), REFUSED)
def test_what_this_target_cannot_have(settings: dict[str, Any], at: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(BuildConfig(**settings), target(**at))
    assert str(error.value) == message


def test_a_fused_all_reduce_is_for_llamas() -> None:
    fused = BuildConfig(reduce_fusion=True)
    assert resolve(fused, target(tp=2))[0].reduce_fusion is True
    check_architecture(fused, "LlamaForCausalLM")
    with pytest.raises(UsageError, match=r"build\.reduce_fusion is not for a MistralForCausalLM: trtllm-build would"):
        check_architecture(fused, "MistralForCausalLM")


def test_what_trtllm_build_would_change_is_chosen_or_can_be_turned_off() -> None:
    made, why = resolve(BuildConfig(max_batch_size=1, max_seq_len=1200), target())
    assert made.max_num_tokens == 1200
    assert why["max_num_tokens"] == "max_batch_size x max_seq_len: trtllm-build lowers a larger number to it"
    off = BuildConfig(use_fp8_context_fmha=False, use_paged_context_fmha=False)
    assert resolve(off, target(algo=FP8, cache=FP8_KV))[0].use_fp8_context_fmha is False


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"opt_num_tokens": 64, "multiple_profiles": True},
        "build.opt_num_tokens does not go with build.multiple_profiles",
    ),
    ({"opt_num_tokens": 4096}, "build.opt_num_tokens 4096 exceeds build.max_num_tokens 2048"),
    ({"use_paged_context_fmha": True, "context_fmha": False}, "build.use_paged_context_fmha needs build.context_fmha"),
    ({"use_paged_context_fmha": True, "kv_cache_type": "continuous"}, "build.use_paged_context_fmha needs"),
    ({"use_fp8_context_fmha": True, "context_fmha": False}, "build.use_fp8_context_fmha needs build.context_fmha"),
    ({"gpt_attention_plugin": "disable"}, "build.gpt_attention_plugin=disable needs build.remove_input_padding=false"),
    ({"user_buffer": True}, "build.user_buffer needs build.reduce_fusion"),
    ({"gemm_swiglu_plugin": "fp8", "use_fused_mlp": False}, "build.gemm_swiglu_plugin needs build.use_fused_mlp"),
    (
        {"low_latency_gemm_swiglu_plugin": "fp8", "use_fused_mlp": False},
        "build.low_latency_gemm_swiglu_plugin needs build.use_fused_mlp",
    ),
    (
        {"lora_plugin": "auto", "gemm_swiglu_plugin": "fp8"},
        "build.gemm_swiglu_plugin does not go with build.lora_plugin",
    ),
    (
        {"lora_plugin": "auto", "gemm_allreduce_plugin": "bfloat16"},
        "build.gemm_allreduce_plugin does not go with build.lora_plugin",
    ),
    ({"lora_dir": ("a",)}, "build.lora_dir needs build.lora_plugin"),
    ({"dora_plugin": True}, "build.dora_plugin needs build.lora_plugin"),
    ({"max_draft_len": 4}, "build.speculative_decoding_mode and build.max_draft_len are given together"),
    (
        {"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": 4, "gather_context_logits": True},
        "build.gather_context_logits does not go with build.max_draft_len",
    ),
    ({"streamingllm": True, "kv_cache_type": "continuous"}, "build.streamingllm needs a paged KV cache"),
    ({"kv_cache_type": "pagd"}, "unknown build.kv_cache_type 'pagd'; did you mean 'paged'?"),
    ({"max_lora_rank": 0}, "build.max_lora_rank is 0; give at least 1"),
    ({"tokens_per_block": 48}, "build.tokens_per_block is 48; give a power of two"),
]


@pytest.mark.parametrize(("settings", "message"), CONTRADICTIONS)
def test_what_no_engine_can_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        BuildConfig(**settings)
    assert str(error.value).startswith(message)


def test_sinks_on_the_releases_that_have_them() -> None:
    made, _ = resolve(BuildConfig(streamingllm=True), target(release="0.21"))
    assert made.streamingllm
    window = ServingConfig(max_attention_window_size=1024, sink_token_length=4)
    serving, reasons = resolve_serving(window, made)
    assert (serving.enable_kv_cache_reuse, serving.enable_chunked_context) == (False, False)
    assert reasons["enable_kv_cache_reuse"] == "attention sinks rule it out"


@pytest.mark.parametrize(
    ("runtime", "count"), [("tensorrt_llm", None), ("trtllm_pytorch", None), ("reference", 1), ("vllm", 4)]
)
def test_an_engine_in_python_is_shared_by_as_many_instances_as_its_batch_keeps_busy(
    runtime: str, count: int | None
) -> None:
    made, _ = resolve(BuildConfig(max_batch_size=200), target())
    assert resolve_serving(ServingConfig(), made, runtime)[0].engine_instance_count == count
    several = ServingConfig(engine_instance_count=2)
    if count is not None:
        assert resolve_serving(several, made, runtime)[0].engine_instance_count == 2
    else:
        with pytest.raises(UsageError, match=f"engine_instance_count is not for the runtime {runtime}: each instance"):
            resolve_serving(several, made, runtime)


@pytest.mark.parametrize(
    ("build", "serving", "message"),
    [
        (
            {"use_paged_context_fmha": False},
            {"enable_kv_cache_reuse": True},
            "serving.enable_kv_cache_reuse is not possible here: the engine's prompt attention does not read a paged",
        ),
        (
            {"use_paged_context_fmha": False, "max_input_len": 1024, "max_num_tokens": 512},
            {},
            "build.max_input_len 1024 exceeds build.max_num_tokens 512, and serving.enable_chunked_context is off: the "
            "engine's prompt attention does not read a paged KV cache; raise build.max_num_tokens",
        ),
        ({"streamingllm": True}, {}, "build.streamingllm needs serving.sink_token_length"),
        ({}, {"sink_token_length": 4}, "serving.sink_token_length needs serving.max_attention_window_size"),
        (
            {},
            {"sink_token_length": 4, "max_attention_window_size": 64},
            "serving.sink_token_length needs build.streamingllm",
        ),
        ({"remove_input_padding": False}, {}, "an engine without in-flight batching cannot be served: since 0.20"),
        ({}, {"triton_max_batch_size": 65}, "serving.triton_max_batch_size 65 exceeds build.max_batch_size 64"),
    ],
)
def test_serving_asks_for_no_more_than_the_engine_has(
    build: dict[str, Any], serving: dict[str, Any], message: str
) -> None:
    made, _ = resolve(BuildConfig(**build), target(release="0.21"))
    with pytest.raises(UsageError) as error:
        resolve_serving(ServingConfig(**serving), made)
    assert str(error.value).startswith(message)
