"""The server that the tests of this folder share. An idle one costs the others time: it ends with the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import Cli, Served


@pytest.fixture(scope="package")
def served(cli: Cli, target: str, serve: Callable[[str], Served]) -> Iterator[Served]:
    """The float32 SmolLM2 behind a real tritonserver."""
    server = serve(target)
    yield server
    cli.kill_server(server.name)
