"""Commands for running servers: ps, logs, top, reload, stop."""

from __future__ import annotations

from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import AllowModelCode, Json, ServerName, own_store


def ps(as_json: Json = False) -> None:
    """List the servers that run, and those that died.

    One that died is listed until it is served again, or until `trtpipe stop` names it.

    \b
    Examples:
      trtpipe ps
      trtpipe ps --json
    """
    from trtpipe.pipeline.cli import console, console_serve
    from trtpipe.pipeline.serving import servers

    store = own_store()
    found = servers.recorded(store)
    if as_json:
        console.result_json([console_serve.facts(server) for server in found])
    else:
        console_serve.servers(found, store.home)
    for told in servers.unreadable(store).values():
        console.note(told)


def logs(
    server: Annotated[
        str | None,
        typer.Option(
            help="Name of a server, running or ended; the only one if left out.", autocompletion=complete.servers
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10**9, help="Number of last lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C or the server's end.")
    ] = False,
    gateway: Annotated[bool, typer.Option("--gateway", help="The log of its gateway.")] = False,
) -> None:
    """Print the log of a server, running or not.

    On a terminal, control characters in it are shown as escapes.

    \b
    Examples:
      trtpipe logs -f
      trtpipe logs --server llama3-8b.h100.fp8
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving import logs

    for piece in logs.read_log(own_store(), server, lines=lines, follow=follow, gateway=gateway):
        console.text(piece)


def top(
    server: ServerName = None,
    url: Annotated[str | None, typer.Option(help="Metrics of an external server: host:8002.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading over one interval.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a server: requests, tokens, KV cache, latency.

    \b
    Examples:
      trtpipe top
      trtpipe top --once --json
    """
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.cli import console_top
    from trtpipe.pipeline.serving import servers

    find = servers.find_ready if once else servers.find_running
    found = None if url is not None else find(own_store(), server)
    if found is not None and found.native:
        raise UsageError(
            f"{found.name} is served by its runtime's own server", why="that publishes none of Triton's metrics",
            remedy=f"read {found.endpoints.metrics_url}",
        )  # fmt: skip
    name = found.name if found else str(url)
    where = found.endpoints.metrics_url if found else str(url)
    console_top.run(where, name, interval=interval, once=once, as_json=as_json)


def reload(
    target: Annotated[
        str | None,
        typer.Argument(help="Target to load; the server's own if left out.", autocompletion=complete.targets),
    ] = None,
    server: ServerName = None,
    allow_model_code: AllowModelCode = False,
    as_json: Json = False,
) -> None:
    """Load a changed repository into a running server.

    The models are loaded one by one; the server goes on.

    \b
    Examples:
      trtpipe reload
      trtpipe reload llama3-8b.h100.fp8
    """
    from trtpipe.pipeline.cli import console, console_progress, console_serve
    from trtpipe.pipeline.serving.reload import reload_models

    with console_progress.working("reload", announce=False):
        renewed, loaded = reload_models(own_store(), server, target, allow_model_code=allow_model_code)
    if as_json:
        targets = [one.target for one in loaded]
        console.result_json({"server": renewed.name, "targets": targets, "loaded": [one.repository for one in loaded]})
        return
    console.result(*(f"{renewed.name} has loaded {one.target}" for one in loaded))
    console.result(f"next: {console_serve.first_steps(renewed, served=loaded[0])[0]}")


def stop(
    name: Annotated[
        str | None, typer.Argument(help="A server's name; the only one if left out.", autocompletion=complete.servers)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
    as_json: Json = False,
) -> None:
    """Stop servers that `trtpipe serve` started.

    \b
    Examples:
      trtpipe stop llama3-8b.h100.fp8
      trtpipe stop --all
    """
    from trtpipe.pipeline.cli import console, console_progress, console_serve
    from trtpipe.pipeline.serving import serve

    with console_progress.working("stopping", announce=False):
        ended = serve.stop(own_store(), name, everything=everything)
    if as_json:
        console.result_json([console_serve.facts(server, stopped=True) for server in ended])
    else:
        told = [f"stopped {one.name}" if one.died is None else f"dropped {one.name}, which had died" for one in ended]
        console.result(*told or ["no server is running"])
