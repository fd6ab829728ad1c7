"""The JSON schema of measurements of guided decoding."""

from __future__ import annotations

# A list longer than an answer, so that every request makes as many tokens as it may. XGrammar 0.2.3 compiles it to some
# 100 MB for a vocabulary of 128,000 tokens, of which the reference runtime takes 32; 0.2.8 compiles it to some 5.
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "number"}, "kind": {"enum": ["small", "large"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}
