"""What a benchmark is asked to do, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.errors import UsageError, suggestion

PROTOCOLS = ("grpc", "http")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of one run. Raises UsageError for what cannot be measured.

    tokenizer           the served model's tokenizer.json: makes prompts, counts output where the server does not
    grpc_url            host:port of Triton's gRPC endpoint
    http_url            http://host:port of Triton's HTTP endpoint
    model               served model with the inputs and outputs of NVIDIA's `ensemble`
    protocols           of `grpc`, `http`, in this order; empty: every one whose URL is given
    concurrency         requests kept in flight, one level after the other
    requests_per_level  measured requests of a level; None: the larger of 20 and 4 x concurrency
    duration_s          measure for this many seconds at full load instead of a number of requests
    warmup              full-length requests of every slot before its measured ones; 0 measures the start-up burst too
    input_tokens        length of every prompt in tokens, the special ones that the tokenizer adds included
    output_tokens       length of every answer in tokens
    seed                of the prompts
    timeout_s           a request that has not ended after this many seconds has failed
    """

    tokenizer: Path
    grpc_url: str | None = None
    http_url: str | None = None
    model: str = "ensemble"
    protocols: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = (1, 4, 16)
    requests_per_level: int | None = None
    duration_s: float | None = None
    warmup: int = 1
    input_tokens: int = 64
    output_tokens: int = 64
    seed: int = 0
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise UsageError(f"unknown protocol '{protocol}'", remedy=suggestion(protocol, PROTOCOLS))
            if self.url(protocol) is None:
                raise UsageError(
                    f"no {protocol} URL to measure", remedy=f"give the {protocol} URL or drop the protocol"
                )
        if not self.grpc_url and not self.http_url:
            raise UsageError("no URL to measure", remedy="give the gRPC URL (host:8001), the HTTP URL or both")
        if not self.concurrency or min(self.concurrency) < 1:
            raise UsageError("concurrency must be one or more positive numbers", remedy="give for example 1,4,16")
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", remedy="give a positive number")
        if self.warmup < 0:
            raise UsageError(f"warmup is {self.warmup}", remedy="give 0 or more requests per slot")
        if not self.timeout_s > 0:
            raise UsageError(f"timeout_s is {self.timeout_s}", remedy="give a positive number of seconds")
        if self.duration_s is not None:
            if self.requests_per_level is not None:
                raise UsageError("both requests_per_level and duration_s are given", remedy="give one of them")
            if not self.duration_s > 0:
                raise UsageError(f"duration_s is {self.duration_s}", remedy="give a positive number of seconds")
        elif self.requests_per_level is not None and self.requests_per_level < 2 * (most := max(self.concurrency)):
            # Below that no stretch of time exists in which all slots serve measured requests.
            raise UsageError(
                f"{self.requests_per_level} requests are too few for a throughput at concurrency {most}",
                remedy=f"give at least {2 * most}, twice the concurrency",
            )

    def url(self, protocol: str) -> str | None:
        return self.grpc_url if protocol == "grpc" else self.http_url

    def chosen_protocols(self) -> tuple[str, ...]:
        return self.protocols or tuple(protocol for protocol in PROTOCOLS if self.url(protocol))

    def requests_at(self, concurrency: int) -> int | None:
        """Measured requests of a level; None when a duration decides."""
        if self.duration_s is not None:
            return None
        return max(20, 4 * concurrency) if self.requests_per_level is None else self.requests_per_level


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a level stands.

    warmed  warm-up requests that have ended
    done    measured requests that have ended, of `total` (None when a duration decides)
    failed  requests of either sort that failed
    """

    protocol: str
    concurrency: int
    warmed: int
    done: int
    total: int | None
    failed: int
