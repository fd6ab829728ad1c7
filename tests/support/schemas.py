"""Random JSON schemas of all the shapes that guided decoding enforces."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "name", "x y", 'q"t', "größe")


def schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are short more often than not."""
    kinds = [_string, _integer, _number, _enum, _const, _boolean, _formatted, _untyped]
    if depth > 0:
        kinds += [_object, _object, _object, _array, _array, _tuple, _any_of, _one_of, _nullable, _referring, _mapping]
    return chance.choice(kinds)(chance, depth)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    return chance.choice([
        {"type": "string", "minLength": least, "maxLength": least + chance.randrange(6)},
        {"type": "string", "pattern": chance.choice(["^[a-c]{1,4}$", "^a?b*c$", "^\\d{3}-\\d{2}$", "x[0-9]"])},
        {"type": "string", "maxLength": 5, "description": "short", "default": "a"},
    ])  # fmt: skip


def _formatted(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(["date", "ipv4", "uuid", "time"])}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(-20, 20)
    return chance.choice([
        {"type": "integer", "minimum": low, "maximum": low + chance.randrange(300)},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2 + chance.randrange(30)},
        {"type": "integer", "multipleOf": chance.randrange(1, 12)},
    ])  # fmt: skip


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": chance.choice([-1.5, 0, 2]), "maximum": chance.choice([2.5, 10, 1000])}


def _boolean(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null"])}


def _untyped(chance: random.Random, depth: int) -> dict[str, Any]:
    return chance.choice([{"maxLength": 4}, {"minimum": 3, "maximum": 12}, {"properties": {"a": {"type": "null"}}}])


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    values = [1, -2.5, "a", 'say "hi"\n', None, True, {"a": [1, {}]}, [], "größe"]
    return {"enum": chance.sample(values, chance.randrange(1, 5))}


def _const(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"const": chance.choice([0, "x", {"k": None}, False])}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randrange(1, 4))
    out: dict[str, Any] = {"type": "object", "properties": {name: schema(chance, depth - 1) for name in names}}
    if chance.random() < 0.7:
        out["required"] = chance.sample(names, chance.randrange(1, len(names) + 1))
    if chance.random() < 0.5:
        out["additionalProperties"] = False
    return out


def _mapping(chance: random.Random, depth: int) -> dict[str, Any]:
    return chance.choice([
        {"type": "object", "patternProperties": {"^p_[a-z]{1,3}$": schema(chance, 0)}, "additionalProperties": False},
        {"type": "object", "additionalProperties": schema(chance, 0), "maxProperties": 2},
    ])  # fmt: skip


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    items = schema(chance, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + chance.randrange(1, 3)}


def _tuple(chance: random.Random, depth: int) -> dict[str, Any]:
    count = chance.randrange(1, 3)
    return {
        "type": "array", "prefixItems": [schema(chance, depth - 1) for _ in range(count)], "items": False,
        "minItems": count,
    }  # fmt: skip


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(chance, depth - 1) for _ in range(2)]}


def _one_of(chance: random.Random, depth: int) -> dict[str, Any]:
    def tagged(tag: str) -> dict[str, Any]:
        fields = {"kind": {"const": tag}, "value": schema(chance, depth - 1)}
        return {"type": "object", "properties": fields, "required": ["kind"]}

    return {"oneOf": [tagged("cat"), tagged("dog")]}


def _nullable(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": 3, "maximum": 99}


def _referring(chance: random.Random, depth: int) -> dict[str, Any]:
    node = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/leaf"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }  # fmt: skip
    return {"$defs": {"leaf": schema(chance, 0), "node": node}, "allOf": [{"$ref": "#/$defs/node"}]}


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    made = [schema(chance, 2) for _ in range(count)]
    # A reference is from the root.
    return [one if "$defs" in one or "$defs" not in str(one) else {"type": "null"} for one in made]
