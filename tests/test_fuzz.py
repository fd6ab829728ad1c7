"""Ten thousand damaged folders: each is refused by our own error class or is a sound folder; nothing else happens."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.errors import TrtpipeError
from engines.hf_folder import locate_tensors, read_model_config
from engines.tensorrt_llm.convert import check_source
from tests.factories import hf_folder

ROUNDS = 10_000
TINY = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 5,
        "num_hidden_layers": 1}  # fmt: skip
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 2**31, 2**63, 2**64, 10**400, -(2**70), 1e308, "", "BF16", "F8_E5M2", "x" * 5000, "../x",
    "/etc/passwd", "\ud800", [], {}, [[]], [1, 2], [2**62, 2**62], [True, False], {"a": {}}, {"rope_theta": "x"},
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    out: list[tuple[Any, Any]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        out.append((value, key))
        out += places(inner)
    return out


def mutate_json(rng: random.Random, text: bytes) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return text[: rng.randrange(len(text))]
    if kind == 1:
        at = rng.randrange(len(text))
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    value = json.loads(text)
    container, key = rng.choice(places(value))
    if kind == 3:
        container[key] = rng.choice(NASTY)
    elif kind == 4:
        del container[key]
    else:  # another entry twice: the text, since a dictionary cannot hold it
        name = json.dumps(rng.choice(list(value)))
        return text.rstrip()[:-1] + b"," + name.encode() + b":" + json.dumps(rng.choice(NASTY)).encode() + b"}"
    return json.dumps(value).encode()


def mutate_shard(rng: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1])) + data[8:]
    changed = mutate_json(rng, header.rstrip())
    if kind == 2:
        changed = changed.ljust(length)
    return struct.pack("<Q", len(changed)) + changed + body


@pytest.mark.parametrize("part", range(4))
def test_damage_is_always_told_in_our_own_words(tmp_path: Path, part: int) -> None:
    folder = hf_folder(tmp_path / "hf", shards=2, tokenizer=False, **TINY)
    files: list[tuple[Path, Callable[[random.Random, bytes], bytes]]] = [
        (folder / "config.json", mutate_json),
        (folder / "model.safetensors.index.json", mutate_json),
        (folder / "model-00001-of-00002.safetensors", mutate_shard),
    ]
    sound = {path: path.read_bytes() for path, _ in files}
    rng = random.Random(part)
    refusals: list[TrtpipeError] = []
    for _ in range(ROUNDS // 4):
        path, mutate = rng.choice(files)
        path.write_bytes(mutate(rng, sound[path]))
        try:
            check_source(folder, read_model_config(folder), locate_tensors(folder))
        except TrtpipeError as error:
            refusals.append(error)
        finally:
            path.write_bytes(sound[path])
    assert {error.exit_code for error in refusals} == {3}
    assert not [error for error in refusals if "\n" in str(error)]
    # A changed epsilon or an extra key is no damage; most of the rest is.
    assert len(refusals) > ROUNDS // 4 * 0.6
