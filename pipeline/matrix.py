"""Build of several targets from one command: every combination of the given lists; what they share is made once.

This module does no sharing itself: stages of equal inputs and settings have equal keys, so the store makes each once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import TrtpipeError, UsageError
from trtpipe.pipeline.errors import translate
from trtpipe.pipeline.execution.hardware import GpuAbsent
from trtpipe.pipeline.runner import StageResult
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import stages_of

# Options that take a list.
LISTS = ("model", "gpu", "dtype", "runtime", "toolchain", "tp", "pp")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a target: what was made, and the failure that ended it, if any."""

    spec: BuildSpec
    results: tuple[StageResult, ...]
    error: TrtpipeError | None

    @property
    def state(self) -> str:
        if self.error is None and not self.results:
            return "nothing to make"  # all of it came from elsewhere
        if self.error is None:
            made = self.results[-1].stage
            return "ready" if made == stages_of(self.spec)[-1].name else f"made up to {made}"
        return "waits for its GPU" if isinstance(self.error, GpuAbsent) else "failed"

    @property
    def packaged(self) -> bool:
        """Whether its model repository is made, whichever stages come after that."""
        return any(result.makes == "repository" for result in self.results)

    @property
    def next_step(self) -> str:
        if self.error is None:
            return f"trtpipe serve {self.spec.target}" if self.packaged else ""
        if isinstance(self.error, GpuAbsent):
            return f"trtpipe export {self.spec.target}; where the GPU is: trtpipe build --from {self.spec.target}.tar"
        return str(self.error)


def combinations(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the comma-separated lists in `options`, in the order given. Raises UsageError."""
    lists = {name: _words(name, options[name]) for name in LISTS if options.get(name) is not None}
    rows = itertools.product(*lists.values())
    return [{**options, **dict(zip(lists, row, strict=True))} for row in rows]


def require_one(options: dict[str, Any]) -> None:
    """Raise UsageError for a list, where one target is meant."""
    for name in LISTS:
        value = options.get(name)
        if isinstance(value, str) and "," in value and not _is_path(name, value):
            raise UsageError(
                f"--{name} {value} is a list", why="that is for `trtpipe build`; this command is of one target",
                remedy=f"give one, such as --{name} {value.partition(',')[0]}",
            )  # fmt: skip


def build_all(specs: list[BuildSpec], build: Callable[[BuildSpec], list[StageResult]]) -> list[Outcome]:
    """Build one target after the other; a failed target does not stop the others. Raises as `require_distinct`."""
    require_distinct(specs)
    out = []
    for spec in specs:
        try:
            out.append(Outcome(spec=spec, results=tuple(build(spec)), error=None))
        except Exception as error:
            out.append(Outcome(spec=spec, results=(), error=failure(error)))
    return out


def failure(error: Exception) -> TrtpipeError:
    """The error of ours for an exception that ended a target's build, also for one of the system, such as a full disk.
    Raises the exception again where it is a defect of ours."""
    known = translate(error)
    if known is None:
        raise error
    if known is not error:
        known.__cause__ = error  # for --debug
    return known


def require_distinct(specs: list[BuildSpec]) -> None:
    """Raise UsageError for two targets of one name, because they would share a run folder."""
    names = [spec.target for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two targets are called {twice}", remedy="give the models' folders other names")


def raise_failures(outcomes: list[Outcome]) -> None:
    """Raise the error that a command ends with: the failure of a single target, or a count of several."""
    errors = [(outcome, outcome.error) for outcome in outcomes if outcome.error is not None]
    if not errors:
        return
    absent = [pair for pair in errors if isinstance(pair[1], GpuAbsent)]
    if len(outcomes) == 1:
        outcome, error = errors[0]
        if absent:
            error.remedy = f"the checkpoint is made; next: {outcome.next_step}"
        raise error
    others = [error for _, error in errors if not isinstance(error, GpuAbsent)]
    parts = [f"{len(absent)} wait for their GPU"] if absent else []
    parts += [f"{len(others)} failed"] if others else []
    first = type(others[0] if others else errors[0][1])
    kind = next(one for one in first.__mro__ if TrtpipeError in one.__bases__)  # one of the five
    raise kind(f"of {len(outcomes)} targets {' and '.join(parts)}", remedy="the table says what to do next")


def _is_path(name: str, value: str) -> bool:
    """Whether `--model` names one existing folder or file, whose path may hold commas, and not a list."""
    return name == "model" and Path(value).exists()


def _words(name: str, value: Any) -> list[Any]:
    if not isinstance(value, str) or _is_path(name, value):
        return [value]
    words = [word.strip() for word in value.split(",")]
    if "" in words:
        raise UsageError(f"--{name} {value} has an empty place", remedy="write for example a100,h100")
    if len(set(words)) < len(words):
        raise UsageError(f"--{name} {value} names something twice", remedy="name each once")
    if name not in ("tp", "pp"):
        return list(words)
    if not all(word.isdigit() for word in words):
        raise UsageError(f"--{name} {value} is not a list of numbers", remedy="write for example 1,2")
    return [int(word) for word in words]
