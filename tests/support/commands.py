"""The command trtpipe as click knows it, for tests that parse command lines without running them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtpipe.pipeline.cli import app


def every_command(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A command and those within it, each with its path, such as "deploy k8s"."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, f"{path} {name}".strip())


def command_of_examples() -> Any:
    """The command for which no path has to exist: files of examples do not."""
    made = app.command.__wrapped__()  # one of its own, since it is changed
    for _, command in every_command(made):
        for parameter in command.params:
            if hasattr(parameter.type, "exists"):
                parameter.type.exists = False
    return made
