"""`trtpipe ls` and `rm`: the targets in ./runs; `gc` and `scrub`: the artefacts of the store that they refer to."""

from __future__ import annotations

from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import Json, own_store


def ls(as_json: Json = False) -> None:
    """List the targets in ./runs.

    \b
    Examples:
      trtpipe ls
      trtpipe ls --json
    """
    import dataclasses
    import time

    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving.targets import list_targets

    found = list_targets(own_store())
    if as_json:
        console.result_json([dataclasses.asdict(one) for one in found])
    elif not found:
        console.result("there is no target in ./runs", "next: trtpipe build --recipe smollm2-cpu")
    else:
        now = time.time()
        rows = [
            (one.name, one.state, console.size(one.size), _age(now - one.updated), ", ".join(one.servers))
            for one in found
        ]
        console.table(("target", "state", "size", "age", "served by"), rows, numeric=("size", "age"))


def rm(
    targets: Annotated[list[str], typer.Argument(help="Targets in ./runs.", autocompletion=complete.targets)],
    gc: Annotated[bool, typer.Option("--gc", help="Also delete artefacts that no run refers to.")] = False,
    studies: Annotated[bool, typer.Option("--studies", help="Also delete what `tune` measured for them.")] = False,
    as_json: Json = False,
) -> None:
    """Remove targets from ./runs.

    Their artefacts stay in the store until `trtpipe gc`, or with --gc they go too. A target that is served
    stays, and so does one for which `tune` has measured candidates, unless --studies is given.

    \b
    Examples:
      trtpipe rm llama3-8b.h100.fp8
      trtpipe rm llama3-8b.h100.fp8 llama3-8b.a100.bf16 --gc
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving.references import references
    from trtpipe.pipeline.serving.targets import remove_targets
    from trtpipe.pipeline.store.gc import find_garbage, remove

    store = own_store()
    removed = remove_targets(targets, store, studies=studies)
    if not as_json:
        console.result(*(f"removed {name}" for name in removed))
    garbage = find_garbage(store, references)
    if gc:
        garbage = remove(garbage, store, references)
    size = console.size(sum(one.size for one in garbage))
    if as_json:
        console.result_json({"removed": removed, "dropped": gc, "garbage": garbage})
    elif gc:
        console.result(f"dropped {len(garbage)} artefacts, {size}")
    elif garbage:
        console.result(f"next: trtpipe gc   (frees {size})")


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    others_after: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="DAYS",
            help="Forget runs of other machines and of containers that were not built for this many days.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete artefacts that no run refers to.

    What interrupted runs left is deleted too. Runs and servers of other machines that share the store count as they
    were when they last wrote to it.

    \b
    Examples:
      trtpipe gc --dry-run
      trtpipe gc
    """
    from functools import partial

    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving.references import elsewhere, forget_deleted, references
    from trtpipe.pipeline.store.gc import find_garbage, remove

    store, kept_by = own_store(), partial(references, others_after=others_after)
    garbage, others = find_garbage(store, kept_by), elsewhere(store, others_after)
    if garbage and not as_json:
        console.table(("size", "why", "what"), [(console.size(g.size), g.reason, g.path) for g in garbage])
    if not dry_run:
        garbage = remove(garbage, store, kept_by)
        forget_deleted(store, others_after)
    if as_json:
        kept = [{"kept_for": one.name, "machine": one.machine, "file": one.file} for one in others]
        console.result_json({"dry_run": dry_run, "garbage": garbage, "elsewhere": kept})
        return
    if others:
        console.table(("kept for", "on", "by"), [(one.name, one.machine, one.file) for one in others])
        told = "run `trtpipe gc` on that machine to drop what was deleted on it"
        console.note(
            f"{told}; --others-after DAYS forgets runs that were not built for so long; "
            "remove the file of a server whose machine is gone"
        )
    console.result(
        f"{'would drop' if dry_run else 'dropped'} {len(garbage)}, {console.size(sum(g.size for g in garbage))}"
    )


def scrub(as_json: Json = False) -> None:
    """Compare every file of the store with its digest.

    Fails when a file is damaged.

    \b
    Examples:
      trtpipe scrub
      TRTPIPE_HOME=/data/trtpipe trtpipe scrub
    """
    from trtpipe.engines.errors import InputDataError
    from trtpipe.pipeline.cli import console, console_progress
    from trtpipe.pipeline.run_folder import TAKE_AGAIN
    from trtpipe.pipeline.store.scrub import scrub as read_all

    with console_progress.working("scrub", "reading every artefact") as progress:
        found = read_all(own_store(), progress)
    damaged = [one for one in found if one.fault is not None]
    if as_json:
        console.result_json(found)
    else:
        rows = [(one.name, console.size(one.size), one.fault or "whole") for one in found]
        console.table(("artefact", "size", "state"), rows)
    if damaged:
        brought = [one for one in damaged if one.name.startswith("imported/")]
        ways = ["the next `trtpipe build` of their targets moves them aside and makes them again"]
        if brought:
            ways = [*(ways if len(brought) < len(damaged) else []), f"{TAKE_AGAIN} where they are in imported/"]
        ways.append("`trtpipe gc` drops those of no target")
        raise InputDataError(f"{len(damaged)} of {len(found)} artefacts are damaged", remedy="; ".join(ways))


def _age(seconds: float) -> str:
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
