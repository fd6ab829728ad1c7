"""The functions of the API: their arguments are checked against their annotations, and their exceptions are ours."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

# By its name in an annotation: the class of a value, the classes that do not count as it, and the words of a remedy.
# A class of ours is given by its name, since it may not be loaded. Other names, such as Any, are not checked.
KINDS: dict[str, tuple[Any, Any, str]] = {
    "str": (str, (), "a text"), "Path": (Path, (), "a path"), "bool": (bool, (), "True or False"),
    "int": (Integral, bool, "a whole number"), "float": (Real, bool, "a number"), "None": (type(None), (), ""),
    "Sequence": (Collection, (str, bytes, Mapping), "a list"), "Mapping": (Mapping, (), "a mapping"),
    "Callable": (Callable, (), "a function"), "Client": ("Client", (), "a client"), "Store": ("Store", (), "a store"),
    "BuildSpec": ("BuildSpec", (), "what `trtpipe.settings` returns, or recipe=... or model=... instead"),
}  # fmt: skip
EXAMPLES: dict[str, Any] = {
    "slo": "ttft:p99<200ms", "sampling": {"top_p": 0.9}, "price": {"h100": 2.5}, "set": {"build.max_batch_size": 16},
    "lora": {"support": "adapters/support"}, "messages": [{"role": "user", "content": "Hello"}],
}  # fmt: skip


def checked(function: _Function) -> _Function:
    """The function, which then raises UsageError for an argument or option of another kind than its annotation says,
    and its exceptions are those of `known_errors`."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        code, kinds = function.__code__, dict(function.__annotations__)
        for kind in function.__annotations__.values():
            if kind.startswith("Unpack["):
                options = function.__globals__[kind[len("Unpack[") : -1]].__annotations__
                kinds |= {name: getattr(one, "__forward_arg__", one) for name, one in options.items()}
        names = code.co_varnames[: code.co_argcount]
        _check_names(named, {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *kinds})
        for name, value in {**dict(zip(names, given, strict=False)), **named}.items():
            if name in kinds:
                _check(name, value, ast.parse(kinds[name], mode="eval").body)
        with known_errors():
            return function(*map(_plain, given), **{name: _plain(value) for name, value in named.items()})

    return cast(_Function, call)


@contextlib.contextmanager
def known_errors() -> Iterator[None]:
    """Raise the TrtpipeError with which the command would end for another exception of the block, where there is one:
    HostError for a file that is not there, say."""
    try:
        yield
    except Exception as error:
        from trtpipe.pipeline.errors import translate

        known = translate(error)
        if known is None or known is error:
            raise
        raise known from error


def _check_names(named: Collection[str], known: Collection[str]) -> None:
    from trtpipe.engines.errors import UsageError, suggestion

    unknown = [name for name in named if name not in known]
    if unknown:
        raise UsageError(f"unknown argument '{unknown[0]}'", remedy=suggestion(unknown[0], sorted(known)))


def _plain(value: Any) -> Any:
    """The value with Python's own numbers, also within lists and mappings: a report cannot hold NumPy's."""
    if isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value)) if type(value) is tuple else value
    return [_plain(one) for one in value] if isinstance(value, Collection) else value


def _check(name: str, value: Any, kind: ast.expr) -> None:
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.bench.load.lines import shown

    if not _fits(value, kind):
        words = [word for word in map(_word, _either(kind)) if word]
        known = name in EXAMPLES and _fits(EXAMPLES[name], kind)
        such = f", such as {json.dumps(EXAMPLES[name])}" if known else ""
        told = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        raise UsageError(f"{name} is {shown(value)}", remedy=f"give {told}{such}")


def _either(kind: ast.expr) -> list[ast.expr]:
    """The kinds of A | B | C."""
    return [*_either(kind.left), *_either(kind.right)] if isinstance(kind, ast.BinOp) else [kind]


def _fits(value: Any, kind: ast.expr) -> bool:
    return any(_is(value, one) for one in _either(kind))


def _is(value: Any, kind: ast.expr) -> bool:
    if isinstance(kind, ast.Subscript):
        if not _is(value, kind.value) or not isinstance(value, Collection):
            return _is(value, kind.value)
        parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        columns = (value, value.values()) if isinstance(value, Mapping) else (value,)
        return all(_fits(one, part) for part, column in zip(parts, columns, strict=True) for one in column)
    of, but, _ = KINDS.get(ast.unparse(kind), (object, (), ""))
    if isinstance(of, str):
        return of in [one.__name__ for one in type(value).__mro__]
    return isinstance(value, of) and not isinstance(value, but)


def _word(kind: ast.expr) -> str:
    name = ast.unparse(kind.value if isinstance(kind, ast.Subscript) else kind)
    if isinstance(kind, ast.Subscript) and name == "Sequence":
        return "a list of " + " or ".join(f"{_word(one).removeprefix('a ')}s" for one in _either(kind.slice))
    return KINDS.get(name, (object, (), ""))[2]
