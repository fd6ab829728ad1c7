"""Exception classes of the project. The class determines the exit code; the message describes the failure.

TrtpipeError
+- UsageError          2  the request itself is wrong or impossible (option, recipe, precision that the SM lacks)
+- InputDataError      3  an input file is damaged, incomplete or of another kind
+- HostError           4  this machine lacks something (program, package, disk, port, network, access)
+- StageFailed         5  work that should have succeeded did not
+- ArtefactRefused     6  an artefact is intact but must not be used here

Narrower classes are defined in the modules that raise them and derive from one of these five.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrtpipeError(Exception):
    """A failure described in three parts: what happened, why, and what to do next.

    `what` and `remedy` are sentences without a final full stop; `why` is empty when `what` suffices.
    """

    exit_code = 5

    def __init__(self, what: str, *, why: str = "", remedy: str = "") -> None:
        self.what = what
        self.why = why
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        cause = f"{self.what}: {self.why}" if self.why else self.what
        line = f"{cause}; {self.remedy}" if self.remedy else cause
        # A message is one line: a multi-line cause (a server's traceback) is in the log that the message names.
        return " ".join(line.split())


class UsageError(TrtpipeError):
    """The request is malformed, or this version of the project cannot fulfil it on any machine."""

    exit_code = 2


class InputDataError(TrtpipeError):
    """A checkpoint, tokenizer, YAML or JSON file is damaged, incomplete or of another kind."""

    exit_code = 3


class HostError(TrtpipeError):
    """This machine lacks a program, package, port, disk space, network or permission."""

    exit_code = 4


class StageFailed(TrtpipeError):
    """A stage or a server failed although its input was valid."""

    exit_code = 5


class ArtefactRefused(TrtpipeError):
    """An artefact is intact but must not be used here: another SM, version, world size or runtime."""

    exit_code = 6


def suggestion(value: str, choices: Iterable[str]) -> str:
    """Remedy for an unknown name: the nearest known spelling, else the list of known names."""
    known = sorted(choices)
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(value.lower(), lower, n=1, cutoff=0.6)
    return f"did you mean '{lower[near[0]]}'?" if near else "known: " + ", ".join(known)
