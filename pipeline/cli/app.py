"""The trtpipe command. Each command parses, calls one function, and hands the result to the console.

Imports are inside the commands: `trtpipe --help` answers in a blink.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtpipe import __version__
from trtpipe.pipeline.cli import (
    bench,
    build,
    facts,
    plan,
    registry,
    serve,
    weights,
)
from trtpipe.pipeline.cli.help import SectionedCommand, SectionedGroup

if TYPE_CHECKING:
    from trtpipe.engines.errors import TrtpipeError

# As `trtpipe --help` lists them. `bench` and `deploy` have commands of their own.
GROUPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Build": (build.build, build.settings, build.status, facts.recipes, build.gc, build.scrub),
    "Serve": (
        serve.serve, serve.generate, serve.ps, serve.logs, serve.top, serve.reload, serve.stop, serve.check,
        serve.gateway, serve.monitoring,
    ),
    "Measure": (bench.compare,),
    "Plan": (plan.plan, facts.probe),
    "Share": (
        build.export, build.import_, registry.push, registry.pull, registry.search, registry.provenance,
        registry.verify_provenance,
    ),
    "Weights": (weights.convert, weights.inspect, weights.restore, weights.quantize, weights.verify, facts.quants),
    "Facts": (facts.models, facts.gpus, facts.toolchains, facts.passport, facts.doctor),
}  # fmt: skip
APPS = {"Serve": "deploy", "Measure": "bench"}


def command_name(function: Callable[..., Any]) -> str:
    return function.__name__.strip("_").replace("_", "-")


class Grouped(SectionedGroup):
    """Help that lists the commands by group, each with the first line of its own help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, functions in GROUPS.items():
            names = [command_name(function) for function in functions]
            names += [APPS[group]] if group in APPS else []
            with formatter.section(group):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(80)) for name in names])


# click's base class. A newer typer carries a click of its own, whose classes are not those of `import click`.
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]


def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    from trtpipe.pipeline.cli import console

    if version:
        console.text(f"trtpipe {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.text(context.get_help() + "\n")


def make_app() -> typer.Typer:
    """The command with every command of GROUPS and APPS."""
    made = typer.Typer(
        cls=Grouped,
        name="trtpipe",
        help="From a Hugging Face model to a measured Triton deployment.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    made.callback(invoke_without_command=True)(_root)
    for functions in GROUPS.values():
        for function in functions:
            made.command(name=command_name(function), cls=SectionedCommand)(function)
    made.add_typer(bench.app, name="bench")
    made.add_typer(serve.deploy, name="deploy")
    return made


app = make_app()


def main() -> None:
    """Run the command; one line and an exit code for every failure we know, a traceback only with --debug."""
    from trtpipe.pipeline.cli import console

    console.prepare()
    try:
        # Not standalone: failures come back here instead of ending the process with click's own message.
        code = typer.main.get_command(app).main(prog_name="trtpipe", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has left, as `| head` does; say nothing more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        from trtpipe.pipeline.errors import translate

        known = _usage(error) if isinstance(error, CLICK_ERROR) else translate(error)
        if known is None or "--debug" in sys.argv[1:]:
            sys.excepthook = console.traceback
            raise
        console.error(str(known))
        sys.exit(known.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> TrtpipeError:
    """Our error for an unknown command or option, a missing argument, or a value of the wrong type."""
    from trtpipe.engines.errors import UsageError

    command = error.ctx.command_path if getattr(error, "ctx", None) else "trtpipe"
    return UsageError(error.format_message().rstrip("."), remedy=f"see `{command} --help`")
