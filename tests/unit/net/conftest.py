"""A connection without a socket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.h2 import Bench


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.connection.abort()
    made.loop.close()
