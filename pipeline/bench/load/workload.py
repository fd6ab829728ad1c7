"""Maker of the requests that Work describes: a prompt each, the length of its answer, and its sampling options.

Prompts are synthetic (with drawn lengths, or the lengths and shared blocks of a trace) or read from a file. A synthetic
prompt has exactly its stated number of tokens, counted as the served preprocessing counts them; see texts.

`Workload.asks` starts the work from its beginning, once for each load point: all load points see the same lengths in
the same order, but different texts, and no synthetic prompt occurs twice in a run. A file that is used up begins again;
`distinct` gives the number of prompts after which it does, since a server that keeps KV blocks gains from that.

In a session every prompt is the conversation so far and new words of the user. The driver passes each answer to
`next_turn`. What is drawn for a session depends on its number alone, not on when other sessions end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.lengths import draw_pairs
from trtpipe.pipeline.bench.load.prompt_files import Entry, Message, read_conversations, read_prompts
from trtpipe.pipeline.bench.load.seeds import generator
from trtpipe.pipeline.bench.load.texts import Texts, count_tokens
from trtpipe.pipeline.bench.load.trace import BLOCK_TOKENS, TracedRequest, read_trace
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.workers.share import WHOLE, Share

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Render = Callable[[list[Message]], str]
# Reads an answer, which costs as much as a dozen requests: called only where another turn follows.
ReadAnswer = Callable[[], str]

# Prompts are made in batches, smaller ones where prompts are long: a batch takes a millisecond or two, and neither the
# first request nor the measuring loop should wait longer for it.
BATCH = 64
BATCH_TOKENS = 1 << 14
# After this many requests in a row above the allowed length, no shorter one is expected.
LEFT_OUT = 10_000
# Upper limit of the turns of a session.
MOST_TURNS = 10_000
# Streams of random numbers: separate ones, so that no choice changes another.
LENGTHS, PREFIXES, WORDS, SESSIONS, TURNS, BLOCKS, ORDER = range(7)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request.

    session   number of the session; a request without a session counts as a session of its own
    think_s   seconds from the end of the previous answer until this turn is due
    options   sampling options; among them `ignore_eos` and `min_tokens` where the length of the answer is fixed
    messages  messages that the prompt was rendered from, for servers that render it themselves
    last      no turn of its session comes after it; False where that is known only after the answer
    """

    prompt: str
    input_tokens: int
    output_tokens: int
    session: int
    turn: int = 0
    think_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None
    last: bool = True


def unrendered(messages: list[Message]) -> str:
    """Text of messages that only the server renders: its length serves until the server reports the prompt's."""
    return "\n".join(message["content"] for message in messages)


class Asks(Iterator[RequestSpec]):
    """Endless requests of one load point: single ones, or first turns of sessions. Made by Workload.asks."""

    def __init__(
        self, first_turns: Iterator[RequestSpec], next_turn: Callable[[RequestSpec, ReadAnswer], RequestSpec | None]
    ) -> None:
        self._first_turns = first_turns
        self._next_turn = next_turn

    def __next__(self) -> RequestSpec:
        return next(self._first_turns)

    def next_turn(self, ask: RequestSpec, answer: ReadAnswer) -> RequestSpec | None:
        """The turn after `ask`; `answer` reads the answer to `ask`. None when the session is over."""
        return self._next_turn(ask, answer)


@dataclass(frozen=True)
class _First:
    """A synthetic prompt before it has a text."""

    tokens: int
    output: int
    session: int
    opening: list[str]


@dataclass(frozen=True)
class _Session:
    """Lengths of each turn; input lengths after the first turn are those of the new text alone."""

    inputs: list[int]
    outputs: list[int]
    think_s: list[float]


