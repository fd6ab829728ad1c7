"""Tokenizers of every kind that prompts have to be exact with, small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.factories import write_tokenizer

WORDS = "ant bee cow dog elk fox gnu hen ibis jay kiwi lark mole newt owl pig quail rat seal toad"
KINDS = ("byte-level", "both ends", "unsplit", "letters")
# Of no model, and the worst that could be.
RUN_OVER = "run over"


def make(kind: str, folder: Path) -> Path:
    """Write a tokenizer.json.

    byte-level  like Llama 3's: cut at spaces, one special token in front
    both ends   the same with one at the end too, and few words that are one token without a space before them
    unsplit     like Llama 2's: spaces are letters, and a text is cut nowhere, yet no token holds parts of two words
    run over    the same, and tokens do
    letters     bytes without merges: every letter and every space is a token
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if kind == "letters":
        write_tokenizer(folder)
        return path
    tokenizer = Tokenizer(models.BPE())
    if kind in ("unsplit", RUN_OVER):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    alone = [] if kind == "both ends" else WORDS.split()
    rows = [] if kind == "unsplit" else [WORDS]
    tokenizer.train_from_iterator([*rows, *alone] * 50, trainer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    form = "<s> $A </s>" if kind == "both ends" else "<s> $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.save(str(path))
    return path
