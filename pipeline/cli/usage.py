"""Our errors for command lines that click refuses: an unknown command or option, a missing argument, a wrong value."""

from __future__ import annotations

import re
from typing import Any

from trtpipe.engines.errors import UsageError, nearest


def describe(error: Any) -> UsageError:
    """Our error for one of click's."""
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context else "trtpipe"
    help_text = f"see `{command} --help`"
    value, is_not, _ = str(getattr(error, "message", "")).partition(" is not ")
    wanted = _number(getattr(error, "param", None)) if is_not else ""
    if wanted:
        return UsageError(f"{error.param.opts[0]} is {value}", remedy=f"give {wanted}; {help_text}")
    unknown, known = "", []
    if context and hasattr(error, "possibilities"):
        error.possibilities = None  # ours are better
        unknown = error.option_name.lstrip("-")
        known = [name[2:] for one in context.command.params for name in one.opts if name.startswith("--")]
    elif context and error.message.startswith("No such command"):
        unknown, known = error.message.split("'")[1], list(context.command.commands)
    dashes = "--" if hasattr(error, "possibilities") else ""
    near = [dashes + name for name in nearest(unknown, known)]
    if unknown and not dashes and any(f"--{unknown}" in one.opts for one in context.command.params):
        near = [f"--{unknown}"]
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    remedy = help_text
    if unknown and not dashes and not near and any("--target" in one.opts for one in context.command.params):
        remedy = f"a target is named by --target {unknown}; {remedy}"
    told = error.format_message()
    if getattr(getattr(error, "param", None), "param_type_name", "") == "argument" and error.message:
        told = error.message  # without "Invalid value for 'NAME'", whose name the user has not written
    return UsageError(told.rstrip(".") + meant, remedy=remedy)


def _number(parameter: Any) -> str:
    """The values that a numeric option takes, in words: "a whole number from 0 to 65535, such as 8000", or "a number
    of seconds" where the help names them. "" for other options."""
    words = str(getattr(getattr(parameter, "type", None), "name", "")).split()
    kinds = {"int": "a whole number", "integer": "a whole number", "float": "a number"}
    if not words or words[0] not in kinds:
        return ""
    least, most = (getattr(parameter.type, bound, None) for bound in ("min", "max"))
    bounds = ""
    if most is not None:
        bounds = f" up to {most:.12g}" if least is None else f" from {least:g} to {most:.12g}"
    elif least is not None:
        bounds = f" of {least:g} or more"
    usual = parameter.default
    unit = " of seconds" if re.search(r"\bseconds\b", str(getattr(parameter, "help", "")), re.IGNORECASE) else ""
    such = f", such as {usual:g}" if isinstance(usual, int | float) and usual else ""
    return kinds[words[0]] + unit + bounds + such
