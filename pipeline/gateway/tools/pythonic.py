"""Tool calls of Llama as a Python list, [get_weather(city="Paris"), get_time()], sometimes after <|python_start|>."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass

from trtpipe.pipeline.gateway.tools.call_format import MAX_CHARACTERS, CallFormat, CompleteCalls, Found, NotACall

_HEAD = re.compile(r"\[\s*([A-Za-z_]\w*)?\s*(\()?", re.ASCII)
_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}
_OUTSIDE = re.compile(r"['\"\[\](){}]")
# Constants that models write as in JSON.
_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, kw_only=True)
class Pythonic(CallFormat):
    def read(self, text: str, names: frozenset[str], *, first: bool, held: int, final: bool) -> Found:
        if not _may_be_calls(text, names):
            return NotACall()
        end = _end(text[:MAX_CHARACTERS])
        if end is None:
            return NotACall() if final or len(text) > MAX_CHARACTERS else None
        calls = _calls(text[:end])
        return CompleteCalls(calls, end) if calls and all(name in names for name, _ in calls) else NotACall()


PYTHONIC = Pythonic(
    name="pythonic",
    mark="<|python_start|>",
    bare="[",
    close="<|python_end|>",
    sign="[func_name1(",
)


def _may_be_calls(text: str, names: frozenset[str]) -> bool:
    """Whether the list may begin with a call of one of the functions. Any other list is text and is not held back."""
    head = _HEAD.match(text)
    if head is None:
        return not text
    name = head[1] or ""
    if head[2] or head.end() < len(text):
        return bool(head[2]) and name in names
    return any(one.startswith(name) for one in names)


def _end(text: str) -> int | None:
    """Position behind the bracket that closes the one at the start."""
    place, depth = 0, 0
    while found := _OUTSIDE.search(text, place):
        mark, place = found[0], found.end()
        if mark in _IN_STRING:
            while (found := _IN_STRING[mark].search(text, place)) and found[0] == "\\":
                place = found.end() + 1
            if found is None:
                return None
            place = found.end()
        else:
            depth += 1 if mark in "[({" else -1
            if depth == 0:
                return place
    return None


def _calls(text: str) -> tuple[tuple[str, str], ...]:
    """(name, arguments as JSON text) of the calls in a Python list; empty if it is not one of calls with constants."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            body = ast.parse(text, mode="eval").body
        return tuple(_call(one) for one in body.elts) if isinstance(body, ast.List) else ()
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        return ()


def _call(node: ast.expr) -> tuple[str, str]:
    """(name, arguments as JSON text) of a call. Raises ValueError or TypeError for another expression."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        arguments[keyword.arg] = ast.literal_eval(_Constants().visit(keyword.value))
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # fails for half of a surrogate pair, which UTF-8 cannot have
    return node.func.id, text


class _Constants(ast.NodeTransformer):
    """Replaces the names true, false and null by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_NAMES[node.id]), node) if node.id in _NAMES else node
