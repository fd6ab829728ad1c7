"""Sampling parameters of a request, for runtimes, the gateway and `trtpipe generate`. Names are TensorRT-LLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtpipe.engines.json_input import read_json

# Below this a 32-bit float of the engine is not reliably above 0, and only the likeliest token is drawn anyway.
LEAST_TEMPERATURE = 1e-4
# Least and most values that the gateway takes; engines refuse others, or read them as something else.
TEMPERATURES, TOP_P = (0, 2), (0, 1)
# Most white space between the parts of a JSON text: a model that draws may else go on with it for ever.
WHITE_SPACE = 8
# Kinds of guides. NVIDIA's C++ backend has all but the last.
GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag"]


@dataclass(frozen=True)
class Guide:
    """Constraint on an answer, which guided decoding enforces.

    kind  json for any JSON, whose text is empty; else what `text` is
    text  JSON schema, regular expression, grammar in XGrammar's EBNF, or XGrammar's structural tag as JSON
    """

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. None means unset for every field.

    temperature         divides the logits, before the penalties as in TensorRT-LLM; 0 means greedy
    top_k               number of candidates, at most 1024; unset or 0 with top_p unset or 0 is greedy
    top_p               probability mass of the candidates; 1 or more disables this limit
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output
    presence_penalty    subtracted from the logits of tokens in the output
    frequency_penalty   subtracted once for each time a token is in the output
    min_tokens          number of tokens before which neither end_id nor a stop word ends the request; until then end_id
                        and stop words of one token are not drawn
    seed                unset means 0, TensorRT-LLM's default: equal requests get equal tokens

    NVIDIA's C++ backend differs: its presence_penalty and frequency_penalty count the tokens of the prompt too, and its
    min_tokens is for end_id alone.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    seed: int | None = None


def recommended(folder: Path) -> dict[str, float]:
    """The sampling options by name that generation_config.json of a model's folder recommends; none where it recommends
    greedy answers. Raises InputDataError."""
    path = folder / "generation_config.json"
    given = read_json(path, "generation config") if path.is_file() else {}
    names = ("temperature", "top_p", "top_k", "repetition_penalty") if given.get("do_sample", True) else ()
    return {name: given[name] for name in names if isinstance(given.get(name), int | float)}


def with_top_p(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options of a request by name, with top_p 1 where a temperature alone asks for drawn tokens: a
    request without top_k and top_p is greedy, whatever its temperature."""
    temperature = options.get("temperature")
    drawn = isinstance(temperature, int | float) and temperature >= LEAST_TEMPERATURE
    if drawn and not options.get("top_k") and options.get("top_p") is None:
        return {**options, "top_p": 1.0}
    return dict(options)
