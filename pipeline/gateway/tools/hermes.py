"""Calls of Hermes, Qwen 2.5 and Qwen 3: each a JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtpipe.pipeline.gateway.tools.call_format import Function, tags
from trtpipe.pipeline.gateway.tools.json_calls import JsonCalls


class Hermes(JsonCalls):
    def form(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any]:
        begin, end = '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"
        return tags(functions, begin, end, separator="\n", parallel=parallel)


HERMES = Hermes(name="hermes", mark="<tool_call>", close="</tool_call>", sign="<tool_call>")
