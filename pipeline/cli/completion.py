"""Completion in the shell: `trtpipe completion`, and the values of options. Reads names of files alone, to be quick."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

SHELLS = ("bash", "zsh", "fish")


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Names that continue what is typed, or its part after the last comma."""
    before, comma, last = incomplete.rpartition(",")
    return sorted(before + comma + name for name in names if name.startswith(last))


def of(folder: str, *more: str) -> Callable[[str], list[str]]:
    """Completion of names of files in a folder of configs, for GPUs also of the user's home, and of other names."""

    def complete(incomplete: str) -> list[str]:
        from trtpipe.configs.facts import CONFIGS
        from trtpipe.configs.home import default_home

        places = (CONFIGS / folder, *([default_home() / folder] if folder == "gpus" else []))
        return _matching({*more, *(path.stem for place in places for path in place.glob("*.yaml"))}, incomplete)

    return complete


def words(*names: str) -> Callable[[str], list[str]]:
    return lambda incomplete: _matching(names, incomplete)


def targets(incomplete: str) -> list[str]:
    from trtpipe.pipeline.run_folder import RUNS

    return _matching((path.name for path in RUNS.glob("*") if path.is_dir()), incomplete)


def runtimes(incomplete: str) -> list[str]:
    from trtpipe.engines import BACKENDS

    return _matching(BACKENDS, incomplete)


def servers(incomplete: str) -> list[str]:
    from trtpipe.configs.home import default_home

    return _matching((path.stem for path in (default_home() / "servers").glob("*.json")), incomplete)


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=words(*SHELLS))],
) -> None:
    """Print the completion script of a shell.

    \b
    Examples:
      trtpipe completion bash >> ~/.bashrc
      trtpipe completion zsh >> ~/.zshrc
      trtpipe completion fish > ~/.config/fish/completions/trtpipe.fish
    """
    from typer._completion_shared import get_completion_script

    from trtpipe.engines.errors import UsageError, suggestion
    from trtpipe.pipeline.cli import console

    if shell not in SHELLS:
        raise UsageError(f"there is no completion for the shell '{shell}'", remedy=suggestion(shell, SHELLS))
    console.text(get_completion_script(prog_name="trtpipe", complete_var="_TRTPIPE_COMPLETE", shell=shell) + "\n")
