"""What it takes to put requests to a server: a Codec makes and reads their bytes, a Sender moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest

# No prompt and no answer has more.
MOST_TOKENS = 1 << 30

Messages = Sequence[Mapping[str, str]]


class Answer(NamedTuple):
    """What an exchange brought, read after the run.

    stamps_ns  of each response that carried tokens
    tokens     how many each carried, by the server's count or its ids; None when it did not say
    text       all of it, where the tokens have to be counted here; else empty
    usage      the server's count of the whole answer, if it gave one
    prompt     and of the prompt: what a chat's template adds is in it
    """

    stamps_ns: list[int]
    tokens: list[int] | None
    text: str = ""
    usage: int | None = None
    prompt: int | None = None


class BadAnswer(Exception):
    """What came is no answer. Its class and words are those of a Failure."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class Codec(Protocol):
    """One model of a server, as bytes."""

    protocol: str

    def described(self) -> dict[str, Any]:
        """What answers, for the report."""

    def encode(
        self, identity: str, prompt: str, max_tokens: int, options: Mapping[str, Any], messages: Messages | None = None
    ) -> bytes:
        """A request's bytes. `messages` are what the prompt was rendered from, for a server that renders them itself.

        Raises UsageError for a sampling option that the server does not know.
        """

    def decode(self, exchange: InFlightRequest) -> Answer:
        """Read what an exchange without a failure brought. Raises BadAnswer."""

    def text(self, exchange: InFlightRequest) -> str:
        """The text of an answer, for the next turn of a conversation; empty where it cannot be read."""


class Sender(Protocol):
    """Connections to a server, kept between requests."""

    def described(self) -> dict[str, Any]:
        """For the report."""

    async def warm(self, calls: int) -> None:
        """Have connections for so many requests at once. Raises HostError."""

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        """Send requests that are due together, and set their `sent_ns`. Each ends by `Exchange.end`, at once if it
        cannot be sent."""

    def cancel(self, exchange: InFlightRequest) -> None:
        """Abandon a request that has been started; it gets no more calls."""

    async def close(self) -> None:
        """Release the connections."""


@dataclass(frozen=True)
class Client:
    """Both together."""

    codec: Codec
    sender: Sender

    def described(self) -> dict[str, Any]:
        return {**self.codec.described(), **self.sender.described()}
