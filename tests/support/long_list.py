"""The JSON schema of measurements of guided decoding."""

from __future__ import annotations

# A list longer than an answer, so that every request makes as many tokens as it may. XGrammar 0.2.3 compiles each item:
# with a vocabulary of 128,000 a thousand take 103 MB, of which the reference runtime takes 32. 0.2.8 takes 6.
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "number"}, "kind": {"enum": ["small", "large"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}
