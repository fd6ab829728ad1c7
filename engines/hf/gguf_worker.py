"""Worker that converts a GGUF file to an HF folder (bfloat16 safetensors and fast tokenizer) with transformers.

Its argument is `{"gguf": FILE, "out": FOLDER}`; it needs torch, transformers and gguf.

The worker corrects what transformers ignores or leaves to the reader: it states the number of KV heads, without which
the rows of q and k stay in llama.cpp's order; it writes the older names of rotary settings too, which other readers
know; and it has the tokenizer split a text, begin it and end it as the file says, with the file's own tokens.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from trtpipe.engines.hf.gguf_tokenizer import BYTE_LEVEL
from trtpipe.engines.hf.layout import with_older_names
from trtpipe.engines.json_input import load_json
from trtpipe.engines.process import Progress, serve_worker

DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
# Type of tokens that a text is searched for before it is split, such as <|im_start|>.
USER_DEFINED = 4


def work(spec: dict[str, Any], progress: Progress) -> None:
    import gguf

    # transformers calls both functions of the package at each use: it reads the vocabulary five times, seconds each,
    # and maps all tensors' names for every module. Caching avoids that.
    gguf.GGUFReader = functools.cache(functools.partial(_read, gguf.GGUFReader))  # type: ignore[misc, assignment]
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
    config = with_older_names(load_json(out / "config.json"))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _correct_tokenizer(source, out)


def _read(reader: Any, path: Any) -> Any:
    """The reader of a file, with as many KV heads as heads where it does not state them."""
    found = reader(path)
    heads = f"{found.get_field('general.architecture').contents()}.attention.head_count"
    found.fields.setdefault(f"{heads}_kv", found.get_field(heads))
    return found


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


def _correct_tokenizer(source: Path, out: Path) -> None:
    """Write the split, the user-defined tokens, the BOS token before a text and the EOS token into the tokenizer's two
    files."""
    import gguf

    reader = gguf.GGUFReader(str(source))

    def value(name: str, otherwise: Any = None) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{name}")
        return otherwise if field is None else field.contents()

    def text(number: int) -> str:
        return str(reader.get_field("tokenizer.ggml.tokens").contents(number))  # type: ignore[union-attr]

    tokenizer, settings = (load_json(out / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    level = BYTE_LEVEL[value("pre")] if value("model") == "gpt2" else None
    if level is not None:
        tokenizer.update(pre_tokenizer=level.pre_tokenizer, decoder=DECODER)
        tokenizer["model"]["ignore_merges"] = level.ignore_merges
    bos, eos = value("bos_token_id"), value("eos_token_id")
    if bos is not None and value("add_bos_token", level is None or level.bos):
        tokenizer["post_processor"] = _begin(bos, text(bos))
    if eos is not None:
        settings.update(eos_token=text(eos), eos_token_id=eos)
    known = {token["content"] for token in tokenizer["added_tokens"]}
    defined = [number for number, kind in enumerate(value("token_type", ())) if kind == USER_DEFINED]
    tokenizer["added_tokens"] += [
        _added(number, text(number), special=number == eos) for number in defined if text(number) not in known
    ]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings_text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(settings_text, encoding="utf-8")


def _added(number: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens` of tokenizer.json; a text is searched for it as it stands."""
    unread = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **unread, "special": special}


def _begin(number: int, token: str) -> dict[str, Any]:
    """A post-processor of tokenizer.json that puts a token before each text."""
    first, second = ([{"SpecialToken": {"id": token, "type_id": n}}, {"Sequence": {"id": name, "type_id": n}}]
                     for n, name in enumerate("AB"))  # fmt: skip
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": first, "pair": [*first, *second], "special_tokens": special}


if __name__ == "__main__":
    serve_worker(work)
