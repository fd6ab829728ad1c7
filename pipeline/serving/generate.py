"""One streamed generation from a running server: over gRPC from a Triton, over the OpenAI API from another."""

from __future__ import annotations

import atexit
import contextlib
import queue
import struct
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.sampling import SamplingParams, with_top_p
from trtpipe.pipeline.gateway import failure
from trtpipe.pipeline.gateway.stops import Stops
from trtpipe.pipeline.serving.openai_client import SILENCE_SECONDS, events, refused

# Time limit for a server to end a stream after its last response.
LEAVE_SECONDS = 10.0
# The same after a stop text, which the engine sees too where it has the tokens of the text alone.
STOP_SECONDS = 0.25
# Responses that may wait to be shown; the server waits while there are more.
WAITING = 64
# Bytes counted for a response in addition to its text: a server could send empty ones without end.
RESPONSE_BYTES = 64


# Options of a request, as the gateway names them, and the types of their inputs.
_TYPES = {
    "max_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "repetition_penalty": "FP32",
    "seed": "UINT64",
}

# A server of the OpenAI API takes the model's recommended values for what is left out, Triton takes these.
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


def _values(sampling: SamplingParams, max_tokens: int | None) -> dict[str, Any]:
    return {name: max_tokens if name == "max_tokens" else getattr(sampling, name) for name in _TYPES}


def check_options(sampling: SamplingParams, max_tokens: int | None) -> None:
    """Raises UsageError, naming the option, for a value that the gateway or the engine would refuse."""
    from pydantic import Field, ValidationError

    from trtpipe.pipeline.gateway.requests import Common

    class Options(Common):
        # The gateway takes -1 for all tokens, as vLLM does. An engine takes 0 or more.
        top_k: int | None = Field(None, ge=0, lt=2**31)

    try:
        Options(model="", **_values(sampling, max_tokens))
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"--{str(first['loc'][0]).replace('_', '-')}"
        told = first["msg"].removeprefix("Input should be ")
        raise UsageError(f"{flag} is {first['input']}", remedy=f"it has to be {told}") from None


def stream(
    grpc_url: str, prompt: str, sampling: SamplingParams, *,
    model: str, max_tokens: int, stop_words: Sequence[str] = (),
) -> Iterator[str]:  # fmt: skip
    """Yield the text of the answer as it arrives, up to the first of `stop_words`. Closing the iterator ends the
    stream.

    Raises HostError when the server cannot be reached or goes away; with its message UsageError when it refuses the
    request, StageFailed when it fails.
    """
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    from trtpipe.pipeline.bench.loop.in_flight import answer_limit

    room = limit = answer_limit(len(prompt.encode("utf-8", "replace")), max_tokens)
    arrived: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue(WAITING)
    left = threading.Event()
    words = tuple(word for word in stop_words if word)
    stops = Stops(words)

    def arrive(result: Any, error: InferenceServerException | None) -> None:
        while not left.is_set():
            try:
                arrived.put((result, error), timeout=0.1)
                return
            except queue.Full:
                continue

    client = InferenceServerClient(grpc_url, channel_args=[("grpc.max_receive_message_length", min(limit, 2**31 - 1))])
    whole = found = False

    def leave() -> None:
        left.set()
        _leave(client, by_itself=False, seconds=0)

    atexit.register(leave)
    try:
        config = _config(client, grpc_url, model)
        # Its thread would keep a program that has not closed this generator from ending. One that a daemon thread
        # starts is a daemon too, and `leave` ends it.
        starting = threading.Thread(target=client.start_stream, args=(arrive,), daemon=True)
        starting.start()
        starting.join()
        # It raises where the stream has ended already, and the reason arrives.
        with contextlib.suppress(InferenceServerException):
            client.async_stream_infer(
                model,
                _inputs(config, prompt, sampling, max_tokens, words),
                # By this id the ensemble's postprocessing continues the text of this very stream.
                request_id=uuid.uuid4().hex,
                enable_empty_final_response=True,
            )
        while True:
            try:
                result, error = arrived.get(timeout=SILENCE_SECONDS)
            except queue.Empty:
                raise StageFailed(f"the server at {grpc_url} has been silent for {SILENCE_SECONDS:.0f} s") from None
            if error is not None:
                raise _explain(grpc_url, error)
            piece = _text(grpc_url, result)
            room -= RESPONSE_BYTES + len(piece)
            if room < 0:
                asked = f"{max_tokens:,} tokens were asked for"
                raise StageFailed(f"the server at {grpc_url} sent more than {limit:,} bytes", why=asked)
            whole = result.get_response().parameters["triton_final_response"].bool_param
            text, found = stops.push(piece)
            if whole and not found:
                text += stops.flush()
            if text:
                yield text
            if whole or found:
                return
    finally:
        if not left.is_set():
            atexit.unregister(leave)
            left.set()
            _leave(client, by_itself=whole or found, seconds=LEAVE_SECONDS if whole else STOP_SECONDS)


