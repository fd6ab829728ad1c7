"""A process of the load tester's, for the attacks on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.attacks import hostile_servers as hostile
from tests.attacks.bench_child import Child


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One that has measured: what it imports is no memory of an attack's."""
    with closing(Child()) as made:
        with closing(hostile.http_server(lambda: (), good=1000)) as server:
            made.measure(protocol="chat", url=f"http://127.0.0.1:{server.port}/v1")
        with closing(hostile.grpc_server(lambda number: (), good=1000)) as server:
            made.measure(protocol="grpc", url=f"127.0.0.1:{server.port}")
        yield made
