"""Detection of JSON schemas without a finite value, such as an object that must contain another of its own kind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


def endless(references: Collection[str], find: Callable[[str], Any]) -> str | None:
    """The first reference whose schema, returned by `find`, has no finite value; None where each has one."""
    ends: set[str] = set()
    while more := [name for name in references if name not in ends and _ends(find(name), ends)]:
        ends.update(more)
    return next((name for name in references if name not in ends), None)


def _ends(schema: Any, known: Collection[str]) -> bool:
    """Whether a schema has a finite value. `known`: references whose schemas are known to have one."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        return schema["$ref"] in known
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            return any(_ends(one, known) for one in schema[name])
    if "enum" in schema or "const" in schema:
        return True
    named = schema.get("type")
    kinds = named if isinstance(named, list) else [named] if named else _implied(schema)
    needs = {"object": _properties, "array": _items}
    return not kinds or any(
        kind not in needs or all(_ends(one, known) for one in needs[kind](schema)) for kind in kinds
    )


def _implied(schema: dict[str, Any]) -> list[str]:
    return (
        ["object"] if "required" in schema or "minProperties" in schema else ["array"] if "minItems" in schema else []
    )


def _properties(schema: dict[str, Any]) -> list[Any]:
    """Schemas of the properties that every value has."""
    properties = schema.get("properties") or {}
    return [properties.get(name) for name in schema.get("required") or ()] + (
        [schema.get("additionalProperties")] if schema.get("minProperties") else []
    )


def _items(schema: dict[str, Any]) -> list[Any]:
    """Schemas of the items that every value has."""
    first, least = schema.get("prefixItems") or [], schema.get("minItems") or 0
    return [*first[:least], *([schema.get("items")] if least > len(first) else [])]
