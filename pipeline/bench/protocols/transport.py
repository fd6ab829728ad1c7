"""Interfaces of a client: a Codec makes and reads the bytes of requests, a Sender moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest

# Upper limit of the tokens of a prompt or an answer.
MOST_TOKENS = 1 << 30

Messages = Sequence[Mapping[str, str]]
# Text of token ids.
ReadIds = Callable[[list[int]], str]


class Answer(NamedTuple):
    """Answer to a request, decoded after the run.

    stamps_ns  stamps of the responses that carried tokens
    tokens     number of tokens of each of these responses, by the server's count or its ids; None when unknown
    text       the whole text, where its tokens have to be counted here; else empty
    usage      the server's count of the whole answer's tokens, if it gave one
    prompt     the server's count of the prompt's tokens, including those that a chat template adds
    ended      whether the model ended it: servers count the end token too, which has no text
    unstreamed number of the answer's tokens that no response brought, such as reasoning that the server keeps to itself
    """

    stamps_ns: list[int]
    tokens: list[int] | None
    text: str = ""
    usage: int | None = None
    prompt: int | None = None
    ended: bool = False
    unstreamed: int = 0


class BadAnswer(Exception):
    """The bytes are not a valid answer. `kind` and message are those of a Failure."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class Codec(Protocol):
    """Converts requests for one model of a server to bytes, and answers from bytes."""

    protocol: str

    def described(self) -> dict[str, Any]:
        """Description of the endpoint, for the report."""

    def encode(
        self, identity: str, prompt: str, max_tokens: int, options: Mapping[str, Any], messages: Messages | None = None
    ) -> bytes:
        """Bytes of a request. The prompt was rendered from `messages`; a server that renders itself gets these instead.

        Raises UsageError for a sampling option that the server does not know.
        """

    def decode(self, request: InFlightRequest) -> Answer:
        """Read the bytes of a request that ended without a failure. Raises BadAnswer."""

    def text(self, request: InFlightRequest, read_ids: ReadIds | None = None) -> str:
        """The text of an answer; empty where it cannot be read, and for token ids without `read_ids`."""

    def content(self, request: InFlightRequest) -> str:
        """What a conversation keeps of an answer: its text without reasoning and tool calls; empty where it cannot be
        read."""


class Sender(Protocol):
    """Connections to a server, kept between requests."""

    def described(self) -> dict[str, Any]:
        """Description for the report."""

    async def warm(self, calls: int) -> None:
        """Open connections for this many concurrent requests. Raises HostError."""

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        """Send requests that are due together, and set their `sent_ns`. Each one ends by `InFlightRequest.end`, at once
        if it cannot be sent."""

    def cancel(self, request: InFlightRequest) -> None:
        """Abandon a request that has been started; none of its callbacks is called afterwards."""

    async def close(self) -> None:
        """Release the connections."""


@dataclass(frozen=True)
class Client:
    """A codec and a sender for one endpoint."""

    codec: Codec
    sender: Sender

    def described(self) -> dict[str, Any]:
        return {**self.codec.described(), **self.sender.described()}
