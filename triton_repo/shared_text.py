"""Loader of the module that the text models of a repository share, and the tokenizer file that is made with it."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

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


def tokenizer_info(folder: Path) -> str:
    """The JSON file that the C++ backend's guided decoding reads about the tokenizer in `folder`.

    It has each token's text as the vocabulary writes it, by id, the text of tokenizer.json, and the ids of the tokens
    that end an answer.
    """
    tokenizer = shared().load_tokenizer(folder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for text, number in vocabulary.items():
        tokens[number] = text
    ends, _, _ = shared().special_ids(folder, tokenizer)
    return json.dumps({"encoded_vocab": tokens, "tokenizer_str": tokenizer.to_str(), "stop_token_ids": ends})
