"""Guide for an answer that must call tools: a JSON array of calls, whatever the model's own format is.

Guided decoding by a JSON schema cannot give a call that fails to parse, and every runtime with guided decoding has
JSON schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtpipe.engines.json_input import parse_json
from trtpipe.engines.sampling import Guide
from trtpipe.pipeline.gateway import schemas


def arguments(parameters: dict[str, Any] | None, place: str) -> dict[str, Any]:
    """Schema of a function's arguments, from its `parameters`, whose path is `place`. Raises Failure for a schema that
    guided decoding cannot enforce."""
    given = parameters or {}
    usual = (
        {} if given.keys() & {"$ref", "anyOf", "oneOf", "allOf"} else {"type": "object", "additionalProperties": False}
    )
    checked: dict[str, Any] = parse_json(schemas.checked({**usual, **given}, place))
    return checked


def guide(functions: Mapping[str, dict[str, Any]], *, parallel: bool) -> Guide:
    """Guide for a call of one of the functions, or for several calls where `parallel`.

    functions  name -> schema of the arguments
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in functions.items()},
    }
    return Guide("json_schema", json.dumps(schema if parallel else {**schema, "maxItems": 1}, ensure_ascii=False))


def _moved(schema: Any, root: str) -> Any:
    """A schema for use inside another: references to its root (`#`) become references to `root`."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value[:1] == "#"
        else _moved(value, root)
        for name, value in schema.items()
    }
