"""The trtpipe command. Each command parses, calls one function, and hands the result to the console.

Imports are inside the commands: `trtpipe --help` answers in a blink.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import typer

from trtpipe import __version__
from trtpipe.engines.errors import Ended
from trtpipe.pipeline.cli import (
    bench,
    build,
    chat,
    check,
    config,
    deploy,
    facts,
    gateway,
    generate,
    lora,
    migrate,
    plan,
    prove,
    registry,
    serve,
    servers,
    targets,
    tune,
    weights,
)
from trtpipe.pipeline.cli.completion import completion
from trtpipe.pipeline.cli.help import USAGE_ERROR, SectionedCommand, SectionedGroup, add_common_options

# Those that have commands of their own.
APPS = {"bench": bench.app, "deploy": deploy.deploy, "lora": lora.lora}
# As `trtpipe --help` lists them: functions, and names of APPS.
GROUPS: dict[str, tuple[Callable[..., Any] | str, ...]] = {
    "Build": (
        build.build, build.settings, build.status, migrate.migrate, facts.recipes, targets.ls, targets.rm, targets.gc,
        targets.scrub,
    ),
    "Serve": (
        serve.serve, chat.chat, generate.generate, servers.ps, servers.logs, servers.top, servers.reload, servers.stop,
        check.check, gateway.gateway, "lora", "deploy", deploy.monitoring,
    ),
    "Measure": ("bench", bench.compare, prove.prove),
    "Plan": (plan.plan, tune.tune, facts.probe),
    "Share": (
        registry.export, registry.import_, registry.push, registry.pull, registry.search, registry.provenance,
        registry.verify_provenance,
    ),
    "Weights": (weights.convert, weights.inspect, weights.restore, weights.quantize, weights.verify, facts.quants),
    "Facts": (facts.models, facts.gpus, facts.toolchains, facts.passport, facts.doctor),
    "This command": (config.config, completion),
}  # fmt: skip
# Exit status after a KeyboardInterrupt, which typer turns into it.
INTERRUPTED = 130
ENVIRONMENT = (
    ("TRTPIPE_HOME", "Folder of artefacts, logs and your own GPUs; ~/.cache/trtpipe."),
    ("TRTPIPE_API_KEY", "API key that `trtpipe bench` and `chat` send."),
    ("TRTPIPE_API_KEYS", "API keys that `trtpipe serve` accepts: KEY,KEY."),
    ("HF_TOKEN", "Token of the Hugging Face Hub, for gated models."),
    ("HF_HOME", "Folder of what the hub's client keeps."),
    ("HF_ENDPOINT", "Address of another hub, such as a mirror."),
    ("HF_HUB_OFFLINE", "Set to 1, nothing is asked of the hub."),
    ("CUDA_VISIBLE_DEVICES", "GPUs that may be used, by nvidia-smi's index or UUID."),
    ("XDG_CONFIG_HOME", "Folder of trtpipe/config.toml; ~/.config."),
    ("NO_COLOR", "Set, no colour is printed."),
)
EXIT_CODES = (
    ("0", "done; of a server also: it ended when it was told to"),
    ("1", "a defect of trtpipe"),
    ("2", "the request is wrong or impossible"),
    ("3", "an input file is damaged or of another kind"),
    ("4", "this machine lacks something"),
    ("5", "work that should have succeeded did not"),
    ("6", "an artefact must not be used here"),
    ("130", "interrupted by Ctrl-C"),
    ("141", "the reader of the output left, as `head` does"),
    ("143", "ended by SIGTERM; 129 by the end of the terminal"),
)


def command_name(function: Callable[..., Any] | str) -> str:
    return function if isinstance(function, str) else function.__name__.strip("_").replace("_", "-")


class Grouped(SectionedGroup):
    """Help that lists the commands by group, each with the first line of its own help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, functions in GROUPS.items():
            names = [command_name(function) for function in functions]
            with formatter.section(group):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(80)) for name in names])
        for title, rows in (("Environment variables", ENVIRONMENT), ("Exit codes", EXIT_CODES)):
            with formatter.section(title):
                formatter.write_dl(rows)


# click's base class.
CLICK_ERROR: Any = USAGE_ERROR.__mro__[1]


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    from trtpipe.pipeline.cli import console

    if version:
        console.text(f"trtpipe {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.text(context.get_help() + "\n")


def make_app(only: str | None = None) -> typer.Typer:
    """The command with every command of GROUPS and APPS, or with the one named `only`."""
    made = typer.Typer(
        cls=Grouped,
        name="trtpipe",
        help="From a Hugging Face model to a measured Triton deployment.\n\n\b\nExamples:\n"
        "  trtpipe build --recipe smollm2-cpu\n  trtpipe serve\n  trtpipe bench\n  trtpipe build --help",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    made.callback(invoke_without_command=True)(_root)
    for function in (one for functions in GROUPS.values() for one in functions):
        name = command_name(function)
        if only not in (None, name):
            continue
        if isinstance(function, str):
            made.add_typer(APPS[function], name=name)
        else:
            made.command(name=name, cls=SectionedCommand)(function)
    return made


app = make_app()


def handle_signals() -> None:
    """Let SIGTERM and the end of the terminal end the command as Ctrl-C does: what it has started ends with it."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        raise Ended(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, leave)


@functools.cache
def command(only: str | None = None) -> Any:
    """The command as click knows it, with the options that stand anywhere; of its commands all, or the one named."""
    made = typer.main.get_command(app if only is None else make_app(only))
    add_common_options(made)
    return made


def main() -> None:
    """Run the command; one line and an exit code for every failure, a traceback with --debug."""
    from trtpipe.pipeline.cli import console

    console.prepare()
    handle_signals()
    if "_TRTPIPE_COMPLETE" in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        # Not standalone: failures come back here instead of ending the process with click's own message.
        words = sys.argv[1:]
        words = [*words[1:], "--help"] if words[:1] == ["help"] else words
        # typer takes a tenth of a second to prepare all commands, which only another first word needs, such as --help.
        names = {command_name(function) for functions in GROUPS.values() for function in functions}
        made = command(words[0]) if words and words[0] in names else command()
        code = made.main(args=words, prog_name="trtpipe", standalone_mode=False)
        sys.stdout.flush()
    except Ended:
        console.note("interrupted")
        raise
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        from trtpipe.pipeline.cli import defect, usage
        from trtpipe.pipeline.errors import translate

        known = usage.describe(error) if isinstance(error, CLICK_ERROR) else translate(error)
        if "--debug" in sys.argv[1:]:
            console.traceback(type(error), error, error.__traceback__)
        console.error(defect.describe(error) if known is None else str(known))
        sys.exit(defect.EXIT_CODE if known is None else known.exit_code)
    if code == INTERRUPTED:
        console.note("interrupted")
    sys.exit(code if isinstance(code, int) else 0)
