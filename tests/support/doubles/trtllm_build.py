"""A contract double of NVIDIA's trtllm-build: its arguments, checks, log lines and files, and no engine.

TensorRT-LLM runs on NVIDIA GPUs alone, so tests build with this. It reads a checkpoint as the loader of a release
does, refuses what that refuses in the same words, turns off what that turns off, and writes an engine folder whose
rank files say what they are. Where upstream would build a wrong model without a word, or where nothing is known of
what it does, this refuses with a ContractError. Llama, Mixtral, Phi-3 and Qwen only.

One file of the standard library, and nothing of this project: it is a second reading of the contract, and it is
copied into a container image that holds a Python and nothing else.

TRTLLM_DOUBLE_VERSION  the release: 1.2.1, 1.1.0, 1.0.0 or 0.21.0
TRTLLM_DOUBLE_SM       compute capability of the GPU, 90
TRTLLM_DOUBLE_GPUS     visible GPUs, 1
TRTLLM_DOUBLE_SLEEP    seconds that a build lasts, 0
TRTLLM_DOUBLE_FAIL     how the build ends, once all checks have passed:
                         oom        no GPU memory; status 1
                         wrong-sm   TensorRT refuses the GPU; status 1
                         disk-full  a partial engine file; status 1
                         killed     a partial engine file; ended by SIGKILL, as for want of memory
                         crash      ended by SIGSEGV
                         hang       not at all: it sleeps until SIGTERM or SIGINT
"""

from __future__ import annotations

import argparse
import copy
import errno
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

VERSIONS = ("0.21.0", "1.0.0", "1.1.0", "1.2.1")
FAILURES = ("oom", "wrong-sm", "disk-full", "killed", "crash", "hang")
MARK = b"CONTRACT DOUBLE, NO ENGINE\n"


class ContractError(Exception):
    """Upstream would build something wrong here, or what it does is not known."""


class SafetensorError(Exception):
    """A rank file that safetensors cannot read."""


@dataclass(frozen=True)
class Setup:
    """What the environment says of the machine and of the release."""

    version: str
    sm: int
    gpus: int
    sleep: float
    fail: str

    @classmethod
    def read(cls) -> Setup:
        env = os.environ.get
        version, fail = env("TRTLLM_DOUBLE_VERSION", "1.2.1"), env("TRTLLM_DOUBLE_FAIL", "")
        if version not in VERSIONS:
            raise ValueError(f"TRTLLM_DOUBLE_VERSION is {version}, not one of {', '.join(VERSIONS)}")
        if fail and fail not in FAILURES:
            raise ValueError(f"TRTLLM_DOUBLE_FAIL is {fail}, not one of {', '.join(FAILURES)}")
        sm, gpus = int(env("TRTLLM_DOUBLE_SM", "90")), int(env("TRTLLM_DOUBLE_GPUS", "1"))
        return cls(version, sm, gpus, float(env("TRTLLM_DOUBLE_SLEEP", "0")), fail)

    def since(self, version: str) -> bool:
        return VERSIONS.index(self.version) >= VERSIONS.index(version)


LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug")


class Log:
    """TensorRT-LLM's log, on standard output."""

    def __init__(self, level: str) -> None:
        self.level = LEVELS.index(level)

    def line(self, level: str, text: str, source: str = "TRT-LLM") -> None:
        if LEVELS.index(level) <= self.level:
            stamp = time.strftime("[%m/%d/%Y-%H:%M:%S]")
            print(f"{stamp} [{source}] [{level[0].upper()}] {text}", flush=True)

    def info(self, text: str) -> None:
        self.line("info", text)

    def warning(self, text: str) -> None:
        self.line("warning", text)


# Arguments

DTYPE_WORDS = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
# Plugins: the words each takes, and its default.
PLUGINS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "bert_attention_plugin": (DTYPE_WORDS, "auto"),
    "gpt_attention_plugin": (DTYPE_WORDS, "auto"),
    "gemm_plugin": ((*DTYPE_WORDS[:-1], "fp8", "nvfp4", "disable"), None),
    "gemm_swiglu_plugin": (("fp8", "disable"), "disable"),
    "fp8_rowwise_gemm_plugin": (DTYPE_WORDS, "disable"),
    "nccl_plugin": (DTYPE_WORDS, "auto"),
    "lora_plugin": (DTYPE_WORDS, "disable"),
    "moe_plugin": (DTYPE_WORDS, "auto"),
    "mamba_conv1d_plugin": (DTYPE_WORDS, "auto"),
    "low_latency_gemm_plugin": (("fp8", "disable"), "disable"),
    "low_latency_gemm_swiglu_plugin": (("fp8", "disable"), "disable"),
    "gemm_allreduce_plugin": (("float16", "bfloat16", "disable"), "disable"),
}
# Features: enable or disable, and the default.
SWITCHES = {
    "dora_plugin": False,
    "context_fmha": True,
    "remove_input_padding": True,
    "norm_quant_fusion": False,
    "reduce_fusion": False,
    "user_buffer": False,
    "use_paged_context_fmha": True,
    "use_fp8_context_fmha": True,
    "fuse_fp4_quant": False,
    "multiple_profiles": False,
    "streamingllm": False,
    "use_fused_mlp": True,
    "pp_reduce_scatter": False,
}
SIZES = {
    "max_input_len": 1024,
    "max_seq_len": None,
    "max_batch_size": 2048,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "opt_num_tokens": None,
    "max_prompt_embedding_table_size": 0,
    "max_draft_len": 0,
}
ALIASES = {"max_seq_len": "max_decoder_seq_len", "max_prompt_embedding_table_size": "max_multimodal_len"}
BARE = (
    "strip_plan", "weight_sparsity", "weight_streaming", "fast_build", "enable_debug_output", "dry_run",
    "monitor_memory", "gather_context_logits", "gather_generation_logits", "gather_all_token_logits",
)  # fmt: skip
SPECULATION = ("draft_tokens_external", "medusa", "lookahead_decoding", "explicit_draft_tokens", "eagle")


def parser(setup: Setup) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=False)
    add = made.add_argument
    for name in ("checkpoint_dir", "model_config", "build_config", "input_timing_cache"):
        add(f"--{name}")
    add("--output_dir", default="engine_outputs")
    add("--output_timing_cache", default="model.cache")
    for name, size in SIZES.items():
        add(f"--{name}", *(f"--{ALIASES[name]}" for _ in range(name in ALIASES)), dest=name, type=int, default=size)
    # Left out and given are different things: the two are checked against each other.
    add("--kv_cache_type", type=_cache_type, default=argparse.SUPPRESS)
    add("--paged_kv_cache", choices=("enable", "disable"), default=argparse.SUPPRESS)
    add("--tokens_per_block", type=int, default=32)
    for name in BARE:
        add(f"--{name}", action="store_true")
    for name, (words, word) in PLUGINS.items():
        add(f"--{name}", choices=words, default=word)
    for name, on in SWITCHES.items():
        add(f"--{name}", choices=("enable", "disable"), default="enable" if on else "disable")
    add("--workers", type=int, default=1)
    add("--log_level", choices=LEVELS, default="info")
    add("--profiling_verbosity", choices=("layer_names_only", "detailed", "none"), default="layer_names_only")
    add("--logits_dtype", choices=("float16", "float32"))
    add("--lora_dir", nargs="+")
    add("--lora_ckpt_source", choices=("hf", "nemo"), default="hf")
    add("--lora_target_modules", nargs="+")
    add("--max_lora_rank", type=int, default=64)
    add("--speculative_decoding_mode", choices=SPECULATION)
    if setup.since("1.0.0"):
        add("--visualize_network")
    else:
        # When it became a path is not known.
        add("--visualize_network", nargs="?", const="")
        add("--auto_parallel", type=int, default=1)
        add("--gpus_per_node", type=int, default=8)
        add("--cluster_key")
    return made


