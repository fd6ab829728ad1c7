"""Ways to damage a Hugging Face folder, each with how the message of a command begins."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.factories import CONFIG, hf_folder


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def another_family(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["LlamaForCausalLMs"]}))


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ')


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def empty_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 0)


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def missing_shard(folder: Path) -> None:
    hf_folder(folder, shards=2)
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def missing_tensor(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))


DAMAGES = [
    (no_config, "{0} is not a Hugging Face model folder: it has no config.json; give the model's folder"),
    (
        another_family,
        "{0}/config.json describes a LlamaForCausalLMs: trtpipe reads no model of this architecture; "
        "did you mean 'LlamaForCausalLM'?",
    ),
    (half_a_config, "model config {0}/config.json is not JSON: Expecting value: line 1 column 19 (char 18); "),
    (truncated, "{0}/model.safetensors is damaged: the header describes "),
    (empty_weights, "{0}/model.safetensors is damaged: 0 bytes is too short to hold a header; "),
    (lfs_pointer, "{0}/model.safetensors is a Git LFS pointer, not weights; "),
    (
        missing_shard,
        "model-00002-of-00002.safetensors is missing: {0}/model.safetensors.index.json names it; "
        "download the model again to complete it",
    ),
    (pickle_only, "{0} holds only pickle weights (pytorch_model.bin): a pickle can run code when it is loaded; "),
]
