"""Calls of Mistral's models with a version 3 tokenizer: [TOOL_CALLS], then a JSON array of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtpipe.pipeline.gateway.tools.call_format import Function, tags
from trtpipe.pipeline.gateway.tools.json_calls import JsonCalls


class Mistral(JsonCalls):
    def prefix(self) -> str:
        # A special token, which a grammar over texts cannot have a model write.
        return self.mark

    def form(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any]:
        calls = tags(functions, '{"name": "NAME", "arguments": ', "}", separator=", ", parallel=parallel)
        opening, close = ({"type": "const_string", "value": value} for value in (self.opening, self.close))
        return {"type": "sequence", "elements": [opening, calls, close]}


MISTRAL = Mistral(
    name="mistral",
    mark="[TOOL_CALLS]",
    opening="[",
    separator=",",
    close="]",
    sign="[TOOL_CALLS]",
    short_ids=True,
)
