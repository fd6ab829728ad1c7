"""Share of a GPU's memory that a served engine takes, and whether another engine can be loaded beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpipe.configs.read import read_yaml
from trtpipe.engines import load_backend
from trtpipe.engines.errors import HostError
from trtpipe.engines.passport import Passport
from trtpipe.triton_repo.check.faults import Report
from trtpipe.triton_repo.check.models import read_models
from trtpipe.triton_repo.check.service import DEFAULT_SHARE, gpus_of, memory_share
from trtpipe.triton_repo.llmapi import MODEL, SETTINGS

SETTING = "serving.kv_cache_free_gpu_mem_fraction"


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """Memory that a repository gives its engine.

    share   of the GPU's memory: of all of it, or of what is free once the weights are there
    capped  whether the KV cache has a number of tokens, so that it may take less than its share
    gpus    indices of its GPUs; None where the repository names none
    """

    share: float
    capped: bool
    gpus: set[int] | None


def require_room(name: str, served: Sequence[Path], repository: Path, passport: Passport) -> None:
    """Raises HostError where the engine of `repository`, which has this passport, cannot be loaded while those of the
    repositories `served` are: together their shares are more than the memory of a GPU.

    An engine that runs without a GPU too takes no more than its sequences need. What a KV cache of a number of tokens
    takes is not known here: beside it an engine is loaded, and may fail.
    """
    if passport.sms is None:
        return
    new, there = _memory(repository), [_memory(one) for one in served]
    whole = SETTING in load_backend(passport.runtime).MEANS  # a share that must be free when the engine is loaded
    taken = sum(one.share for one in there if not one.capped and _on_one_gpu(one, new))
    if not taken or (new.capped and not whole) or taken + new.share <= 1:
        return
    raise HostError(
        f"the GPU has no room for the new engine of {name} beside the old one, which serves while it loads",
        why=f"{taken:g} of its {'memory' if whole else 'free memory'} is taken, and the new engine takes {new.share:g}",
        remedy=f"stop the server and serve the new one, or build both with a lower {SETTING}, together at most 1",
    )


def _on_one_gpu(one: _Memory, other: _Memory) -> bool:
    return one.gpus is None or other.gpus is None or bool(one.gpus & other.gpus)


def _memory(repository: Path) -> _Memory:
    model = read_models(repository, Report(repository))[MODEL]
    share, most = memory_share(model), model.value("max_tokens_in_paged_kv_cache")
    settings = repository / MODEL / "1" / SETTINGS
    if settings.is_file():
        cache = read_yaml(settings, repeats=True).get("kv_cache_config") or {}
        given = cache.get("free_gpu_memory_fraction")
        share, most = DEFAULT_SHARE if given is None else float(given), cache.get("max_tokens")
    return _Memory(share=share, capped=most is not None, gpus=gpus_of(model))