def _leave(client: Any, *, by_itself: bool, seconds: float) -> None:
    """End a client's stream: at once, or `by_itself` within so many seconds."""
    if by_itself:
        # In Triton 2.51 a call that is cancelled as it ends can stay for ever, with its model: the server then takes
        # all its exit timeout to stop. A call that does not end by itself is cancelled all the same.
        late = threading.Timer(seconds, client.stop_stream, kwargs={"cancel_requests": True})
        late.daemon = True
        late.start()
        client.stop_stream(cancel_requests=False)
        late.cancel()
    else:
        client.stop_stream(cancel_requests=True)
    client.close()


def stream_openai(
    url: str, prompt: str, sampling: SamplingParams, *,
    model: str, max_tokens: int, stop_words: Sequence[str] = (), key: str | None = None, bos: str | None = None,
) -> Iterator[str]:  # fmt: skip
    """As `stream`, from an OpenAI-compatible server: a gateway, or that of a runtime.

    bos  text of the token that the server puts before each prompt; None for a gateway, which looks at the prompt
    """
    values = {name: value for name, value in _values(sampling, max_tokens).items() if value is not None}
    if sampling.temperature is None and not sampling.top_k and not sampling.top_p:
        values["temperature"] = 0.0  # its default is not greedy
    body = {"model": model, "prompt": prompt, "stop": list(stop_words), **_NEUTRAL, **values}
    if bos and prompt.startswith(bos):
        # A chat template writes the token itself; a second one would change the answer.
        body["add_special_tokens"] = False
    for event in events(url, "/v1/completions", body, key):
        yield from (choice["text"] for choice in event["choices"])


def _text(grpc_url: str, result: Any) -> str:
    """The text in a response. Raises StageFailed for an unreadable response."""
    try:
        pieces = result.as_numpy("text_output")
        return "" if pieces is None else b"".join(pieces.reshape(-1)).decode("utf-8", "replace")
    except (ValueError, TypeError, struct.error) as error:
        raise StageFailed(f"an answer of the server at {grpc_url} cannot be read", why=str(error)) from None


def _config(client: Any, grpc_url: str, model: str) -> Any:
    """The server's configuration of a model. Raises as `stream`."""
    from tritonclient.utils import InferenceServerException

    try:
        return client.get_model_config(model, client_timeout=SILENCE_SECONDS).config
    except InferenceServerException as error:
        raise _explain(grpc_url, error) from None


def _inputs(config: Any, prompt: str, sampling: SamplingParams, max_tokens: int, words: Sequence[str]) -> list[Any]:
    """Inputs of a request to the model of this configuration: an ensemble, or the LLM API's, which has no batches.

    The answer is streamed where the model can.
    """
    import numpy as np
    from tritonclient.grpc import InferInput
    from tritonclient.utils import triton_to_np_dtype

    from trtpipe.pipeline.bench.protocols.endpoint import LLMAPI, TEXT

    def tensor(name: str, kind: str, *values: Any) -> Any:
        shape = [1, len(values)] if config.max_batch_size else [len(values)]
        item = InferInput(name, shape, kind)
        dtype = np.object_ if kind == "BYTES" else triton_to_np_dtype(kind)
        item.set_data_from_numpy(np.array(values, dtype=dtype).reshape(shape))
        return item

    names = {one.name for one in config.input}
    family = LLMAPI if names >= set(LLMAPI.inputs) else TEXT
    text, length, streamed = family.inputs
    inputs = [
        tensor(text, "BYTES", prompt.encode("utf-8")),
        tensor(streamed, "BOOL", config.model_transaction_policy.decoupled),
    ]
    values = with_top_p(_values(sampling, max_tokens))
    if sampling.seed is not None:
        values["seed"] = sampling.seed % 2**64
    greedy = values.get("top_k") == 1 or (values.get("top_k") is None and values.get("top_p") is None)
    idle = ("temperature", "top_k", "top_p", "seed") if greedy else ()
    for name, value in values.items():
        if value is None:
            continue
        taken = length if name == "max_tokens" else family.sampling[name][0]
        if family is LLMAPI and taken not in names:
            if (name, value) == ("repetition_penalty", 1) or name in idle:
                continue  # without effect anyway
            raise UsageError(
                f"the model has no input for --{name.replace('_', '-')}",
                why="the sampler of its TensorRT-LLM release ignores it",
                remedy="leave it out",
            )
        inputs.append(tensor(taken, _TYPES[name], value))
    if words:
        inputs.append(tensor(family.sampling["stop"][0], "BYTES", *(word.encode("utf-8") for word in words)))
    return inputs


def _explain(grpc_url: str, error: Any) -> TrtpipeError:
    status, message = str(error.status() or ""), str(error.message())
    if "UNAVAILABLE" in status:
        return HostError(f"the server at {grpc_url} cannot be reached", why=message, remedy="run `trtpipe serve`")
    return refused("the server", message, failure.of_text(message).status)
