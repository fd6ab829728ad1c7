"""Python of an engine process: which one it is, and whether its environment has what the runtime needs.

The order: the one that is asked for (an option, or the user's configuration), for a runtime with an environment of its
own that beside this environment, else this Python.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from trtpipe.configs.home import default_home
from trtpipe.engines.backends.base import EngineBackend, Needs
from trtpipe.engines.errors import HostError
from trtpipe.engines.extras import CLONE, is_tool

# Prints the version of a distribution; nothing where it is not installed.
VERSION = (
    "import sys, importlib.metadata as m; print(*(d.version for d in m.distributions(name=sys.argv[1])), sep='\\n')"
)
SECONDS = 60.0


def beside() -> Path | None:
    """Python of the environment beside this one, whose folder has this one's name and `-vllm`, or of `venv-vllm` in
    TRTPIPE_HOME where uv or pipx keeps trtpipe as a tool; None without one."""
    python = _folder() / "bin" / "python"
    return python if python.is_file() else None


def choose(backend: EngineBackend, *, on_cpu: bool, asked: str | None) -> str:
    """Python for engines of a runtime. Raises HostError for what is no Python, and where its environment lacks what the
    runtime needs."""
    needs = backend.NEEDS_ON_CPU if on_cpu else backend.NEEDS
    if needs is None:
        if asked is not None:
            _version(asked, "pip")  # of any package
        return asked or sys.executable
    python = asked or str(beside() or sys.executable)
    require(python, needs)
    return python


def require(python: str, needs: Needs) -> str:
    """The package that the runtime needs and its version in the environment of `python`, as text. Raises HostError."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    wanted = Requirement(needs.package)
    remedy = f"run `{install_command(needs)}`, or name a Python that has it with --engine-python"
    try:
        found = _version(python, wanted.name)
        known = bool(found) and wanted.specifier.contains(found, prereleases=True)
    except InvalidVersion:
        known = False
    if not found:
        raise HostError(f"{python} has no {wanted.name}", why="the runtime executes engines with it", remedy=remedy)
    if not known:
        raise HostError(
            f"{wanted.name} {found} of {python} is not known to work", why=f"it must be {wanted.specifier}",
            remedy=remedy,
        )  # fmt: skip
    return f"{wanted.name} {found}"


def install_command(needs: Needs) -> str:
    """The command that makes the environment beside this one, in which `choose` finds it."""
    folder = _folder()
    if needs.target and folder == CLONE / ".venv-vllm" and (CLONE / "Makefile").is_file():
        return f"make {needs.target}"
    python, made = shlex.quote(sys.executable), shlex.quote(str(folder))
    return f"{python} -m venv {made} && {made}/bin/pip install {shlex.join(needs.install)}"


def _folder() -> Path:
    if is_tool():  # what lies beside it, uv and pipx take for another tool of theirs
        return default_home() / "venv-vllm"
    return Path(f"{sys.prefix}-vllm")


def _version(python: str, package: str) -> str:
    """Version of a package in the environment of `python`; "" where it is not there. Raises HostError for no Python."""
    found = shutil.which(python)
    if found is None:
        raise HostError(f"{python} cannot be started", why="it is not an executable file", remedy="name a Python")
    try:
        done = subprocess.run(
            [found, "-I", "-c", VERSION, package], capture_output=True, text=True, check=False, timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"{python} cannot be started", why=str(error), remedy="name a Python") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise HostError(f"{python} is not a Python that works", why=why, remedy="name a Python")
    return (done.stdout.splitlines() or [""])[0]
