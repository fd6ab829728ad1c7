"""Candidates of a search: changes to a target's settings, each with the values around the present one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.build_config import BuildConfig
from trtpipe.triton_repo.serving import POLICIES, ServingConfig

# Factors on sizes, and shares of free memory for the KV cache, in the order in which they are tried.
FACTORS = {"max_batch_size": (2, 0.5), "max_num_tokens": (2, 4, 0.5)}
SHARES = (0.95, 0.8)


@dataclass(frozen=True)
class Candidate:
    """Settings that differ from the target's own: (dotted name, value) each, sorted; none for the target as it is."""

    changes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, changes: dict[str, Any]) -> Candidate:
        return cls(tuple(sorted(changes.items())))

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={_text(value)}" for name, value in self.changes) or "as it is"

    @property
    def settings(self) -> set[str]:
        return {name for name, _ in self.changes}

    @property
    def rebuilds(self) -> bool:
        """Whether the engine is made anew."""
        return any(name.startswith("build.") for name in self.settings)

    def joined(self, other: Candidate) -> Candidate:
        """Both changes; where both change a setting, this one's value."""
        return Candidate.of({**dict(other.changes), **dict(self.changes)})


AS_IT_IS = Candidate()


def single_changes(runtime: str, build: BuildConfig, serving: ServingConfig, *, on_cpu: bool) -> list[Candidate]:
    """Every single change that the runtime follows, settings of serving first."""
    backend = load_backend(runtime)
    return [
        Candidate(((name, value),))
        for name, value in _values(runtime, build, serving, on_cpu=on_cpu)
        if name not in backend.FIXED
    ]


def _values(runtime: str, build: BuildConfig, serving: ServingConfig, *, on_cpu: bool) -> Iterator[tuple[str, Any]]:
    backend = load_backend(runtime)
    if not on_cpu:  # there the runtimes take a fixed number of bytes
        now = serving.kv_cache_free_gpu_mem_fraction
        yield from (("serving.kv_cache_free_gpu_mem_fraction", share) for share in SHARES if share != now)
    yield from (("serving.batch_scheduler_policy", one) for one in POLICIES if one != serving.batch_scheduler_policy)
    yield "serving.enable_chunked_context", not serving.enable_chunked_context
    if backend.SERVED_BY is ServedBy.ENGINE_PROCESS:
        yield "serving.engine_instance_count", 2 * (serving.engine_instance_count or 1)
    if backend.SERVED_BY is not ServedBy.LLM_API:  # that takes text
        yield "serving.preprocessing_instance_count", 2 * serving.preprocessing_instance_count
    for name, factors in FACTORS.items():
        if name in backend.SETTINGS:
            yield from ((f"build.{name}", int(getattr(build, name) * one)) for one in factors if getattr(build, name))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