class Workload:
    """Requests for one tokenizer and seed.

    render    the model's chat template, needed for files of messages
    distinct  number of prompts in a file, after which it begins again; None for synthetic prompts
    """

    def __init__(self, work: Work, tokenizer: Tokenizer, seed: int, render: Render | None = None) -> None:
        """Raises UsageError for lengths without room for a word, InputDataError for a file or a tokenizer."""
        if seed < 0:
            raise UsageError(f"seed is {seed}", remedy="give 0 or more")
        self._work = work
        self._seed = seed
        self._render = render
        self._tokenizer = tokenizer
        self._texts = Texts(tokenizer, seed)
        self._inputs, self._outputs = work.lengths()
        self._turns = work.turns()
        self._entries: list[Entry] = []
        self._sized: dict[int, tuple[str, int, int | None]] = {}  # sizes of the entries used so far; see _size
        self._requests: tuple[TracedRequest, ...] = ()
        self._starts = 0
        if work.prompts is not None:
            self._entries = self._ordered(read_prompts(work.folder / work.prompts))
        elif work.sharegpt is not None:
            self._entries = self._ordered(read_conversations(work.folder / work.sharegpt))
        elif work.trace is not None:
            self._requests = read_trace(work.folder / work.trace, work.max_total_tokens)
        else:
            self._check_room()
        self.distinct = len(self._entries) or None

    def asks(self, share: Share = WHOLE) -> Asks:
        """The requests of `share`, from the beginning of the work."""
        self._starts += 1
        start = self._starts
        if self._entries:
            source = self._read()
        elif self._requests:
            source = self._traced(start)
        else:
            source = self._made(start)
        return Asks(share.take(source), partial(self._following, start))

    def _rng(self, *stream: int) -> np.random.Generator:
        return generator((self._seed, *stream))

    def _ask(
        self, prompt: str, tokens: int, output: int, session: int, turn: int = 0, think_s: float = 0.0
    ) -> RequestSpec:
        options = self._options(output, {})
        return RequestSpec(prompt, tokens, output, session, turn, think_s, options, last=self._turns is None)

    def _options(self, output: int, own: Mapping[str, Any]) -> dict[str, Any]:
        asked = {**self._work.options, **own}
        fixed = {"ignore_eos": True, "min_tokens": output} if self._work.ignore_eos else {}
        if asked.get("ignore_eos") is False:  # this answer may end earlier
            fixed = {}
        return {**fixed, **asked}

    def _fits(self, tokens: int, output: int) -> bool:
        most = self._work.max_total_tokens
        return most is None or tokens + output <= most

    # Synthetic prompts

    def _least(self, prefix_tokens: int) -> int:
        """Number of tokens of the shortest prompt with a word of its own."""
        return 1 + max(self._texts.special, prefix_tokens + self._texts.trailing)

    def _shortest(self, prefix_tokens: int) -> int:
        """Lower end of drawn lengths: below it, distinct texts do not exist or run out."""
        least = self._least(prefix_tokens)
        return max(least, min(int(self._inputs.typical), least - 1 + self._texts.beginning))

    def _check_room(self) -> None:
        prefix = self._work.shared_prefix
        special = self._texts.special
        adds = f"the tokenizer adds {special} special tokens"
        if prefix is not None and prefix.tokens + self._texts.trailing <= special:
            raise UsageError(f"a shared prefix of {prefix.tokens} tokens has no room for a word", why=adds)
        least = self._least(prefix.tokens if prefix else 0)
        if self._inputs.typical < least:
            raise UsageError(
                f"a prompt of {self._inputs.typical:g} tokens has no room for a word of its own",
                why=f"{adds}, and {prefix.tokens} are shared with others" if prefix else adds,
                remedy=f"give at least {least} input tokens",
            )

    def _made(self, start: int) -> Iterator[RequestSpec]:
        words = self._rng(WORDS, start)
        prefix, openings = self._work.shared_prefix, list[list[str]]()
        if prefix is not None:
            openings = [self._texts.opening(prefix.tokens, words) for _ in range(prefix.groups)]
        batch: list[_First] = []
        tokens = 0
        for first in self._first_turns(openings):
            batch.append(first)
            tokens += first.tokens
            if len(batch) == BATCH or tokens >= BATCH_TOKENS:
                prompts = self._texts.prompts([one.tokens for one in batch], words, [one.opening for one in batch])
                for prompt, one in zip(prompts, batch, strict=True):
                    yield self._ask(prompt, one.tokens, one.output, one.session)
                batch, tokens = [], 0

    def _first_turns(self, openings: list[list[str]]) -> Iterator[_First]:
        prefix = self._work.shared_prefix
        member, group = self._rng(PREFIXES, 0), self._rng(PREFIXES, 1)
        left_out = 0
        for tokens, output, session in self._drawn():
            opening: list[str] = []
            if prefix is not None and member.random() < prefix.share:
                opening = openings[int(group.integers(0, len(openings)))]
            tokens = max(tokens, self._shortest(prefix.tokens if prefix and opening else 0))
            first = _First(tokens, output, session, opening)
            left_out = 0 if self._fits(first.tokens, output) else left_out + 1
            if not left_out:
                yield first
            elif left_out == LEFT_OUT:
                raise self._nothing_left(f"{LEFT_OUT} lengths in a row were drawn that are longer")

    def _drawn(self) -> Iterator[tuple[int, int, int]]:
        """Input tokens, output tokens and session, without end."""
        if self._turns is not None:
            for number in count():
                session = self._session(number)
                yield session.inputs[0], session.outputs[0], number
        rng, numbers = self._rng(LENGTHS), count()
        while True:
            inputs, outputs = draw_pairs(self._inputs, self._outputs, rng, BATCH)
            yield from zip(inputs.tolist(), outputs.tolist(), numbers, strict=False)

    # Sessions

    def _session(self, number: int) -> _Session:
        assert self._turns is not None
        turns, think_s, user = self._turns
        rng = self._rng(SESSIONS, number)
        length = min(turns.token_count(rng), MOST_TURNS)
        inputs, outputs = draw_pairs(self._inputs, self._outputs, rng, length)
        if user is not None:
            inputs[1:] = user.tokens(rng, length - 1)
        return _Session(inputs.tolist(), outputs.tolist(), think_s.seconds(rng, length).tolist())

    def _following(self, start: int, ask: RequestSpec, answer: ReadAnswer) -> RequestSpec | None:
        if self._turns is None:
            return None
        session, turn = self._session(ask.session), ask.turn + 1
        if turn == len(session.inputs):
            return None
        new = self._texts.words(self._rng(TURNS, start, ask.session, turn), session.inputs[turn])
        answered = answer()
        prompt, tokens = self._texts.follow(ask.prompt, ask.input_tokens, answered, new)
        output = session.outputs[turn]
        if not self._fits(tokens, output):
            return None
        said = ask.messages or (Message(role="user", content=ask.prompt),)
        said = (
            *said,
            Message(role="assistant", content=answered),
            Message(role="user", content=self._texts.joined(new)),
        )
        return replace(self._ask(prompt, tokens, output, ask.session, turn, session.think_s[turn]), messages=said)

    # Traces

    def _traced(self, start: int) -> Iterator[RequestSpec]:
        own = self._rng(WORDS, start)
        # Blocks are shared within one pass over the trace: a second pass must not hit the cache of the first one.
        for number in count():
            replay, index = divmod(number, len(self._requests))
            request = self._requests[index]
            tokens = max(request.input_tokens, self._texts.special + 1)
            shared: list[str] = []
            room = tokens - self._texts.special
            for identity in request.hash_ids[: -(-room // BLOCK_TOKENS)]:
                shared += self._texts.block(self._rng(BLOCKS, start, replay, identity), BLOCK_TOKENS)
            if len(shared) < room:
                (prompt,) = self._texts.prompts([tokens], own, [shared])
            else:
                prompt = self._texts.fit(shared[:room], tokens)
            yield self._ask(prompt, tokens, request.output_tokens, number)

    # Files

    def _ordered(self, entries: list[Entry]) -> list[Entry]:
        if self._render is None and any(entry.messages for entry in entries):
            raise UsageError(
                f"{self._work.prompts} has messages, and there is no chat template that makes prompts of them",
                remedy="give each prompt as text, or measure --protocol chat alone, whose server has its own",
            )
        if not self._work.shuffle:
            return entries
        return [entries[index] for index in self._rng(ORDER).permutation(len(entries))]

    def _read(self) -> Iterator[RequestSpec]:
        rng, session = self._rng(LENGTHS), count()
        while True:
            kept = 0
            for index, entry in enumerate(self._entries):
                prompt, tokens, output = self._sized[index] = self._sized.get(index) or self._size(entry)
                if output is None:
                    output = self._outputs.token_count(rng)
                if self._fits(tokens, output):
                    kept += 1
                    options = self._options(output, entry.options)
                    yield RequestSpec(prompt, tokens, output, next(session), options=options, messages=entry.messages)
            if not kept:
                raise self._nothing_left(f"all {len(self._entries)} prompts of the file are longer")

    def _size(self, entry: Entry) -> tuple[str, int, int | None]:
        """The prompt, its tokens, and the tokens of its answer where the file gives them."""
        prompt = entry.prompt
        if prompt is None:
            assert self._render is not None
            assert entry.messages is not None
            prompt = self._render(list(entry.messages))
        output = entry.output_tokens
        if entry.answer is not None:
            output = max(1, count_tokens(self._tokenizer, entry.answer))
        return prompt, self._texts.count([prompt])[0], output

    def _nothing_left(self, why: str) -> UsageError:
        return UsageError(
            f"no request is within max_total_tokens {self._work.max_total_tokens}", why=why, remedy="raise it"
        )
