"""Format in which models write tool calls: what a format's module describes, and what its reader finds."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

# Characters of a call that are kept until the call is complete, so that a broken one is still text of the answer. A
# longer call is sent while it is made.
HELD_CHARACTERS = 512


@dataclass(frozen=True)
class Whole:
    """Complete calls, as (name, arguments as a JSON text), in the first `end` characters of a text."""

    calls: tuple[tuple[str, str], ...]
    end: int


@dataclass(frozen=True)
class Begun:
    """A call whose arguments begin at the position `start` of a text, and end in a later piece."""

    name: str
    start: int


class Wrong:
    """The text is not a call."""


Found = Whole | Begun | Wrong | None


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """One format of calls.

    name       as clients of vLLM know it
    mark       text that begins calls wherever it stands in an answer; a model may write it as a special token
    bare       text with which calls may begin at the start of an answer, without the mark; empty for none
    separator  text between two calls; empty where each call has its own mark
    close      text after the last call, which a model may leave out; empty for none
    sign       text of chat templates that ask for this format; empty where none does
    prefix     end of a prompt whose answer must be calls
    short_ids  whether ids of calls are nine letters and digits, which Mistral's templates insist on
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
        """What stands at the start of `text`, which is behind a mark or a separator; None when that shows only later.

        names  functions that may be called
        first  whether it would be the first call behind its mark
        held   number of characters that a call may have before its beginning is reported; 0 where the engine is held
               to calls, which thus are right
        final  whether the answer has ended
        """
        raise NotImplementedError

    def call_id(self) -> str:
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"
