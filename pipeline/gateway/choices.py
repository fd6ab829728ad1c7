"""One choice of an answer: turns the engine's tokens into text, tool calls and log-probabilities."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from typing import Any

from trtpipe.pipeline.gateway.engine_requests import EngineRequest
from trtpipe.pipeline.gateway.failure import Failure
from trtpipe.pipeline.gateway.reasoning import CLOSE, OPEN, Reasoning, ReasoningParser
from trtpipe.pipeline.gateway.stops import Stops
from trtpipe.pipeline.gateway.text import Text
from trtpipe.pipeline.gateway.tools.formats import FORMATS
from trtpipe.pipeline.gateway.tools.parser import CallParser, ToolUse
from trtpipe.pipeline.gateway.upstream import Generation

# Tokens of a prompt that are listed without letting other answers go on: about a millisecond.
_PART = 256
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Description of the answer to a request.

    chat        form of the answer: chat, or text completion
    prompt_lengths   tokens of each prompt
    requests    the engine's request for each answer, prompt by prompt
    stops       strings that end an answer; as in vLLM, none does that is complete within the first `min_tokens` tokens
    end_ids     tokens that end an answer and are not part of its text; empty when they are to be ignored
    likeliest   whether the chosen token is also listed as the likeliest, which holds when nothing is drawn
    tools       how the answer may call tools; None where it may not
    reasoning   where the model's reasoning begins, which is not part of the answer's text; None where it has none
    continued   last tokens of each prompt that its answers continue as one text; empty for chats
    echoes      text of each prompt where its answers begin with it (`echo`); else empty
    guide_param field of the request that asks for a guide; "" for none
    prompts     token ids of each prompt where their log-probabilities are listed too; else empty
    """

    id: str
    chat: bool
    model: str
    created: int
    prompt_lengths: tuple[int, ...]
    requests: tuple[EngineRequest, ...]
    max_tokens: int
    min_tokens: int
    stops: tuple[str, ...]
    end_ids: frozenset[int]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    log_probs: bool
    likeliest: bool
    tools: ToolUse | None
    reasoning: Reasoning | None = None
    continued: tuple[list[int], ...] = ()
    echoes: tuple[str, ...] = ()
    guide_param: str = ""
    prompts: tuple[array[int], ...] = ()

    @property
    def endpoint(self) -> str:
        return "chat" if self.chat else "completions"


