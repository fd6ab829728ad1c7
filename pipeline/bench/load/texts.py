"""Texts of an exact number of tokens, all different from the first words on, in the served model's tokenizer.

A text is a row of words that the tokenizer knows as one token each. Its length is that of the whole text encoded
with special tokens, as NVIDIA's preprocessing model encodes it by default. No two texts of one object are equal, and
they differ within their first few words, so that reuse of KV blocks between requests does not flatter the server.

With most tokenizers no token runs over from one word to the next: they cut a text at its spaces first, or have no such
token. Then a row of one-token words has as many tokens as words whatever they are, which is checked once, over all
words. With any other tokenizer every text is encoded, and those of another length are changed until they fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.bench.load.seeds import generator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Enough that two texts rarely share a word at one position; few enough to be found in milliseconds.
WORDS = 2048
# A text's own beginning has as many words as it takes for this number of different beginnings.
BEGINNINGS = 1 << 24
# Rounds in which a text of a wrong length is changed; after them another text is drawn, at most this many times.
ROUNDS = 16
REDRAWS = 64

# A token in which a space follows another character, as three families of tokenizers write spaces.
_RUNS_OVER = re.compile("[^ \u2581\u0120][ \u2581\u0120]")


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
    # The file may store both settings, and they would falsify every length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Number of tokens of a generated text; special tokens are not added to an answer."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass
class _Row:
    """Words of a text of `tokens` tokens; the first `keep` of them are not changed to reach that length."""

    tokens: int
    words: list[str]
    keep: int


class Texts:
    """Makes texts with one tokenizer. The seed and the order of the calls determine them.

    special    number of tokens that the tokenizer adds to a text
    trailing   number of those that it adds at the end
    beginning  number of words within which a text differs from all others; with fewer words, distinct texts run out
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """Raises InputDataError for a vocabulary without two words of one token."""
        rng = generator(seed)
        alone = tokenizer.encode("a")
        mask = alone.special_tokens_mask
        self.special: int = sum(mask)
        leading = mask.index(0) if 0 in mask else 0
        self.trailing: int = self.special - leading
        self._begin_token = alone.tokens[0] if leading else None
        self._tokenizer = tokenizer
        self._between, words = _find_words(tokenizer, rng)
        self._words = np.array(words, dtype=object)
        encoded = tokenizer.encode_batch_fast(words)
        starters = [word for word, code in zip(words, encoded, strict=True) if len(code) == self.special + 1]
        self._starters = starters or words
        self._apart = bool(starters) and self._words_are_apart()
        self._made: dict[tuple[int, bool], int] = {}  # beginnings so far, by (number of words, opens a text)
        self._step, self._origin = (int(value) for value in rng.integers(1, 1 << 31, 2))
        self._beginning = {opens: self._words_to_differ(opens) for opens in (True, False)}
        self.beginning = max(self._beginning.values())

    def prompts(
        self,
        lengths: Sequence[int],
        rng: np.random.Generator,
        openings: Sequence[Sequence[str]] | None = None,
    ) -> list[str]:
        """A text of each length, different from all made so far, and after an opening where one is given.

        Raises UsageError when a length has no room for a word of the text's own, or when no further text exists.
        """
        return [self.joined(row.words) for row in self._unlike(lengths, rng, openings)]

    def opening(self, tokens: int, rng: np.random.Generator) -> list[str]:
        """Words that begin a text and make its first `tokens` tokens, special ones in front included."""
        (row,) = self._unlike([tokens + self.trailing], rng, None)
        return row.words

    def block(self, rng: np.random.Generator, count: int) -> list[str]:
        """Words of `count` tokens that depend on the state of `rng` alone. They can begin or continue a text."""
        first = self._starters[int(rng.integers(0, len(self._starters)))]
        return [first, *self.words(rng, count - 1)]

    def fit(self, words: list[str], tokens: int) -> str:
        """The text of words chosen to make `tokens` tokens; its end is changed where they make another number."""
        row = _Row(tokens, words, min(1, len(words)))
        if self._settle([row], generator(tokens)):
            raise self._unfit(tokens)
        return self.joined(row.words)

    def words(self, rng: np.random.Generator, count: int) -> list[str]:
        drawn: list[str] = self._words[rng.integers(0, len(self._words), count)].tolist()
        return drawn

    def follow(self, prompt: str, tokens: int, answer: str, words: list[str]) -> tuple[str, int]:
        """The next prompt of a conversation, and its tokens: `prompt` of `tokens` tokens, the answer, new words."""
        new = self._between + self.joined(words)
        text = prompt + answer + new
        before, space, last = prompt.rpartition(" ")
        if not (self._apart and before and self._between == space):
            return text, self.count([text])[0]
        # The tokenizer splits before the last word, and what precedes it has been counted: so a long conversation is
        # not encoded again at each turn, which would keep the measuring loop from its work.
        end = f"{self._starters[0]} {last}{answer}{new}"
        return text, tokens - 2 + count_tokens(self._tokenizer, end)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as the served preprocessing counts them.

        It adds nothing to a text that writes the first special token itself, as chat templates do.
        """
        marked = [self._begin_token is not None and text.startswith(self._begin_token) for text in texts]
        counts = [len(code) for code in self._tokenizer.encode_batch_fast(list(texts))]
        for index in (index for index, mark in enumerate(marked) if mark):
            counts[index] = count_tokens(self._tokenizer, texts[index])
        return counts

    def joined(self, words: Sequence[str]) -> str:
        return self._between.join(words)

    def _unlike(
        self, lengths: Sequence[int], rng: np.random.Generator, openings: Sequence[Sequence[str]] | None
    ) -> list[_Row]:
        begun: Sequence[Sequence[str]] = openings or [()] * len(lengths)
        rows = [self._begin(tokens, opening) for tokens, opening in zip(lengths, begun, strict=True)]
        missing = [row.tokens - self.special - row.keep for row in rows]
        drawn, start = self.words(rng, sum(missing)), 0
        for row, count in zip(rows, missing, strict=True):
            row.words += drawn[start : start + count]
            start += count
        wrong = list(range(len(rows)))
        for _ in range(REDRAWS):
            wrong = [wrong[index] for index in self._settle([rows[index] for index in wrong], rng)]
            if not wrong:
                return rows
            for index in wrong:
                rows[index] = self._begin(rows[index].tokens, begun[index])
        raise self._unfit(rows[wrong[0]].tokens)

    def _begin(self, tokens: int, opening: Sequence[str]) -> _Row:
        """The opening, and the words by which the text differs from every other."""
        own = tokens - self.special - len(opening)
        if own < 1:
            least = self.special + len(opening) + 1
            raise UsageError(
                f"a prompt of {tokens} tokens has no room for a word of its own",
                why=f"{least - 1} are special tokens or shared with others",
                remedy=f"give at least {least} input tokens",
            )
        opens = not opening
        count = min(own, self._beginning[opens])
        first = len(self._starters) if opens else len(self._words)
        number, possible = self._made.get((count, opens), 0), first * len(self._words) ** (count - 1)
        if number >= possible:
            raise UsageError(
                f"the tokenizer yields no more than {possible} distinct prompts of {tokens} tokens",
                remedy="raise the number of input tokens",
            )
        self._made[count, opens] = number + 1
        step = self._step
        while math.gcd(step, possible) > 1:
            step += 1
        # Takes every beginning once, far from the one before: the step has no common factor with their number.
        place = (self._origin + number * step) % possible
        words = []
        for _ in range(count - 1):
            place, digit = divmod(place, len(self._words))
            words.append(self._words[digit])
        words.append(self._starters[place] if opens else self._words[place])
        return _Row(tokens, [*opening, *reversed(words)], len(opening) + count)

    def _words_to_differ(self, opens: bool) -> int:
        count, possible = 1, len(self._starters) if opens else len(self._words)
        while possible < BEGINNINGS:
            count, possible = count + 1, possible * len(self._words)
        return count

    def _settle(self, rows: list[_Row], rng: np.random.Generator) -> list[int]:
        """Change the ends of rows until their lengths are right; returns the indices of those that resist."""
        wrong = [] if self._apart else list(range(len(rows)))
        for _ in range(ROUNDS):
            if not wrong:
                break
            counts = self.count([self.joined(rows[index].words) for index in wrong])
            found = [(index, count - rows[index].tokens) for index, count in zip(wrong, counts, strict=True)]
            wrong = [index for index, excess in found if excess]
            for index, excess in found:
                row = rows[index]
                if excess < 0:
                    row.words += self.words(rng, -excess)
                else:
                    del row.words[max(row.keep, len(row.words) - excess) :]
        return wrong

    def _words_are_apart(self) -> bool:
        """Whether each word is one token at its position, and no token depends on neighbouring words."""
        row = self._tokenizer.encode(self.joined([self._starters[0], *self._words]), add_special_tokens=False)
        if len(row) != len(self._words) + 1:
            return False
        if row.word_ids == list(range(len(row))):  # the tokenizer split off each word before its model ran
            return True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        return self._between == " " and not any(_RUNS_OVER.search(token) for token in vocabulary)

    def _unfit(self, tokens: int) -> UsageError:
        return UsageError(
            f"no text of exactly {tokens} tokens was found", remedy="ask for another number of input tokens"
        )


def _find_words(tokenizer: Tokenizer, rng: np.random.Generator) -> tuple[str, list[str]]:
    """The separator of words, and up to WORDS lower-case ASCII words of one token each.

    The separator is a space, or empty where a space is a token of its own: then the words are single letters.
    """
    ids = rng.permutation(tokenizer.get_vocab_size(with_added_tokens=False)).tolist()
    alone = count_tokens(tokenizer, "a")
    for between in (" ", ""):
        found: dict[str, None] = {}  # an ordered set: the seed determines the order too
        for start in range(0, len(ids), WORDS):
            texts = tokenizer.decode_batch([[token] for token in ids[start : start + WORDS]])
            words = [word for word in (text.strip() for text in texts) if word.isascii() and word.isalpha()]
            words = [word for word in words if word.islower() and (between or len(word) == 1)]
            encoded = tokenizer.encode_batch_fast([f"a{between}{word}" for word in words], add_special_tokens=False)
            found.update({word: None for word, code in zip(words, encoded, strict=True) if len(code) == alone + 1})
            if len(found) >= WORDS:
                break
        if len(found) >= 2:
            return between, list(found)[:WORDS]
    raise InputDataError(
        "the tokenizer knows no two words of one token",
        why="prompts of an exact length are made of such words",
        remedy="give the tokenizer.json of the model that is served",
    )
