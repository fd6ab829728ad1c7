"""The formats of tool calls, by name."""

from __future__ import annotations

from trtpipe.pipeline.gateway.tools.call_format import CallFormat
from trtpipe.pipeline.gateway.tools.hermes import HERMES
from trtpipe.pipeline.gateway.tools.llama3_json import LLAMA3_JSON
from trtpipe.pipeline.gateway.tools.mistral import MISTRAL
from trtpipe.pipeline.gateway.tools.pythonic import PYTHONIC

FORMATS: dict[str, CallFormat] = {one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC)}


# Beginning of a call as Qwen3-Coder writes it, between Hermes' marks: XML, which no format here reads.
XML = "<function="


def recognise(template: str) -> CallFormat | None:
    """The format whose `sign` is in a chat template; None without one."""
    if XML in template:
        return None
    return next((one for one in FORMATS.values() if one.sign in template), None)
