"""Build settings of an engine: trtllm-build's flags as typed settings, each with its meaning.

Settings have trtllm-build's names, so that its documentation applies. Upstream's defaults for sizes (2048
requests, the model's 131072 tokens) fit few GPUs; so every size here has its own default.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.speculation import DRAFT_MODEL, EAGLE3, NGRAM, WITH_MODEL

FLOAT_PLUGIN = ("auto", "float16", "bfloat16", "float32", "disable")
FP8_PLUGIN = ("fp8", "disable")
# Settings of adapters, which an engine of any runtime has where it takes them.
LORA = ("lora_plugin", "lora_target_modules", "max_lora_rank")
# Settings of speculation, which an engine of any runtime has where it speculates.
SPECULATIVE = ("speculative_decoding_mode", "max_draft_len", "speculative_model")
# Settings that affect the build process but not the engine, and the place of files that are themselves in its key.
NOT_IN_ENGINE = ("workers", "monitor_memory", "log_level", "speculative_model")


def option(default: Any, meaning: str, *, choices: tuple[str, ...] = (), least: int | None = None) -> Any:
    """Dataclass field of a setting. `choices` are its allowed words, `least` its minimum; construction checks both."""
    return field(default=default, metadata={"meaning": meaning, "choices": choices, "least": least})


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Build settings of an engine. None leaves the choice to `resolve`, which knows the model and the GPU.

    Each field's metadata has its meaning and unit; `trtpipe settings --explain` prints them.
    Construction raises UsageError for values that no engine can be built with.
    """

    max_batch_size: int = option(64, "requests in flight in one step", least=1)
    max_input_len: int = option(1024, "tokens of the longest prompt", least=1)
    max_seq_len: int = option(2048, "tokens of prompt and output together", least=1)
    max_num_tokens: int = option(
        2048, "tokens in one step over all requests; sets activation memory and the size of a prompt chunk", least=1
    )
    opt_num_tokens: int | None = option(
        None, "tokens in a step that kernels are tuned for; max_batch_size x max_beam_width if left out", least=1
    )
    max_beam_width: int = option(1, "beams per request", least=1)
    max_prompt_embedding_table_size: int = option(0, "rows of a prompt-tuning table", least=0)

    kv_cache_type: str = option(
        "paged", "paged shares the cache out in blocks, which in-flight batching needs",
        choices=("paged", "continuous", "disabled"),
    )  # fmt: skip
    tokens_per_block: int = option(32, "tokens in a KV-cache block; fewer waste less, more read faster", least=1)
    remove_input_padding: bool = option(True, "pack prompts without padding, which in-flight batching needs")
    context_fmha: bool = option(True, "fused attention for prompts; without it memory grows with the prompt's square")
    use_paged_context_fmha: bool | None = option(
        None, "prompt attention that reads paged KV: what chunked context and KV-cache reuse run on"
    )
    use_fp8_context_fmha: bool | None = option(None, "prompt attention in FP8, with FP8 weights and KV cache on SM89+")

    gpt_attention_plugin: str = option("auto", "attention kernels of TensorRT-LLM", choices=FLOAT_PLUGIN)
    gemm_plugin: str | None = option(
        None, "matrix products by cuBLASLt; best off for FP8 except at small batches", choices=(*FLOAT_PLUGIN, "fp8")
    )
    gemm_swiglu_plugin: str = option("disable", "FP8 product and SwiGLU in one kernel (Hopper)", choices=FP8_PLUGIN)
    low_latency_gemm_plugin: str = option("disable", "FP8 products for small batches (Hopper)", choices=FP8_PLUGIN)
    low_latency_gemm_swiglu_plugin: str = option("disable", "the same with SwiGLU (Hopper)", choices=FP8_PLUGIN)
    gemm_allreduce_plugin: str = option(
        "disable", "product and all-reduce in one kernel, for tp > 1", choices=("float16", "bfloat16", "disable")
    )
    nccl_plugin: str = option("auto", "communication between ranks", choices=FLOAT_PLUGIN)
    use_fused_mlp: bool | None = option(None, "gate and up projections as one product; without quantization or in FP8")
    reduce_fusion: bool = option(False, "all-reduce and RMSNorm in one kernel, for tp > 1")
    user_buffer: bool = option(False, "all-reduce without a copy, on top of reduce_fusion, for FP8")
    multiple_profiles: bool = option(False, "several optimisation profiles: faster steps, a longer build")
    streamingllm: bool = option(False, "keep attention sinks beside a sliding window: endless output in bounded memory")

    lora_plugin: str = option("disable", "low-rank adapters at run time", choices=FLOAT_PLUGIN)
    dora_plugin: bool = option(False, "weight-decomposed adapters")
    lora_dir: tuple[str, ...] = option((), "folders of adapters; the first decides the configuration")
    lora_target_modules: tuple[str, ...] = option((), "modules with adapters, such as attn_qkv; the adapter's if empty")
    max_lora_rank: int = option(64, "highest rank of an adapter; sets workspace", least=1)
    lora_ckpt_source: str = option("hf", "format of the adapters", choices=("hf", "nemo"))

    # The first two are modes of trtllm-build, whose others need extra heads, which a plain Llama does not have.
    speculative_decoding_mode: str | None = option(
        None, "how draft tokens are made",
        choices=("draft_tokens_external", "lookahead_decoding", NGRAM, DRAFT_MODEL, EAGLE3),
    )  # fmt: skip
    max_draft_len: int = option(
        0, "draft tokens of a request in a step; trtllm-build adds them to max_seq_len and max_num_tokens", least=0
    )
    speculative_model: str | None = option(None, "folder of the model or the EAGLE-3 head that makes draft tokens")

    gather_context_logits: bool = option(False, "return logits of the prompt's tokens")
    gather_generation_logits: bool = option(False, "return logits of the new tokens")
    logits_dtype: str | None = option(
        None, "type of logits; the checkpoint's if left out", choices=("float16", "float32")
    )

    strip_plan: bool = option(False, "an engine without weights, to be refitted with trtllm-refit")
    weight_streaming: bool = option(False, "weights in host memory, streamed to the GPU: fits, and is slow")
    weight_sparsity: bool = option(False, "use 2:4 sparsity where weights have it")
    fast_build: bool = option(False, "build faster, with weights beside the engine; may run slower")

    profiling_verbosity: str = option(
        "layer_names_only", "what the engine can tell a profiler", choices=("layer_names_only", "detailed", "none")
    )
    workers: int = option(1, "ranks built at a time, each on a GPU of its own", least=1)
    monitor_memory: bool = option(False, "log memory during the build")
    log_level: str = option(
        "info", "of trtllm-build", choices=("internal_error", "error", "warning", "info", "verbose")
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_value(one.name, getattr(self, one.name), one.metadata["choices"], one.metadata["least"])
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise UsageError(
                f"build.tokens_per_block is {self.tokens_per_block}", remedy="give a power of two, such as 32"
            )
        if self.max_input_len >= self.max_seq_len:
            raise UsageError(
                f"build.max_input_len {self.max_input_len} leaves no room for output "
                f"within build.max_seq_len {self.max_seq_len}",
                remedy="raise build.max_seq_len or lower build.max_input_len",
            )
        if self.max_num_tokens < self.tokens_per_block:
            raise UsageError(
                f"build.max_num_tokens {self.max_num_tokens} is below build.tokens_per_block {self.tokens_per_block}",
                remedy="raise build.max_num_tokens",
            )
        if self.max_num_tokens < self.max_batch_size * self.max_beam_width:
            raise UsageError(
                f"build.max_num_tokens {self.max_num_tokens} is below build.max_batch_size {self.max_batch_size} "
                f"times build.max_beam_width {self.max_beam_width}: a full batch could not decode in one step",
                remedy="raise build.max_num_tokens or lower build.max_batch_size",
            )
        for refused, why, remedy in _contradictions(self):
            raise UsageError(refused, why=why, remedy=remedy)

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine computes LoRA adapters."""
        return self.lora_plugin != "disable"

    @property
    def speculates(self) -> bool:
        """Whether the engine makes draft tokens by itself."""
        return self.speculative_decoding_mode in (NGRAM, *WITH_MODEL)

    @property
    def in_flight_batching(self) -> bool:
        """Whether the engine can start new requests at every step."""
        return self.kv_cache_type == "paged" and self.remove_input_padding and self.gpt_attention_plugin != "disable"


def changed(build: BuildConfig) -> list[str]:
    """Names of the settings that differ from their defaults."""
    return [one.name for one in fields(build) if getattr(build, one.name) != one.default]


def _check_value(name: str, value: Any, choices: tuple[str, ...], least: int | None) -> None:
    if value is None:
        return
    if choices and value not in choices:
        raise UsageError(f"unknown build.{name} '{value}'", remedy=suggestion(str(value), choices))
    if least is not None and value < least:
        raise UsageError(f"build.{name} is {value}", remedy=f"give at least {least}")


def _contradictions(build: BuildConfig) -> list[tuple[str, str, str]]:
    """(what, why, remedy) for each pair of settings that exclude each other."""
    paged = build.kv_cache_type == "paged"
    table = [
        (
            build.opt_num_tokens is not None and build.multiple_profiles,
            "build.opt_num_tokens does not go with build.multiple_profiles",
            "several profiles are each tuned for a size of their own",
            "leave one of the two out",
        ),
        (
            build.opt_num_tokens is not None and build.opt_num_tokens > build.max_num_tokens,
            f"build.opt_num_tokens {build.opt_num_tokens} exceeds build.max_num_tokens {build.max_num_tokens}",
            "",
            "lower it",
        ),
        (
            build.use_paged_context_fmha is True and not (build.context_fmha and paged),
            "build.use_paged_context_fmha needs build.context_fmha and build.kv_cache_type=paged",
            "it is the kernel of the first and reads the blocks of the second",
            "turn them on, or leave it out",
        ),
        (
            build.use_fp8_context_fmha is True and not build.context_fmha,
            "build.use_fp8_context_fmha needs build.context_fmha",
            "it is a variant of it",
            "turn it on, or leave the other out",
        ),
        (
            build.gpt_attention_plugin == "disable" and (build.remove_input_padding or paged),
            "build.gpt_attention_plugin=disable needs build.remove_input_padding=false and another build.kv_cache_type",
            "packing and paging are done by that plugin",
            "leave it at auto",
        ),
        (
            build.user_buffer and not build.reduce_fusion,
            "build.user_buffer needs build.reduce_fusion",
            "it is the fused kernel that uses the buffer",
            "turn both on",
        ),
        (
            build.gemm_swiglu_plugin == "fp8" and build.use_fused_mlp is False,
            "build.gemm_swiglu_plugin needs build.use_fused_mlp",
            "it computes gate and up together",
            "turn it on",
        ),
        (
            build.low_latency_gemm_swiglu_plugin == "fp8" and build.use_fused_mlp is False,
            "build.low_latency_gemm_swiglu_plugin needs build.use_fused_mlp",
            "it computes gate and up together",
            "turn it on",
        ),
        *(
            (
                build.takes_adapters and getattr(build, name) != "disable",
                f"build.{name} does not go with build.lora_plugin",
                "an adapter adds to the product that the fused kernel hides",
                "leave one of the two out",
            )
            for name in ("gemm_swiglu_plugin", "gemm_allreduce_plugin")
        ),
        *(
            (
                bool(getattr(build, name)) and not build.takes_adapters,
                f"build.{name} needs build.lora_plugin",
                "without it the engine takes no adapters",
                "set build.lora_plugin=auto",
            )
            for name in ("lora_dir", "lora_target_modules", "dora_plugin")
        ),
        (
            (build.speculative_decoding_mode is None) != (build.max_draft_len == 0),
            "build.speculative_decoding_mode and build.max_draft_len are given together or not at all",
            "",
            "give both",
        ),
        (
            build.speculative_decoding_mode in WITH_MODEL and not build.speculative_model,
            f"build.speculative_decoding_mode={build.speculative_decoding_mode} needs build.speculative_model",
            "that model makes the draft tokens",
            f"name its folder, or use build.speculative_decoding_mode={NGRAM}, which needs no model",
        ),
        (
            build.speculative_model is not None and build.speculative_decoding_mode not in WITH_MODEL,
            f"build.speculative_model needs build.speculative_decoding_mode={' or '.join(WITH_MODEL)}",
            "no other mode has a model of draft tokens",
            "give the mode, or leave build.speculative_model out",
        ),
        (
            build.speculates and build.max_batch_size * (1 + build.max_draft_len) > build.max_num_tokens,
            f"build.max_draft_len {build.max_draft_len} is too much for build.max_num_tokens {build.max_num_tokens}",
            f"a full batch of {build.max_batch_size} requests, each with its draft tokens and one more, would take "
            f"{build.max_batch_size * (1 + build.max_draft_len)} tokens in a step",
            "lower build.max_draft_len or build.max_batch_size, or raise build.max_num_tokens",
        ),
        (
            build.gather_context_logits and build.max_draft_len > 0,
            "build.gather_context_logits does not go with build.max_draft_len",
            "trtllm-build refuses the two together",
            "leave one of the two out",
        ),
        (
            build.streamingllm and not (paged and build.remove_input_padding),
            "build.streamingllm needs a paged KV cache and build.remove_input_padding",
            "",
            "leave both at their defaults",
        ),
    ]
    return [(what, why, remedy) for applies, what, why, remedy in table if applies]
