"""The event loop that the load tester runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """To its end, which must come within two minutes."""
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(scenario, 120))
    finally:
        loop.close()