def _cache_type(word: str) -> str:
    if word.lower() not in ("continuous", "paged", "disabled"):
        raise argparse.ArgumentTypeError(f"invalid choice: '{word}' (choose from continuous, paged, disabled)")
    return word.lower()


# The checkpoint's config.json

# The other architectures of the same class are not dense Llamas.
# Those of the class QWenForCausalLM, each with its qwen_type.
QWEN = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
# Key of the features of an expert.
EXPERTS = {"MixtralForCausalLM": "intermediate_size", "Qwen3MoeForCausalLM": "moe_intermediate_size"}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", *QWEN)
# Those whose gate and up are one matrix.
ONE_MATRIX = ("Phi3ForCausalLM", *EXPERTS)
SAME_CLASS = ("GraniteForCausalLM", "ExaoneForCausalLM", "ArcticForCausalLM")
FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
AWQ = ("W4A16_AWQ", "W4A8_AWQ")
COVERED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL", "W8A16", *AWQ)
NOT_COVERED = (
    "W8A8_SQ_PER_TENSOR_PLUGIN", "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN", "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "W4A16", "W4A16_GPTQ", "W8A16_GPTQ", "W4A8_QSERVE_PER_GROUP",
    "W4A8_QSERVE_PER_CHANNEL", "NVFP4", "MIXED_PRECISION",
)  # fmt: skip
NOT_QUANTIZED = (
    "*lm_head", "*vocab_embedding", "*router", "*position_embedding", "*block_embedding", "*shared_expert_gate",
)  # fmt: skip
MAPPING = {"world_size", "tp_size", "pp_size", "gpus_per_node", "cp_size", "moe_tp_size", "moe_ep_size", "rank"}
MAPPING_1 = {
    "moe_cluster_size", "attn_tp_size", "attn_cp_size", "cp_config", "enable_attention_dp", "enable_lm_head_tp_in_adp",
}  # fmt: skip
QUANTIZATION = {
    "quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "has_zero_point", "pre_quant_scale",
    "exclude_modules", "clamp_val", "use_meta_recipe",
}  # fmt: skip
MOE = {
    "num_experts", "shared_expert_intermediate_size", "top_k", "normalization_mode", "sparse_mixer_epsilon", "tp_mode",
    "device_limited_n_group", "device_limited_topk_group", "device_limited_routed_scaling_factor",
}  # fmt: skip
# All other keys are taken too, with a line in the log.
TOP_LEVEL = {
    "architecture", "dtype", "logits_dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_size", "hidden_act", "intermediate_size", "norm_epsilon", "position_embedding_type",
    "max_position_embeddings", "rotary_base", "rotary_scaling", "rotary_embedding_dim", "use_parallel_embedding",
    "embedding_sharding_dim", "qk_layernorm", "mlp_bias", "attn_bias", "residual_mlp",
    "disable_weight_only_quant_plugin", "remove_duplicated_kv_heads", "fc_after_embed",
    "use_input_layernorm_in_first_layer", "use_last_layernorm", "layer_idx_offset", "embedding_multiplier",
    "attention_multiplier", "residual_multiplier", "output_multiplier_scale", "has_partial_lora_mask", "moe",
    "runtime_defaults", "mapping", "quantization",
}  # fmt: skip
# The loader has defaults for these, which are another model's.
NEEDED = (
    "vocab_size", "intermediate_size", "hidden_act", "norm_epsilon", "position_embedding_type",
    "max_position_embeddings", "rotary_base",
)  # fmt: skip
ROPE_TYPES = ("llama3", "linear", "dynamic", "yarn", "longrope", "su")


@dataclass(frozen=True)
class Ranks:
    tp: int
    pp: int
    cp: int
    partition: list[int] | None
    moe_tp: int
    moe_ep: int

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp

    def layers(self, total: int, stage: int) -> int:
        """Layers of a pipeline stage; the first stages take a remainder."""
        if self.partition is not None:
            return self.partition[stage]
        base, extra = divmod(total, self.pp)
        return base + (stage < extra)


@dataclass(frozen=True)
class Quant:
    algo: str | None
    cache: str | None
    group: int
    pre_quant_scale: bool
    zero_point: bool
    exclude: tuple[str, ...] | None

    def excluded(self, module: str) -> bool:
        if self.algo == "FP8_PER_CHANNEL_PER_TOKEN":
            # This one replaces whole attentions and feed-forwards, and never the head.
            patterns = (*(self.exclude or ()), "*ln_f", "*ln_embed", "*lm_head")
            module = module if "." not in module else module.rsplit(".", 1)[0]
        else:
            patterns = NOT_QUANTIZED if self.exclude is None else self.exclude
        return any(fnmatchcase(module, pattern) for pattern in patterns)

    def of(self, module: str) -> str | None:
        return None if self.excluded(module) else self.algo


@dataclass(frozen=True)
class Model:
    raw: dict[str, Any]
    architecture: str
    dtype: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    positions: int
    sharding: int | None
    ranks: Ranks
    quant: Quant
    experts: int

    @property
    def float(self) -> str:
        return FLOATS[self.dtype]


