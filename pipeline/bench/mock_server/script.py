"""Scripted answers to requests, faults on request included, and the record of what happened to each request.

A prompt that begins with `!` and the name of a fault asks for it: "!stall 3" for three tokens, then silence, "!error 3
out of memory" for an error with these words after three tokens, "!status 429" for a refusal. FAULTS has them all.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any

# Text of each token: one token in the vocabularies of most models.
TOKEN_TEXT = " the"


class Then(Enum):
    """What follows the tokens."""

    FINISH = auto()  # the proper end, with the last token
    STALL = auto()  # nothing, ever
    CUT = auto()  # the connection ends
    ERROR = auto()  # an error within the stream, then its end
    GARBAGE = auto()  # a message that cannot be read, then the end
    STATUS = auto()  # a refusal in place of an answer


# "!stall 3" sends three tokens, then does what is given here.
FAULTS = {
    "stall": Then.STALL,
    "cut": Then.CUT,
    "short": Then.FINISH,
    "error": Then.ERROR,
    "garbage": Then.GARBAGE,
    "status": Then.STATUS,
    "empty": Then.FINISH,
    "burst": Then.FINISH,
}


@dataclass(frozen=True)
class Script:
    """An answer of `tokens` tokens, and what follows them.

    words   message of the error, or HTTP status of the refusal
    burst   all tokens are sent when the first one is due
    """

    tokens: int
    then: Then = Then.FINISH
    words: str = ""
    burst: bool = False


def script_of(prompt: str, max_tokens: int) -> Script:
    """The script that `prompt` asks for: `max_tokens` tokens, unless the prompt names a fault."""
    name, number, words = [*prompt[1:].split(maxsplit=2), "", "", ""][:3]
    if not prompt.startswith("!") or name not in FAULTS:
        return Script(max_tokens)
    then = FAULTS[name]
    if then is Then.STATUS:
        return Script(0, then, number if number.isdecimal() else "503")
    if name == "burst":
        return Script(max_tokens, burst=True)
    count = min(int(number), max_tokens) if number.isdecimal() else 0
    return Script(count, then, (words or "as the prompt asked") if then is Then.ERROR else "")


@dataclass
class Truth:
    """Record of what happened to one request, in nanoseconds of `time.monotonic_ns`.

    arrival_ns  when the whole request was there: the kernel's stamp of the read that completed it, or the time of that
                read where the kernel gave none
    scripted    tokens that the answer was to have
    then        how the answer was to end: the name of a Then
    stamps_ns   just before each write of a response with tokens, one stamp per response
    end_ns      just before the write of the end; None while the answer lasts, and if it was cut off or given up
    """

    id: str
    protocol: str
    arrival_ns: int
    scripted: int
    then: str
    tokens_per_response: int
    stamps_ns: array[int] = field(default_factory=lambda: array("q"))
    end_ns: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens written so far."""
        return min(len(self.stamps_ns) * self.tokens_per_response, self.scripted)

    @property
    def rest(self) -> int:
        """Number of tokens of the last response."""
        return (self.scripted - 1) % self.tokens_per_response + 1 if self.scripted else 0

    def ended(self, stamp: int) -> None:
        self.end_ns = stamp

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"stamps_ns": self.stamps_ns.tolist(), "tokens": self.tokens}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Truth:
        given = {name: value[name] for name in cls.__dataclass_fields__}
        return cls(**given | {"stamps_ns": array("q", value["stamps_ns"])})
