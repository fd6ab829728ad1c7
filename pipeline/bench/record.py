"""What one request leaves behind: stamps, token counts, text, and how it failed.

All stamps are integers in nanoseconds of one monotonic clock (`time.perf_counter_ns` outside tests).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """Why a request does not count. `kind` is the class that the report counts by."""

    kind: str
    message: str


class RequestFailed(Exception):
    """Raised by a transport for one request; the load goes on.

    Kinds: ConnectFailed, ConnectionLost, TruncatedStream, ServerError (an error told inside the stream),
    MalformedResponse, `http NNN`, `grpc STATUS`. The driver adds Timeout, `settle` adds EmptyOutput.
    """

    def __init__(self, kind: str, message: str) -> None:
        # One line each: a server's traceback belongs in its own log.
        self.failure = Failure(kind, " ".join(message.split()))
        super().__init__(f"{kind}: {self.failure.message}")


@dataclass(frozen=True)
class Response:
    """One streamed response that carried outputs.

    tokens  the server's num_output_tokens for this response alone; None when it did not say
    text    text_output: what this response adds
    """

    stamp_ns: int
    tokens: int | None
    text: str


@dataclass(kw_only=True)
class RequestRecord:
    """One request from the moment it could have left until its stream ended.

    slot           which of the `concurrency` places it occupied
    warmup         sent to bring the server into its stride; in no metric
    input_tokens   length of the prompt, in tokens
    max_tokens     output length asked for, in tokens
    due_ns         its slot was free
    sent_ns        just before its first byte; None if it never came to that
    end_ns         its stream ended or failed
    output_tokens  set by `settle`
    """

    request_id: str
    slot: int
    warmup: bool
    input_tokens: int
    max_tokens: int
    due_ns: int
    sent_ns: int | None = None
    responses: list[Response] = field(default_factory=list)
    end_ns: int | None = None
    failure: Failure | None = None
    output_tokens: int | None = None

    @property
    def counted_by_server(self) -> bool:
        """Every response came with its token count."""
        return bool(self.responses) and all(response.tokens is not None for response in self.responses)

    @property
    def content(self) -> list[Response]:
        """The responses that brought tokens: by count where the server counts, else those with text."""
        if self.counted_by_server:
            return [response for response in self.responses if response.tokens]
        return [response for response in self.responses if response.text]


def settle(record: RequestRecord, count_tokens: Callable[[str], int]) -> None:
    """Set `output_tokens` of a finished record: the server's counts summed, else `count_tokens` of the whole text.

    Never the number of responses: one response may carry several tokens. A request that ended well but
    brought no token becomes a failure, since none of its latencies exists.
    """
    if record.failure is not None:
        return
    if record.counted_by_server:
        record.output_tokens = sum(response.tokens or 0 for response in record.responses)
    else:
        record.output_tokens = count_tokens("".join(response.text for response in record.responses))
    if not record.output_tokens or not record.content:
        record.failure = Failure(
            "EmptyOutput", f"the stream ended without a token of the {record.max_tokens} asked for"
        )
