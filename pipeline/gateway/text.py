"""Conversion of prompts to tokens and of tokens to text, with the code of the repository's own text models."""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.chat_template import compile_template, read_template, require_template
from trtpipe.engines.sampling import recommended
from trtpipe.pipeline.gateway.failure import wrong
from trtpipe.pipeline.gateway.requests import Common, quoted
from trtpipe.triton_repo.shared_text import read_text, shared

# Tokens of a prompt behind which an answer is decoded; several, since a special token has no text.
_CONTINUED = 8


class Text:
    """A model's tokenizer, chat template, end ids and sampling defaults."""

    def __init__(self, folder: Path) -> None:
        """Raises InputDataError when the folder holds no tokenizer, or a chat template that cannot be read."""
        self.folder = folder
        require_template(folder)
        self.tokenizer, self.end_ids, self.pad_id, self.bos = read_text(folder)
        # By whether the chat has tools: some models have a template of its own for such chats.
        self.templates = {tools: read_template(folder, tools=tools) for tools in (False, True)}
        self.compiled = {
            template: compile_template(folder, template) for template in self.templates.values() if template is not None
        }
        # As in other servers, the model's recommended values apply where the request gives none.
        self.defaults = recommended(folder)
        try:
            Common.model_validate({"model": "", **self.defaults})
        except ValidationError as error:
            wanted = f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}"
            raise InputDataError(
                f"{folder / 'generation_config.json'} recommends sampling that no request may ask for",
                why=wanted,
                remedy="correct the file",
            ) from None
        self.vocab_size: int = self.tokenizer.get_vocab_size()
        self._tokens: dict[int, str] = {}  # texts of tokens, see `token`

    @functools.cached_property
    def longest_token(self) -> int:
        """Most characters that one token can stand for. A normalizer, such as Qwen's NFC, turns up to four into one."""
        return max(map(len, self.tokenizer.get_vocab())) * (1 if self.tokenizer.normalizer is None else 4)

    def render(
        self,
        messages: list[dict[str, Any]],
        settings: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The text of a chat. `settings` are variables of the template, `tools` functions that the answer may call.

        Raises Failure without a chat template, or when the template refuses the messages.
        """
        template = self.templates[tools is not None]
        if template is None:
            raise wrong("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        try:
            return self.compiled[template](messages, settings, tools)
        except InputDataError as error:
            why = quoted(error.why or "")
            raise wrong(f"the chat template refuses these messages: {why}", "messages") from None

    def encode(self, text: str, *, special: bool) -> list[int]:
        # "fast" omits each token's position in the text, which takes half of the time and a quarter of the memory.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def detokenizer(self, shown: frozenset[str] = frozenset(), before: Sequence[int] = ()) -> Any:
        """A detokenizer that leaves out special tokens, except those whose texts are `shown`; of a text that follows
        that of the tokens `before`."""
        added = self.tokenizer.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items() if token.special}
        made: Any
        if shown.isdisjoint(special.values()):
            made = shared().Detokenizer(self.tokenizer, True)
        else:
            made = _Showing(self.tokenizer, frozenset(number for number, text in special.items() if text not in shown))
        if before:
            made.push(list(before))
            made.flush()
        return made

    def continued(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt that a text continues: decoders such as SentencePiece's drop the space of a first
        word, which the first word behind a prompt is not. Empty where they have no text, or end within a character."""
        last = list(prompt[-_CONTINUED:])
        text = self.tokenizer.decode(last)
        return last if text and not text.endswith(shared().UNFINISHED) else []

    def token(self, number: int, *, first: bool = False) -> str:
        """One token's own text, with special tokens spelled out.

        first  whether the token begins its text: a decoder such as SentencePiece's drops the space of a first word
        """
        if first:
            return self._decoded(number)
        if number not in self._tokens:
            before, text = self._before
            both = self._decoded(*before, number)
            self._tokens[number] = both[len(text) :] if both.startswith(text) else self._decoded(number)
        return self._tokens[number]

    @functools.cached_property
    def _before(self) -> tuple[list[int], str]:
        """A token behind which others are decoded as within a text, and its text; none where no letter is a token."""
        ids = (self.tokenizer.token_to_id(letter) for letter in string.ascii_letters)
        before = [number for number in ids if number is not None][:1]
        return before, self._decoded(*before)

    def _decoded(self, *numbers: int) -> str:
        return str(self.tokenizer.decode(numbers, skip_special_tokens=False))


class _Showing:
    """A detokenizer that leaves out the special tokens in `hidden` and writes the others."""

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._inner = shared().Detokenizer(tokenizer, False)
        self._hidden = hidden

    def push(self, ids: list[int]) -> str:
        return str(self._inner.push([one for one in ids if one not in self._hidden]))

    def flush(self) -> str:
        return str(self._inner.flush())
