"""Description of an endpoint: inputs and outputs of its model, and how to form a request for its model family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError, UsageError, suggestion
from trtpipe.engines.sampling import with_top_p

# Seconds to wait for a server's description of itself; not part of any measurement.
CONNECT_TIMEOUT_S = 5.0
# Most bytes of such an answer: a list of 10,000 models has less.
MAX_BYTES = 1 << 20
# Most dimensions of an input; the models used here have two.
MAX_RANK = 8
# Most models named in an error.
_NAMED = 20

Value = str | int | float | bool | list[int] | list[str]


@dataclass(frozen=True)
class Family:
    """Models with the same inputs and outputs.

    inputs    required inputs
    output    output that carries tokens
    count     output with the number of tokens, if there is one
    sampling  sampling option -> names of inputs that take it, in order of preference; names changed between releases
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    count: str | None
    sampling: Mapping[str, tuple[str, ...]]


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LENGTH = {"min_tokens": ("min_tokens", "min_length"), "ignore_eos": ("end_id",)}
_SAME: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("temperature", *_PENALTIES)},
    "seed": ("seed", "random_seed"),
    **_LENGTH,
}
# NVIDIA's ensemble and tensorrt_llm_bls: text in, text out.
TEXT = Family(
    "text",
    ("text_input", "max_tokens", "stream"),
    "text_output",
    "num_output_tokens",
    {**_SAME, "top_k": ("top_k",), "top_p": ("top_p",), "stop": ("stop_words",)},
)
# The engine's own model: token ids in, token ids out.
ENGINE = Family(
    "engine",
    ("input_ids", "input_lengths", "request_output_len", "streaming"),
    "output_ids",
    None,
    {**_SAME, "top_k": ("runtime_top_k",), "top_p": ("runtime_top_p",)},
)
LLMAPI = Family(
    "llmapi",
    ("text_input", "sampling_param_max_tokens", "streaming"),
    "text_output",
    None,
    {
        "ignore_eos": ("sampling_param_end_id",),
        **{
            name: (f"sampling_param_{name}",)
            for name in ("temperature", "top_k", "top_p", "min_tokens", *_PENALTIES, "seed", "stop")
        },
    },
)
FAMILIES = (TEXT, ENGINE, LLMAPI)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One model of a Triton server.

    inputs   name -> (datatype, number of dimensions, the batch dimension included)
    outputs  names
    """

    protocol: str
    url: str
    server_name: str
    server_version: str
    model: str
    model_versions: tuple[str, ...]
    inputs: Mapping[str, tuple[str, int]]
    outputs: frozenset[str]

    def __post_init__(self) -> None:
        """Raises HostError for implausible declarations, which would make requests as large as the server likes."""
        most = max((rank for _, rank in self.inputs.values()), default=0)
        if most > MAX_RANK:
            raise HostError(f"model '{self.model}' at {self.url} declares an input of {most:,} dimensions")

    def family(self) -> Family:
        """Family of the model. Raises UsageError unless the model streams tokens for a prompt."""
        for family in FAMILIES:
            if set(family.inputs) <= set(self.inputs) and family.output in self.outputs:
                return family
        if {"text_input", "sampling_parameters"} <= set(self.inputs):
            raise UsageError(
                f"model '{self.model}' at {self.url} is of Triton's vLLM backend",
                why="requests are not made for its inputs",
                remedy="measure it by --openai-url, the API of vLLM's own server or of Triton's OpenAI frontend",
            )
        near = max(FAMILIES, key=lambda family: len(set(family.inputs) & set(self.inputs)))
        missing = [name for name in near.inputs if name not in self.inputs]
        missing += [near.output] if near.output not in self.outputs else []
        raise UsageError(
            f"model '{self.model}' at {self.url} takes no prompt: it declares no {', '.join(missing)}",
            remedy="name the ensemble, tensorrt_llm_bls or tensorrt_llm",
        )

    def values(
        self, prompt: str, max_tokens: int, options: Mapping[str, Any], tokenize: Callable[[str], list[int]]
    ) -> dict[str, Value]:
        """Inputs of one request: streamed, with token counts where the model has them, greedy unless `options` sample.

        Inputs that the model does not declare are left out: gRPC refuses them, and generate_stream silently turns them
        into parameters. Raises UsageError for an option that the model has no input for.
        """
        family = self.family()
        asked: dict[str, Value]
        if family is ENGINE:
            ids = tokenize(prompt)
            asked = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": max_tokens, "streaming": True}
            asked |= {"exclude_input_in_output": True}
        elif family is LLMAPI:
            asked = {"text_input": prompt, "sampling_param_max_tokens": max_tokens, "streaming": True}
            asked |= {"sampling_param_exclude_input_from_output": True}
        else:
            asked = {"text_input": prompt, "max_tokens": max_tokens, "stream": True, "return_num_output_tokens": True}
        asked = {name: value for name, value in asked.items() if name in self.inputs}
        optional = set(_LENGTH)  # without these inputs an answer may be shorter, which the report states
        if not {"temperature", "top_k", "top_p"} & set(options):
            options = {"top_k": 1, **options}
            optional.add("top_k")
        sent = with_top_p(options)
        optional |= sent.keys() - options.keys()
        for name, value in sent.items():
            taken = next((one for one in family.sampling.get(name, ()) if one in self.inputs), None)
            if taken is not None:
                # No token has the id -1, so no end token stops the answer early.
                asked[taken] = -1 if name == "ignore_eos" else value
            elif name not in optional:
                raise UsageError(
                    f"model '{self.model}' has no input for the sampling option '{name}'", remedy="leave it out"
                )
        return asked

    def described(self) -> dict[str, object]:
        """Description for the report."""
        return {
            "protocol": self.protocol,
            "url": self.url,
            "server": f"{self.server_name} {self.server_version}".strip(),
            "model": self.model,
            "model_versions": list(self.model_versions),
        }


def model_error(model: str, url: str, index: Iterable[tuple[str, str, str]]) -> TrtpipeError:
    """The error for a model without metadata. `index` is the repository index: (name, state, reason) of each model."""
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
    more = f" and {len(ready) - _NAMED} more" if len(ready) > _NAMED else ""
    return UsageError(
        f"model '{model}' is not served at {url}",
        why="served: " + (", ".join(ready[:_NAMED]) + more or "nothing"),
        remedy=near if near.startswith("did you mean") else "name one that is",
    )
