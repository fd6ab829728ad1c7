"""Factory of requests as bytes, which are made before the clock starts."""

from __future__ import annotations

import itertools
import secrets
from functools import partial

from trtpipe.pipeline.bench.load.workload import Asks, RequestSpec
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.transport import Codec


class RequestFactory:
    """Turns request specifications into requests, each with an id of its own."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(4)  # a server may remember the ids of an earlier run
        self._numbers = itertools.count()

    def make(self, codec: Codec, ask: RequestSpec, max_tokens: int | None = None) -> InFlightRequest:
        """A request as bytes; `max_tokens` overrides its output length."""
        length = ask.output_tokens if max_tokens is None else max_tokens
        options = dict(ask.options)
        least = options.get("min_tokens")
        # Where the user has set a number, it is only a lower bound, and the answer may be longer.
        exact = least == ask.output_tokens and bool(options.get("ignore_eos"))
        if least is not None:
            options["min_tokens"] = length if exact else min(least, length)
        identity = f"{self._run}-{next(self._numbers)}"
        message = codec.encode(identity, ask.prompt, length, options, ask.messages)
        request = InFlightRequest(identity, message, input_tokens=ask.input_tokens, max_tokens=length)
        request.exact = exact
        if not ask.last:
            request.ask = ask  # otherwise not kept, since a prompt takes memory
            request.session, request.turn = ask.session, ask.turn
        return request

    def follow(self, codec: Codec, asks: Asks, request: InFlightRequest) -> tuple[InFlightRequest, int] | None:
        """The next turn of a conversation, and the nanoseconds after the answer at which it is due; None after the last
        turn, or where the answer failed."""
        answered, request.ask = request.ask, None
        if request.failure is not None or answered is None:
            return None
        ask = asks.next_turn(answered, partial(codec.content, request))
        return None if ask is None else (self.make(codec, ask), int(ask.think_s * 1e9))
