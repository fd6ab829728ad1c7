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

# Names that a message lists at most.
LISTED = 24


class Ended(SystemExit):
    """A signal other than Ctrl-C tells the command to end; its exit status is 128 and the signal's number."""


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


def malformed(error: Exception) -> str:
    """Why a document of known form cannot be read, from what its reader raised."""
    return f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def kind_of(value: object) -> str:
    """The kind of a value that JSON or YAML held, with its article."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (type(None), "null"), (bool, "a truth value"), ((int, float), "a number"), (str, "a text"),
        ((list, tuple), "a list"), (dict, "a mapping"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def nearest(value: str, choices: Iterable[str]) -> list[str]:
    """Names that `value` begins, three at most, else the one of the nearest spelling.

    A typing error rarely hits the first letter, and names without a letter, such as releases, have no spelling.
    """
    known, text = {name.lower(): name for name in sorted(choices)}, value.lower()
    near = [text] if text in known else [name for name in known if text and name.startswith(text)]
    if not near and any(letter.isalpha() for letter in text):
        alike = [name for name in known if name[:1] == text[:1]]
        near = difflib.get_close_matches(text, known, n=1, cutoff=0.8)
        near = near or difflib.get_close_matches(text, alike, n=1, cutoff=0.5 if len(text) <= 4 else 0.6)
    near = [name for name in near if not any(name != other and name.startswith(other) for other in near)]
    return [known[name] for name in near[:3]]


def suggestion(value: str, choices: Iterable[str]) -> str:
    """Remedy for an unknown name: the nearest known names, else the list of all, of which a long one is cut."""
    known = sorted(choices)
    near = nearest(value, known)
    if near:
        return "did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    more = len(known) - LISTED
    return "known: " + ", ".join(known[:LISTED]) + (f" and {more} more" if more > 0 else "")
