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
    bench as cli_bench,
)
from trtpipe.pipeline.cli import (
    build as cli_build,
)
from trtpipe.pipeline.cli import (
    facts as cli_facts,
)
from trtpipe.pipeline.cli import (
    plan as cli_plan,
)
from trtpipe.pipeline.cli import (
    registry as cli_registry,
)
from trtpipe.pipeline.cli import (
    serve as cli_serve,
)
from trtpipe.pipeline.cli import (
    weights as cli_weights,
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


# As `--help` lists them.
for _command in (
    cli_build.build, cli_plan.plan, cli_build.settings, cli_build.status, cli_weights.convert, cli_weights.quantize,
    cli_weights.verify, cli_weights.recipes, cli_weights.inspect, cli_weights.restore, cli_serve.serve, cli_serve.ps,
    cli_serve.logs, cli_serve.reload, cli_serve.stop, cli_serve.check, cli_serve.top, cli_serve.monitoring,
    cli_serve.generate, cli_bench.compare, cli_facts.models, cli_facts.gpus, cli_facts.probe, cli_facts.toolchains,
    cli_facts.passport, cli_build.export, cli_build.import_, cli_registry.push, cli_registry.pull, cli_registry.search,
    cli_registry.provenance, cli_registry.verify_provenance, cli_build.gc,
    cli_build.scrub, cli_facts.doctor,
):  # fmt: skip
    app.command(name=_command.__name__.strip("_").replace("_", "-"))(_command)
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_serve.deploy, name="deploy")


def main() -> None:
    """Run the command; one line and an exit code for every failure we know, a traceback only with --debug."""
    from trtpipe.pipeline.cli import console

    console.prepare()
    try:
        # Not standalone: failures come back here instead of ending the process with click's own words.
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
    """Our words for an unknown command or option, a missing argument, or a value of the wrong type."""
    from trtpipe.engines.errors import UsageError

    command = error.ctx.command_path if getattr(error, "ctx", None) else "trtpipe"
    return UsageError(error.format_message().rstrip("."), remedy=f"see `{command} --help`")
