"""Faults that the check of a repository finds: helpers of its tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.triton_repositories import Repository
from trtpipe.triton_repo.check import ERROR, RULES, Fault, check_repository

RELEASES = ("0.9.0", "0.10.0", "0.12.0", "0.15.0", "0.16.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.2.1")


def looked_into(faults: Sequence[Fault]) -> list[Fault]:
    """Without the paths of a container or of the hub."""
    return [fault for fault in faults if fault.rule != "not-here"]


def told(faults: Sequence[Fault]) -> str:
    return "\n".join(f"{fault.severity} [{fault.rule}] {fault}" for fault in faults)


def expect(repository: Repository, rule: str, severity: str = ERROR, **asked: Any) -> Fault:
    """Exactly one fault, of that rule."""
    faults = looked_into(check_repository(repository.path, **asked))
    assert [(fault.rule, fault.severity) for fault in faults] == [(rule, severity)], told(faults)
    assert rule in RULES
    return faults[0]
