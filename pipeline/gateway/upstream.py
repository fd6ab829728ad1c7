"""Client of the engine behind the gateway: it sends requests as tokens and receives tokens."""

from __future__ import annotations

import asyncio
import struct
import uuid
from array import array
from collections.abc import Callable

from trtpipe.pipeline.gateway.engine_requests import EngineModel, EngineRequest, require_tokens, stop_request
from trtpipe.pipeline.gateway.failure import Failure, gone, of_status, of_text
from trtpipe.pipeline.net.h2.connection import Stream
from trtpipe.pipeline.net.h2.pool import REFUSED_PAUSES_S, Pool
from trtpipe.pipeline.net.h2.status import CallFailed, Code, H2Error, Status
from trtpipe.pipeline.net.h2.triton import (
    MODEL_CONFIG,
    MODEL_READY,
    STREAM_INFER,
    MalformedMessage,
    Reader,
    messages,
)

CALL_SECONDS = 10.0
# Durations of the attempts to end a request: a `stop` that overtakes its request finds nothing to end.
STOP_PAUSES_S = (0.25, 0.5, 1.0, 2.0)

_INT32 = struct.Struct("<i")
_ONE = _INT32.pack(1)


class Upstream:
    """Client of Triton, through a pool of connections with our own reader."""

    def __init__(self, host: str, port: int, connections: int) -> None:
        self.pool = Pool(host, port, connections=connections)
        self._models: dict[str, EngineModel] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def ready(self, model: str) -> bool:
        """Whether the model is ready. Of a model in our own backend the engine process is asked too: Triton calls the
        model ready while its Python process lives, even when that process is restarting the engine process."""
        service_pb2 = messages()
        ask = service_pb2.ModelReadyRequest(name=model).SerializeToString()
        try:
            answer = await asyncio.wait_for(self.pool.unary(MODEL_READY, ask, CALL_SECONDS), CALL_SECONDS)
        except (H2Error, asyncio.TimeoutError):
            return False
        if not service_pb2.ModelReadyResponse.FromString(answer).ready:
            return False
        try:
            known = await self.model(model)
        except Failure as failure:
            return failure.status != 503  # others are a model that is ready, and that this gateway cannot serve
        return not known.own or await self._has_engine(known)

    async def _has_engine(self, model: EngineModel) -> bool:
        """Whether the engine process runs: it is sent a `stop` with an id that no request has."""
        probe = Generation(self, lambda: None)
        try:
            await probe.begin(EngineRequest(stop_request(model, uuid.uuid4().hex), None))
            await asyncio.wait_for(probe.ended.wait(), CALL_SECONDS)
        except (Failure, asyncio.TimeoutError):
            probe.reset()
            return False
        return probe.failure is None

    async def model(self, name: str) -> EngineModel:
        """What the model takes and gives, queried once. Raises Failure."""
        known = self._models.get(name)
        if known is not None:
            return known
        service_pb2 = messages()
        ask = service_pb2.ModelConfigRequest(name=name).SerializeToString()
        try:
            answer = await self.pool.unary(MODEL_CONFIG, ask, CALL_SECONDS)
        except CallFailed as error:
            if error.status.code is Code.NOT_FOUND:
                raise gone(error.status.message) from None
            raise of_status(error.status) from None
        except H2Error as error:
            raise gone(str(error)) from None
        config = service_pb2.ModelConfigResponse.FromString(answer).config
        found = EngineModel(
            name=name,
            decoupled=config.model_transaction_policy.decoupled,
            inputs=frozenset(tensor.name for tensor in config.input),
            outputs=frozenset(tensor.name for tensor in config.output),
            drawn_log_probs=config.parameters["drawn_log_probs"].string_value != "false",
        )
        require_tokens(found)
        self._models[name] = found
        return found

    def end(self, generation: Generation, stop: bytes) -> None:
        """Have the engine end a generation, in the background. Not by a reset: tritonserver up to 25.03 may abort when
        a stream is cancelled while it writes to that stream (`prior > 0`), which ends everybody's answers."""
        task = asyncio.get_running_loop().create_task(self._end(generation, stop))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, generation: Generation, stop: bytes) -> None:
        for pause in STOP_PAUSES_S:
            try:
                await asyncio.wait_for(self._stop(generation, stop), pause)
            except asyncio.TimeoutError:
                continue
            except H2Error:
                pass  # the connection is lost, and the generation with it
            return
        generation.reset()

    async def _stop(self, generation: Generation, stop: bytes) -> None:
        await self.pool.start(STREAM_INFER, stop, on_data=lambda data, stamp: None, on_end=lambda status, stamp: None)
        await generation.ended.wait()

    async def close(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=1.0)
        await self.pool.close()


