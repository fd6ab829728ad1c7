"""Requests to an engine model of Triton, in token ids: NVIDIA's C++ backend, or the model of the LLM API."""

from __future__ import annotations

import struct
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from trtpipe.engines.adapters import InstalledAdapter
from trtpipe.engines.sampling import Guide, SamplingParams
from trtpipe.pipeline.gateway.failure import Failure, wrong
from trtpipe.pipeline.gateway.traces import TIMES, TIMES_INPUT, RequestSpan
from trtpipe.pipeline.net.h2.triton import Tensor, infer_request

_LENGTH = struct.Struct("<I")
_NUMBERS = {"INT32": struct.Struct("<i"), "FP32": struct.Struct("<f"), "UINT64": struct.Struct("<Q")}


@dataclass(frozen=True)
class EngineModel:
    """Inputs and outputs of an engine model in Triton.

    drawn_log_probs  whether it gives the log-probability of a token that was drawn, and not of the likeliest alone
    """

    name: str
    decoupled: bool
    inputs: frozenset[str]
    outputs: frozenset[str]
    drawn_log_probs: bool = True

    @property
    def own(self) -> bool:
        """Whether it runs in our Python-based backend, whose models have inputs that NVIDIA's lack."""
        return "return_prompt_log_probs" in self.inputs

    @property
    def llm_api(self) -> bool:
        """Whether it is a model of the LLM API, which names its inputs after SamplingParams and has no batches."""
        return "sampling_param_max_tokens" in self.inputs

    def takes(self, option: str) -> bool:
        """Whether a sampling option has an effect: the model of an LLM API has no input for one that it ignores."""
        return not self.llm_api or f"sampling_param_{option}" in self.inputs


@dataclass(frozen=True)
class EngineRequest:
    """Bytes of a request, and of the request that ends it; None where the model has no `stop` input.

    metadata  headers of the call
    """

    start: bytes
    stop: bytes | None
    metadata: tuple[tuple[str, str], ...] = ()


def require_tokens(model: EngineModel) -> None:
    """Raises Failure for a model that takes or gives text alone, such as that of NVIDIA's `llmapi` template."""
    if "input_ids" not in model.inputs or "output_ids" not in model.outputs:
        raise Failure(
            501,
            f"the model {model.name} takes text alone, and this gateway sends token ids: serve a repository that this "
            "version of `trtpipe build` has made",
            code="unsupported_model",
        )


def require_guide(model: EngineModel, guide: Guide, param: str) -> None:
    """Raises Failure, naming the field `param`, for a model whose runtime cannot follow the guide."""
    if not {"guided_decoding_guide_type", "guided_decoding_guide"} <= model.inputs:
        why = "this model's runtime has no guided decoding" + (" with drafts" if model.llm_api else "")
        raise wrong(f"'{param}': {why}", param, "unsupported_parameter")
    if guide.kind == "structural_tag" and not (model.own or model.llm_api):
        why = "NVIDIA's C++ backend takes no structural tags"
        if param == "tools":
            why += ", which hold a call to `strict`: leave it out, or require a call with 'tool_choice'"
        raise wrong(f"'{param}': {why}", param, "unsupported_parameter")


def require_sampling(model: EngineModel, sampling: SamplingParams, ends: Sequence[int], *, log_probs: bool) -> None:
    """Raises Failure, naming the field, for a sampling option of a client that would have no effect and should have,
    and for log-probabilities that the model's sampler does not give."""
    drawn = sampling.top_k != 1
    if drawn and not model.takes("temperature"):
        why = "the sampler of this model's runtime ignores it and takes the likeliest token: give 0"
        raise wrong(f"'temperature': {why}", "temperature", "unsupported_parameter")
    if drawn and log_probs and not model.drawn_log_probs:
        why = "the sampler of this model's runtime gives none of a token that it draws"
        remedy = "give 'temperature': 0, or serve a build without drafts and with another sampler (serving.llm_args)"
        raise wrong(f"'logprobs': {why}: {remedy}", "logprobs", "unsupported_parameter")
    asked = {
        "repetition_penalty": sampling.repetition_penalty not in (None, 1),
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
        "min_tokens": bool(sampling.min_tokens and ends),
        "seed": sampling.seed is not None and drawn,  # a greedy answer is the same without one
    }
    for name, given in asked.items():
        if given and not model.takes(name):
            why = "the sampler of this model's runtime ignores it"
            raise wrong(f"'{name}': {why}", name, "unsupported_parameter")


