"""OpenAI's request bodies, with every field checked: an unknown field that could change the answer is refused."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from trtpipe.engines.json_input import parse_json
from trtpipe.engines.sampling import TEMPERATURES, TOP_P
from trtpipe.pipeline.gateway.failure import Failure, wrong
from trtpipe.pipeline.gateway.guides import GuideRequest, guide_request
from trtpipe.pipeline.gateway.messages import Message
from trtpipe.pipeline.gateway.strict import Strict
from trtpipe.pipeline.gateway.tools.fields import Tool, ToolFields

# Limit of values in a body. A comma in a text counts as one: 4 MB of numbers in a text, or a million token ids.
MAX_VALUES = 1_000_000
# Limit of elements in one array or object, except a prompt's token ids, and in all together. pydantic takes a
# microsecond and up to a kilobyte for each.
MAX_ELEMENTS = 4096
MAX_ALL_ELEMENTS = 50_000
# Length of a quote of the client's input in an error message.
QUOTED_CHARACTERS = 200
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256

# Fields of OpenAI's API that would change the answer and that no engine behind this gateway supports, with the values
# that have no effect. Those of one kind of request are refused of the other.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
# Reasons, where a field's name does not say enough.
_WHY = {"suffix": ": its models continue a text, and cannot fill in a gap"}
# Parts of a message's content in OpenAI's API that are not text.
_NO_TEXT = {"image_url": "images are", "input_audio": "audio is", "file": "files are"}
# Fields that may hold a million token ids.
_IDS = ("prompt", "tokens")
# Fields for the caller's bookkeeping, which do not change the answer.
_IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")


R = TypeVar("R", bound=BaseModel)


class StreamOptions(Strict):
    include_usage: bool | None = None
    # An extension of vLLM and TensorRT-LLM: the usage so far in every chunk.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


# Variables of a model's chat template, such as Qwen 3's enable_thinking.
Settings = dict[str, str | bool | int | float | None]


class Common(Strict):
    """Fields of both kinds of request; the last block is not OpenAI's, but known from other servers."""

    model: str
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, ge=TEMPERATURES[0], le=TEMPERATURES[1])
    top_p: float | None = Field(None, ge=TOP_P[0], le=TOP_P[1])
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)

    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    # A logit multiplied or divided by this value must stay a 32-bit number.
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None

    def stops(self) -> tuple[str, ...]:
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(word for word in words if word)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class ConstraintFields(Strict):
    """Fields that restrict or weight the tokens of the answer. Preparation turns them into a bias and a guide."""

    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: dict[str, Any] | None = None
    # An extension of vLLM.
    structured_outputs: dict[str, Any] | None = None

    def bias(self, vocab_size: int) -> dict[int, float]:
        """Token id -> number that is added to its logit. Raises Failure for a name that is no token id."""
        out = {}
        for name, value in (self.logit_bias or {}).items():
            if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
                place = quoted(f"logit_bias.{name}")
                raise wrong(f"'{place}': the names are token ids from 0 to {vocab_size - 1}", place, "invalid_value")
            out[int(name)] = value
        return out

    def guide(self) -> GuideRequest | None:
        """The form that the answer must have; None for free text. Raises Failure for a form that is refused."""
        return guide_request(self.response_format, self.structured_outputs)


