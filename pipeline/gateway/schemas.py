"""Check of JSON schemas for guided decoding: a schema that XGrammar would enforce only in part is refused.

XGrammar accepts keywords that its grammars do not enforce (`not`, `uniqueItems`), drops bounds beside some keywords (a
`minimum` beside an `enum`), and accepts references that only lead to one another. Answers could then violate the
schema. A refusal names the keyword's path in the request.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from trtpipe.pipeline.gateway.endless import endless
from trtpipe.pipeline.gateway.failure import invalid, wrong

# Limits of a schema: bytes of its text, its depth, and the largest number in a bound of lengths or counts, since each
# character or item up to that bound is a state of the grammar.
MAX_BYTES, MAX_DEPTH, MAX_COUNT = 32 << 10, 32, 1000
# Keywords that restrict values of one type, by that type.
_BOUNDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames",
               "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
_OF = {keyword: kind for kind, keywords in _BOUNDS.items() for keyword in keywords}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_FORMATS = ("date", "date-time", "email", "ipv4", "time", "uuid")
# Keywords whose value is a schema, and those whose value has one under each of its names.
_SCHEMAS = ("items", "additionalProperties", "propertyNames")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_CHOICES = ("anyOf", "oneOf", "allOf")
# Keywords that do not restrict values; they are left out.
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
          "$id", "$defs", "definitions", "discriminator")  # fmt: skip
# Keywords of JSON Schema that no grammar of XGrammar enforces.
_REFUSED = ("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
            "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "additionalItems",
            "contentEncoding", "contentMediaType", "contentSchema", "$dynamicRef", "$recursiveRef",
            "$anchor", "$dynamicAnchor", "$vocabulary")  # fmt: skip


def checked(schema: Any, place: str) -> str:
    """A schema as JSON text that XGrammar enforces in full. What it allows is what `schema` allows, or less.

    place  path of the schema in the request. Raises Failure with the path of what cannot be enforced.
    """
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise wrong(f"'{place}' has {len(text)} bytes, at most {MAX_BYTES} are taken", place, "schema_too_large")
    if not isinstance(schema, dict):
        raise wrong(f"'{place}': Input should be an object", place, "invalid_value")
    return json.dumps(_Check(schema, place).whole(), separators=(",", ":"))


class _Check:
    def __init__(self, root: dict[str, Any], place: str) -> None:
        self._root = root
        self._place = place
        self._resolved: dict[str, str] = {}  # reference that leads to a schema other than a reference -> its path

    def whole(self) -> Any:
        """The root by `schema`. Raises Failure too for a reference to a schema without a finite value."""
        out = self.schema(self._root, self._place, ())
        name = endless(self._resolved, self._find)
        if name is not None:
            raise _invalid(self._resolved[name], "each value of it would contain another one, without end")
        return out

    def schema(self, given: Any, place: str, way: tuple[str, ...]) -> Any:
        """A schema without the keywords that restrict nothing, and with its type written out where keywords imply it.

        way  references that led here without passing a property or an item; one that occurs twice has no end
        """
        if given is True:
            return True
        if not isinstance(given, dict):
            raise _invalid(place, "Input should be a schema, which is an object")
        if place.count(".") > self._place.count(".") + 2 * MAX_DEPTH:
            raise _invalid(place, f"the schema is nested more than {MAX_DEPTH} deep", code="schema_too_large")
        out = {name: value for name, value in given.items() if name not in _NOTES}
        for name in _REFUSED:
            if name in out and not (name == "uniqueItems" and out.pop(name) is False):
                raise _invalid(f"{place}.{name}", "guided decoding cannot enforce this keyword")
        for name in ("$defs", "definitions"):
            if name in given:
                out[name] = self._each(given[name], f"{place}.{name}", ())
        if "$ref" in out:
            return self._reference(out, place, way)
        for name in _CHOICES:
            if name in out:
                return self._choice(out, name, place, way)
        if "enum" in out or "const" in out:
            return self._listed(out, place)
        return self._typed(out, place)

    def _each(self, given: Any, place: str, way: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise _invalid(place, "Input should be an object")
        return {name: self.schema(one, f"{place}.{name}", way) for name, one in given.items()}

    def _require_alone(self, out: dict[str, Any], name: str, place: str) -> None:
        """Raises Failure for keywords besides `name` that restrict the value: XGrammar drops them."""
        others = [one for one in out if one != name and one not in _NOTES and (one in _OF or one in _KEYWORDS)]
        if others:
            raise _invalid(f"{place}.{others[0]}", f"guided decoding cannot enforce it beside '{name}'")

    def _reference(self, out: dict[str, Any], place: str, way: tuple[str, ...]) -> dict[str, Any]:
        self._require_alone(out, "$ref", place)
        name = out["$ref"]
        if not isinstance(name, str) or self._find(name) is None:
            raise _invalid(
                f"{place}.$ref", "it names no schema; references are to '#', '#/$defs/...' and other schemas in it"
            )
        if name in way:
            raise _invalid(f"{place}.$ref", "it refers to itself, and never to a value")
        if name not in self._resolved:
            found = self._find(name) or {}
            same = {one: value for one, value in found.items() if one in (*_CHOICES, "$ref")}
            self.schema(same, ".".join((self._place, *name.split("/")[1:])), (*way, name))
            self._resolved[name] = f"{place}.$ref"
        return out

    def _find(self, name: str) -> Any:
        """The schema that a reference names; None where there is none, or none that is checked."""
        if name != "#" and not name.startswith("#/"):
            return None
        found, named = self._root, False
        for part in name.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                return None
            if not named and key not in (*_NAMED, *_SCHEMAS):
                return None
            found, named = found[key], not named and key in _NAMED
        return found if isinstance(found, dict) and not named else None

    def _choice(self, out: dict[str, Any], name: str, place: str, way: tuple[str, ...]) -> dict[str, Any]:
        self._require_alone(out, name, place)
        given = out[name]
        if not isinstance(given, list) or not given:
            raise _invalid(f"{place}.{name}", "Input should be a list of schemas")
        if name == "allOf" and len(given) > 1:
            raise _invalid(f"{place}.allOf", "guided decoding cannot enforce several schemas at once: merge them")
        out[name] = [self.schema(one, f"{place}.{name}.{at}", way) for at, one in enumerate(given)]
        if name == "oneOf" and not self._disjoint(given):
            raise _invalid(f"{place}.oneOf", "a value may match two of its schemas: use anyOf or other types")
        return out

    def _disjoint(self, schemas: list[Any]) -> bool:
        """Whether no value can match two of the schemas: types differ, or all are objects with a required property
        whose `const` differs."""
        if not all(isinstance(one, dict) for one in schemas):
            return False
        while any("$ref" in one for one in schemas):
            schemas = [self._find(one["$ref"]) if "$ref" in one else one for one in schemas]
        if not all(_has_names(one) for one in schemas):
            return True  # one that a reference names, which is refused at its own place
        types = [one.get("type") for one in schemas]
        if not all(isinstance(one, str) for one in types):
            return False
        if len({"number" if one == "integer" else one for one in types}) == len(types):
            return True
        for name in schemas[0].get("properties", {}):
            tags = [one.get("properties", {}).get(name) for one in schemas if name in one.get("required", ())]
            values = [tag["const"] for tag in tags if isinstance(tag, dict) and isinstance(tag.get("const"), str)]
            if len(set(values)) == len(schemas):
                return True
        return False

    def _listed(self, out: dict[str, Any], place: str) -> dict[str, Any]:
        name = "enum" if "enum" in out else "const"
        kinds = _kinds(out, place)
        out.pop("type", None)
        self._require_alone(out, name, place)
        values = out["enum"] if name == "enum" else [out["const"]]
        if not isinstance(values, list) or not values:
            raise _invalid(f"{place}.enum", "Input should be a list of values")
        if kinds is not None and not all(_is(value, kinds) for value in values):
            raise _invalid(f"{place}.{name}", f"its values are not all of the type {json.dumps(kinds)[:100]}")
        return out

    def _typed(self, out: dict[str, Any], place: str) -> dict[str, Any]:
        named = _kinds(out, place)
        about = {_OF[name]: name for name in out if name in _OF}
        if named is None and about:
            # XGrammar enforces a keyword where the schema names the type that the keyword restricts.
            if len(about) > 1:
                raise _invalid(f"{place}.type", "it is missing, and the other keywords restrict several types")
            named = [*about]
            out["type"] = named[0]
        if named is None:
            return out
        for kind, name in about.items():
            if kind not in named and not (kind == "number" and "integer" in named):
                raise _invalid(f"{place}.{name}", f"it restricts {kind}s, which the type does not allow")
        for name in _COUNTS:
            if name in out:
                _check_count(out[name], f"{place}.{name}")
                if out[name] == 0 and name.startswith("min"):
                    del out[name]  # it restricts nothing
        if "object" in named:
            self._object(out, place)
        if "array" in named:
            self._array(out, place)
        if "string" in about:
            self._string(out, place)
        if "number" in about:
            self._number(out, place, named)
        return out

    def _object(self, out: dict[str, Any], place: str) -> None:
        for name in ("properties", "patternProperties"):
            if name in out:
                out[name] = self._each(out[name], f"{place}.{name}", ())
        extra = out.get("additionalProperties")
        if extra not in (None, False):
            out["additionalProperties"] = self.schema(extra, f"{place}.additionalProperties", ())
        given = [
            name for name in _BOUNDS["object"] if name in out and (name, out[name]) != ("additionalProperties", False)
        ]
        if ("patternProperties" in out or "propertyNames" in out) and len(given) > 1:
            raise _invalid(f"{place}.{given[1]}", f"guided decoding cannot enforce it beside '{given[0]}'")
        if "propertyNames" in out:
            out["propertyNames"] = self.schema(out["propertyNames"], f"{place}.propertyNames", ())
        properties = out.get("properties", {})
        if not properties and "patternProperties" not in out and "propertyNames" not in out:
            # Otherwise XGrammar allows no properties but the named ones, which is narrower than the schema.
            out.setdefault("additionalProperties", True)
        required = out.get("required", [])
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise _invalid(f"{place}.required", "Input should be a list of names")
        missing = next((one for one in required if one not in properties), None)
        if missing is not None:
            raise _invalid(f"{place}.required", f"'{missing[:100]}' is not in properties")
        for name in ("minProperties", "maxProperties"):
            if name in out and (properties or out[name] == 0):
                raise _invalid(f"{place}.{name}", "guided decoding cannot enforce it beside 'properties'")

    def _array(self, out: dict[str, Any], place: str) -> None:
        if "items" in out and out["items"] is not False:
            out["items"] = self.schema(out["items"], f"{place}.items", ())
        if "prefixItems" in out:
            given = out["prefixItems"]
            if not isinstance(given, list) or not given:
                raise _invalid(f"{place}.prefixItems", "Input should be a list of schemas")
            out["prefixItems"] = [self.schema(one, f"{place}.prefixItems.{at}", ()) for at, one in enumerate(given)]
        else:
            out.setdefault("items", True)

    def _string(self, out: dict[str, Any], place: str) -> None:
        if "format" in out and out["format"] not in _FORMATS:
            del out["format"]  # validators of JSON Schema ignore it too
        chosen = [name for name in _BOUNDS["string"] if name in out]
        if ("pattern" in out or "format" in out) and len(chosen) > 1:
            raise _invalid(f"{place}.{chosen[1]}", f"guided decoding cannot enforce it beside '{chosen[0]}'")
        if "pattern" in out and not isinstance(out["pattern"], str):
            raise _invalid(f"{place}.pattern", "Input should be a regular expression")
        least, most = out.pop("minLength", 0), out.pop("maxLength", "")
        if least or most != "":
            # XGrammar's own strings of bounded length may contain control characters, which JSON forbids.
            out["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'

    def _number(self, out: dict[str, Any], place: str, kinds: list[str]) -> None:
        for name in _BOUNDS["number"]:
            if name in out and not _is(out[name], "number"):
                raise _invalid(f"{place}.{name}", "Input should be a number")
        if "multipleOf" in out:
            if sum(name in out for name in _BOUNDS["number"]) > 1:
                raise _invalid(f"{place}.multipleOf", "guided decoding cannot enforce it beside another bound")
            if "number" in kinds or not 1 <= out["multipleOf"] <= MAX_COUNT or out["multipleOf"] % 1:
                raise _invalid(
                    f"{place}.multipleOf", f"it must be a whole number up to {MAX_COUNT}, beside the type 'integer'"
                )


_invalid = functools.partial(invalid, code="invalid_schema")
_KEYWORDS = (*_CHOICES, "enum", "const", "type", "$ref")


def _kinds(out: dict[str, Any], place: str) -> list[str] | None:
    """The types that a schema names; None without any. Raises Failure."""
    given = out.get("type")
    named = [given] if isinstance(given, str) else given
    if named is None:
        return None
    if not isinstance(named, list) or not named or not all(isinstance(one, str) and one in _TYPES for one in named):
        raise _invalid(f"{place}.type", f"Input should be of {', '.join(_TYPES)}")
    return named


def _has_names(schema: dict[str, Any]) -> bool:
    """Whether `properties` and `required`, where a schema has them, are an object and a list."""
    return isinstance(schema.get("properties", {}), dict) and isinstance(schema.get("required", []), list)


def _is(value: Any, kinds: Any) -> bool:
    """Whether a value is of the type, or one of the types."""
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind in _TYPES and isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)):
            return True
    return False


def _check_count(value: Any, place: str) -> None:
    if not _is(value, "integer") or value < 0:
        raise _invalid(place, "Input should be a whole number, 0 or more")
    if value > MAX_COUNT:
        raise _invalid(place, f"at most {MAX_COUNT} is taken", code="schema_too_large")