class Generation:
    """One answer in progress: tokens (and log-probabilities) that were not taken yet, and how it ended."""

    __slots__ = (
        "_left",
        "_reader",
        "_stop",
        "_stream",
        "_upstream",
        "_wake",
        "begun",
        "done",
        "ended",
        "failure",
        "last",
        "log_probs",
        "prompt_likeliest",
        "prompt_log_probs",
        "refused",
        "tokens",
    )

    def __init__(self, upstream: Upstream, wake: Callable[[], None]) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        # Of the prompt's tokens but the first, then of the likeliest tokens in their places; and the likeliest tokens.
        self.prompt_log_probs: array[float] = array("f")
        self.prompt_likeliest: array[int] = array("i")
        self.begun = False
        self.done = False  # set when the engine says so
        self.failure: Failure | None = None
        self.last: dict[str, bytes] = {}  # outputs of the last response with tokens
        self.refused: Status | None = None  # refused before it began: may be sent again
        self.ended = asyncio.Event()  # set when its stream has ended, in whatever way
        self._left = False  # nobody wants the rest of the answer
        self._reader = Reader()
        self._stream: Stream | None = None
        self._stop: bytes | None = None
        self._upstream = upstream
        self._wake = wake

    async def begin(self, request: EngineRequest) -> None:
        """Send the request; waits while the server takes no more streams. Raises Failure."""
        self._stop = request.stop
        try:
            self._stream = await self._upstream.pool.start(
                STREAM_INFER, request.start, on_data=self._data, on_end=self._end, metadata=request.metadata
            )
        except H2Error as error:
            raise gone(str(error)) from None

    async def again(self, request: EngineRequest, attempt: int) -> None:
        """Send the request again after a refusal. Raises Failure when there were too many refusals."""
        assert self.refused is not None
        if attempt >= len(REFUSED_PAUSES_S):
            raise of_status(self.refused)
        await asyncio.sleep(REFUSED_PAUSES_S[attempt])
        self.refused = None
        self.ended.clear()
        await self.begin(request)

    def cancel(self) -> None:
        """Have the engine drop the request, unless it has ended by itself."""
        if self._stream is None or self._left or self.done or self.ended.is_set():
            return
        self._left = True
        if self._stop is None:
            self.reset()
        else:
            self._upstream.end(self, self._stop)

    def reset(self) -> None:
        """Cancel the stream of this generation."""
        if self._stream is not None:
            self._stream.cancel()

    def _data(self, data: bytes, stamp: int) -> None:
        if self._left:
            return
        try:
            outputs, final, error = self._reader.read(data)
            self.begun = True
            if error:
                # An error is the last response of a request, so nothing is left to end in the engine.
                self.failure, final = of_text(error), True
            else:
                raw = outputs.get("output_ids")
                if raw:
                    self._tokens(raw, outputs)
                if "prompt_log_probs" in outputs:
                    self.prompt_log_probs.frombytes(outputs["prompt_log_probs"])
                    self.prompt_likeliest.frombytes(outputs["prompt_likeliest"])
        except (MalformedMessage, struct.error, ValueError, KeyError) as malformed:
            self.failure = Failure(500, f"the inference server sent what cannot be read: {malformed}")
            final = False
        if final:
            self.done = True
        elif self.failure is not None:
            self.cancel()
        self._wake()

    def _tokens(self, raw: bytes, outputs: dict[str, bytes]) -> None:
        self.last = outputs
        length = outputs.get("sequence_length")
        if len(raw) == 4 and (length == _ONE or not length):
            self.tokens += _INT32.unpack(raw)
        else:
            count = len(raw) // 4
            if length:  # the rest is padding
                count = min(count, _INT32.unpack_from(length)[0])
            self.tokens += struct.unpack_from(f"<{count}i", raw)
        probabilities = outputs.get("output_log_probs")
        if probabilities:
            self.log_probs += struct.unpack(f"<{len(probabilities) // 4}f", probabilities)

    def _end(self, status: Status, stamp: int) -> None:
        self.ended.set()
        if self._left:
            return
        if not self.done and self.failure is None:
            if status.retry and not self.begun:
                self.refused = status
            elif not status.ok:
                self.failure = of_status(status)
            else:
                self.failure = Failure(500, "the inference server ended the answer without a final response")
        self._wake()
