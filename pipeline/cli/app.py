"""The trtpipe command. Each command parses, calls one function, and hands the result to the console.

Imports are inside the commands: `trtpipe --help` answers in a blink.
"""

from __future__ import annotations

import os
import sys
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

if TYPE_CHECKING:
    from trtpipe.engines.errors import TrtpipeError

app = typer.Typer(
    name="trtpipe",
    help="From a Hugging Face Llama to a measured Triton deployment on TensorRT-LLM.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# click's base class. A newer typer carries a click of its own, whose classes are not those of `import click`.
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]


@app.callback(invoke_without_command=True)
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


# In the order of `--help`.
for _command in (
    build.build, plan.plan, build.settings, build.status, weights.convert, weights.quantize,
    weights.verify, weights.recipes, weights.inspect, weights.restore, serve.serve, serve.ps,
    serve.logs, serve.reload, serve.stop, serve.check, serve.top, serve.monitoring,
    serve.generate, bench.compare, facts.models, facts.gpus, facts.probe, facts.toolchains,
    facts.passport, build.export, build.import_, registry.push, registry.pull, registry.search,
    registry.provenance, registry.verify_provenance, build.gc,
    build.scrub, facts.doctor,
):  # fmt: skip
    app.command(name=_command.__name__.strip("_").replace("_", "-"))(_command)
app.add_typer(bench.app, name="bench")
app.add_typer(serve.deploy, name="deploy")


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
