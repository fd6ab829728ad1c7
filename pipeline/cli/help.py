"""Help of commands: options in named sections, commands in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
import typer.core


def in_section(title: str) -> Callable[..., Any]:
    """A typer.Option that `--help` lists under `title`; its first argument is its help."""

    def option(help: str, *names: str, **more: Any) -> Any:  # noqa: A002
        return typer.Option(*names, help=help, rich_help_panel=title, **more)

    return option


def write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    """The arguments and options of a command, in the order of their declaration within each section."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)


class SectionedCommand(typer.core.TyperCommand):
    """A command whose help has its options in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)


class SectionedGroup(typer.core.TyperGroup):
    """A command with commands of its own whose help has its options in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)
        self.format_commands(ctx, formatter)