def _unexpected(kind: str, given: dict[str, Any], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise TypeError(f"{kind}.__init__() got an unexpected keyword argument '{key}'")


def read_mapping(raw: dict[str, Any], setup: Setup) -> Ranks:
    # Which of these 0.21 knows is not established, nor since when there is pp_partition.
    known = MAPPING | (MAPPING_1 if setup.since("1.0.0") else set())
    _unexpected("Mapping", raw, known | ({"pp_partition"} if setup.since("1.2.1") else set()))
    world, tp, pp, cp = (raw.get(key, 1) for key in ("world_size", "tp_size", "pp_size", "cp_size"))
    moe_tp, moe_ep, cluster = (raw.get(key, -1) for key in ("moe_tp_size", "moe_ep_size", "moe_cluster_size"))
    cluster = 1 if cluster == -1 else cluster
    if moe_tp == -1:
        moe_ep = 1 if moe_ep == -1 else moe_ep
        moe_tp = tp // (moe_ep * cluster)
    elif moe_ep == -1:
        moe_ep = tp // (moe_tp * cluster)
    attn_tp, attn_cp = raw.get("attn_tp_size", -1), raw.get("attn_cp_size", -1)
    if attn_cp == -1:
        attn_cp = 1 if attn_tp == -1 else tp * cp // attn_tp
    attn_tp = tp * cp // attn_cp if attn_tp == -1 else attn_tp
    if tp * pp * cp != world:
        raise ValueError(
            f"world_size must equal to tp_size * pp_size * cp_size, but got {world} != {tp} * {pp} * {cp}."
        )
    if moe_tp * moe_ep * cluster != tp:
        product = moe_tp * moe_ep * cluster
        raise ValueError(
            f"moe_tp_size * moe_ep_size * moe_cluster_size must equal to moe_world_size, but got {product} != {tp}"
        )
    if attn_tp * attn_cp != tp * cp:
        raise ValueError(
            f"tp_size * cp_size must equal to attn_tp_size * attn_cp_size, but got {tp} * {cp} != {attn_tp} * {attn_cp}"
        )
    return Ranks(tp, pp, cp, raw.get("pp_partition"), moe_tp, moe_ep)


def read_quantization(raw: dict[str, Any], setup: Setup, folder: Path) -> Quant:
    _unexpected("QuantConfig", raw, QUANTIZATION | ({"mamba_ssm_cache_dtype"} if setup.since("1.0.0") else set()))
    algo, cache = raw.get("quant_algo"), raw.get("kv_cache_quant_algo")
    if algo == "MIXED_PRECISION" and not (folder / "quant_cfg.json").is_file():
        lost = folder / "quant_cfg.json"
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(lost))
        raise RuntimeError(f"Encounter error '{missing}' for read quantization config '{lost}'")
    if algo in NOT_COVERED or cache == "NVFP4" or raw.get("use_meta_recipe"):
        raise ContractError(f"the double does not know {algo} with a KV cache in {cache}, or Meta's recipe")
    assert algo is None or algo in COVERED
    assert cache in (None, "FP8", "INT8")
    exclude = raw.get("exclude_modules")
    quant = Quant(
        algo=algo,
        cache=cache,
        group=raw.get("group_size", 128),
        pre_quant_scale=bool(raw.get("pre_quant_scale", False)),
        zero_point=bool(raw.get("has_zero_point", False)),
        exclude=None if exclude is None else tuple(exclude),
    )
    if algo in AWQ and not quant.pre_quant_scale:
        raise ContractError(f"pre_quant_scale is false: the smoothing of {algo} would be left out without an error")
    return quant


