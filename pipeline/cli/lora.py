"""`trtpipe lora`: adapters of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtpipe.pipeline.cli.help import SectionedCommand, SectionedGroup
from trtpipe.pipeline.cli.options import Json, ServerName, TargetName, own_store

if TYPE_CHECKING:
    from trtpipe.pipeline.serving.servers import Served, Server
    from trtpipe.pipeline.store.store import Store

lora = typer.Typer(
    cls=SectionedGroup,
    help="List, add and remove adapters of a running server.\n\n\b\nExamples:\n"
    "  trtpipe lora add support=adapters/support\n"
    '  trtpipe generate "Where is my parcel?" --adapter support',
    rich_markup_mode=None,
)


@lora.callback()
def _lora() -> None:
    """List, add and remove adapters of a running server."""


@lora.command(name="list", cls=SectionedCommand)
def list_(server: ServerName = None, target: TargetName = None, as_json: Json = False) -> None:
    """List the adapters of a running server.

    \b
    Examples:
      trtpipe lora list
      trtpipe lora list --json
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving import adapters

    store, running, served = _served(server, target)
    found = adapters.find(store, running, served).all()
    rows = [(served.model_name(one.name), one.rank, adapters.stored_bytes(one)) for one in found]
    if as_json:
        console.result_json([dict(zip(("model", "rank", "bytes"), row, strict=True)) for row in rows])
    elif rows:
        console.table(("model", "rank", "size"), [(*row[:2], console.size(row[2])) for row in rows])
    else:
        console.result(f"{served.name} has no adapters; `trtpipe lora add` adds one")


@lora.command(cls=SectionedCommand)
def add(
    adapter: Annotated[str, typer.Argument(help="NAME=FOLDER of an adapter that PEFT has saved.")],
    server: ServerName = None, target: TargetName = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Add an adapter to a running server.

    The next request can name it, as MODEL:NAME, or by --adapter of `generate` and `chat`. It lasts until the server
    ends: `trtpipe build --lora` keeps it.

    \b
    Examples:
      trtpipe lora add support=adapters/support
      trtpipe lora add support=adapters/support --server llama3-8b.h100.fp8
    """
    from trtpipe.engines.adapters import check_name
    from trtpipe.engines.hf.adapter import read_adapter
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.cli.options import named_folders
    from trtpipe.pipeline.serving import adapters

    ((name, folder),) = (named_folders([adapter], "") or {}).items()
    check_name(name)
    read_adapter(Path(folder))  # a mistake in it is told also where no server runs
    store, running, served = _served(server, target)
    placed = adapters.add(store, running, served, name, Path(folder))
    model = served.model_name(placed.name)
    if as_json:
        console.result_json({"model": model, "rank": placed.rank})
        return
    console.result(f"{running.name} serves {model}")


@lora.command(cls=SectionedCommand)
def remove(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    server: ServerName = None, target: TargetName = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Remove an adapter from a running server.

    Requests that use it go on to their end.

    \b
    Examples:
      trtpipe lora remove support
      trtpipe lora remove support --server llama3-8b.h100.fp8
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving import adapters

    store, running, served = _served(server, target)
    adapters.remove(store, running, served, name)
    if as_json:
        console.result_json({"model": served.model_name(name), "removed": True})
        return
    console.result(f"{running.name} no longer serves {served.model_name(name)}")


def _served(server: str | None, target: str | None) -> tuple[Store, Server, Served]:
    from trtpipe.pipeline.serving.servers import find_running

    store = own_store()
    running = find_running(store, server, target)
    return store, running, running.find(target)
