"""One streamed request to Triton, behind a Protocol: gRPC ModelStreamInfer or HTTP generate_stream.

Both speak to a model with the inputs and outputs of NVIDIA's `ensemble` (`tensorrt_llm_bls` has the same).
Inputs that the served model does not declare are left out, and the report says which: gRPC refuses an
undeclared input, and generate_stream silently turns it into a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engines.errors import StageFailed, TrtpipeError, UsageError, suggestion
from pipeline.bench.record import RequestRecord

# Seconds that a server may take to say who it is. Not a measurement: only how long an absent one is waited for.
CONNECT_TIMEOUT_S = 5.0

# Triton datatype of every input that is sent, from NVIDIA's ensemble (tensorrt_llm 1.x).
INPUT_TYPES = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "end_id": "INT32",
    "top_k": "INT32",
    "stream": "BOOL",
    "return_num_output_tokens": "BOOL",
}
REQUIRED_INPUTS = ("text_input", "max_tokens", "stream")
TEXT_OUTPUT = "text_output"
COUNT_OUTPUT = "num_output_tokens"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What answers at a URL, and what its model takes and gives.

    ranks    declared inputs: name -> number of dimensions, the batch dimension included
    outputs  declared outputs
    """

    protocol: str
    url: str
    server_name: str
    server_version: str
    model: str
    model_versions: tuple[str, ...]
    ranks: dict[str, int]
    outputs: frozenset[str]

    def check(self) -> None:
        """Raise UsageError unless the model streams text for a prompt."""
        missing = [name for name in REQUIRED_INPUTS if name not in self.ranks]
        if TEXT_OUTPUT not in self.outputs:
            missing.append(TEXT_OUTPUT)
        if missing:
            raise UsageError(
                f"model '{self.model}' at {self.url} is not a text front: it declares no {', '.join(missing)}",
                remedy="name the ensemble (or tensorrt_llm_bls) in front of the engine",
            )

    @property
    def undeclared_inputs(self) -> list[str]:
        return [name for name in INPUT_TYPES if name not in self.ranks]

    def inputs(self, prompt: str, max_tokens: int) -> dict[str, str | int | bool]:
        """Input values of one request: exactly `max_tokens` tokens, greedy, streamed, counted."""
        values: dict[str, str | int | bool] = {
            "text_input": prompt,
            "max_tokens": max_tokens,
            # -1 is no token's id, so nothing ends the answer early; min_tokens guards against stop words.
            "end_id": -1,
            "min_tokens": max_tokens,
            "top_k": 1,
            "stream": True,
            "return_num_output_tokens": True,
        }
        return {name: value for name, value in values.items() if name in self.ranks}


class Transport(Protocol):
    """A connected client. Both implementations keep their connections between requests."""

    endpoint: Endpoint

    async def send(self, prompt: str, record: RequestRecord) -> None:
        """Send a request for `record.max_tokens` tokens and read its stream to the end.

        Sets `record.sent_ns` just before the first byte and appends a Response, stamped as soon as the bytes
        reach Python, for each one with outputs. Raises RequestFailed for everything that can go wrong on the
        wire. Cancelling it abandons the request.
        """

    async def close(self) -> None:
        """Release the connections."""


def model_error(model: str, url: str, index: Iterable[tuple[str, str, str]]) -> TrtpipeError:
    """The error for a model without metadata, from the repository index: (name, state, reason) of each model."""
    states = {name: (state, reason) for name, state, reason in index}
    if model in states and states[model][0] != "READY":
        state, reason = states[model]
        return StageFailed(
            f"model '{model}' at {url} is not ready ({state or 'not loaded'})",
            why=reason,
            remedy="see the server's log",
        )
    ready = sorted(name for name, (state, _) in states.items() if state == "READY")
    near = suggestion(model, ready)
    return UsageError(
        f"model '{model}' is not served at {url}",
        why="served: " + (", ".join(ready) or "nothing"),
        remedy=near if near.startswith("did you mean") else "name one that is",
    )
