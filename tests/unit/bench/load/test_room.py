"""A load that this machine cannot hold is refused before anything is sent."""

from __future__ import annotations

import math
import resource

import pytest

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load import room


def test_requests_may_take_a_part_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: 10e9)
    room.check_memory(3_000_000, 500)
    with pytest.raises(UsageError, match=r"3,000,001 requests need 6.0 GB of memory .* 10.0 GB .* 60%; give fewer"):
        room.check_memory(3_000_001, 500)
    monkeypatch.setattr(room, "free_memory", lambda: math.inf)
    room.check_memory(10**12, 500)


def test_this_machine_has_memory() -> None:
    assert 1e6 < room.free_memory() < 1e15


def test_connections_raise_the_limit_of_open_files_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    room.check_connections(36)
    assert len(limits) == 1
    room.check_connections(37)
    room.check_connections(936)
    assert limits[1:] == [(101, 1000), (1000, 1000)]
    with pytest.raises(UsageError, match=r"937 requests in flight over HTTP .* 1,000 files open; raise"):
        room.check_connections(937)
