"""Tiny real things: an HF folder of a two-layer Llama with a byte-level tokenizer, made without torch."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.safetensors_file import header_bytes
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig
from trtpipe.engines.passport import Passport

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Changes that make other families of it.
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
# Heads wider than hidden_size / heads, as in most of that family.
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
# The same as it is read.
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    dtype=DataType.BFLOAT16,
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_size=8,
    hidden_act="silu",
    norm_epsilon=1e-5,
    max_position_embeddings=256,
    rotary_base=10000.0,
    rotary_scaling=None,
    tie_word_embeddings=False,
    attn_bias=False,
    mlp_bias=False,
)
# A checkpoint's config of much the same model.
CHECKPOINT = CheckpointConfig(
    architecture="LlamaForCausalLM",
    dtype=DataType.FLOAT32,
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_size=8,
    norm_epsilon=1e-5,
    max_position_embeddings=64,
    rotary_base=10000.0,
    rotary_scaling=None,
    attn_bias=False,
    tie_word_embeddings=False,
    mapping=Mapping(),
)
NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
# The same as raw bit patterns.
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


def write_passport(folder: Path, **changes: Any) -> Passport:
    """Give an engine folder a passport: of the reference runtime, for batches of 8, unless `changes` say otherwise."""
    made = Passport(
        runtime="reference", gpu="cpu", sm=None, sms=None, toolchain=None, image=None, versions={}, tp_size=1,
        pp_size=1, dtype="bfloat16", quant_algo=None, kv_cache_quant_algo=None, rank_bytes=1, checkpoint="0",
        build_config={"max_batch_size": 8},
    )  # fmt: skip
    made = replace(made, **changes)
    made.write(folder)
    return made


def hf_folder(
    path: Path, *, dtype: str = "BF16", shards: int = 1, seed: int = 0, tokenizer: bool = True, **overrides: Any
) -> Path:
    """Write a model folder with random weights of about ±0.1; `overrides` change config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **overrides}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    write_weights(path, read_model_config(path), dtype=dtype, shards=shards, seed=seed)
    if tokenizer:
        write_tokenizer(path)
    return path


def write_weights(path: Path, model: ModelConfig, *, dtype: str = "BF16", shards: int = 1, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    tensors = {name: random_tensor(rng, shape, dtype) for name, shape in sorted(source_shapes(model).items())}
    names = list(tensors)
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors, dtype)
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        write_safetensors(path / file, part, dtype)
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    values = (rng.standard_normal(shape) * 0.1).astype(np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMPY[dtype])


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]], dtype: str) -> None:
    header, _ = header_bytes((name, dtype, array.shape) for name, array in tensors.items())
    path.write_bytes(header + b"".join(array.tobytes() for array in tensors.values()))


def read_tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a safetensors file as raw unsigned integers."""
    from trtpipe.engines.hf.safetensors_file import ITEMSIZE, read_header

    data = path.read_bytes()
    return {
        name: np.frombuffer(
            data, dtype=f"<u{ITEMSIZE[entry.dtype]}", count=prod(entry.shape), offset=entry.offset
        ).reshape(entry.shape)
        for name, entry in read_header(path).tensors.items()
    }


GGUF_KEYS: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 32,
    "llama.feed_forward_length": 48, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.context_length": 256, "tokenizer.ggml.tokens": ["<s>", "</s>"],
}  # fmt: skip


def gguf_tensors() -> dict[str, tuple[int, ...]]:
    """Dimensions, columns first, of the tensors that GGUF_KEYS imply."""
    shapes = {
        "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 16), "attn_v": (32, 16), "attn_output": (32, 32),
        "ffn_norm": (32,), "ffn_gate": (32, 48), "ffn_up": (32, 48), "ffn_down": (48, 32),
    }  # fmt: skip
    layers = {f"blk.{layer}.{name}.weight": shape for layer in range(2) for name, shape in shapes.items()}
    return {"token_embd.weight": (32, 2), **layers, "output_norm.weight": (32,)}


def gguf_bytes(keys: dict[str, Any] = GGUF_KEYS, tensors: dict[str, tuple[int, ...]] | None = None) -> bytes:
    """A GGUF file of float32 zeros. A value is a whole number, a string, or a list of strings."""
    tensors = gguf_tensors() if tensors is None else tensors

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for name, value in keys.items():
        if isinstance(value, str):
            out += text(name) + struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            out += text(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            out += text(name) + struct.pack("<Iq", 11, value)
    offset = 0
    for name, shape in tensors.items():
        out += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
        out += struct.pack("<IQ", 0, offset)
        offset += -(-4 * prod(shape) // 32) * 32
    return out + bytes(-len(out) % 32) + bytes(offset)


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: <s>, </s>, then the 256 bytes as byte-level BPE spells them; no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{char: index + 2 for index, char in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def cast_by_torch(bits: np.ndarray[Any, Any], source: str, target: str) -> np.ndarray[Any, Any]:
    """What torch makes of the same bit patterns."""
    import torch

    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    signed = {"BF16": np.int16, "F16": np.int16, "F32": np.int32}
    tensor = torch.from_numpy(bits.view(signed[source]).copy()).view(types[source]).to(types[target])
    return tensor.view(torch.int32 if target == "F32" else torch.int16).numpy().view(BITS[target])
