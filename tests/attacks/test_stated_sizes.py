"""Files that state sizes which their bytes do not have: every command says so at once, and allocates nothing for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.running import run_apart
from tests.support.factories import GGUF_KEYS, gguf_bytes, hf_folder
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.convert import convert

pytestmark = pytest.mark.process

LAYERS = 2_000_000
# A refusal takes a fraction of a second and 10 MB. The bound on time is for a busy machine: what it is for had no end.
MOST_SECONDS = 20.0
MOST_BYTES = 110 << 20


def change(path: Path, **values: Any) -> None:
    """Give a JSON object other values; a value that is an object is merged."""
    raw = json.loads(path.read_text())
    for name, value in values.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) and isinstance(raw.get(name), dict) else value
    path.write_text(json.dumps(raw))


def model(folder: Path, **stated: Any) -> None:
    """A Hugging Face folder of two tiny layers whose config.json states other sizes."""
    hf_folder(folder / "model")
    change(folder / "model" / "config.json", **stated)


def checkpoint(folder: Path, **stated: Any) -> None:
    """A TensorRT-LLM checkpoint of two tiny layers, likewise; `model` beside it is as it should be."""
    hf_folder(folder / "model")
    (folder / "checkpoint").mkdir()
    convert(folder / "model", folder / "checkpoint", dtype=None, mapping=Mapping())
    change(folder / "checkpoint" / "config.json", **stated)


def quantized(folder: Path, **stated: Any) -> None:
    model(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}, **stated)


def header(tensors: int) -> bytes:
    """A safetensors file of so many empty tensors."""
    entries = b",".join(b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(tensors))
    text = b"{" + entries + b"}"
    return struct.pack("<Q", len(text)) + text


def many_tensors(folder: Path, count: int) -> None:
    model(folder)
    (folder / "model" / "model.safetensors").write_bytes(header(count))


def many_names(folder: Path, count: int) -> None:
    """An index that places `count` tensors in the one shard."""
    model(folder)
    entries = ",".join(f'"model.layers.{number}.weight":"model.safetensors"' for number in range(count))
    (folder / "model" / "model.safetensors.index.json").write_text('{"weight_map":{' + entries + "}}")


def gguf(folder: Path, **stated: int) -> None:
    keys = {**GGUF_KEYS, **{f"llama.{name}": value for name, value in stated.items()}}
    (folder / "model.gguf").write_bytes(gguf_bytes(keys))


BUILD = "build --gpu cpu --dtype fp32 --model"
HUGE = {"num_attention_heads": 1 << 30, "num_key_value_heads": 1 << 30, "hidden_size": 1 << 30, "vocab_size": 1 << 30}
WIDE = {"num_hidden_layers": 1000, "vocab_size": 1 << 23}
CASES: list[tuple[str, Callable[[Path], None], tuple[str, ...], str]] = [
    (
        "layers of a model", lambda folder: model(folder, num_hidden_layers=LAYERS),
        (
            "convert model out", "inspect model", "quantize model out --quant fp8", "verify model model",
            "plan --model model", f"{BUILD} model",
        ),
        "num_hidden_layers is 2,000,000, and at most 1,024 are read",
    ),
    (
        "sizes of a model", lambda folder: model(folder, **HUGE),
        ("convert model out --tp 3", "inspect model", "plan --model model", "build --gpu h100 --model model"),
        "num_attention_heads is 1,073,741,824, and at most 1,024 are read",
    ),
    (
        "sizes within the limits", lambda folder: model(folder, **WIDE), ("convert model out", "inspect model"),
        "has shape [300, 32]: config.json implies [8388608, 32]",
    ),
    (
        "layers of a quantized model", lambda folder: quantized(folder, num_hidden_layers=LAYERS), ("inspect model",),
        "num_hidden_layers is 2,000,000, and at most 1,024 are read",
    ),
    (
        "layers of a checkpoint", lambda folder: checkpoint(folder, num_hidden_layers=LAYERS),
        (
            "inspect checkpoint", "restore checkpoint out", "inspect checkpoint --verify-against model",
            "verify model checkpoint",
        ),
        "num_hidden_layers is 2,000,000, and at most 1,024 are read",
    ),
    (
        "ranks of a checkpoint", lambda folder: checkpoint(folder, mapping={"tp_size": 1 << 30, "pp_size": 1 << 30}),
        ("inspect checkpoint", "restore checkpoint out"),
        "world_size is 1,152,921,504,606,846,976, and at most 4,096 are read",
    ),
    (
        "vocabulary of a checkpoint", lambda folder: checkpoint(folder, vocab_size=1 << 23),
        ("inspect checkpoint", "restore checkpoint out"), "[8388608, 32]",
    ),
    (
        "tensors of a file", lambda folder: many_tensors(folder, 250_000), ("inspect model", "convert model out"),
        "its header holds more than 1,500,000 values",
    ),
    (
        "bytes of a header", lambda folder: many_tensors(folder, 300_000), ("inspect model",),
        "its header has 17,288,891 bytes, and at most 16,777,216 are read",
    ),
    (
        "names of an index", lambda folder: many_names(folder, 400_000), ("inspect model", "convert model out"),
        "cannot be read: it has more than 16,777,216 bytes",
    ),
    (
        "layers of a GGUF file", lambda folder: gguf(folder, block_count=LAYERS), (f"{BUILD} model.gguf",),
        "llama.block_count is 2,000,000, and at most 1,024 are read",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "asked", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_stated_size_is_refused_at_once(
    in_folder: Path, make: Callable[[Path], None], asked: tuple[str, ...], message: str
) -> None:
    make(in_folder)
    for command in asked:
        ended = run_apart(command.split())
        errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert (ended.code, len(errors)) == (3, 1), ended.err
        assert message in errors[0]
        assert ended.seconds < MOST_SECONDS, command
        assert ended.peak < MOST_BYTES, command
        assert not (in_folder / "out").exists()