class ChatOptions(Common):
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def wants_log_probs(self) -> tuple[bool, int]:
        """(whether they are wanted, how many of the likeliest)."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return bool(self.logprobs), self.top_logprobs or 0

    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionOptions(Common):
    # 0 needs `echo`: the answer is the prompt alone.
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None

    def wants_log_probs(self) -> tuple[bool, int]:
        return self.logprobs is not None, self.logprobs or 0

    def limit(self) -> int | None:
        return self.max_tokens


class ChatRequest(ChatOptions, ConstraintFields, ToolFields):
    messages: list[Message] = Field(min_length=1)
    # An extension of vLLM and TensorRT-LLM.
    chat_template_kwargs: Settings | None = None


class CompletionRequest(CompletionOptions, ConstraintFields):
    prompt: Any  # checked below: pydantic would try a million token ids as texts first

    def prompts(self, most: int) -> list[str | list[int]]:
        """The prompts, each as text or as token ids. Raises Failure for anything else, and for more than `most`."""
        given = self.prompt
        if not isinstance(given, (str, list)):
            raise wrong("'prompt': Input should be a valid string or a valid list", "prompt", "invalid_value")
        if not given:
            raise wrong("'prompt' is empty", "prompt")
        if isinstance(given, str) or _are_ids(given):
            return [given]
        if len(given) > most:
            raise wrong(f"at most {most} prompts a request, not {len(given)}; send them in several requests", "prompt")
        for place, one in enumerate(given):
            if not (isinstance(one, str) or (isinstance(one, list) and _are_ids(one))) or type(one) is not type(
                given[0]
            ):
                wanted = "be a string, or a list of token ids, as the first is"
                raise wrong(f"'prompt.{place}': Input should {wanted}", f"prompt.{place}", "invalid_value")
        return given


class TokenizeRequest(Strict):
    """vLLM's /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: Settings | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """vLLM's /detokenize."""

    model: str | None = None
    tokens: Any  # checked by `ids`: pydantic would visit a million ids one by one

    def ids(self, vocab_size: int) -> list[int]:
        """The token ids. Raises Failure for anything else."""
        given = self.tokens
        if not isinstance(given, list) or not _are_ids(given) or not all(0 <= one < vocab_size for one in given):
            raise wrong(
                f"'tokens': Input should be a list of ids from 0 to {vocab_size - 1}", "tokens", "invalid_value"
            )
        return given


def _are_ids(given: list[Any]) -> bool:
    return all(type(one) is int for one in given)


def parse(body: bytes, kind: type[R]) -> R:
    """The request in `body`. Raises Failure 400 naming the field."""
    try:
        raw = parse_json(body, max_bytes=len(body), max_values=MAX_VALUES)
    except ValueError as error:
        raise wrong(f"the body is not JSON that this server takes: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise wrong("the body is not a JSON object", code="invalid_json")
    _check_sizes(raw)
    for name in _IGNORED:
        raw.pop(name, None)
    for name in (_UNSUPPORTED.keys() & raw.keys()) - kind.model_fields.keys():
        value = raw.pop(name)
        if value is not None and value not in _UNSUPPORTED[name]:
            raise wrong(f"'{name}' is not supported by this server{_WHY.get(name, '')}", name, "unsupported_parameter")
    try:
        request = kind.model_validate(raw)
    except ValidationError as error:
        raise _named(error, kind, raw) from None
    if isinstance(request, Common):
        _check_answer(request)
    return request


def _check_answer(request: Common) -> None:
    """Raises Failure for stop strings and stream options that cannot be."""
    words = request.stops()
    if len(words) > MAX_STOPS or any(len(word) > MAX_STOP_CHARACTERS for word in words):
        raise wrong(f"'stop' takes up to {MAX_STOPS} strings of up to {MAX_STOP_CHARACTERS} characters", "stop")
    if isinstance(request, CompletionOptions) and request.max_tokens == 0 and not request.echo:
        raise wrong("'max_tokens' of 0 needs 'echo': true", "max_tokens")
    if request.stream_options is not None and not request.stream:
        raise wrong("'stream_options' needs 'stream': true", "stream_options")


def _check_sizes(raw: dict[str, Any]) -> None:
    """Raises Failure for more elements than a request can need, because validation visits each of them."""
    count = len(raw)
    left: list[tuple[str, Any]] = [(name, value) for name, value in raw.items() if name not in _IDS]
    while left and count <= MAX_ALL_ELEMENTS:
        name, value = left.pop()
        if isinstance(value, (dict, list)):
            count += len(value)
            if len(value) > MAX_ELEMENTS:
                many = f"'{quoted(name)}' holds more than {MAX_ELEMENTS} elements"
                raise wrong(many, quoted(name), "too_many_elements")
            left += [(name, one) for one in (value.values() if isinstance(value, dict) else value)]
    if count > MAX_ALL_ELEMENTS:
        raise wrong(f"the body holds more than {MAX_ALL_ELEMENTS} elements", code="too_many_elements")


def quoted(name: str) -> str:
    return name if len(name) <= QUOTED_CHARACTERS else f"{name[:QUOTED_CHARACTERS]}..."


def _place(error: ErrorDetails, raw: Any) -> str:
    """Path of an error in the body: its `loc` without the names that pydantic gives to the types a field may have."""
    out, value = [], raw
    for left, part in enumerate(error["loc"], 1 - len(error["loc"])):
        if isinstance(value, dict) and (part in value or (error["type"] == "missing" and left == 0)):
            out.append(str(part))
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            out.append(str(part))
            value = value[part]
    return ".".join(out)


def _told(one: Any) -> str:
    """Pydantic's message of an error, without the names of our classes."""
    return (
        "Input should be an object"
        if one["type"] in ("model_type", "dict_type")
        else str(one["msg"]).replace(" after validation", "")
    )


def _named(error: ValidationError, kind: type[BaseModel], raw: dict[str, Any]) -> Failure:
    """The Failure for the first error, with its field; for an unknown field also with the nearest known one."""
    every = [(_place(one, raw), one) for one in error.errors(include_url=False, include_context=False)]
    # Of the errors of a field with several types, take the deepest: its type came nearest to matching.
    place, first = max((one for one in every if one[0].startswith(every[0][0])), key=lambda one: one[0].count("."))
    name, shown = place.rpartition(".")[2], quoted(place)
    given = first["input"]
    if first["type"] == "literal_error" and name == "type" and isinstance(given, str) and given in _NO_TEXT:
        return wrong(f"'{shown}': {_NO_TEXT[given]} not supported", shown, "unsupported_parameter")
    if first["type"] == "extra_forbidden":
        known = [] if "." in place else list(kind.model_fields)
        near = difflib.get_close_matches(quoted(name), known, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return wrong(f"unknown field '{shown}'{hint}", shown, "unknown_parameter")
    if first["type"] == "missing":
        return wrong(f"'{shown}' is missing", shown, "missing_parameter")
    wanted = dict.fromkeys(_told(one).removeprefix("Input should be ") for at, one in every if at == place)
    told = _told(first) if len(wanted) == 1 else f"Input should be {' or '.join(wanted)}"
    return wrong(f"'{shown}': {told}", shown, "invalid_value")
