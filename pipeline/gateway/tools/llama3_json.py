"""Calls of Llama 3.1 to 3.3: the whole answer is a JSON object, at times behind <|python_tag|>; `;` between several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtpipe.pipeline.gateway.tools.call_format import Function, tags
from trtpipe.pipeline.gateway.tools.json_calls import JsonCalls


class Llama3Json(JsonCalls):
    def form(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any]:
        # One call whatever is allowed: Meta's chat template refuses a history with several in one message.
        return tags(functions, '{"name": "NAME", "parameters": ', "}")


LLAMA3_JSON = Llama3Json(
    name="llama3_json",
    mark="<|python_tag|>",
    bare="{",
    separator=";",
    sign='{"name": function name, "parameters":',
)
