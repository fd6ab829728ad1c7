"""Memory of the host that a repository's KV cache takes, compared with what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

from trtpipe.configs.read import read_yaml
from trtpipe.engines.errors import HostError
from trtpipe.engines.passport import Passport
from trtpipe.triton_repo.check.faults import Report
from trtpipe.triton_repo.check.text import parse
from trtpipe.triton_repo.llmapi import MODEL, SETTINGS


def require_host_memory(name: str, repository: Path, passport: Passport) -> None:
    """Raises HostError when the KV cache of a target's engine takes more memory of the host than there is."""
    wanted = cache_bytes(repository, passport, passport.world_size)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted >= there:
        raise HostError(
            f"{name} does not fit this machine's memory",
            why=f"its KV cache takes {wanted / 2**30:.1f} GiB of the host's memory, of which there are "
            f"{there / 2**30:.1f} GiB",
            remedy="lower serving.kv_cache_host_memory_bytes and build again",
        )


def cache_bytes(repository: Path, passport: Passport, ranks: int) -> int:
    """Bytes of the host's memory that the KV cache of so many ranks takes; 0 where `check` finds the setting wrong.

    TensorRT-LLM gives each rank a cache of the size that is set, vLLM all of them together.
    """
    settings = repository / MODEL / "1" / SETTINGS
    if settings.is_file():
        found = (read_yaml(settings).get("kv_cache_config") or {}).get("host_cache_size")
    else:
        _, config = parse(repository / MODEL / "config.pbtxt", Report(repository))
        found = None if config is None else config.parameters["kv_cache_host_memory_bytes"].string_value
    text = str(found)
    size = int(text) if text.isdecimal() else 0
    return size if passport.runtime == "vllm" else size * ranks
