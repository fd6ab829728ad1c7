"""Options of a benchmark, validated before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.pipeline.bench.load.lines import shown
from trtpipe.pipeline.bench.load.loads import MOST_SECONDS, Closed, Load, Replay
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.loop.driver import Live
from trtpipe.pipeline.bench.protocols.connect import TRANSPORTS, Wiring
from trtpipe.pipeline.bench.results.slo import Objective
from trtpipe.pipeline.bench.search import Search

if TYPE_CHECKING:
    from trtpipe.pipeline.bench.results.report import LoadPointResult

PROTOCOLS = ("grpc", "http", "completions", "chat")
# Most repeats of a load point, processes on a machine, connections of each, and machines.
MOST = 1000
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_local(url: str) -> bool:
    """Whether `url` (with or without a scheme) is reachable from this machine only."""
    return urlsplit(url if "//" in url else f"//{url}").hostname in LOOPBACK


@dataclass(frozen=True, kw_only=True)
class Target:
    """An endpoint: protocol, URL, the model's name there, and the URL of the server's metrics, if known."""

    protocol: str
    url: str
    model: str
    metrics_url: str | None = None

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise UsageError(f"unknown protocol '{self.protocol}'", remedy=suggestion(self.protocol, PROTOCOLS))


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of one run. Raises UsageError for what cannot be measured.

    targets          endpoints, measured one after the other, each under every load
    tokenizer        the served model's tokenizer.json: makes prompts, counts output where the server does not
    loads, work      when requests are sent, and what they are
    objectives       SLOs that each load point is judged by
    repeat           how often each load point is measured, each time with other arrival times
    workers          processes that share each load, on each machine
    hosts            machines of the Ray cluster at `ray` that share each load; 0: this machine alone
    search           instead of `loads`: the highest rate that meets the objectives
    seed             seed of prompts and arrival times
    timeout_s        a request that has not ended after this many seconds has failed
    token_timeout_s  a request that has received nothing for this many seconds has failed
    log_samples      keep samples of prompts and answers in the report; None: unless the prompts come from a file
    """

    targets: tuple[Target, ...]
    tokenizer: Path
    loads: tuple[Load, ...] = (Closed(concurrency=1), Closed(concurrency=4), Closed(concurrency=16))
    work: Work = field(default_factory=Work)
    wiring: Wiring = field(default_factory=Wiring)
    objectives: tuple[Objective, ...] = ()
    repeat: int = 1
    workers: int = 1
    hosts: int = 0
    ray: str = "auto"
    search: Search | None = None
    seed: int = 0
    timeout_s: float = 300.0
    token_timeout_s: float = 60.0
    log_samples: bool | None = None

    def __post_init__(self) -> None:
        if not self.targets:
            raise UsageError("there is nothing to measure", remedy="name a protocol: " + ", ".join(PROTOCOLS))
        if not self.loads:
            raise UsageError("there is no load", remedy="give for example --concurrency 1,4,16")
        if self.wiring.transport not in TRANSPORTS:
            raise UsageError(
                f"unknown transport '{self.wiring.transport}'", remedy=suggestion(self.wiring.transport, TRANSPORTS)
            )
        if self.search is not None and not self.objectives:
            raise UsageError("nothing says what a load has to meet", remedy="give --slo, such as ttft:p99<500ms")
        for name, value in (
            ("repeat", self.repeat),
            ("workers", self.workers),
            ("connections", self.wiring.connections),
        ):
            if value < 1:
                raise UsageError(f"{name} is {shown(value)}", remedy="give 1 or more")
            if value > MOST:
                raise UsageError(f"{name} is {shown(value)}", remedy=f"give at most {MOST:,}")
        if not 0 <= self.hosts <= MOST:
            raise UsageError(f"hosts is {shown(self.hosts)}", remedy="give the number of machines")
        for load in self.loads:
            places = load.concurrency if isinstance(load, Closed) else load.max_in_flight
            if places is not None and places < self.shares:
                machines, fewer = (f" on {self.hosts} machines", " or machines") if self.hosts > 1 else ("", "")
                raise UsageError(
                    f"{self.shares} workers{machines} cannot share {places} in flight",
                    remedy=f"give fewer workers{fewer}",
                )
        for name in ("timeout_s", "token_timeout_s"):
            if not 0 < getattr(self, name) <= MOST_SECONDS:
                remedy = f"give a positive number of seconds, at most {MOST_SECONDS:,.0f}"
                raise UsageError(f"{name} is {getattr(self, name)}", remedy=remedy)
        if self.work.sessions is not None and any(isinstance(load, Replay) for load in self.loads):
            raise UsageError("a trace brings its own requests", remedy="leave the sessions out")

    @property
    def shares(self) -> int:
        """Number of processes among which each load is divided."""
        return self.workers * max(1, self.hosts)

    @property
    def sampled(self) -> bool:
        """Whether samples are kept. Prompts of a user's file are private."""
        private = self.work.prompts is not None or self.work.sharegpt is not None
        return not private if self.log_samples is None else self.log_samples

    def to_json(self) -> dict[str, Any]:
        """All options for the report, so that `from_json` can repeat the run. Without headers, which may hold a key."""
        out: dict[str, Any] = _plain(asdict(self))
        del out["wiring"]["headers"]
        folder = self.work.folder.absolute()
        named = {name: getattr(self.work, name) for name in ("prompts", "sharegpt", "trace")}
        out["work"] |= {name: None if file is None else str(folder / file) for name, file in named.items()}
        return out

    @classmethod
    def from_json(cls, value: Any, where: str) -> BenchOptions:
        """Options as `to_json` wrote them into the report `where`. Raises InputDataError."""
        import pydantic

        try:
            # Strict in pydantic's JSON mode: only a list is accepted for a tuple, and a string for a path.
            return pydantic.TypeAdapter(cls).validate_json(json.dumps(value), strict=True)
        except (pydantic.ValidationError, UsageError) as error:
            first = error.errors()[0] if isinstance(error, pydantic.ValidationError) else None
            why = str(error) if first is None else f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InputDataError(
                f"{where} does not say how it was measured", why=why, remedy="measure anew with a newer trtpipe"
            ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value.absolute()) if isinstance(value, Path) else value


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a load point. `total` is the number of measured requests; None when a duration ends the load point.

    state   begun, running or ended; begun and ended are reported once
    result  of a load point that has ended
    """

    protocol: str
    label: str
    total: int | None
    live: Live
    state: str = "running"
    result: LoadPointResult | None = None

    @property
    def name(self) -> str:
        return f"{self.protocol}, {self.label}"
