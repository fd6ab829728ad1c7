"""Preparation of a request: checked options, and prompts as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trtpipe.pipeline.gateway.failure import Failure, invalid, wrong
from trtpipe.pipeline.gateway.guides import GuideRequest
from trtpipe.pipeline.gateway.messages import plain, without_calls
from trtpipe.pipeline.gateway.model_names import ModelNames
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.reasoning import Reasoning, find_reasoning
from trtpipe.pipeline.gateway.requests import (
    ChatOptions,
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from trtpipe.pipeline.gateway.text import Text
from trtpipe.pipeline.gateway.tools.fields import Tool, find_format
from trtpipe.pipeline.gateway.tools.formats import FORMATS
from trtpipe.pipeline.gateway.tools.parser import ToolUse

Request = ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest
KINDS: dict[str, tuple[type[ChatRequest | CompletionRequest], type[ChatOptions | CompletionOptions]]] = {
    "chat": (ChatRequest, ChatOptions),
    "completions": (CompletionRequest, CompletionOptions),
}
REQUESTS: dict[str, type[Request]] = {
    **{endpoint: kind for endpoint, (kind, _) in KINDS.items()},
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
# OpenAI's default for text completions.
COMPLETION_TOKENS = 16
# Largest number of tokens for the engine, used where the model's own limit is not known.
INT32_MAX = 2**31 - 1


def _rendered(text: Text, asked: ChatRequest | TokenizeRequest, tools: Sequence[Tool]) -> tuple[str, str | None]:
    """The text of the chat, and the template that made it. Raises Failure for messages that contradict their roles, and
    for tools or tool calls that the template ignores."""
    messages, settings = plain(asked.messages or []), asked.chat_template_kwargs
    if not tools and without_calls(messages) == messages:
        return text.render(messages, settings), text.templates[False]
    try:
        offered = [tool.plain() for tool in tools] or None
        return _heeding(text, messages, settings, offered), text.templates[bool(tools)]
    except Failure as failure:
        if tools or text.templates[True] == text.templates[False]:
            raise
        # Earlier calls of a chat that offers no tools any more. The template for tools takes a list, if an empty one.
        try:
            return _heeding(text, messages, settings, []), text.templates[True]
        except Failure:
            raise failure from None


def _heeding(
    text: Text, messages: list[dict[str, Any]], settings: dict[str, Any] | None, tools: list[dict[str, Any]] | None
) -> str:
    """The text of a chat with tools or tool calls. Raises Failure where it would be the same without them."""
    rendered = text.render(messages, settings, tools)
    try:
        heeded = text.render(without_calls(messages), settings, None if tools else tools) != rendered
    except Failure:  # the template requires the calls
        heeded = True
    if not heeded:
        param = "tools" if tools else "messages"
        why = "the model's chat template ignores tools, so the model would not see them"
        raise wrong(f"'{param}': {why}", param, "unsupported_parameter")
    return rendered


def _adds_special(text: Text, prompt: str) -> bool:
    """Whether the tokenizer adds its special tokens: not to a prompt that has the first of them already."""
    return not (text.bos and prompt.startswith(text.bos))


class Preparation:
    """Prepares requests for the models of `options`."""

    def __init__(self, options: GatewayOptions, texts: dict[str, Text]) -> None:
        self._options = options
        self._names = ModelNames(options)
        self._texts = texts
        for text in texts.values():
            text.longest_token  # noqa: B018  # computed once, before processes are forked

    def prepare(self, endpoint: str, body: bytes, *, expected: str) -> tuple[dict[str, Any], bytes]:
        """Reply of a prompt process to a request that is expected for the model `expected`. Raises Failure.

        Cheap checks come before any tokenisation.
        """
        asked = parse(body, REQUESTS[endpoint])
        served, adapter = self._names.find(asked.model)
        if served.name != expected:
            return {"model": served.name}, b""
        if isinstance(asked, TokenizeRequest):
            return self._tokenized(asked, served)
        text = self._texts[served.name]
        if isinstance(asked, DetokenizeRequest):
            ids = asked.ids(text.vocab_size)
            return {"prompt": text.tokenizer.decode(ids, skip_special_tokens=False)}, b""
        use, reasoning, guide = None, None, asked.guide()
        if isinstance(asked, ChatRequest):
            prompts, use, reasoning, of_tools = self._chat(asked, served)
            if use is not None and not use.required and guide is not None:
                why = (
                    "it would hold the whole answer to a form, so the model could not call a tool; leave out one of "
                    "both, or require a call"
                )
                raise wrong(f"'{guide.param}' with 'tools': {why}", guide.param, "unsupported_parameter")
            if guide is not None or (use is not None and use.required):
                reasoning = None  # the answer has the form from its first token on
            guide = of_tools or guide
        else:
            prompts = self._prompts(asked, served)
        max_tokens = self._max_tokens(asked, served, [len(prompt) for prompt in prompts])
        if (asked.min_tokens or 0) > max_tokens:
            raise invalid("min_tokens", f"{asked.min_tokens} is more than the {max_tokens} tokens of the answer")
        _, kept = KINDS[endpoint]
        told: dict[str, Any] = {
            "adapter": None if adapter is None else adapter.name,
            "options": {**asked.model_dump(include=set(kept.model_fields), exclude_unset=True), "model": served.name},
            "max_tokens": max_tokens,
            "lengths": [len(prompt) for prompt in prompts],
            "tools": use and asdict(use),
            "reasoning": reasoning,
            "bias": list(asked.bias(text.vocab_size).items()),
            "guide": None if guide is None else guide.to_json(),
        }
        if isinstance(asked, CompletionRequest) and asked.echo:
            told["echoes"] = [
                one if isinstance(one, str) else text.tokenizer.decode(one, skip_special_tokens=False)
                for one in asked.prompts(self._options.max_choices)
            ]
        return told, b"".join(array("i", prompt).tobytes() for prompt in prompts)

    def _tokenized(self, asked: TokenizeRequest, served: ServedModel) -> tuple[dict[str, Any], bytes]:
        """Reply to a request for the tokens of a text or of messages. Raises Failure."""
        text = self._texts[served.name]
        if (asked.prompt is None) == (asked.messages is None):
            raise wrong("give 'prompt' or 'messages'", "prompt")
        if asked.messages is not None:
            characters, _ = _rendered(text, asked, asked.tools or ())
            special = bool(asked.add_special_tokens)
        else:
            characters = asked.prompt or ""
            special = _adds_special(text, characters) if asked.add_special_tokens is None else asked.add_special_tokens
        ids = self._tokens(text, served, characters, "prompt", special=special)
        told: dict[str, Any] = {"count": len(ids), "max_model_len": served.max_seq_len}
        if asked.return_token_strs:
            told["token_strs"] = [text.tokenizer.id_to_token(token) for token in ids]
        return told, array("i", ids).tobytes()

    def _chat(
        self, asked: ChatRequest, served: ServedModel
    ) -> tuple[list[list[int]], ToolUse | None, Reasoning | None, GuideRequest | None]:
        """The prompt of a chat; how the answer may call tools, where reasoning begins, and the form of calls."""
        self._check_answers(asked, 1)
        text, tools = self._texts[served.name], asked.offered()
        rendered, template = _rendered(text, asked, tools)
        reasoning = find_reasoning(template or "", rendered) if served.reasoning else None
        use, guide = None, None
        if tools:
            use, guide = asked.use(find_format(served.tool_format, template))
            rendered += FORMATS[use.format].prefix if use.required else ""
        # The template writes the special tokens itself.
        return [self._tokens(text, served, rendered, "messages", special=False)], use, reasoning, guide

    def _check_answers(self, asked: ChatRequest | CompletionRequest, prompts: int) -> None:
        answers, most = prompts * (asked.n or 1), self._options.max_choices
        if answers > most:
            raise wrong(f"at most {most} answers a request, not {answers}; send them in several requests", "n")

    def _prompts(self, asked: CompletionRequest, served: ServedModel) -> list[list[int]]:
        text = self._texts[served.name]
        given = asked.prompts(self._options.max_choices)
        self._check_answers(asked, len(given))
        prompts = []
        for one in given:
            if isinstance(one, str):
                prompts.append(self._tokens(text, served, one, "prompt", special=_adds_special(text, one)))
            else:
                if not all(0 <= token < text.vocab_size for token in one):
                    raise wrong(f"'prompt' holds ids outside of 0 to {text.vocab_size - 1}", "prompt")
                prompts.append(one)
        return prompts

    def _tokens(self, text: Text, served: ServedModel, characters: str, param: str, *, special: bool) -> list[int]:
        most = served.max_input_len or served.max_seq_len
        if most is not None and len(characters) > most * text.longest_token:
            long = f"the prompt has {len(characters)} characters, which cannot be {most} tokens or less"
            raise wrong(f"{long}; this model takes {most}", param, "context_length_exceeded")
        return text.encode(characters, special=special)

    def _max_tokens(self, asked: ChatRequest | CompletionRequest, served: ServedModel, lengths: list[int]) -> int:
        """Limit of tokens for each answer. Raises Failure when prompt and answer do not fit the engine."""
        chat = isinstance(asked, ChatRequest)
        param, code = "messages" if chat else "prompt", "context_length_exceeded"
        longest = max(lengths)
        if min(lengths) == 0:
            raise wrong("the prompt is empty", param)
        if served.max_input_len is not None and longest > served.max_input_len:
            raise wrong(f"the prompt has {longest} tokens; this model takes {served.max_input_len}", param, code)
        wished = asked.limit()
        most = served.max_seq_len or INT32_MAX
        if longest + (wished or 1) > most:  # an engine makes at least one token
            sides = f"the prompt has {longest} tokens and max_tokens is {wished or 1}"
            raise wrong(f"{sides}; this model takes {most} together", param, code)
        if wished is not None:
            return wished
        if served.max_seq_len is None:
            return self._options.default_max_tokens if chat else COMPLETION_TOKENS
        return most - longest if chat else min(COMPLETION_TOKENS, most - longest)