def read_config(path: Path, setup: Setup, log: Log) -> Model:
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    architecture = raw["architecture"]
    if architecture not in ARCHITECTURES:
        if architecture in SAME_CLASS:
            raise ContractError(f"the double does not know {architecture}")
        raise KeyError(architecture)
    for key in ("dtype", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if key not in raw:
            raise TypeError(f"PretrainedConfig.__init__() missing 1 required keyword-only argument: '{key}'")
    _unexpected("MoeConfig", raw.get("moe") or {}, MOE)
    ranks = read_mapping(raw.get("mapping") or {}, setup)
    quant = read_quantization(raw.get("quantization") or {}, setup, path.parent)
    for key in sorted(raw.keys() - TOP_LEVEL):
        log.warning(f"Implicitly setting {_config_class(architecture)}.{key} = {raw[key]}")
    _refuse_silent_faults(raw)
    experts = _experts(raw, ranks, quant)
    if architecture in QWEN:
        for key in ("qwen_type", "seq_length"):
            if key not in raw:
                raise AttributeError(f"'QWenConfig' object has no attribute '{key}'")
        if raw["qwen_type"] != QWEN[architecture]:
            raise ContractError(f"qwen_type is {raw['qwen_type']}, a {architecture}'s is {QWEN[architecture]}")
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    ffn, layers, tp = raw["intermediate_size"], raw["num_hidden_layers"], ranks.tp
    assert heads % tp == 0, "num_attention_heads must be divisible by tp_size"
    if kv_heads % tp and tp % kv_heads:
        raise ContractError(f"{kv_heads} key/value heads over {tp} ranks: ranks would get parts of heads")
    if not experts and ffn % tp:
        raise ContractError(f"intermediate_size {ffn} over {tp} ranks: the remainder would be lost")
    if ranks.partition is not None and (len(ranks.partition), sum(ranks.partition)) != (ranks.pp, layers):
        raise ValueError(f"pp_partition {ranks.partition} does not match pp_size {ranks.pp} and {layers} layers.")
    return Model(
        raw=raw,
        architecture=architecture,
        dtype=raw["dtype"],
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        ffn=raw[EXPERTS[architecture]] // ranks.moe_tp if experts else ffn // tp,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=raw.get("head_size") or raw["hidden_size"] // heads,
        positions=raw["max_position_embeddings"],
        sharding=raw.get("embedding_sharding_dim", 0) if raw.get("use_parallel_embedding") else None,
        ranks=ranks,
        quant=quant,
        experts=experts,
    )


def _experts(raw: dict[str, Any], ranks: Ranks, quant: Quant) -> int:
    """Experts of each layer; 0 for a dense model."""
    count: int = (raw.get("moe") or {}).get("num_experts", 0)
    key = EXPERTS.get(raw["architecture"])
    if (key is None) != (count == 0):
        raise ContractError(f"moe.num_experts is {count} for a {raw['architecture']}")
    if key is None:
        return 0
    if count % ranks.moe_ep:
        raise ValueError(f"MixtureOfExperts - Number of experts {count} is not a multiple of EP size {ranks.moe_ep}")
    if raw[key] % ranks.moe_tp:
        raise ValueError(f"{key} {raw[key]} is not a multiple of the TP size of experts {ranks.moe_tp}")
    if quant.algo not in (None, "FP8", "W8A16"):
        raise ContractError(f"the double does not know experts in {quant.algo}")
    if quant.algo is not None and not quant.excluded("transformer.layers.0.mlp.router"):
        raise ContractError("exclude_modules does not name the routers, which would be quantized")
    return count


def _config_class(architecture: str) -> str:
    return "QWenConfig" if architecture in QWEN else {"Phi3ForCausalLM": "Phi3Config"}.get(architecture, "LLaMAConfig")


def _refuse_silent_faults(raw: dict[str, Any]) -> None:
    """What the loader would take, and build another model from."""
    assert raw["dtype"] in FLOATS, f"Unsupported dtype: {raw['dtype']}"
    for key in NEEDED:
        if raw.get(key) is None:
            raise ContractError(f"config.json lacks {key}: the loader has a default, which is not this model's")
    act, kind = ("swiglu", "that of one matrix") if raw["architecture"] in ONE_MATRIX else ("silu", "Llama's")
    if raw["hidden_act"] != act:
        raise ContractError(f"hidden_act is {raw['hidden_act']}, {kind} is {act}")
    if raw["position_embedding_type"] != "rope_gpt_neox":
        raise ContractError(f"position_embedding_type is {raw['position_embedding_type']}: no rotary embedding applies")
    if raw.get("qk_layernorm"):
        raise ContractError("the double does not know qk_layernorm")
    if raw.get("embedding_sharding_dim", 0) not in (0, 1):
        raise ContractError(f"embedding_sharding_dim is {raw['embedding_sharding_dim']}, not 0 or 1")
    scaling = raw.get("rotary_scaling")
    if scaling is not None:
        kind = scaling.get("type", scaling.get("rope_type"))
        if kind not in ROPE_TYPES:
            raise ContractError(f"rotary_scaling has the type {kind}, not one of {', '.join(ROPE_TYPES)}")
        if kind == "dynamic" and "alpha" not in scaling:
            raise ContractError("rotary_scaling of the type dynamic lacks alpha")


# The tensors of a rank

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """Element type as safetensors names it, and shape."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Parameter(Tensor):
    """A tensor that the network has. `required` is false of those it can compute."""

    required: bool = True


LINEARS = ("qkv.weight", "dense.weight", "fc.weight", "proj.weight", "gate.weight")
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
TENSORRT_TYPES = {
    "BF16": "BF16", "F16": "HALF", "F32": "FLOAT", "I8": "INT8", "U8": "UINT8", "F8_E4M3": "FP8", "I32": "INT32",
    "I64": "INT64", "BOOL": "BOOL",
}  # fmt: skip


def read_header(path: Path) -> dict[str, Tensor]:
    """Names, types and shapes of a safetensors file, whose ranges must cover it."""

    def wrong(kind: str) -> SafetensorError:
        return SafetensorError(f"Error while deserializing header: {kind}")

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise wrong("HeaderTooSmall")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, 100_000_000):
            raise wrong("HeaderTooLarge" if length > 100_000_000 else "InvalidHeaderLength")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: Tensor(spec["dtype"], tuple(spec["shape"])) for name, spec in header.items()}
        ranges = sorted((*spec["data_offsets"], name) for name, spec in header.items())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise wrong("InvalidHeaderDeserialization") from None
    position = 0
    for begin, end, name in ranges:
        tensor = tensors[name]
        if begin != position:
            raise wrong(f'InvalidOffset("{name}")')
        if end - begin != math.prod(tensor.shape) * ITEMSIZE.get(tensor.dtype, 0):
            raise wrong("TensorInvalidInfo")
        position = end
    if 8 + length + position != size:
        raise wrong("MetadataIncompleteBuffer")
    return tensors


def parameters(model: Model, stage: int) -> dict[str, Parameter]:
    """Every parameter of a rank of that pipeline stage, by name."""
    return dict(_parameters(model, stage))


def _parameters(model: Model, stage: int) -> Iterator[tuple[str, Parameter]]:
    ranks, number, d = model.ranks, model.float, model.head_size
    if stage == 0:
        yield from _embedding(model)
    q, kv = model.heads // ranks.tp * d, -(-model.kv_heads // ranks.tp) * d
    qwen = model.raw["qwen_type"] if model.architecture in QWEN else None
    # A Qwen's class has this default, and never a bias of the output.
    attn_bias, mlp_bias = bool(model.raw.get("attn_bias", qwen is not None)), bool(model.raw.get("mlp_bias"))
    for index in range(ranks.layers(model.layers, stage)):
        layer = f"transformer.layers.{index}."
        for norm in ("input_layernorm", "post_layernorm"):
            yield f"{layer}{norm}.weight", Parameter(number, (model.hidden,))
        ffn = model.ffn
        yield from _linear(model, f"{layer}attention.qkv", q + 2 * kv, model.hidden, bias=attn_bias)
        yield from _linear(model, f"{layer}attention.dense", model.hidden, q, row=True, bias=attn_bias and not qwen)
        for norm in ("q_layernorm", "k_layernorm") if qwen in ("qwen3", "qwen3_moe") else ():
            yield f"{layer}attention.{norm}.weight", Parameter(number, (d,))
        if model.experts:
            yield f"{layer}mlp.router.weight", Parameter("F32", (model.experts, model.hidden))
            yield from _stack(model, f"{layer}mlp.fc", 2 * ffn, model.hidden)
            yield from _stack(model, f"{layer}mlp.proj", model.hidden, ffn)
        elif model.architecture in ONE_MATRIX:
            yield from _linear(model, f"{layer}mlp.fc", 2 * ffn, model.hidden)
            yield from _linear(model, f"{layer}mlp.proj", model.hidden, ffn, row=True)
        else:
            yield from _linear(model, f"{layer}mlp.fc", ffn, model.hidden, bias=mlp_bias)
            yield from _linear(model, f"{layer}mlp.gate", ffn, model.hidden, bias=mlp_bias)
            yield from _linear(model, f"{layer}mlp.proj", model.hidden, ffn, row=True, bias=mlp_bias)
        if model.quant.cache:
            for scale in ("kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor"):
                yield f"{layer}attention.{scale}", Parameter("F32", (1,))
    if stage == ranks.pp - 1:
        yield "transformer.ln_f.weight", Parameter(number, (model.hidden,))
        yield from _linear(model, "lm_head", -(-model.vocab // ranks.tp), model.hidden)
    positions = model.positions
    yield "embed_positions", Parameter("F32", (1, positions, d), required=False)
    yield "rotary_inv_freq", Parameter("F32", (d // 2,), required=False)
    yield "embed_positions_for_gpt_attention", Parameter("F32", (1, positions * d), required=False)


def _embedding(model: Model) -> Iterator[tuple[str, Parameter]]:
    tp, module = model.ranks.tp, "transformer.vocab_embedding"
    shape = {
        None: (model.vocab, model.hidden),
        0: (-(-model.vocab // tp), model.hidden),
        1: (model.vocab, model.hidden // tp),
    }[model.sharding]
    # Of all the algorithms only this one has an embedding too, where the list of exceptions does not name it.
    if model.quant.of(module) == "W8A16":
        yield f"{module}.weight", Parameter("I8", shape)
        yield f"{module}.per_token_scale", Parameter(model.float, (model.vocab,))
    else:
        yield f"{module}.weight", Parameter(model.float, shape)


def _linear(
    model: Model, module: str, out: int, width: int, *, row: bool = False, bias: bool = False
) -> Iterator[tuple[str, Parameter]]:
    """A rank's linear of `width` inputs; `row` when ranks share the inputs, else they share the outputs."""
    algo, number, group = model.quant.of(module), model.float, model.quant.group
    if algo == "W8A16" or algo in AWQ:
        unit = max(64, group if algo in AWQ else 0)
        # Both dimensions of the whole matrix are rounded up, the one that is not shared too.
        whole = unit * model.ranks.tp
        out = _up(out, whole if row else unit)
        width = _up(width, unit if row else whole)
    tensors = {"weight": Parameter(number, (out, width))}
    if bias:
        tensors["bias"] = Parameter(number, (out,))
    if algo == "FP8":
        tensors["weight"] = Parameter("F8_E4M3", (out, width))
        tensors["weights_scaling_factor"] = tensors["activation_scaling_factor"] = Parameter("F32", (1,))
    elif algo == "FP8_PER_CHANNEL_PER_TOKEN":
        tensors["weight"] = Parameter("F8_E4M3", (out, width))
        tensors["per_channel_scale"] = Parameter("F32", (out,))
    elif algo == "W8A8_SQ_PER_CHANNEL":
        tensors["weight"] = Parameter("I8", (out, width))
        tensors["weights_scaling_factor"] = Parameter("F32", (out,))
        tensors["activation_scaling_factor"] = Parameter("F32", (1,))
        tensors["prequant_scaling_factor"] = Parameter(number, (width,))
    elif algo == "W8A16":
        tensors["weight"] = Parameter("I8", (width, out))
        tensors["per_channel_scale"] = Parameter(number, (out,))
    elif algo in AWQ:
        # Four 4-bit numbers in an element of 16 bits.
        tensors["weight"] = Parameter(number, (width, out // 4))
        tensors["weights_scaling_factor"] = Parameter(number, (width // group, out))
        tensors["prequant_scaling_factor"] = Parameter(number, (1, width))
        if model.quant.zero_point:
            tensors["zero"] = Parameter(number, (width // group, out))
        if algo == "W4A8_AWQ":
            if group == 64:
                raise NotImplementedError("W4A8_AWQ with group_size = 64 is not implemented yet!")
            tensors["alpha"] = Parameter("F32", (1,))
            if row:
                tensors["activation_scaling_factor"] = Parameter("F32", (1,))
    for name, parameter in tensors.items():
        yield f"{module}.{name}", parameter


def _stack(model: Model, module: str, out: int, width: int) -> Iterator[tuple[str, Parameter]]:
    """One of the two matrices of each expert that a rank holds."""
    held, algo = model.experts // model.ranks.moe_ep, model.quant.of(module)
    if algo == "FP8":
        yield f"{module}.weight", Parameter("F8_E4M3", (held, out, width))
        yield f"{module}.weights_scaling_factor", Parameter("F32", (held, 1))
        yield f"{module}.activation_scaling_factor", Parameter("F32", (1,))
    elif algo == "W8A16":
        yield f"{module}.weight", Parameter("I8", (held, width, out))
        yield f"{module}.per_channel_scale", Parameter(model.float, (held, out))
    else:
        yield f"{module}.weight", Parameter(model.float, (held, out, width))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def loaded(model: Model, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the loader makes of a rank file before it looks for its parameters."""
    tensors = dict(stored)
    for name in stored:
        if name.endswith(".k_cache_scaling_factor"):
            value = name.replace("k_cache_scaling_factor", "v_cache_scaling_factor")
            assert value in stored, f"{value} not found"
            tensors[name.replace("k_cache", "kv_cache")] = stored[name]
            del tensors[name], tensors[value]
    for name in list(tensors):
        if name.endswith(".kv_cache_scaling_factor"):
            tensors.setdefault(name.replace("kv_cache", "kv_cache_rcp"), tensors[name])
    algo, head = model.quant.algo, tensors.get("lm_head.weight")
    if algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        for name, tensor in tensors.items():
            if name.endswith("weight") and tensor.dtype == "I8":
                tensors[name] = Tensor("F8_E4M3", tensor.shape)
        if algo == "FP8_PER_CHANNEL_PER_TOKEN" and head is not None:
            assert head.dtype == model.float
        if head is not None and head.dtype not in ("F8_E4M3", "I8"):
            for scale in ("weights_scaling_factor", "activation_scaling_factor"):
                tensors.pop(f"lm_head.{scale}", None)
    elif algo == "W8A16":
        for name, tensor in list(tensors.items()):
            named = any(fnmatchcase(name, pattern) for pattern in model.quant.exclude or ())
            if not named and any(linear in name for linear in LINEARS) and tensor.dtype != "I8":
                *held, out, width = tensor.shape
                tensors[name] = Tensor("I8", (*held, width, out))
                tensors[name.replace(".weight", ".per_channel_scale")] = Tensor(model.float, (*held, out))
    elif algo in AWQ:
        _loaded_awq(model, tensors, algo)
    return tensors


def _loaded_awq(model: Model, tensors: dict[str, Tensor], algo: str) -> None:
    for name, tensor in list(tensors.items()):
        if name.endswith("weight") and tensor.dtype == "I8":
            rows, width = tensor.shape
            if rows % 2:
                raise RuntimeError(f"{rows} rows of packed bytes in '{name}' cannot be seen as elements of 16 bits")
            tensors[name] = Tensor("F16" if model.dtype == "float16" else "BF16", (width, rows // 2))
        elif name.endswith("weights_scaling_factor"):
            tensors[name] = Tensor(model.float, tensor.shape[::-1])
        elif name.endswith("prequant_scaling_factor"):
            tensors[name] = Tensor(tensor.dtype, (1, math.prod(tensor.shape)))
    if algo == "W4A8_AWQ":
        for name in [name for name in tensors if name.endswith("weights_scaling_factor")]:
            linear = name.removesuffix("weights_scaling_factor")
            scale = tensors[f"{linear}activation_scaling_factor"]
            tensors.pop(f"{linear}weights_scaling_factor_2")
            # Missing, it ends the loader here.
            tensors[f"{linear}prequant_scaling_factor"] = tensors[f"{linear}prequant_scaling_factor"]
            tensors[f"{linear}alpha"] = scale


def check_rank(model: Model, stored: dict[str, Tensor], stage: int, log: Log) -> None:
    """Refuse a rank file that the network has no use for. Raises what the loader raises."""
    tensors, wanted = loaded(model, stored), parameters(model, stage)
    required = {name for name, parameter in wanted.items() if parameter.required}
    if "transformer.vocab_embedding.weight" in tensors and "lm_head.weight" not in tensors:
        required.discard("lm_head.weight")
    if required - tensors.keys():
        raise RuntimeError(f"Required but not provided tensors:{_names(required - tensors.keys())}")
    if tensors.keys() - required:
        log.warning(f"Provided but not required tensors: {_names(tensors.keys() - required)}")
    for name in [name for name in wanted if name in tensors]:
        parameter, tensor = wanted[name], tensors[name]
        scalar = tensor.shape == () and max(parameter.shape) == 1
        if tensor.shape != parameter.shape and not scalar and not model.raw.get("is_pruned"):
            raise RuntimeError(
                "Encounter error 'The value updated is not the same shape as the original. "
                f"Updated: {tensor.shape}, original: {parameter.shape}' for parameter '{name}'"
            )
        bits = parameter.dtype == "F8_E4M3" and tensor.dtype in ("I8", "U8")
        if tensor.dtype != parameter.dtype and not bits:
            was, now = (f"DataType.{TENSORRT_TYPES.get(one.dtype, one.dtype)}" for one in (parameter, tensor))
            log.warning(f"Parameter was initialized as {was} but set to {now}")


def _names(names: set[str]) -> str:
    return "{" + ", ".join(repr(name) for name in sorted(names)) + "}"


# Build settings

HOPPER_PLUGINS = (
    "gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin",
)  # fmt: skip


def read_plugins(args: argparse.Namespace, setup: Setup, log: Log) -> dict[str, Any]:
    given = vars(args)
    plugins: dict[str, Any] = {"dtype": "float16"}
    plugins.update({name: None if given[name] == "disable" else given[name] for name in PLUGINS})
    plugins.update({name: given[name] == "enable" for name in SWITCHES})
    paged = given.get("paged_kv_cache")
    plugins["paged_kv_cache"] = None if paged is None else paged == "enable"
    plugins["tokens_per_block"] = args.tokens_per_block
    plugins["manage_weights"] = args.fast_build
    for name, value in plugins.items():
        log.info(f"Set {name} to {value}.")
    if setup.sm in (100, 103):
        for name in HOPPER_PLUGINS:
            if plugins[name]:
                raise NotImplementedError(f"{name}={plugins[name]} is not supported on SM {setup.sm}.")
    return plugins


def read_settings(args: argparse.Namespace, plugins: dict[str, Any]) -> dict[str, Any]:
    """The settings as given, by flags or by a file that replaces their sizes."""
    given = vars(args)
    settings: dict[str, Any] = {
        **{name: given[name] for name in SIZES},
        "opt_batch_size": 8,
        "kv_cache_type": given.get("kv_cache_type"),
        "gather_context_logits": args.gather_context_logits,
        "gather_generation_logits": args.gather_generation_logits,
        "strongly_typed": True,
        "force_num_profiles": os.environ.get("BUILDER_FORCE_NUM_PROFILES"),
        "profiling_verbosity": args.profiling_verbosity,
        "enable_debug_output": args.enable_debug_output,
        "speculative_decoding_mode": _mode(args.speculative_decoding_mode),
        "use_refit": False,
        "input_timing_cache": args.input_timing_cache,
        "output_timing_cache": args.output_timing_cache,
        "lora_config": {
            "lora_dir": [],
            "lora_ckpt_source": "hf",
            "max_lora_rank": 64,
            "lora_target_modules": [],
            "trtllm_modules_to_hf_modules": {},
        },
        "weight_sparsity": args.weight_sparsity,
        "weight_streaming": args.weight_streaming,
        "plugin_config": plugins,
        "use_strip_plan": args.strip_plan,
        "max_encoder_input_len": 1024,
        "monitor_memory": args.monitor_memory,
        "use_mrope": False,
    }
    if args.build_config is not None:
        file: dict[str, Any] = json.loads(Path(args.build_config).read_text(encoding="utf-8"))
        plugins.update({name: value for name, value in file.pop("plugin_config", {}).items() if name in plugins})
        settings.update({name: value for name, value in file.items() if name in settings})
    elif args.multiple_profiles == "enable" and args.opt_num_tokens is not None:
        raise RuntimeError(
            "multiple_profiles is enabled, while opt_num_tokens is set. "
            "They are not supposed to be working in the same time for now."
        )
    if plugins["lora_plugin"] is not None:
        lora = settings["lora_config"]
        lora.update(lora_dir=args.lora_dir or [], lora_ckpt_source=args.lora_ckpt_source)
        lora.update(max_lora_rank=args.max_lora_rank, lora_target_modules=args.lora_target_modules or [])
    return settings


def _mode(word: str | None) -> int:
    """How a mode of speculation is stored: one bit of a set, whose first says that there is none."""
    return 1 if word is None else 2 << SPECULATION.index(word)


def check_features(plugins: dict[str, Any], setup: Setup) -> None:
    """Refuse the features that a release has given up, before it reads weights."""
    assert not (plugins["streamingllm"] and setup.since("1.1.0")), (
        "StreamingLLM is no longer supported because attention sink cannot work with the non-cyclic kv cache kernel & "
        "runtime changes."
    )
    assert not plugins["pp_reduce_scatter"], "PP reduce scatter is only supported in the mixtral model."


def resolve(settings: dict[str, Any], model: Model, setup: Setup, log: Log) -> None:
    """Change the settings as the builder does for this model and GPU. Raises what it raises."""
    plugins: dict[str, Any] = settings["plugin_config"]
    if plugins["streamingllm"]:
        plugins["use_paged_context_fmha"] = False
        log.warning(
            "Paged Context FMHA is disabled because StreamingLLM is not supported when enabling paged KV context FMHA."
        )
    plugins["dtype"] = model.dtype
    _cache(settings, plugins)
    _sizes(settings, plugins, model, log)
    if plugins["reduce_fusion"] and (model.ranks.tp == 1 or model.architecture != "LlamaForCausalLM"):
        log.warning("Overriding reduce_fusion to False")
        plugins["reduce_fusion"] = False
    if plugins["user_buffer"] and not plugins["reduce_fusion"]:
        log.warning("Overriding user_buffer to False")
        plugins["user_buffer"] = False
    if plugins["norm_quant_fusion"]:
        # It is for NVFP4 alone.
        log.warning("Overriding norm_quant_fusion to False")
        plugins["norm_quant_fusion"] = False
    _speculation(settings, model, log)
    _attention(plugins, model, setup, log)


def _cache(settings: dict[str, Any], plugins: dict[str, Any]) -> None:
    kind, paged = settings["kv_cache_type"], plugins["paged_kv_cache"]
    kind = kind.lower() if kind else None
    if kind is not None and paged is not None:
        assert paged == (kind == "paged")
    if kind is None:
        kind = "continuous" if paged is False else "paged"
    settings["kv_cache_type"], plugins["paged_kv_cache"] = kind, kind == "paged"
    tokens = plugins["tokens_per_block"]
    if tokens < 1 or tokens & (tokens - 1):
        raise ContractError(f"tokens_per_block is {tokens}, not a power of two")


def _sizes(settings: dict[str, Any], plugins: dict[str, Any], model: Model, log: Log) -> None:
    scaling = model.raw.get("rotary_scaling") or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    factor = 1 if kind in ("su", "longrope", "llama3") else scaling.get("factor", 1)
    limit = math.ceil(model.positions * factor)
    if settings["max_seq_len"] is None:
        settings["max_seq_len"] = limit
        log.info(f"max_seq_len is not specified, using deduced value {limit}")
    elif settings["max_seq_len"] > limit:
        log.warning(
            f"max_seq_len {settings['max_seq_len']} is larger than max_position_embeddings {model.positions} * "
            f"rotary scaling {factor}, the model accuracy might be affected"
        )
    length, prompt = settings["max_seq_len"], settings["max_input_len"]
    if prompt > length:
        log.warning(f"max_input_len is {prompt} is larger than max_seq_len {length}, clipping it to max_seq_len")
        settings["max_input_len"] = length
    _tokens(settings, plugins, log)
    if plugins["remove_input_padding"] and plugins["context_fmha"]:
        log.warning("padding removal and fMHA are both enabled, max_input_len is not required and will be ignored")


def _tokens(settings: dict[str, Any], plugins: dict[str, Any], log: Log) -> None:
    most = settings["max_seq_len"] * settings["max_batch_size"]
    if not plugins["remove_input_padding"]:
        settings["max_num_tokens"] = most
        log.warning("remove_input_padding is not enabled, the specified max_num_tokens/opt_num_tokens will be ignored.")
        return
    if settings["opt_num_tokens"] is None and not plugins["multiple_profiles"]:
        batch = settings["max_batch_size"] * settings["max_beam_width"]
        settings["opt_num_tokens"] = min(batch, settings["max_num_tokens"])
    tokens = settings["max_num_tokens"]
    if tokens > 16384:
        log.warning(
            f"Specifying a `max_num_tokens` larger than 16384 is usually not recommended. "
            f"Got `max_num_tokens` = {tokens}"
        )
    if tokens > most:
        log.warning(
            f"max_num_tokens ({tokens}) shouldn't be greater than max_seq_len * max_batch_size ({most}), "
            f"specifying to max_seq_len * max_batch_size ({most})."
        )
        tokens = most
    block, prompt = plugins["tokens_per_block"], settings["max_input_len"]
    if not plugins["context_fmha"] and tokens < prompt:
        log.warning(
            f"When enable_context_fmha is not turned on, max_num_tokens ({tokens}) should be at least max_input_len "
            f"({prompt}), specifying to max_input_len ({prompt})."
        )
        tokens = prompt
    elif plugins["context_fmha"] and tokens < block:
        log.warning(
            f"When enable_context_fmha is turned on, max_num_tokens ({tokens}) should be at least tokens_per_block "
            f"({block}), specifying to tokens_per_block ({block}). At this time, you also need to enable context "
            "chunking at runtime, otherwise you may encounter errors."
        )
        tokens = block
    settings["max_num_tokens"] = tokens
    if settings["opt_num_tokens"] is not None and settings["opt_num_tokens"] > tokens:
        log.warning(
            f"opt_num_tokens ({settings['opt_num_tokens']}) shouldn't be greater than max_num_tokens ({tokens}), "
            f"specifying to max_num_tokens ({tokens})."
        )
        settings["opt_num_tokens"] = tokens


def _speculation(settings: dict[str, Any], model: Model, log: Log) -> None:
    if settings["speculative_decoding_mode"] == _mode(None):
        return
    draft, length = settings["max_draft_len"], settings["max_seq_len"]
    if settings["speculative_decoding_mode"] == _mode("eagle"):
        assert "num_eagle_layers" in model.raw
        length += model.raw["num_eagle_layers"]
    settings["max_seq_len"] = length + draft
    log.info(f"Increasing max_seq_len ({length}) by max_draft_len ({draft})")
    tokens = settings["max_batch_size"] * (draft + 1)
    if settings["max_num_tokens"] < tokens:
        log.info(f"max_num_tokens ({settings['max_num_tokens']}) is too small. New max_num_tokens is set to {tokens}.")
        settings["max_num_tokens"] = tokens


def _attention(plugins: dict[str, Any], model: Model, setup: Setup, log: Log) -> None:
    """Which variants of prompt attention remain."""
    fp8_cache, fp8_algo = model.quant.cache == "FP8", model.quant.algo in ("FP8", "W4A8_AWQ")
    if not plugins["context_fmha"]:
        plugins["use_fp8_context_fmha"] = plugins["use_paged_context_fmha"] = False
        log.warning("Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA are disabled.")
    elif not fp8_algo or setup.sm < 89:
        if plugins["use_fp8_context_fmha"]:
            plugins["use_fp8_context_fmha"] = False
            log.warning(
                "FP8 context FMHA is disabled because it is only supported on Ada and Hopper Arch."
                if fp8_algo
                else "FP8 Context FMHA is disabled because it must be used together with the fp8 quantization workflow."
            )
        if plugins["use_paged_context_fmha"] and fp8_cache:
            plugins["use_paged_context_fmha"] = False
            log.warning("FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled.")
    elif plugins["use_paged_context_fmha"] and not fp8_cache and plugins["use_fp8_context_fmha"]:
        plugins["use_fp8_context_fmha"] = False
        log.warning("FP8 Paged Context FMHA is disabled because it must be used together with fp8 KV Cache.")
    elif plugins["use_paged_context_fmha"] and fp8_cache and not plugins["use_fp8_context_fmha"]:
        plugins["use_fp8_context_fmha"] = True
        log.warning("FP8 Context FMHA is enabled to support FP8 Paged Context FMHA.")
    if plugins["use_paged_context_fmha"] and model.quant.cache == "INT8":
        plugins["use_paged_context_fmha"] = False
        log.warning("Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.")


def check_plugins(settings: dict[str, Any], model: Model, setup: Setup) -> None:
    """Refuse plugins that do not go with each other, the model or the GPU."""
    plugins, algo = settings["plugin_config"], model.quant.algo
    swiglu = plugins["gemm_swiglu_plugin"] or plugins["low_latency_gemm_swiglu_plugin"]
    if swiglu and not plugins["use_fused_mlp"]:
        raise RuntimeError("GemmSwiGLU plugin requires --use_fused_mlp flag")
    for name in ("gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin"):
        if plugins[name] and (algo != "FP8" or setup.sm in (80, 86, 89)):
            raise ContractError(f"{name} is for FP8 weights on SM90, not for {algo} on SM{setup.sm}")
    for name in ("gemm_swiglu_plugin", "gemm_allreduce_plugin"):
        if plugins["lora_plugin"] and plugins[name]:
            raise AssertionError(f"{name} does not go with lora_plugin")
    plugin = not model.raw.get("disable_weight_only_quant_plugin")
    if plugins["manage_weights"] and (algo == "W8A16" or algo in AWQ) and not plugin:
        raise RuntimeError("Manage weights of weight only quant works only with plugin currently.")
    # What follows from the model, whatever was asked for.
    plugins["weight_only_groupwise_quant_matmul_plugin"] = model.dtype if algo in AWQ and plugin else None
    plugins["weight_only_quant_matmul_plugin"] = model.dtype if algo == "W8A16" and plugin else None
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        plugins["fp8_rowwise_gemm_plugin"] = model.dtype
    plugins["nccl_plugin"] = model.dtype if model.ranks.world > 1 else None


def check_gpu(model: Model, setup: Setup) -> None:
    """Refuse what the builder refuses of an algorithm on this GPU, before TensorRT sees it."""
    sm, algo = setup.sm, model.quant.algo
    assert sm >= 80 or model.dtype != "bfloat16", "pre SM 80 GPUs do not support bfloat16"
    if sm not in (80, 86, 89, 90, 100, 103, 120):
        raise ContractError(f"SM{sm} is not in TensorRT-LLM's support matrix")
    if 100 <= sm < 120:
        if algo == "W8A16" or algo in AWQ or model.quant.cache == "INT8":
            raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100.")
        if algo == "W8A8_SQ_PER_CHANNEL":
            raise RuntimeError("SmoothQuant is not supported on SM>=100.")
        if algo == "FP8_PER_CHANNEL_PER_TOKEN":
            raise RuntimeError("Per-channel or per-token scaling is not supported on SM>=100.")
    if algo == "W4A8_AWQ" and sm > 90:
        raise ContractError("W4A8_AWQ is for SM89 and SM90")


# The build

FP8_NEEDED = (
    "IBuilder::buildSerializedNetwork: Error Code 9: Internal Error "
    "(Networks with FP8 precision require hardware with FP8 support.)"
)
OTHER_DEVICE = (
    "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is generated on an "
    "incompatible device, expecting compute {}.{} got compute 8.0, please rebuild.)"
)
NOT_ALLOCATED = (
    "Requested amount of GPU memory (33555480576 bytes) could not be allocated. "
    "There may not be enough free memory for allocation to succeed."
)
OUT_OF_MEMORY = "[globWriter.cpp::makeResizableGpuMemory::433] Error Code 2: OutOfMemory (no further information)"


@dataclass(frozen=True)
class Job:
    """What all ranks of a build have in common. `folder` is None when the weights are to be random."""

    args: argparse.Namespace
    setup: Setup
    log: Log
    model: Model
    folder: Path | None
    out: Path


def build(args: argparse.Namespace, setup: Setup) -> None:
    """One run of trtllm-build. Raises what that ends with."""
    begun, log, out = time.monotonic(), Log(args.log_level), Path(args.output_dir)
    if setup.since("1.0.0"):
        log.warning(
            "Option --gather_generation_logits is deprecated, a build flag is not required anymore. "
            "Use --output_generation_logits at runtime instead."
        )
    if args.gather_all_token_logits:
        args.gather_context_logits = args.gather_generation_logits = True
    if args.gather_context_logits and args.max_draft_len > 0:
        raise RuntimeError("Gather context logits is not support with draft len > 0.")
    out.mkdir(parents=True, exist_ok=True)
    workers = min(setup.gpus, args.workers)
    if hasattr(args, "paged_kv_cache"):
        log.warning("Option --paged_kv_cache is deprecated, use --kv_cache_type=paged/disabled instead.")
    plugins = read_plugins(args, setup, log)
    source = args.checkpoint_dir if args.checkpoint_dir is not None else args.model_config
    if source is None:
        raise AttributeError("'NoneType' object has no attribute 'lower'")
    folder = None if source.lower().endswith(".json") else Path(source)
    model = read_config(Path(source) if folder is None else folder / "config.json", setup, log)
    settings = read_settings(args, plugins)
    settings["use_strip_plan"] = settings["use_strip_plan"] or bool(model.raw.get("is_pruned"))
    if args.logits_dtype is not None:
        model.raw["logits_dtype"] = args.logits_dtype
    job = Job(args, setup, log, model, folder, out)
    failed = False
    for rank in range(model.ranks.world):
        log.info(f"Building rank {rank} of {model.ranks.world} on GPU {rank % workers}")
        try:
            _build_rank(job, rank, copy.deepcopy(settings))
        except Exception as error:
            if workers == 1:
                raise
            # Ranks that are built side by side all come to their end first.
            show(error)
            failed = True
    assert not failed, "Engine building failed, please check error log."
    passed = time.strftime("%H:%M:%S", time.gmtime(max(1.0, time.monotonic() - begun)))
    log.info(f"Total time of building all engines: {passed}")


def _build_rank(job: Job, rank: int, settings: dict[str, Any]) -> None:
    model, setup, log = job.model, job.setup, job.log
    check_features(settings["plugin_config"], setup)
    # The ranks that share a context share a file.
    weights = job.folder and job.folder / f"rank{rank // model.ranks.cp}.safetensors"
    if weights:
        assert weights.is_file()
        check_rank(model, read_header(weights), rank // (model.ranks.tp * model.ranks.cp), log)
    resolve(settings, model, setup, log)
    check_gpu(model, setup)
    check_plugins(settings, model, setup)
    log.info("Total time of constructing network from module object 0.1 seconds")
    if not job.args.dry_run:
        log.info("Build TensorRT engine Unnamed Network 0")
        _compile(model, rank, setup, log)
        log.info("Total time of building Unnamed Network 0: 00:00:01")
    cache = settings["output_timing_cache"]
    if rank == 0 and cache is not None:
        Path(cache).write_bytes(b"CONTRACT DOUBLE, NO TIMINGS\n")
        log.info(f"Timing cache serialized to {cache}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    log.info(f"Build phase peak memory: {peak:.2f} MB, children: 0.00 MB")
    _save(job, rank, weights, settings)


def _compile(model: Model, rank: int, setup: Setup, log: Log) -> None:
    """TensorRT's part."""

    def ends(text: str) -> AssertionError:
        log.line("error", text, "TRT")
        return AssertionError("Engine building failed, please check the error log.")

    fp8 = model.quant.algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A8_AWQ")
    if fp8 and (setup.sm < 89 or setup.fail == "wrong-sm"):
        raise ends(FP8_NEEDED)
    if setup.fail == "wrong-sm":
        raise ends(OTHER_DEVICE.format(*divmod(setup.sm, 10)))
    if setup.fail == "oom":
        log.line("warning", NOT_ALLOCATED, "TRT")
        raise ends(OUT_OF_MEMORY)
    if setup.fail == "crash":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGSEGV)
    if setup.fail == "hang":
        # A parent may have left them ignored.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        log.line("info", "Global timing cache in use. Profiling results in this builder pass will be stored.", "TRT")
        time.sleep(3600)
    end = time.monotonic() + (setup.sleep if rank == 0 else 0)
    while (left := end - time.monotonic()) > 0:
        log.line("info", f"Profiling tactics, {left:.1f} seconds left", "TRT")
        time.sleep(min(0.1, left))
    log.line("info", "Engine generation completed in 0.1 seconds.", "TRT")


def _save(job: Job, rank: int, weights: Path | None, settings: dict[str, Any]) -> None:
    setup, out, lora = job.setup, job.out, settings["lora_config"]
    lora["lora_dir"] = [
        _copy_lora(Path(folder), out, index, lora["lora_ckpt_source"]) for index, folder in enumerate(lora["lora_dir"])
    ]
    inputs = _digest(job.model, weights, settings)
    if not setup.since("1.0.0"):
        # The name of a constant then, its plain word since.
        settings["kv_cache_type"] = settings["kv_cache_type"].upper()
    if rank == 0:
        described = {"version": setup.version, "pretrained_config": job.model.raw, "build_config": settings}
        (out / "config.json").write_text(json.dumps(described, indent=4), encoding="utf-8")
    if job.args.dry_run:
        return
    path = out / f"rank{rank}.engine"
    job.log.info(f"Serializing engine to {path}...")
    content = MARK + json.dumps({"rank": rank, "sm": setup.sm, "inputs": inputs}).encode() + b"\n"
    if setup.fail in ("killed", "disk-full"):
        path.write_bytes(content[: len(content) // 2])
        if setup.fail == "disk-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_bytes(content)
    job.log.info("Engine serialized. Total time: 00:00:00")
    if job.args.fast_build:
        (out / f"rank{rank}_managed_weights.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def _copy_lora(source: Path, out: Path, index: int, kind: str) -> str:
    (out / "lora").mkdir(exist_ok=True)
    if kind == "nemo":
        shutil.copyfile(source, out / "lora" / f"{index}.nemo")
        return f"lora/{index}.nemo"
    target = out / "lora" / str(index)
    target.mkdir(exist_ok=True)
    shutil.copy2(source / "adapter_config.json", target)
    for name in ("adapter_model.bin", "adapter_model.safetensors"):
        if (source / name).exists():
            shutil.copy2(source / name, target)
    return f"lora/{index}"


def _digest(model: Model, weights: Path | None, settings: dict[str, Any]) -> str:
    """Of everything an engine is made of. Where the timings lie is not a part of that."""
    made_of = {name: value for name, value in settings.items() if not name.endswith("_timing_cache")}
    digest = hashlib.sha256(json.dumps([model.raw, made_of], sort_keys=True).encode())
    if weights:
        with weights.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def show(error: BaseException) -> None:
    """The end of a traceback."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    print(f"Traceback (most recent call last):\n{text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run with these arguments and return the exit status."""
    try:
        setup = Setup.read()
    except ValueError as error:
        print(f"trtllm-build: {error}", file=sys.stderr)
        return 2
    print(f"[TensorRT-LLM] TensorRT-LLM version: {setup.version}", flush=True)
    try:
        args = parser(setup).parse_args(argv)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 2
    try:
        build(args, setup)
    except Exception as error:
        show(error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