class Choice:
    """One choice of the answer: its text so far, and why it ended."""

    __slots__ = (
        "_detokenizer",
        "_ended",
        "_order",
        "_reasoning",
        "_stops",
        "_text",
        "attempts",
        "begins",
        "calls",
        "count",
        "echo",
        "entries",
        "finish",
        "generation",
        "index",
        "last",
        "listed",
        "offset",
        "prefix",
        "prompt",
        "reasoning",
        "shown",
        "whole",
    )

    def __init__(self, index: int, order: Order, text: Text, generation: Generation) -> None:
        self.index = index
        self.generation = generation
        self.count = 0
        self.attempts = 0
        self.last = 0.0  # when its last token came, by the monotonic clock
        self.finish: str | None = None
        self.shown = False  # whether the client knows that the choice has ended
        self.whole: list[str] = []
        self.entries: list[tuple[int, float]] = []  # tokens and log-probabilities not sent yet
        self.listed: list[Entry] = []  # entries of the prompt's tokens that have not been sent
        self.offset = 0  # position of the next token in the text, for logprobs of completions
        self.prefix = b""
        copies = len(order.requests) // len(order.prompt_lengths)
        self.echo = order.echoes[index // copies] if order.echoes else ""
        self.prompt = order.prompts[index // copies] if order.prompts else None
        before = order.continued[index // copies] if order.continued else []
        self.begins = bool(order.prompts) or not before  # whether the next token to be listed begins the text
        self._order = order
        self._text = text
        marks = {FORMATS[order.tools.format].mark} if order.tools else set()
        marks |= {OPEN, CLOSE} if order.reasoning else set()
        self._detokenizer = text.detokenizer(frozenset(marks), before)
        self.reasoning: list[str] = []  # pieces not sent yet
        self._reasoning = ReasoningParser(order.reasoning) if order.reasoning else None
        self.calls = CallParser(order.tools) if order.tools else None
        self._stops = Stops(order.stops) if order.stops else None
        self._ended = False

    def take(self) -> str:
        """The text that has become final since the last call; sets `finish` at the end."""
        generation = self.generation
        piece = ""
        tokens = generation.tokens
        if not self._order.max_tokens:
            tokens = []  # an engine makes at least one
        if tokens and self.finish is None:
            generation.tokens = []
            early = max(0, self._order.min_tokens - self.count)
            self.count += len(tokens)
            if self._order.log_probs:
                self._keep_log_probs(tokens)
            # An engine may go on after an end token, before `min_tokens`.
            self._ended = tokens[-1] in self._order.end_ids
            if self._ended:
                tokens = tokens[:-1]
            if self._stops is not None and early:
                piece = self._stops.skip(self._detokenizer.push(tokens[:early]))
                tokens = tokens[early:]
            text = self._detokenizer.push(tokens) if tokens else ""
            if self._stops is not None and text:
                text, found = self._stops.push(text)
                if found:
                    self._stop()
            piece += text
        if generation.done and generation.failure is None and self.finish is None:
            rest = self._detokenizer.flush()
            if self._stops is not None:
                if self.count > self._order.min_tokens:
                    rest, found = self._stops.push(rest)
                else:
                    rest, found = self._stops.skip(rest), False
                if found:
                    self._stop()
                else:
                    rest += self._stops.flush()
            piece += rest
            if self.finish is None:
                # An engine may leave out the end token: an answer that is shorter than allowed ended by it.
                self.finish = "stop" if self._ended or self.count < self._order.max_tokens else "length"
        if self._reasoning is not None:
            thought, piece = self._reasoning.push(piece, final=self.finish is not None)
            if thought:
                self.reasoning.append(thought)
        if self.calls is not None:
            piece = self._text_of(piece, self.calls)
        if generation.begun and self.echo:
            piece, self.echo = self.echo + piece, ""
        return piece

    def _text_of(self, piece: str, calls: CallParser) -> str:
        """The part of a piece that is text of the answer; `calls` takes the tool calls in it."""
        piece = calls.push(piece, final=self.finish is not None)
        if calls.over and self.finish is None:
            self._stop()
        if calls.calls and self.finish == "stop":
            self.finish = "tool_calls"
        return piece

    def call_deltas(self) -> list[Entry]:
        """New parts of tool calls since the last call of this method, in the form of OpenAI's stream."""
        return self.calls.deltas() if self.calls is not None else []

    def take_reasoning(self) -> Entry:
        """The reasoning that has not been sent, as fields of a message or a delta: empty where there is none.

        vLLM calls the field `reasoning`, older releases of it, SGLang and DeepSeek `reasoning_content`.
        """
        text = "".join(self.reasoning)
        self.reasoning.clear()
        return {"reasoning": text, "reasoning_content": text} if text else {}

    def message(self) -> Entry:
        """The complete message of a chat's answer."""
        content = "".join(self.whole)
        calls = [call.message() for call in self.calls.calls] if self.calls is not None else []
        message: Entry = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        return {**message, **self.take_reasoning(), **({"tool_calls": calls} if calls else {})}

    def _stop(self) -> None:
        self.finish = "stop"
        self.generation.cancel()

    def _keep_log_probs(self, tokens: list[int]) -> None:
        """Keep the log-probabilities of new tokens until they are sent."""
        values, self.generation.log_probs = self.generation.log_probs, []
        # With the prompt's tokens an end token is listed too: lm-eval expects max_tokens entries after the prompt.
        hidden = frozenset() if self._order.prompts else self._order.end_ids
        self.entries += [entry for entry in zip(tokens, values, strict=False) if entry[0] not in hidden]

    async def list_prompt(self) -> None:
        """List the prompt's tokens in parts, since a long prompt would keep other answers waiting. Raises Failure."""
        prompt, self.prompt = self.prompt, None
        values, likeliest = self.generation.prompt_log_probs, self.generation.prompt_likeliest
        if prompt is None:
            return
        count = len(prompt) - 1
        if (len(values), len(likeliest)) != (2 * count, count):
            raise Failure(500, "the inference server sent no log-probabilities of the prompt", code="upstream_error")
        self.listed.append(self._listed(prompt[0], None))
        for place in range(count):
            if place % _PART == 0:
                await asyncio.sleep(0)
            best = (likeliest[place], values[count + place])
            self.listed.append(self._listed(prompt[place + 1], values[place], best))

    @property
    def unsent(self) -> bool:
        """Whether there are log-probabilities that have not been sent."""
        return bool(self.entries or self.listed)

    def take_log_probs(self) -> Any:
        """The log-probabilities that have not been sent, in the form of the endpoint."""
        entries, self.entries = self.entries, []
        listed = [*self.listed, *(self._listed(token, value) for token, value in entries)]
        self.listed = []
        if self._order.chat:
            return {"content": listed, "refusal": None}
        offsets = []
        for entry in listed:
            offsets.append(self.offset)
            self.offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in listed],
            "token_logprobs": [entry["logprob"] for entry in listed],
            "top_logprobs": [_by_text(entry["top_logprobs"]) for entry in listed] if self._order.likeliest else None,
            "text_offset": offsets,
        }

    def _listed(self, token: int, value: float | None, likeliest: tuple[int, float] | None = None) -> Entry:
        """One token's entry in the form of chats. The first token of a prompt has no value.

        likeliest  the likeliest token and its log-probability, unless it is the token itself
        """
        first, self.begins = self.begins, False
        entry = self._entry(token, value, first)
        top = [dict(entry)] if self._order.likeliest and value is not None else []
        if top and likeliest is not None and likeliest[0] != token:
            top.append(self._entry(*likeliest, first))
        return {**entry, "top_logprobs": top}

    def _entry(self, token: int, value: float | None, first: bool) -> Entry:
        text = self._text.token(token, first=first)
        # A token that is part of a character has no text of its own.
        whole = "\ufffd" not in text
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def _by_text(top: list[Entry]) -> dict[str, float] | None:
    """Text -> log-probability, as completions list it. The likeliest comes last, and is kept if texts are equal."""
    return {entry["token"]: entry["logprob"] for entry in top} or None
