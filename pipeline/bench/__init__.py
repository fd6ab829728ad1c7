"""Measuring a running Triton server: closed-loop load over gRPC streaming and HTTP generate_stream.

    options    what is asked for
    workload   prompts of an exact length
    load       when requests leave
    client     one streamed request (client_grpc, client_http; transports chooses)
    record     what it leaves behind
    metrics    records -> numbers
    report     numbers -> report.json
    run        all of it in order

Knows URLs, nothing about engines or stores. Importing this package loads none of it but the options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.bench.options import BenchOptions, Progress

if TYPE_CHECKING:
    from pipeline.bench.report import BenchReport

__all__ = ["BenchOptions", "Progress", "run_bench"]


def run_bench(options: BenchOptions, *, progress: Callable[[Progress], None] | None = None) -> BenchReport:
    """Measure each protocol at each concurrency and return the report; write it with `report.write_report`.

    `progress` is called a few times a second from the loop that measures: it must return at once. Ctrl-C ends
    the run and returns what was measured, marked as interrupted. Failed requests are counted in the report.

    Raises UsageError (model not served, prompts impossible), InputDataError (tokenizer), HostError (nothing
    answers at a URL), StageFailed (the model is not ready, or the first request fails).
    """
    from pipeline.bench.run import run

    return run(options, progress)
