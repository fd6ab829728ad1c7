"""Guides of structured output, made from a request's `response_format` or vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from trtpipe.engines.json_input import parse_json
from trtpipe.engines.sampling import Guide, GuideKind
from trtpipe.pipeline.gateway import schemas
from trtpipe.pipeline.gateway.failure import invalid, wrong

# Any JSON object.
OBJECT = Guide("json_schema", '{"type":"object","additionalProperties":true}')
# Fields of `structured_outputs` whose value is a string, and the kinds of guides that they give.
_TEXTS: dict[str, GuideKind] = {"regex": "regex", "grammar": "ebnf_grammar", "structural_tag": "structural_tag"}
_OUTPUTS = ("json", "json_object", "choice", *_TEXTS)


class GuideRequest(NamedTuple):
    """A guide, and `param`, the field of the request that asks for it: errors name the field."""

    guide: Guide
    param: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.guide.kind, "text": self.guide.text, "param": self.param}


def guide_request(response_format: dict[str, Any] | None, outputs: dict[str, Any] | None) -> GuideRequest | None:
    """The guide that `response_format` or `structured_outputs` asks for; None where neither does.

    Raises Failure, naming the field, for a guide that is refused and where both fields are given.
    """
    by_format = None if response_format is None else _response_format(response_format)
    given = {name: value for name, value in (outputs or {}).items() if value is not None}
    if not given:
        return by_format
    if by_format is not None:
        raise wrong("give 'response_format' or 'structured_outputs'", "structured_outputs")
    unknown = next((name for name in given if name not in _OUTPUTS), None)
    if unknown is not None:
        known = ", ".join(_OUTPUTS)
        raise invalid(f"structured_outputs.{unknown[:100]}", f"unknown; known are {known}", "unknown_parameter")
    if len(given) > 1:
        raise wrong(f"'structured_outputs' takes one of {', '.join(given)}", "structured_outputs")
    ((name, value),) = given.items()
    return _structured_output(name, value, f"structured_outputs.{name}")


def _response_format(given: dict[str, Any]) -> GuideRequest | None:
    place, kind = "response_format", given.get("type")
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(f"{place}.type", "Input should be 'text', 'json_object' or 'json_schema'")
    _refuse_others(given, allowed, place)
    if kind == "text":
        return None
    if kind == "json_object":
        return GuideRequest(OBJECT, place)
    place += ".json_schema"
    described = given.get("json_schema")
    if not isinstance(described, dict):
        raise invalid(place, "Input should be an object")
    _refuse_others(described, {"name", "description", "schema", "strict"}, place)
    for name, kinds in (("name", str), ("description", (str, type(None))), ("strict", (bool, type(None)))):
        if not isinstance(described.get(name), kinds):
            raise invalid(f"{place}.{name}", f"Input should be a {'boolean' if name == 'strict' else 'string'}")
    place += ".schema"
    if described.get("schema") is None:
        raise invalid(place, "it is missing", "missing_parameter")
    return GuideRequest(Guide("json_schema", schemas.checked(described["schema"], place)), place)


def _structured_output(name: str, value: Any, place: str) -> GuideRequest:
    if name == "json_object":
        if value is not True:
            raise invalid(place, "Input should be true")
        return GuideRequest(OBJECT, place)
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise invalid(place, "Input should be a list of strings")
        return _bounded("ebnf_grammar", "root ::= " + " | ".join(map(_literal, dict.fromkeys(value))), place)
    if name == "json":
        if isinstance(value, str):
            try:
                value = parse_json(value, max_bytes=schemas.MAX_BYTES)
            except ValueError as error:
                raise invalid(place, f"it is not JSON that this server takes: {error}") from None
        return GuideRequest(Guide("json_schema", schemas.checked(value, place)), place)
    if not isinstance(value, str) or not value:
        raise invalid(place, "Input should be a string")
    if "\0" in value:
        raise invalid(place, "it contains the character U+0000")
    return _bounded(_TEXTS[name], value, place)


def _bounded(kind: GuideKind, text: str, place: str) -> GuideRequest:
    if len(text.encode(errors="replace")) > schemas.MAX_BYTES:
        raise wrong(f"'{place}' has more than {schemas.MAX_BYTES} bytes", place, "schema_too_large")
    return GuideRequest(Guide(kind, text), place)


def _literal(text: str) -> str:
    """A string literal of XGrammar's EBNF, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _refuse_others(given: dict[str, Any], known: set[str], place: str) -> None:
    other = next((name for name in given if name not in known), None)
    if other is not None:
        raise invalid(f"{place}.{other[:100]}", "unknown field", "unknown_parameter")
