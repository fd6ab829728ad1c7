"""Candidates of a search: changes to a target's settings, each with the values around the present one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import EngineBackend, ServedBy
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.speculation import NGRAM
from trtpipe.triton_repo.serving import POLICIES, ServingConfig

# Draft tokens of n-gram speculation, which needs no other model.
DRAFTS = 4
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
    """Every single change that the runtime follows; settings of serving first where an engine must be compiled."""
    backend = load_backend(runtime)
    of_serving = [{name: value} for name, value in _serving(backend, serving, on_cpu=on_cpu)]
    of_engine = [{f"build.{name}": value for name, value in one.items()} for one in _engine(backend, build)]
    every = [*of_serving, *of_engine] if backend.COMPILED else [*of_engine, *of_serving]
    return [Candidate.of(one) for one in every if not one.keys() & backend.FIXED.keys()]


def _serving(backend: EngineBackend, serving: ServingConfig, *, on_cpu: bool) -> Iterator[tuple[str, Any]]:
    if not on_cpu:  # there the runtimes take a fixed number of bytes
        now = serving.kv_cache_free_gpu_mem_fraction
        yield from (("serving.kv_cache_free_gpu_mem_fraction", share) for share in SHARES if share != now)
    yield from (("serving.batch_scheduler_policy", one) for one in POLICIES if one != serving.batch_scheduler_policy)
    yield "serving.enable_chunked_context", not serving.enable_chunked_context
    if backend.SERVED_BY is ServedBy.ENGINE_PROCESS:
        yield "serving.engine_instance_count", 2 * (serving.engine_instance_count or 1)
    if backend.SERVED_BY is not ServedBy.LLM_API:  # that takes text
        yield "serving.preprocessing_instance_count", 2 * serving.preprocessing_instance_count


def _engine(backend: EngineBackend, build: BuildConfig) -> Iterator[dict[str, Any]]:
    for name, factors in FACTORS.items():
        if name in backend.SETTINGS:
            sizes = (int(getattr(build, name) * one) for one in factors if getattr(build, name))
            yield from ({name: size} for size in sizes if size)
    if NGRAM in backend.SPECULATES and build.speculative_decoding_mode in (None, NGRAM):
        on = build.speculates
        yield {"speculative_decoding_mode": None if on else NGRAM, "max_draft_len": 0 if on else DRAFTS}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
