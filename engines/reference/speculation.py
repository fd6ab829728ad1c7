"""Draft tokens of speculative decoding: guessed from the text itself, or by a small model.

The runtime computes a request's draft tokens in one step with its last token, and draws the next tokens one after
another as it does without drafts; each that equals its draft token saves a step. So drafts change the number of steps
of an answer, but not its text, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from trtpipe.engines.reference.attention import Span
from trtpipe.engines.reference.hf_weights import HfFolder
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.scheduler import Chunk, Sequence
from trtpipe.engines.reference.weights import load_all
from trtpipe.engines.speculation import LONGEST_NGRAM, SHORTEST_NGRAM


class Drafter(Protocol):
    """Maker of draft tokens."""

    def propose(self, chunks: Iterable[Chunk]) -> list[list[int]]:
        """Draft tokens for each chunk of a step, before it is computed: at most its room."""

    def close(self) -> None: ...


class PromptLookup:
    """Finds the last tokens of a sequence earlier in it, and takes what followed them there."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Ngrams] = WeakKeyDictionary()

    def propose(self, chunks: Iterable[Chunk]) -> list[list[int]]:
        """See Drafter.propose."""
        return [self._guess(chunk.sequence, chunk.room) if chunk.room else [] for chunk in chunks]

    def close(self) -> None:
        """See Drafter."""

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        tokens = sequence.tokens
        place = self._texts.setdefault(sequence, _Ngrams()).find(tokens)
        out: list[int] = []
        for index in range(place, place + count if place else 0):
            # What followed may reach into the end itself: then the text is taken to repeat.
            out.append(tokens[index] if index < len(tokens) else out[index - len(tokens)])
        return out


class _Ngrams:
    """Places of a text's n-grams: n-gram -> index of the token after its last occurrence but the one at the end."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def find(self, tokens: list[int]) -> int:
        """Index of the token that followed the longest n-gram at the end of `tokens` when it was there before; 0 for
        none. `tokens` only grows from call to call."""
        for end in range(max(1, self._known), len(tokens)):
            for size in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)
        for size in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
            if (found := self._after.get(tuple(tokens[-size:]))) is not None:
                return found
        return 0


class DraftModel:
    """The model in the Hugging Face folder `folder`, which continues each sequence by its likeliest tokens.

    It computes every token that the large model computes, and keeps its keys and values in blocks of the same
    numbers, so that a shared block of the one is a shared block of the other.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, *,
        max_positions: int, num_blocks: int, tokens_per_block: int,
    ) -> None:  # fmt: skip
        source = HfFolder(folder, dtype, device)
        self._model = Model(
            source.config, load_all(source), max_positions=max_positions, num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
        )  # fmt: skip
        # Number of tokens whose keys and values are there, if all of them are still the sequence's.
        self._computed: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def propose(self, chunks: Iterable[Chunk]) -> list[list[int]]:
        """See Drafter.propose."""
        every = list(chunks)
        drafts: list[list[int]] = [[] for _ in every]
        decoding, prompts = [], []
        last: dict[int, int] = {}
        for index, (sequence, start, stop, _) in enumerate(every):
            if not sequence.generated or stop - start > 1:
                prompts.append(Span(sequence.tokens[start:stop], start, sequence.blocks, 0))
                self._computed[sequence] = stop
                continue
            first = min(self._computed.get(sequence, start), start)
            decoding += [Span([sequence.tokens[at]], at, sequence.blocks, 1) for at in range(first, stop)]
            last[index] = len(decoding) - 1
            self._computed[sequence] = stop
        if not every:
            return drafts
        logits = self._model.forward([*decoding, *prompts])
        going = [index for index in last if every[index].room]
        rows = [last[index] for index in going]
        while going:
            for index, token in zip(going, logits[rows].argmax(dim=-1).tolist(), strict=True):
                drafts[index].append(token)
            going = [index for index in going if len(drafts[index]) < every[index].room]
            if going:
                logits = self._model.forward([self._next(every[index], drafts[index]) for index in going])
                rows = list(range(len(going)))
        return drafts

    def close(self) -> None:
        """See Drafter."""
        self._model.close()

    def _next(self, chunk: Chunk, draft: list[int]) -> Span:
        place = chunk.stop + len(draft) - 1
        self._computed[chunk.sequence] = place + 1
        return Span([draft[-1]], place, chunk.sequence.blocks, 1)
