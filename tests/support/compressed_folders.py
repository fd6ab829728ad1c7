"""llm-compressor's own folders of a tiny Llama, as digests; and that Llama, whose weights every machine makes alike.

Run in an environment with llm-compressor, which needs torch and transformers of other versions than ours:

    python tests/support/compressed_folders.py SCRATCH FILE.json

writes the Llama to SCRATCH/model, its quantized forms beside it, and config and tensors of each form to FILE.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Sizes that groups of 64 divide, and rows of words of int32 do not end in step with.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": 96,
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STATIC = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
SYMMETRIC = {"symmetric": True, "dynamic": False}
# Our recipe and group size -> llm-compressor's scheme. The types are those of the weights, and of what is computed in.
CASES: dict[str, dict[str, Any]] = {
    "int8-pc-pt": {"scheme": "W8A8"},
    "fp8-pc-pt": {"scheme": "FP8_DYNAMIC"},
    "fp8-kv": {
        "scheme": "FP8",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
    },
    "int8-sq": {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", **SYMMETRIC},
                "input_activations": {"type": "int", **STATIC, "observer": "static_minmax"},
            }
        }
    },
    "int8-wo": {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", **SYMMETRIC},
            }
        }
    },
    "int4-awq": {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, **SYMMETRIC},
            }
        }
    },
}
DTYPES = ("float32", "bfloat16")


def write_model(folder: Path, dtype: str) -> None:
    """The Llama: weights from a sequence of whole numbers, so that no generator's release matters."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": dtype}))
    save_file(weights(dtype), folder / "model.safetensors", metadata={"format": "pt"})


def weights(dtype: str) -> dict[str, torch.Tensor]:
    hidden, ffn, kv, vocabulary = 128, 192, 64, 96
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            shapes[f"{prefix}{name}.weight"] = shape
    out, state = {}, 1
    for name, shape in shapes.items():
        count, numbers = int(torch.Size(shape).numel()), []
        for _ in range(count):
            state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
            numbers.append((state >> 40) - (1 << 23))
        values = torch.tensor(numbers, dtype=torch.float64).reshape(shape) / 2**23
        # Matrices with rows of different sizes; norms around one.
        scaled = values * torch.linspace(0.05, 0.2, shape[0])[:, None] if len(shape) > 1 else 1 + values / 4
        out[name] = scaled.to(getattr(torch, dtype))
    return out


def digest(tensor: torch.Tensor) -> list[Any]:
    """[type, shape, SHA-256 of the bytes]."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


def folder(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(quantization_config, tensors)."""
    return json.loads((path / "config.json").read_text())["quantization_config"], load_file(path / "model.safetensors")


def compress(model: Path, out: Path, arguments: dict[str, Any], dtype: str) -> None:
    """Quantize the model as llm-compressor does, calibrated with four rows of ids where that has scales to find."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    rows = [{"input_ids": torch.tensor([[(row * 31 + column * 7) % 96 for column in range(32)]])} for row in range(4)]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    targets = {"targets": "Linear"} if "scheme" in arguments else {}
    oneshot(
        model=loaded,
        dataset=DataLoader(rows, batch_size=None),  # type: ignore[arg-type]  # a list has what it asks for
        processor=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))),
        recipe=QuantizationModifier(ignore=["lm_head"], **targets, **arguments),
        pipeline="basic",
    )
    loaded.save_pretrained(out, save_compressed=True)


def main() -> None:
    scratch, path = map(Path, sys.argv[1:])
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        write_model(scratch / dtype / "model", dtype)
        for case, arguments in CASES.items():
            compress(scratch / dtype / "model", scratch / dtype / case, arguments, dtype)
            print(case, dtype, flush=True)
            config, tensors = folder(scratch / dtype / case)
            scalars = {name: float(tensor) for name, tensor in tensors.items() if tensor.numel() == 1}
            digests = {name: digest(tensor) for name, tensor in sorted(tensors.items())}
            found[f"{case} {dtype}"] = {"quantization_config": config, "tensors": digests, "scalars": scalars}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
