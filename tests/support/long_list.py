"""The JSON schema of measurements of guided decoding."""

from __future__ import annotations

# A list longer than an answer, so that every request makes as many tokens as it may. XGrammar compiles each of the
# items: with a vocabulary of 128,000 a thousand would take 103 MB, of which the reference runtime takes 32.
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "number"}, "kind": {"enum": ["small", "large"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}
