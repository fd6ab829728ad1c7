"""Reader of tool calls that are JSON objects: {"name": NAME, "arguments": {...}}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.json_input import parse_json
from trtpipe.engines.sampling import WHITE_SPACE
from trtpipe.pipeline.gateway.tools.call_format import (
    MAX_CHARACTERS,
    CallFormat,
    CompleteCalls,
    Found,
    NotACall,
    OpenCall,
)
from trtpipe.pipeline.gateway.tools.json_text import ValueEnd

# The usual order of the members. An incomplete call is only reported when it has this order.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([\w-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII)
# First member of a call in any order, which is only read when it is complete.
_FIRST = re.compile(
    r'\{\s*"(?:name"\s*:\s*"([\w-]{1,64})"|(?:arguments|parameters)"\s*:\s*["{]|type"\s*:\s*"function")', re.ASCII
)


@dataclass(frozen=True, kw_only=True)
class JsonCalls(CallFormat):
    """Calls as JSON objects.

    opening    bracket before the first one; empty for none
    margin     white space between the marks and the calls
    arguments  name of the member that holds the arguments
    """

    opening: str = ""
    margin: str = ""
    arguments: str = "arguments"

    def read(self, text: str, names: frozenset[str], *, first: bool, held: int, final: bool) -> Found:
        start = 0
        if first and self.opening:
            if not text.startswith(self.opening):
                return None if not text and not final else NotACall()
            start = len(text) - len(text[len(self.opening) :].lstrip())
        call = text[start:]
        if not call.startswith("{"):
            return None if not call and not final else NotACall()
        begun = call[: held or None]
        head = _HEAD.match(begun)
        if head is not None and head[1] not in names:
            head = None
        if held and head is None and _may_be_a_call(begun, names):
            held = MAX_CHARACTERS
        end = ValueEnd().find(call[:held])
        if end is not None:
            made = _call(call[:end], names)
            return CompleteCalls((made,), start + end) if made else NotACall()
        if head is not None and len(call) > held:
            return OpenCall(head[1], start + head.end())
        return NotACall() if final or (held and len(call) > held) else None

    def structural_tag(self, schemas: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
        calls = [
            {
                "begin": f'{{"name": "{name}", "{self.arguments}": ',
                "content": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": WHITE_SPACE},
                "end": "}",
            }
            for name, schema in schemas.items()
        ]
        trigger, tags = '{"name":', calls
        if not self.bare:
            one = {
                "type": "tags_with_separator", "tags": calls, "separator": f"{self.separator} ",
                "at_least_one": True, "stop_after_first": not self.separator,
            }  # fmt: skip
            begin, end = f"{self.mark}{self.opening}{self.margin}", f"{self.margin}{self.close}"
            trigger, tags = self.mark, [{"begin": begin, "content": one, "end": end}]
        return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags}}


def _may_be_a_call(text: str, names: frozenset[str]) -> bool:
    """Whether an object begins as a call of one of the functions does, in any order of its members."""
    found = _FIRST.match(text)
    return found is not None and (found[1] is None or found[1] in names)


def _call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a complete call; None where the text is not a call of one of `names`."""
    try:
        call = parse_json(text)
    except ValueError:
        return None
    name = call.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    given: Any = call.get("arguments", call.get("parameters"))
    head = _HEAD.match(text)
    if isinstance(given, dict) and head is not None:
        # The model's own text, as for a call that is sent while it is written.
        arguments = text[head.end() :]
        return name, arguments[: ValueEnd().find(arguments)]
    if isinstance(given, str):  # some models write them as a JSON text
        try:
            given = parse_json(given)
        except ValueError:
            return None
    if given is None:
        given = {}
    return (name, json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None
