"""`trtpipe ls` and `rm`: the targets in ./runs."""

from __future__ import annotations

from typing import Annotated

import typer

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
            (one.name, one.state, console.size(one.size), _age(now - one.updated), one.server or "") for one in found
        ]
        console.table(("target", "state", "size", "age", "served by"), rows, numeric=("size", "age"))


def rm(
    targets: Annotated[list[str], typer.Argument(help="Targets in ./runs.")],
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


def _age(seconds: float) -> str:
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
