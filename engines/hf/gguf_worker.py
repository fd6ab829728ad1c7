"""Worker that converts a GGUF file to an HF folder (bfloat16 safetensors and fast tokenizer) with transformers.

Its argument is `{"gguf": FILE, "out": FOLDER}`; it needs torch, transformers and gguf.

The worker corrects two things: it writes rotary settings in both forms, because older readers know only
`rope_theta`; and it sets SmolLM's digit-by-digit pre-tokenizer, which the file names and transformers ignores.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from trtpipe.engines.json_input import load_json
from trtpipe.engines.process import Progress, serve_worker

# `tokenizer.ggml.pre` -> its pre-tokenizer in the form of tokenizer.json
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


def work(spec: dict[str, Any], progress: Progress) -> None:
    import gguf

    # transformers calls both functions of the package at each use: it reads the vocabulary five times, seconds each,
    # and maps all tensors' names for every module. Caching avoids that.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[misc, assignment]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    source, out = Path(spec["gguf"]), Path(spec["out"])
    _report_reading(source, progress)

    import torch  # after the first report: these imports take most of the time of a small model
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": source.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the quantized codes by default
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
    _write_both_rope_spellings(out / "config.json")
    _restore_pre_tokenizer(source, out / "tokenizer.json")


def _report_reading(source: Path, progress: Progress) -> None:
    """Have `progress` called with the bytes of the tensors: now, and as transformers reads them one by one."""
    import gguf

    read, total, done = gguf.dequantize, sum(tensor.n_bytes for tensor in gguf.GGUFReader(str(source)).tensors), 0
    progress(done, total)

    def dequantize(data: Any, kind: Any) -> Any:
        nonlocal done
        values = read(data, kind)
        done += data.nbytes
        progress(done, total)
        return values

    gguf.dequantize = dequantize  # type: ignore[assignment]


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
    serve_worker(work)