def require_bias(model: EngineModel) -> None:
    """Raises Failure for a model without an input for biases of logits."""
    if "embedding_bias" not in model.inputs:
        raise wrong("'logit_bias': this model has no input for it", "logit_bias", "unsupported_parameter")


def require_prompt_log_probs(model: EngineModel) -> None:
    """Raises Failure for a model that gives no log-probabilities of prompts."""
    if not model.own:
        why = "this model's runtime gives no log-probabilities of prompts"
        raise wrong(f"'echo' with 'logprobs': {why}", "echo", "unsupported_parameter")


def engine_request(
    model: EngineModel,
    prompt: array[int],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    ends: Sequence[int],
    pad_id: int,
    log_probs: bool = False,
    prompt_log_probs: bool = False,
    bias: array[float] | None = None,
    guide: Guide | None = None,
    adapter: InstalledAdapter | None = None,
    traced: RequestSpan | None = None,
) -> EngineRequest:
    """The bytes that `Generation.begin` sends.

    sampling  its seed is always sent where the model takes one; of the others, None leaves the value to the engine
    ends      token ids that end the answer; none makes it go on to `max_tokens`
    bias      added to the logits, one number for each token of the vocabulary
    guide     form that the answer must have
    traced    span of the request; with one, the engine is asked for its times

    Callers check with the functions `require_*` what only some models can do.
    """
    request_id = uuid.uuid4().hex
    inputs = _llm_api if model.llm_api else _tensorrt_llm
    tensors = inputs(model, prompt, sampling, max_tokens, ends, pad_id)
    outputs = ["output_ids"] if model.llm_api else ["output_ids", "sequence_length"]
    if adapter is not None:
        tensors.append(_adapter(model, adapter))
    if log_probs:
        tensors.append(_flag(model, "return_log_probs", True))
        outputs.append("output_log_probs")
    if traced is not None and TIMES_INPUT in model.inputs and model.outputs >= set(TIMES):
        tensors.append(_flag(model, TIMES_INPUT, True))
        outputs += TIMES
    if prompt_log_probs:
        tensors.append(_flag(model, "return_prompt_log_probs", True))
        outputs += ["prompt_log_probs", "prompt_likeliest"]
    if bias is not None:
        tensors.append(Tensor("embedding_bias", "FP32", (1, len(bias)), bias.tobytes()))
    if guide is not None:
        tensors += [
            _text(model, "guided_decoding_guide_type", guide.kind),
            _text(model, "guided_decoding_guide", guide.text),
        ]
    start = infer_request(model.name, tensors, outputs, request_id=request_id)
    stop = stop_request(model, request_id) if "stop" in model.inputs else None
    return EngineRequest(start, stop, () if traced is None else traced.metadata)


def _tensorrt_llm(
    model: EngineModel, prompt: array[int], sampling: SamplingParams, max_tokens: int, ends: Sequence[int], pad_id: int
) -> list[Tensor]:
    tensors = [
        Tensor("input_ids", "INT32", (1, len(prompt)), prompt.tobytes()),
        _scalar(model, "input_lengths", "INT32", len(prompt)),
        _scalar(model, "request_output_len", "INT32", max_tokens),
        _scalar(model, "end_id", "INT32", ends[0] if ends else -1),
        _scalar(model, "pad_id", "INT32", pad_id),
        _flag(model, "streaming", model.decoupled),
    ]
    if "exclude_input_in_output" in model.inputs:
        tensors.append(_flag(model, "exclude_input_in_output", True))
    tensors += _sampling(
        model,
        sampling,
        seed="seed" if "seed" in model.inputs else "random_seed",  # the input's name up to TensorRT-LLM 0.19
        top_k="runtime_top_k",
        top_p="runtime_top_p",
        min_tokens="min_tokens" if "min_tokens" in model.inputs else "min_length",
    )
    if ends[1:]:
        # The engine takes one end id; the model's other end ids become stop words of one token: the ids, and where each
        # word ends.
        count = len(ends) - 1
        words = array("i", [*ends[1:], *range(1, count + 1)])
        tensors.append(Tensor("stop_words_list", "INT32", (1, 2, count), words.tobytes()))
    return tensors


