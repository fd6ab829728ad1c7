"""Reader of untrusted YAML, with limits on size, depth, number of values and digits.

Commands read all YAML files and values through this module. An alias counts as the values that it expands to: a few
lines of aliases can expand to billions of values.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from trtpipe.engines.json_input import MAX_DEPTH, MAX_DIGITS, read_bounded

# Bound of a YAML text: the largest file of configs/ has 20 kB.
MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
# Bytes of a file whose values are kept for the next time that it is read.
_SMALL = 1 << 13


class YamlError(ValueError):
    """A YAML text is invalid; `line` counts from 1, None where it is not known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def parse_yaml(text: str | bytes, *, repeats: bool = False) -> Any:
    """Parse a YAML text of one document; None for an empty text.

    repeats  accept a key that a mapping has twice, with the last value; otherwise it is an error

    Raises YamlError for an invalid text.
    """
    import yaml  # here: commands that read no YAML need not wait for the import

    if len(text) > MAX_BYTES:
        raise YamlError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        _check_events(text)
        return yaml.load(text, _loader(repeats))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        if mark is not None and text[mark.index : mark.index + 1] == "\t":
            raise YamlError(f"line {mark.line + 1} has a tab, and YAML is indented by blanks", mark.line + 1) from None
        told = str(error).replace('in "<unicode string>", ', "on ")
        raise YamlError(told, None if mark is None else mark.line + 1) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise YamlError(str(error)) from None
    except RecursionError:
        raise YamlError(f"it is nested more than {MAX_DEPTH} deep") from None


def load_yaml(path: Path, *, repeats: bool = False) -> Any:
    """Parse a YAML file. Raises OSError, or ValueError as `parse_yaml` does and if the path is not a regular file."""
    text = read_bounded(path, MAX_BYTES)
    # One command asks for the facts in configs/ several times. What it gets is its own: it may change it.
    return copy.deepcopy(_small(text, repeats)) if len(text) <= _SMALL else parse_yaml(text, repeats=repeats)


@functools.lru_cache(maxsize=256)
def _small(text: bytes, repeats: bool) -> Any:
    return parse_yaml(text, repeats=repeats)


def _check_events(text: str) -> None:
    """Raises YamlError for more than MAX_DEPTH levels or MAX_VALUES values, before any value is constructed.

    An alias counts as the levels and values of its anchor's value, which must not contain the alias.
    """
    import yaml

    # (anchor, values before it, levels within it) of each collection that is open
    opened: list[list[Any]] = []
    known: dict[str, tuple[int, int]] = {}
    values = 0
    event: Any
    for event in yaml.parse(text, _base()):
        line = event.start_mark.line + 1
        size = levels = 0
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append([event.anchor, values, 0])
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before, inner = opened.pop()
            levels = inner + 1
            if anchor is not None:
                known[anchor] = (values - before, levels)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            try:
                event.value.encode("utf-8")
            except UnicodeEncodeError:  # libyaml refuses it itself
                raise YamlError(f"half of a surrogate pair is not a character, on line {line}", line) from None
            if event.anchor is not None:
                known[event.anchor] = (1, 0)
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _, _ in opened):
                raise YamlError(f"'{event.anchor}' is a part of itself, on line {line}", line)
            size, levels = known.get(str(event.anchor), (1, 0))
        else:
            continue
        values += size
        if opened:
            opened[-1][2] = max(opened[-1][2], levels)
        if len(opened) + levels > MAX_DEPTH:
            raise YamlError(f"it is nested more than {MAX_DEPTH} deep, on line {line}", line)
        if values > MAX_VALUES:
            raise YamlError(f"it holds more than {MAX_VALUES:,} values, on line {line}", line)


def _base() -> Any:
    """libyaml's safe loader, ten times as fast, where PyYAML was built with it; else PyYAML's own loader."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def _loader(repeats: bool) -> Any:
    """Safe loader that names the line of a scalar that its type cannot hold, for which PyYAML has no error class, and,
    unless `repeats`, refuses duplicate keys, of which PyYAML would silently keep the last."""
    import yaml

    base: Any = _base()

    class Loader(base):  # type: ignore[misc]
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            if not isinstance(node, yaml.ScalarNode):
                return super().construct_object(node, deep)
            line = node.start_mark.line + 1
            kind = node.tag.rpartition(":")[2]
            if kind in ("int", "float") and len(node.value) > MAX_DIGITS:
                raise YamlError(f"a number has more than {MAX_DIGITS} digits, on line {line}", line)
            try:
                return super().construct_object(node, deep)
            except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
                shown = node.value[:MAX_DIGITS]
                raise YamlError(f"'{shown}' is not a value of type {kind}, on line {line}", line) from None

        # Checked on the whole tree before `<<` is resolved: a key that is merged in may be given again.
        def get_single_node(self) -> Any:
            tree = super().get_single_node()
            if not repeats:
                _check_repeats(tree)
            return tree

    return Loader


def _check_repeats(tree: Any) -> None:
    """Raises YamlError for a mapping that has a key twice."""
    import yaml

    nodes, seen = [tree], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            nodes.append(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                where = f"lines {first} and {line}" if line != first else f"line {line}"
                raise YamlError(f"'{key.value}' is given twice, on {where}", line)
            lines[key.tag, key.value] = line
