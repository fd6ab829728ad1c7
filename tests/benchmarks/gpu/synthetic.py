"""A Llama of Llama 3 8B's shapes and random weights, with a tokenizer. Runs in the engine's environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(folder: str) -> dict[str, Any]:
    """Write a Llama of Llama 3 8B's shapes and random weights, with a tokenizer of as many tokens; its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.benchmarks.convert import COMMON, SIZES

    torch.manual_seed(0)
    config = LlamaConfig(**{**COMMON, **SIZES["8b"], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None})
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="5GB")
    tokenizer(Path(folder), config.vocab_size)
    return {"bytes": sum(parameter.nbytes for parameter in model.parameters())}


def tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE of `size` tokens: two specials, the bytes, then a space and up to three letters."""
    from string import ascii_letters

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: index for index, name in enumerate(["<s>", "</s>", *alphabet])}
    words = ["\u0120"]  # how byte-level BPE spells a space
    merges: list[tuple[str, str]] = []
    for _ in range(3):
        grown = [(word, letter) for word in words for letter in ascii_letters]
        merges += grown
        words = [word + letter for word, letter in grown]
    merges = merges[: size - len(vocab)]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
