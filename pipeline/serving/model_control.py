"""Requests to a running server over HTTP: whether it is ready, and models loaded and unloaded."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.engines.errors import StageFailed
from trtpipe.engines.json_input import parse_json
from trtpipe.engines.process import tail
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.server_log import failure, last_start
from trtpipe.pipeline.serving.tritonserver import PROGRAM

if TYPE_CHECKING:
    import httpx

READY_SECONDS = 600
ANSWER_SECONDS = 10
# Limit for an unload: a model goes when its last request has been answered.
UNLOAD_SECONDS = 60.0


def wait_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, tick: Callable[[], None] = lambda: None,
    *, program: str = PROGRAM, seconds: int = READY_SECONDS,
) -> None:  # fmt: skip
    """Return when a GET of `url` is answered with 200. Raises StageFailed with the server's own reason, and after
    `seconds`."""
    import httpx

    deadline = time.monotonic() + seconds
    with http_client(2) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise StageFailed(f"{program} does not start", why=failure(log), remedy=f"its log is {log}")
            try:
                if client.get(url).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            tick()
            time.sleep(0.05)
    raise StageFailed(
        f"{program} is not ready after {seconds} s",
        why=tail(log, begin=last_start(log)),
        remedy=f"if it still loads, give a longer --ready-timeout; its log is {log}",
    )


def http_client(timeout: float) -> httpx.Client:
    """Client of a server's plain HTTP. `httpx.get` reads all certificate authorities first, which takes 30 ms."""
    import httpx

    return httpx.Client(timeout=timeout, verify=False)


def load_models(endpoints: Endpoints, names: Sequence[str], log: Path, *, seconds: int = READY_SECONDS) -> None:
    """Load models again, each within `seconds`; it serves its old version until then. Raises StageFailed with the
    reason."""
    for name in names:
        _control(endpoints, name, "load", log, seconds=seconds)


def answers(endpoints: Endpoints) -> bool:
    """Whether the server answers its liveness check within ANSWER_SECONDS. It does so while it loads models too."""
    import httpx

    try:
        with http_client(ANSWER_SECONDS) as client:
            return client.get(f"{endpoints.http_url}/v2/health/live").status_code == 200
    except httpx.HTTPError:
        return False


def ready(endpoints: Endpoints, name: str) -> bool:
    """Whether a model takes requests."""
    import httpx

    try:
        with http_client(READY_SECONDS) as client:
            return client.get(f"{endpoints.http_url}/v2/models/{name}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def unload_model(endpoints: Endpoints, name: str, log: Path) -> None:
    """Take a model out of service: it counts as not ready at once. Raises StageFailed."""
    _control(endpoints, name, "unload", log)


def load_unloaded(endpoints: Endpoints, name: str, log: Path, *, seconds: int = READY_SECONDS) -> None:
    """Load a model that is unloaded or about to be, which may take `seconds`. Raises StageFailed with the reason."""
    deadline = time.monotonic() + UNLOAD_SECONDS
    while True:
        try:
            return _control(endpoints, name, "load", log, seconds=seconds)
        except StageFailed:  # it is still being unloaded
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _control(endpoints: Endpoints, name: str, verb: str, log: Path, *, seconds: int = READY_SECONDS) -> None:
    import httpx

    url = f"{endpoints.http_url}/v2/repository/models/{name}/{verb}"
    try:
        with http_client(seconds) as client:
            reply = client.post(url, json={})
        error = "" if reply.status_code == 200 else str(parse_json(reply.content)["error"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as failed:
        error = str(failed) or type(failed).__name__
    if error:
        raise StageFailed(f"{name} does not {verb}", why=error, remedy=f"the server's log is {log}")