def _llm_api(
    model: EngineModel, prompt: array[int], sampling: SamplingParams, max_tokens: int, ends: Sequence[int], pad_id: int
) -> list[Tensor]:
    tensors = [
        Tensor("input_ids", "INT32", (len(prompt),), prompt.tobytes()),
        _flag(model, "streaming", model.decoupled),
        _scalar(model, "sampling_param_max_tokens", "INT32", max_tokens),
        _scalar(model, "sampling_param_end_id", "INT32", ends[0] if ends else -1),
        *(tensor for tensor in _sampling(model, sampling, prefix="sampling_param_") if tensor.name in model.inputs),
    ]
    if ends[1:]:
        ids = array("i", ends[1:])
        tensors.append(Tensor("sampling_param_stop_token_ids", "INT32", (len(ids),), ids.tobytes()))
    return tensors


def _sampling(model: EngineModel, sampling: SamplingParams, prefix: str = "", **renamed: str) -> list[Tensor]:
    """Inputs of the sampling parameters that are given, under their own names except for the `renamed`."""
    values: tuple[tuple[str, str, float | None], ...] = (
        ("seed", "UINT64", sampling.seed or 0),
        ("temperature", "FP32", sampling.temperature),
        ("top_p", "FP32", sampling.top_p),
        ("repetition_penalty", "FP32", sampling.repetition_penalty),
        ("presence_penalty", "FP32", sampling.presence_penalty),
        ("frequency_penalty", "FP32", sampling.frequency_penalty),
        ("top_k", "INT32", sampling.top_k),
        ("min_tokens", "INT32", sampling.min_tokens),
    )
    given = [(renamed.get(name, name), dtype, value) for name, dtype, value in values if value is not None]
    return [_scalar(model, prefix + name, dtype, value) for name, dtype, value in given]


def _adapter(model: EngineModel, adapter: InstalledAdapter) -> Tensor:
    """Input that chooses an adapter: the C++ backend knows it by its number, the LLM API by its name."""
    if "lora_name" in model.inputs:
        return _text(model, "lora_name", adapter.name)
    if "lora_task_id" in model.inputs:
        return _scalar(model, "lora_task_id", "UINT64", adapter.number)
    raise Failure(501, f"the model {model.name} in Triton takes no adapters", code="unsupported_model")


def stop_request(model: EngineModel, request_id: str) -> bytes:
    """The request that ends the one of the same id. The C++ backend refuses one without lengths."""
    names = () if model.llm_api else ("input_ids", "input_lengths", "request_output_len")
    tensors = [_scalar(model, name, "INT32", 1) for name in names]
    tensors.append(_flag(model, "stop", True))
    return infer_request(model.name, tensors, request_id=request_id)


def _scalar(model: EngineModel, name: str, dtype: str, value: float) -> Tensor:
    number = value if dtype == "FP32" else int(value)
    return Tensor(name, dtype, _shape(model), _NUMBERS[dtype].pack(number))


def _flag(model: EngineModel, name: str, value: bool) -> Tensor:
    return Tensor(name, "BOOL", _shape(model), b"\1" if value else b"\0")


def _text(model: EngineModel, name: str, value: str) -> Tensor:
    data = value.encode()
    return Tensor(name, "BYTES", _shape(model), _LENGTH.pack(len(data)) + data)


def _shape(model: EngineModel) -> tuple[int, ...]:
    """Shape of a scalar: the C++ backend's model has batches."""
    return (1,) if model.llm_api else (1, 1)
