"""Parser of an answer in pieces: divides it into text and tool calls.

Text that is not a valid call stays text of the answer. The result does not depend on how the answer is cut into pieces:
the parser waits until it has enough text for each decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trtpipe.pipeline.gateway.stops import overlap
from trtpipe.pipeline.gateway.tools.call_format import HELD_CHARACTERS, CallFormat, CompleteCalls, NotACall, OpenCall
from trtpipe.pipeline.gateway.tools.formats import FORMATS
from trtpipe.pipeline.gateway.tools.json_text import ValueEnd
from trtpipe.pipeline.gateway.tools.mistral import MISTRAL


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """How a request lets its answer call tools.

    format    name of the format that the model writes calls in
    names     functions that may be called
    required  whether guided decoding holds the answer to an array of calls
    parallel  whether the answer may have more than one call
    """

    format: str
    names: tuple[str, ...]
    required: bool
    parallel: bool


@dataclass
class Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)  # pieces of a JSON text

    def message(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class CallParser:
    """Parser of one answer.

    calls  calls that were found so far
    over   whether the answer has ended, or its rest is not wanted
    """

    def __init__(self, use: ToolUse) -> None:
        self.calls: list[Call] = []
        self.over = False
        # A required answer is an array of calls, as in Mistral's format but without its mark.
        self._format: CallFormat = MISTRAL if use.required else FORMATS[use.format]
        self._call_id = FORMATS[use.format].call_id
        self._names = frozenset(use.names)
        self._parallel = use.parallel
        self._required = use.required
        self._held = 0 if use.required else HELD_CHARACTERS
        self._deltas: list[dict[str, Any]] = []
        self._out: list[str] = []
        self._space = ""  # white space after the text so far, dropped if a call follows
        self._rest = ""  # text that may still become a call
        self._opened = ""  # mark or separator before `_rest`, which is text of the answer unless a call follows
        self._first = True  # no call has come since the last mark
        self._end = ValueEnd()
        self._state: Callable[[bool], bool] = self._in_call if use.required else self._at_start

    def push(self, piece: str, *, final: bool = False) -> str:
        """Take the next piece of the answer, `final` if it is the last; return what is now known to be text."""
        if self.over:
            return ""
        self._rest += piece
        while not self.over and self._state(final):
            pass
        if final and not self.over:
            self.over = True
            if not self.calls:
                self._out.append(self._space)
        text = "".join(self._out)
        self._out.clear()
        return text

    def deltas(self) -> list[dict[str, Any]]:
        """New parts of calls since the last call of this method, in the form of OpenAI's stream."""
        deltas, self._deltas = self._deltas, []
        return deltas

    # States: each consumes what it can of `_rest`, and returns whether the current state may consume more.

    def _at_start(self, final: bool) -> bool:
        begin = self._rest.lstrip()
        if not begin and not final:
            return False
        if self._format.bare and begin.startswith(self._format.bare):
            return self._expect_call(self._rest[: len(self._rest) - len(begin)], begin)
        self._state = self._in_text
        return True

    def _in_text(self, final: bool) -> bool:
        mark = self._format.mark
        before, found, rest = self._rest.partition(mark)
        if found:
            self._say(before)
            self._first = True
            return self._expect_call(mark, rest)
        kept = 0 if final else overlap(self._rest, mark)
        self._say(self._rest[: len(self._rest) - kept])
        self._rest = self._rest[len(self._rest) - kept :]
        return False

    def _in_call(self, final: bool) -> bool:
        text = self._rest.lstrip()
        found = self._format.read(text, self._names, first=self._first, held=self._held, final=final)
        if found is None:
            return False
        if isinstance(found, NotACall):
            self._say(self._opened)
            self._state = self._in_text
        elif isinstance(found, CompleteCalls):
            for name, arguments in found.calls:
                self._begin(name)
                self._argue(arguments)
                if self._complete():
                    break
            self._rest = text[found.end :]
            self._state = self._after_call
        else:
            self._begin_open(found, text)
        return True

    def _in_arguments(self, final: bool) -> bool:
        end = self._end.find(self._rest)
        self._argue(self._rest[:end])
        self._rest = "" if end is None else self._rest[end:]
        if end is not None:
            self._state = self._after_arguments
        return end is not None

    def _after_arguments(self, final: bool) -> bool:
        """Take the bracket that closes the call's object."""
        rest = self._rest.lstrip()
        if not rest and not final:
            return False
        self._rest = rest.removeprefix("}")
        self._complete()
        self._state = self._after_call
        return True

    def _after_call(self, final: bool) -> bool:
        self._first = False
        text = self._rest.lstrip()
        separator, close = self._format.separator, self._format.close
        if separator and text.startswith(separator):
            opened = self._rest[: len(self._rest) - len(text)] + separator
            return self._expect_call(opened, text[len(separator) :])
        if close and text.startswith(close):
            self._rest = text[len(close) :]
        elif not final and any(word.startswith(text) for word in (separator, close) if word):
            return False
        self._state = self._in_text
        return True

    # Steps of the states

    def _expect_call(self, opened: str, rest: str) -> bool:
        self._opened, self._rest, self._state = opened, rest, self._in_call
        return True

    def _say(self, text: str) -> None:
        if self._required:
            return  # brackets of the array, and a call that max_tokens has cut off
        text = self._space + text
        self._out.append(text.rstrip())
        self._space = text[len(self._out[-1]) :]

    def _begin_open(self, found: OpenCall, text: str) -> None:
        self._begin(found.name)
        self._rest = text[found.start :]
        self._end = ValueEnd()
        self._state = self._in_arguments

    def _begin(self, name: str) -> None:
        self._space = ""
        self.calls.append(Call(self._call_id(), name))
        call = {**self.calls[-1].message(), "function": {"name": name, "arguments": ""}}
        self._deltas.append({"index": len(self.calls) - 1, **call})

    def _argue(self, piece: str) -> None:
        if piece:
            self.calls[-1].arguments.append(piece)
            self._deltas.append({"index": len(self.calls) - 1, "function": {"arguments": piece}})

    def _complete(self) -> bool:
        """Note that a call is complete; return whether no more may follow."""
        self.over = not self._parallel
        return self.over
