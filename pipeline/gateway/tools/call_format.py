"""Base class of the formats in which models write tool calls, and the results of reading one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Most characters of an incomplete call that are held back. If such a call turns out not to be one, they become text of
# the answer. A longer call is sent while the model writes it.
HELD_CHARACTERS = 512
# Most characters of a call that is only read when it is complete. A longer one is text.
MAX_CHARACTERS = 8192


@dataclass(frozen=True)
class CompleteCalls:
    """Complete calls, as (name, arguments as a JSON text), in the first `end` characters of a text."""

    calls: tuple[tuple[str, str], ...]
    end: int


@dataclass(frozen=True)
class OpenCall:
    """An incomplete call of the function `name`, whose arguments begin at the position `start` of a text."""

    name: str
    start: int


class NotACall:
    """The text is not a call."""


Found = CompleteCalls | OpenCall | NotACall | None


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """One format of calls.

    name       as clients of vLLM know it
    mark       text that begins calls wherever it stands in an answer; a model may write it as a special token
    bare       text that begins calls without a mark, at the start of an answer only; empty for none
    separator  text between two calls; empty where each call has its own mark
    close      text after the last call, which a model may leave out; empty for none
    sign       text by which chat templates that ask for this format are recognised
    prefix     text that is added to a prompt whose answer must be calls
    short_ids  whether ids of calls are nine letters and digits, which Mistral's templates require
    """

    name: str
    mark: str
    bare: str = ""
    separator: str = ""
    close: str = ""
    sign: str = ""
    prefix: str = ""
    short_ids: bool = False

    def read(self, text: str, names: frozenset[str], *, first: bool, held: int, final: bool) -> Found:
        """Read a call at the start of `text`, which follows a mark or a separator; None when more text is needed.

        names  functions that may be called
        first  whether it would be the first call after its mark
        held   most characters of an incomplete call before it is returned as OpenCall; 0 for an answer that guided
               decoding holds to calls, which cannot turn out not to be one
        final  whether the answer has ended
        """
        raise NotImplementedError

    def structural_tag(self, schemas: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
        """XGrammar's structural tag for free text whose calls have arguments of these schemas, by function; None for a
        format that has none."""
        return None

    def call_id(self) -> str:
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"
