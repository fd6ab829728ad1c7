"""Output of `trtpipe serve` and `ps`: the stage of a server's start, and what is known of a server."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.cli import console
from trtpipe.pipeline.cli.options import own_store

if TYPE_CHECKING:
    from trtpipe.pipeline.serving.servers import Served, Server


def facts(server: Server, *, stopped: bool = False) -> dict[str, Any]:
    """A server as `ps --json`, `serve --json` and `stop --json` print it."""
    from trtpipe.pipeline.serving.servers import state

    now = "stopped" if stopped and server.died is None else state(server)
    return {
        "server": server.name,
        "state": now,
        "pid": server.pid if now != "stopped" and server.alive else None,
        "front": "native" if server.native else "triton",
        "http": None if server.native else server.endpoints.http_url,
        "grpc": None if server.native else server.endpoints.grpc_url,
        "metrics": server.endpoints.metrics_url,
        "openai": server.gateway_url,
        "models": {one.name: list(one.model_names) for one in server.served},
        "log": str(server.log),
        "died": server.died,
        "imported": [phrase for one in server.served for phrase in one.imported],
    }


def servers(found: list[Server], home: Path) -> None:
    """Print a row for each server of the store at `home`, then why one has died, then what was made elsewhere."""
    if not found:
        console.result(f"no server is running that was started from the store in {home}")
        return
    from trtpipe.pipeline.serving.servers import state

    rows = [
        (
            one.name,
            state(one),
            None if one.native or one.died is not None else one.endpoints.http_url,
            one.gateway_url if state(one) in ("running", "restarting") else None,
        )
        for one in found
    ]
    console.table(("server", "state", "http", "openai"), rows)
    for server in found:
        if server.died is not None:
            console.result(f"{server.name} died: {server.died}; its log is {server.log}")
        elif state(server) == "no gateway":
            console.result(f"the gateway of {server.name} has ended: stop the server, and serve it again")
        for one in server.served:
            console.result(*(f"{one.name}: {phrase}" for phrase in one.imported))


def started(server: Server, *, attached: bool, as_json: bool, certificate: Path | None = None) -> None:
    """Print where a started server answers, and what to do next.

    attached     it runs in this terminal
    certificate  of its gateway
    """
    if as_json:
        console.result_json(facts(server))
        return
    points = server.endpoints
    triton = [
        *(("HTTP", f"{points.http_url}/v2/models/{one.front}/generate_stream") for one in server.served),
        ("gRPC", points.grpc_url),
    ]
    rows = [
        *([] if server.native else triton),
        ("metrics", points.metrics_url),
        ("OpenAI", f"{server.gateway_url}/v1" if server.gateway_url else None),
        ("log", server.log),
    ]
    console.table(("endpoint", "where"), rows)
    console.result(*(f"next: {command}" for command in first_steps(server, certificate)))
    console.result("Ctrl-C ends it" if attached else f"to end it: trtpipe stop {server.name}")


def first_steps(server: Server, certificate: Path | None = None, *, served: Served | None = None) -> list[str]:
    """Commands to try on a started server: on `served`, or on its first target."""
    from trtpipe.pipeline.serving.servers import running

    others = [one for one in running(own_store()) if one.name != server.name]
    given = f" --server {server.name}" if others else ""
    question, first = "What is the capital of France?", served or server.served[0]
    given += "" if len(server.served) == 1 else f" --target {first.name}"
    steps = [f'trtpipe generate "{question}"{given}']
    if server.gateway_url is not None:
        # An answer without a limit takes minutes on a CPU.
        body = {
            "model": first.model_names[0], "max_tokens": 64, "messages": [{"role": "user", "content": question}],
        }  # fmt: skip
        key = ' -H "Authorization: Bearer $TRTPIPE_API_KEY"' if server.keyed else ""
        trusted = f"--cacert {shlex.quote(str(certificate))} " if certificate else ""
        steps.append(
            f"curl {trusted}{server.gateway_url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(body))}"
        )
    if server.native:
        steps.append(f"trtpipe bench{given}")
    return steps
