"""Reader of calls that are JSON objects: {"name": NAME, "arguments": {...}}, as most formats have them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.gateway.tools.call_format import Begun, CallFormat, Found, Whole, Wrong
from trtpipe.pipeline.gateway.tools.json_text import ValueEnd

# The usual order of the members, which a call must have that is reported before it is complete.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([\w-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JsonCalls(CallFormat):
    """Calls as JSON objects. `opening` is a bracket before the first one; empty for none."""

    opening: str = ""

    def read(self, text: str, names: frozenset[str], *, first: bool, held: int, final: bool) -> Found:
        start = 0
        if first and self.opening:
            if not text.startswith(self.opening):
                return None if not text and not final else Wrong()
            start = len(text) - len(text[len(self.opening) :].lstrip())
        call = text[start:]
        if not call.startswith("{"):
            return None if not call and not final else Wrong()
        end = ValueEnd().find(call[:held])
        if end is not None:
            made = _call(call[:end], names)
            return Whole((made,), start + end) if made else Wrong()
        if len(call) > held:
            head = _HEAD.match(call[: held or None])
            if head and head[1] in names:
                return Begun(head[1], start + head.end())
        return Wrong() if final or (held and len(call) > held) else None


def _call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of a complete call, None where the text is not one."""
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
        # As the model wrote them, which is what a longer call has too.
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
