"""Protocol name -> the client that speaks it, imported on demand."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.bench.client import Transport


async def connect(protocol: str, url: str, model: str, *, clock: Callable[[], int] = time.perf_counter_ns) -> Transport:
    """Find out what answers at `url` and return a client for `model`.

    Raises HostError when nothing (or no Triton) answers, UsageError for a model that is not served there,
    StageFailed for one that the server failed to load.
    """
    if protocol == "grpc":
        from pipeline.bench.client_grpc import TritonGrpcStream

        return await TritonGrpcStream.connect(url, model, clock)
    from pipeline.bench.client_http import TritonHttpStream

    return await TritonHttpStream.connect(url, model, clock)
