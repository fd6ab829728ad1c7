"""Worker: a GGUF file -> HF folder (bfloat16 safetensors and fast tokenizer), through transformers' reader.

Its argument is `{"gguf": FILE, "out": FOLDER}`; it needs torch, transformers and gguf.

Two things that reader loses are put right: rotary settings are written in both spellings, because older readers
know only `rope_theta`; and SmolLM's digit-by-digit pre-tokenizer, which the file names and the reader ignores.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from trtpipe.engines.json_input import load_json

# `tokenizer.ggml.pre` -> the pre-tokenizer it stands for, in tokenizer.json's terms
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def main() -> None:
    import gguf
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers looks both up in the package at each use: five readings of a vocabulary, seconds each, and a map of
    # all tensors' names for every module.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[misc, assignment]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

    spec = json.loads(sys.argv[1])
    source, out = Path(spec["gguf"]), Path(spec["out"])
    options: dict[str, Any] = {"gguf_file": source.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the codes unless they are told not to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
    _write_both_rope_spellings(out / "config.json")
    _restore_pre_tokenizer(source, out / "tokenizer.json")


def _write_both_rope_spellings(path: Path) -> None:
    config = load_json(path)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    config["torch_dtype"] = config.get("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _restore_pre_tokenizer(source: Path, path: Path) -> None:
    import gguf

    field = gguf.GGUFReader(str(source)).get_field("tokenizer.ggml.pre")
    name = field.contents() if field is not None else None
    if name not in PRE_TOKENIZERS:
        return
    tokenizer = load_json(path)
    tokenizer["pre_tokenizer"] = PRE_TOKENIZERS[name]
    tokenizer["decoder"] = BYTE_LEVEL
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
