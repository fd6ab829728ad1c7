"""Prompts of an exact number of tokens, all different, from a seed.

A prompt is a row of words that the tokenizer knows as one token each. Its length is that of the whole text
encoded by the given tokenizer, special tokens included, as NVIDIA's preprocessing model encodes it by default
(`add_special_tokens`). No two prompts of one run are equal, and they differ from the first words on, so that
reuse of KV blocks between requests does not flatter the server.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import InputDataError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Enough words that two prompts rarely share their first; few enough to be found in milliseconds.
WORDS = 2048
# Draws without a new prompt after which there is none.
DRAWS = 200


def load_tokenizer(path: Path) -> Tokenizer:
    """Read tokenizer.json. Raises InputDataError naming the file."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise InputDataError(
            f"tokenizer {path} is not a file", remedy="give the tokenizer.json of the model that is served"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputDataError(f"tokenizer {path} cannot be read", why=str(error), remedy="replace it") from None
    # Both may be stored in the file and would make every length a lie.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of a generated text; special tokens are not added to an answer."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def words(tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    """Up to WORDS lower-case ASCII words of one token each when they follow a space.

    Raises InputDataError for a vocabulary without two of them.
    """
    ids = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    rng.shuffle(ids)
    alone = count_tokens(tokenizer, "a")
    found: dict[str, None] = {}  # an ordered set: the order is part of what the seed fixes
    for start in range(0, len(ids), WORDS):
        texts = tokenizer.decode_batch([[token] for token in ids[start : start + WORDS]])
        candidates = [word for word in (text.strip() for text in texts) if word.isascii() and word.isalpha()]
        candidates = [word for word in candidates if word.islower()]
        encoded = tokenizer.encode_batch([f"a {word}" for word in candidates], add_special_tokens=False)
        found.update({word: None for word, code in zip(candidates, encoded, strict=True) if len(code.ids) == alone + 1})
        if len(found) >= WORDS:
            break
    if len(found) < 2:
        raise InputDataError(
            "the tokenizer knows no two words of one token",
            why="prompts of an exact length are made of such words",
            remedy="give the tokenizer.json of the model that is served",
        )
    return list(found)[:WORDS]


def prompts(tokenizer: Tokenizer, *, tokens: int, seed: int) -> Iterator[str]:
    """Distinct prompts of exactly `tokens` tokens; the same ones in the same order for the same seed.

    Raises UsageError when the special tokens alone are that many, or when no further distinct prompt exists.
    """
    special = len(tokenizer.encode("").ids)
    if tokens <= special:
        raise UsageError(
            f"a prompt of {tokens} tokens has no room for a word",
            why=f"the tokenizer adds {special} special tokens",
            remedy=f"give at least {special + 1} input tokens",
        )
    rng = random.Random(seed)
    pool = words(tokenizer, rng)
    seen: set[str] = set()
    while True:
        for _ in range(DRAWS):
            text = _draw(tokenizer, pool, rng, tokens, tokens - special)
            if text is not None and text not in seen:
                break
        else:
            raise UsageError(
                f"the tokenizer yields no more than {len(seen)} distinct prompts of {tokens} tokens",
                remedy="raise the number of input tokens",
            )
        seen.add(text)
        yield text


def _draw(tokenizer: Tokenizer, pool: list[str], rng: random.Random, tokens: int, guess: int) -> str | None:
    chosen = rng.choices(pool, k=guess)
    # The first word follows no space and may be more than one token, so the whole text decides.
    for _ in range(8):
        text = " ".join(chosen)
        excess = len(tokenizer.encode(text).ids) - tokens
        if excess == 0:
            return text
        if excess >= len(chosen):
            return None
        if excess > 0:
            del chosen[-excess:]
        else:
            chosen += rng.choices(pool, k=-excess)
    return None
