"""The header of a GGUF file: what is sound passes, what is truncated, untrue or of another model is named."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.factories import GGUF_KEYS, gguf_bytes, gguf_tensors
from trtpipe.engines.hf.gguf_file import BLOCKS, GgufError, check_gguf


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(GgufError) as caught:
        check_gguf(path)
    return str(caught.value).replace(str(path), "FILE")


def test_a_sound_file_passes(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    keys = {**GGUF_KEYS, "llama.attention.key_length": 8}
    for data in (gguf_bytes(), gguf_bytes(keys, {**gguf_tensors(), "output.weight": (32, 2)})):
        path.write_bytes(data)
        check_gguf(path)


def test_a_library_s_file_passes(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "</s>"])
    writer.add_token_scores([0.0, 1.0])
    writer.add_add_bos_token(True)
    for name, shape in gguf_tensors().items():
        writer.add_tensor(name, np.zeros(shape[::-1], np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_gguf(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "gemma"}, "FILE describes a gemma: GGUF files of Llama and Mistral alone are read"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing from FILE: llama.block_count is 3"),
        (
            {"llama.block_count": 2_000_000},
            "FILE: llama.block_count is 2,000,000, and at most 1,024 are read; download it again",
        ),
        ({"llama.block_count": -1}, "FILE: llama.block_count is -1, not a positive whole number"),
        ({"llama.block_count": "2"}, "FILE: llama.block_count is '2', not a positive whole number"),
        (
            {"llama.embedding_length": 2**31},
            "FILE: llama.embedding_length is 2,147,483,648, and at most 131,072 are read; download it again",
        ),
        (
            {"llama.embedding_length": 64},
            "tensor 'output_norm.weight' in FILE has the dimensions [32]: its keys imply [64]",
        ),
        (
            {"llama.feed_forward_length": 96},
            "tensor 'blk.0.ffn_gate.weight' in FILE has the dimensions [32, 48]: its keys imply [32, 96]",
        ),
        (
            {"llama.attention.key_length": 16},
            "tensor 'blk.0.attn_q.weight' in FILE has the dimensions [32, 32]: its keys imply [32, 64]",
        ),
        (
            {"llama.attention.head_count_kv": 4},
            "tensor 'blk.0.attn_k.weight' in FILE has the dimensions [32, 16]: its keys imply [32, 32]",
        ),
    ],
)
def test_keys_that_the_tensors_do_not_bear_out(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    assert refused(tmp_path / "a.gguf", gguf_bytes({**GGUF_KEYS, **keys})) == message


FOLDER = "give the folder of the model's safetensors"


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.2.attn_norm.weight", "x"])
def test_a_tensor_that_would_be_left_out(tmp_path: Path, name: str) -> None:
    assert refused(tmp_path / "a.gguf", gguf_bytes(tensors={**gguf_tensors(), name: (4,)})) == (
        f"FILE has a tensor '{name}', which is not read from a GGUF file: the model would be another without it; "
        f"{FOLDER}"
    )


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4}, "linear, factor 4"),
        ({"scaling.factor": 4}, "linear, factor 4"),
        ({"scale_linear": 8}, "linear, factor 8"),
        ({"scaling.type": "yarn", "scaling.factor": 1}, "yarn, factor 1"),
        ({"scaling.type": "longrope"}, "longrope, factor 1"),
    ],
)
def test_a_rotary_scaling_that_would_be_lost(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    given = {**GGUF_KEYS, **{f"llama.rope.{name}": value for name, value in keys.items()}}
    assert refused(tmp_path / "a.gguf", gguf_bytes(given)) == (
        f"FILE scales its rotary positions ({told}): no scaling is read from a GGUF file; {FOLDER}"
    )


@pytest.mark.parametrize(
    "keys", [{"scale_linear": 1}, {"scaling.factor": 0}, {"scaling.type": "none", "scaling.factor": 8}]
)
def test_a_scaling_that_is_none_passes(tmp_path: Path, keys: dict[str, Any]) -> None:
    given = {**GGUF_KEYS, **{f"llama.rope.{name}": value for name, value in keys.items()}}
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(given))
    check_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("model", "pre"), [("gpt2", "qwen2"), ("gpt2", "default"), ("gpt2", None), ("bert", "llama-bpe")]
)
def test_a_tokenizer_whose_rule_is_not_known(tmp_path: Path, model: str, pre: str | None) -> None:
    keys = {**GGUF_KEYS, "tokenizer.ggml.model": model, **({} if pre is None else {"tokenizer.ggml.pre": pre})}
    assert refused(tmp_path / "a.gguf", gguf_bytes(keys)) == (
        f"FILE has a tokenizer that is not read here (model {model}, pre {pre}): of byte-level tokenizers smollm and "
        f"llama-bpe are read; {FOLDER}"
    )


@pytest.mark.parametrize(("model", "pre"), [("gpt2", "smollm"), ("gpt2", "llama-bpe"), ("llama", "default")])
def test_a_tokenizer_that_is_read_passes(tmp_path: Path, model: str, pre: str) -> None:
    keys = {**GGUF_KEYS, "tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre}
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(keys))
    check_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"token_embd.weight": (16, 2)}, "FILE has no usable tensor 'token_embd.weight': llama.embedding_length is 32"),
        ({"x": (2, 2, 2, 2, 2)}, "FILE is damaged: tensor 'x' has 5 dimensions; download it again"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str) -> None:
    assert refused(tmp_path / "a.gguf", gguf_bytes(tensors={**gguf_tensors(), **tensors})) == message


@pytest.mark.parametrize("lost", [1, 1000, 5000])
def test_a_download_that_ends_within_the_tensors(tmp_path: Path, lost: int) -> None:
    data = gguf_bytes()
    assert refused(tmp_path / "a.gguf", data[:-lost]) == (
        "FILE is damaged: it ends within its tensors; download it again"
    )


def test_sizes_of_types_are_those_of_the_library() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    theirs = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    assert theirs == {kind: BLOCKS[kind] for kind in theirs}


def test_a_type_that_is_not_known(tmp_path: Path) -> None:
    name = b"output_norm.weight"
    data = bytearray(gguf_bytes())
    place = data.index(name) + len(name) + 4 + 8
    data[place : place + 4] = struct.pack("<I", 99)
    assert refused(tmp_path / "a.gguf", bytes(data)) == (
        f"tensor 'output_norm.weight' in FILE is of the unknown type 99; {FOLDER}"
    )


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    keys = {key: value for key, value in GGUF_KEYS.items() if key != "tokenizer.ggml.tokens"}
    assert refused(tmp_path / "a.gguf", gguf_bytes(keys)) == (
        f"FILE has no tokenizer: tokenizer.ggml.tokens is missing; {FOLDER}"
    )


HEAD = b"GGUF" + struct.pack("<I", 3)
NAME = struct.pack("<Q", 1) + b"a"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            HEAD + struct.pack("<QQ", 2**60, 0),
            "its header states 1,152,921,504,606,846,976 tensors, and at most 20,480",
        ),
        (HEAD + struct.pack("<QQ", 0, 2**60), "its header states 1,152,921,504,606,846,976 keys, and at most 10,000"),
        (HEAD + struct.pack("<QQ", 20_000, 0), "it ends within its header"),
        (HEAD + struct.pack("<QQQ", 0, 1, 2**63), "its header states 9,223,372,036,854,775,808 bytes of a string"),
        (HEAD + struct.pack("<QQ", 0, 1) + NAME + struct.pack("<I", 13), "a value has the unknown type 13"),
        (HEAD + struct.pack("<QQ", 0, 1) + NAME + struct.pack("<IIQ", 9, 9, 1), "an array holds values of type 9"),
        (
            HEAD + struct.pack("<QQ", 0, 1) + NAME + struct.pack("<IIQ", 9, 0, 2**62),
            "its header states 4,611,686,018,427,387,904 items of an array, and at most 1,048,576 are read",
        ),
        (HEAD + struct.pack("<QQ", 0, 1) + NAME + struct.pack("<IIQ", 9, 12, 2**20), "it ends within its header"),
        (
            HEAD + struct.pack("<QQ", 1, 0) + NAME + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
            "its tensors have 1,208,925,819,614,629,174,706,176 elements, in a file of 65 bytes",
        ),
    ],
)
def test_counts_that_the_file_does_not_have(tmp_path: Path, data: bytes, why: str) -> None:
    assert refused(tmp_path / "a.gguf", data).startswith(f"FILE is damaged: {why}")


def test_another_version(tmp_path: Path) -> None:
    data = b"GGUF" + struct.pack(">I", 3) + bytes(16)
    assert refused(tmp_path / "a.gguf", data) == "FILE is of GGUF version 50331648: 2 and 3 are read"


@given(cut=st.integers(0, 1500), at=st.integers(4, 1500), value=st.binary(min_size=1, max_size=8))
def test_damage_is_named_or_harmless(tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, value: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    data = bytearray(gguf_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data[: len(data) - cut])
    with contextlib.suppress(GgufError):  # anything else is a traceback
        check_gguf(path)
