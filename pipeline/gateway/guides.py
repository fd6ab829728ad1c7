"""Forms that an answer must have, as requests ask for them: `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from trtpipe.engines.json_input import parse_json
from trtpipe.engines.sampling import Guide, GuideKind
from trtpipe.pipeline.gateway import schemas
from trtpipe.pipeline.gateway.failure import Failure, wrong

# Any JSON object.
OBJECT = Guide("json_schema", '{"type":"object","additionalProperties":true}')
# Fields of `structured_outputs` that are a text.
_TEXTS: dict[str, GuideKind] = {"regex": "regex", "grammar": "ebnf_grammar", "structural_tag": "structural_tag"}
_OUTPUTS = ("json", "json_object", "choice", *_TEXTS)


class Asked(NamedTuple):
    """A guide, and the field of the request that asks for it, which errors name."""

    guide: Guide
    param: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.guide.kind, "text": self.guide.text, "param": self.param}


def asked_guide(response_format: dict[str, Any] | None, outputs: dict[str, Any] | None) -> Asked | None:
    """The guide that these two fields ask for. Raises Failure naming the place of what is not taken."""
    by_format = None if response_format is None else _response_format(response_format)
    given = {name: value for name, value in (outputs or {}).items() if value is not None}
    if not given:
        return by_format
    if by_format is not None:
        raise wrong("give 'response_format' or 'structured_outputs'", "structured_outputs")
    unknown = next((name for name in given if name not in _OUTPUTS), None)
    if unknown is not None:
        known = ", ".join(_OUTPUTS)
        raise _invalid(f"structured_outputs.{unknown[:100]}", f"unknown; known are {known}", "unknown_parameter")
    if len(given) > 1:
        raise wrong(f"'structured_outputs' takes one of {', '.join(given)}", "structured_outputs")
    ((name, value),) = given.items()
    return _structured_output(name, value, f"structured_outputs.{name}")


def _response_format(given: dict[str, Any]) -> Asked | None:
    place, kind = "response_format", given.get("type")
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        raise _invalid(f"{place}.type", "Input should be 'text', 'json_object' or 'json_schema'")
    _refuse_others(given, allowed, place)
    if kind == "text":
        return None
    if kind == "json_object":
        return Asked(OBJECT, place)
    place += ".json_schema"
    described = given.get("json_schema")
    if not isinstance(described, dict):
        raise _invalid(place, "Input should be an object")
    _refuse_others(described, {"name", "description", "schema", "strict"}, place)
    for name, kinds in (("name", str), ("description", (str, type(None))), ("strict", (bool, type(None)))):
        if not isinstance(described.get(name), kinds):
            raise _invalid(f"{place}.{name}", f"Input should be a {'boolean' if name == 'strict' else 'string'}")
    place += ".schema"
    if described.get("schema") is None:
        raise _invalid(place, "it is missing", "missing_parameter")
    return Asked(Guide("json_schema", schemas.checked(described["schema"], place)), place)


def _structured_output(name: str, value: Any, place: str) -> Asked:
    if name == "json_object":
        if value is not True:
            raise _invalid(place, "Input should be true")
        return Asked(OBJECT, place)
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise _invalid(place, "Input should be a list of strings")
        return _bounded("ebnf_grammar", "root ::= " + " | ".join(map(_literal, dict.fromkeys(value))), place)
    if name == "json":
        if isinstance(value, str):
            try:
                value = parse_json(value, max_bytes=schemas.MAX_BYTES)
            except ValueError as error:
                raise _invalid(place, f"it is not JSON that this server takes: {error}") from None
        return Asked(Guide("json_schema", schemas.checked(value, place)), place)
    if not isinstance(value, str) or not value:
        raise _invalid(place, "Input should be a string")
    if "\0" in value:
        raise _invalid(place, "it holds a character U+0000")
    return _bounded(_TEXTS[name], value, place)


def _bounded(kind: GuideKind, text: str, place: str) -> Asked:
    if len(text.encode(errors="replace")) > schemas.MAX_BYTES:
        raise wrong(f"'{place}' has more than {schemas.MAX_BYTES} bytes", place, "schema_too_large")
    return Asked(Guide(kind, text), place)


def _literal(text: str) -> str:
    """A string in XGrammar's EBNF, which has JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)


def _refuse_others(given: dict[str, Any], known: set[str], place: str) -> None:
    other = next((name for name in given if name not in known), None)
    if other is not None:
        raise _invalid(f"{place}.{other[:100]}", "unknown field", "unknown_parameter")


def _invalid(place: str, why: str, code: str = "invalid_value") -> Failure:
    return wrong(f"'{place}': {why}", place, code)
