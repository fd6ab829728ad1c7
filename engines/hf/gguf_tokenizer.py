"""Rules by which byte-level tokenizers of GGUF files split a text; a file has only the rule's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ByteLevel:
    """How a byte-level tokenizer splits a text.

    pre_tokenizer  split into pieces, each of which the merges make tokens of; in the form of tokenizer.json
    ignore_merges  whether a piece that is a token stays it, whatever the merges make of it
    bos            whether a text begins with the BOS token, where `tokenizer.ggml.add_bos_token` does not say it
    """

    pre_tokenizer: dict[str, Any]
    ignore_merges: bool
    bos: bool


def _sequence(first: dict[str, Any], *, use_regex: bool) -> dict[str, Any]:
    """A split, then the bytes' spelling; with `use_regex` after GPT-2's split."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "Sequence", "pretokenizers": [first, level]}


# Letters with the character before them, up to three digits, other characters with line breaks, white space.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> its tokenizer
BYTE_LEVEL = {
    "smollm": ByteLevel(
        pre_tokenizer=_sequence({"type": "Digits", "individual_digits": True}, use_regex=True),
        ignore_merges=False,
        bos=False,
    ),
    "llama-bpe": ByteLevel(
        pre_tokenizer=_sequence(
            {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated", "invert": False}, use_regex=False
        ),
        ignore_merges=True,
        bos=True,
    ),
}
