"""Help of commands: options in named sections, commands in groups; and the options that every command has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
import typer.core

from trtpipe.pipeline.cli import console

COMMON = "Common options"
# click's class. A newer typer carries a click of its own, whose classes are not those of `import click`.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


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
            usual = COMMON if parameter.name == "help" else usual
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)


def refuse_repeated(command: Any, ctx: Any, args: list[str]) -> None:
    """Raise UsageError for an option that takes one value and is given several: click would drop all but the last."""
    from trtpipe.engines.errors import UsageError

    try:
        _, _, order = command.make_parser(ctx).parse_args(args=list(args))
    except USAGE_ERROR as error:
        error.ctx = error.ctx or ctx  # of an option without its value; the message names this command's help
        raise
    for option in {one for one in order if one.param_type_name == "option" and order.count(one) > 1}:
        if not option.multiple and (not option.is_flag or option.secondary_opts):
            name = option.opts[0]
            listed = f"; a list, where it takes one, is {name} A,B" if repr(option.type) == "STRING" else ""
            raise UsageError(f"{name} is given {order.count(option)} times", remedy=f"give it once{listed}")


class SectionedCommand(typer.core.TyperCommand):
    """A command whose help has its options in sections, and whose options are given once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)


class SectionedGroup(typer.core.TyperGroup):
    """A command with commands of its own whose help has its options in sections, and whose options are given once."""

    suggest_commands = property(lambda self: False, lambda self, value: None)  # cli.app does it, for options too

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _flag(*names: str, help: str, do: Callable[[], None]) -> Any:  # noqa: A002
    return typer.core.TyperOption(
        param_decls=list(names), is_flag=True, default=False, expose_value=False, help=help, rich_help_panel=COMMON,
        callback=lambda ctx, param, given: do() if given else None,
    )  # fmt: skip


def add_common_options(command: Any) -> None:
    """Give a command, and those within it, the options that stand before or after any verb."""
    command.context_settings["help_option_names"] = ["-h", "--help"]
    command.params += [
        _flag("--quiet", "-q", help="Print results and errors alone.", do=console.be_quiet),
        _flag("--verbose", "-v", help="Print defaults too, and what libraries log.", do=console.be_verbose),
        # cli.app looks for it itself: a command line that is wrong ends before its options are read.
        _flag("--debug", help="Print the traceback of an error.", do=lambda: None),
    ]
    for inner in getattr(command, "commands", {}).values():
        add_common_options(inner)
