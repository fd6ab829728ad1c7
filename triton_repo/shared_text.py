"""Loader of the module that the text models of a repository share, and the tokenizer file that is made with it."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.sizes import excess

_SHARED = Path(__file__).parent / "templates" / "shared" / "trtpipe_text.py"


@functools.cache
def shared() -> Any:
    """The module of which every text model of a repository gets a copy. It is a template, so no package has it."""
    spec = importlib.util.spec_from_file_location("trtpipe_text", _SHARED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_text(folder: Path) -> tuple[Any, list[int], int, str | None]:
    """(tokenizer, end ids, pad id, text that begins a sequence) of `folder`, as the text models of a repository read
    them. Raises InputDataError where there is no tokenizer, or where one of the others is of another kind."""
    try:
        tokenizer = shared().load_tokenizer(folder)
        ends, pad, beginning = shared().special_ids(folder, tokenizer)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise InputDataError(f"{folder} holds no tokenizer that can be read", why=str(error)) from None
    if not all(type(token) is int and 0 <= token < 2**31 for token in [*ends, pad]):
        raise InputDataError(
            f"the end or padding token of {folder} is not a token id",
            why=f"eos_token_id is {str(ends)[:80]}, pad_token_id {str(pad)[:80]}",
            remedy="correct generation_config.json",
        )
    if beginning is not None and type(beginning) is not str:
        raise InputDataError(f"bos_token of {folder} is not a text", remedy="correct tokenizer_config.json")
    return tokenizer, ends, pad, beginning


def tokenizer_info(folder: Path) -> str:
    """The JSON file that the C++ backend's guided decoding reads about the tokenizer in `folder`.

    It has each token's text as the vocabulary writes it, by id, the text of tokenizer.json, and the ids of the tokens
    that end an answer. Raises InputDataError.
    """
    tokenizer, ends, _, _ = read_text(folder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if fault := excess("vocab_size", size):
        raise InputDataError(f"the vocabulary of {folder} is too large", why=fault, remedy="download the model again")
    tokens = [""] * size
    for text, number in vocabulary.items():
        tokens[number] = text
    return json.dumps({"encoded_vocab": tokens, "tokenizer_str": tokenizer.to_str(), "stop_token_ids": ends})
