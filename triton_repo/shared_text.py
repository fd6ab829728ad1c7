"""The module that the text models of a repository share, loaded for ourselves; and what is made with it."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

_SHARED = Path(__file__).parent / "templates" / "shared" / "trtpipe_text.py"


@functools.cache
def shared() -> Any:
    """The module that every text model of a repository has a copy of; it is payload, and in no package."""
    spec = importlib.util.spec_from_file_location("trtpipe_text", _SHARED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokenizer_info(folder: Path) -> str:
    """What the C++ backend's guided decoding reads of the tokenizer in `folder`, as JSON: each token's text in the
    vocabulary's own writing, by id; the tokenizer.json; the tokens that end an answer."""
    tokenizer = shared().load_tokenizer(folder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for text, number in vocabulary.items():
        tokens[number] = text
    ends, _, _ = shared().special_ids(folder, tokenizer)
    return json.dumps({"encoded_vocab": tokens, "tokenizer_str": tokenizer.to_str(), "stop_token_ids": ends})
