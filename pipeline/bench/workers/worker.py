"""Worker of a load test: it connects, tries one request of each target, and drives its share of each load point.

A run has one worker in its own process (LocalWorker), or several in processes of their own (processes.ProcessWorker,
ray.RayWorker). The order of calls is connect, then prepare and drive for each load point, then close.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from trtpipe.engines.errors import StageFailed
from trtpipe.pipeline.bench.load.loads import Closed, Load
from trtpipe.pipeline.bench.load.room import check_connections
from trtpipe.pipeline.bench.load.texts import count_tokens, load_tokenizer
from trtpipe.pipeline.bench.load.workload import Render, Workload, unrendered
from trtpipe.pipeline.bench.loop.closed import ClosedLoop
from trtpipe.pipeline.bench.loop.driver import Limits, Live
from trtpipe.pipeline.bench.loop.load_point import OPENED, Driven, LoadPointRun
from trtpipe.pipeline.bench.loop.request_factory import RequestFactory
from trtpipe.pipeline.bench.options import BenchOptions
from trtpipe.pipeline.bench.protocols.connect import connect
from trtpipe.pipeline.bench.protocols.transport import Client, ReadIds
from trtpipe.pipeline.bench.results.records import settle
from trtpipe.pipeline.bench.workers.share import WHOLE, Share

Watch = Callable[[Live], None]
# Token ids are 32 bits wide.
MOST_IDS = 1 << 32


class Worker(Protocol):
    """Interface of a worker. All methods may raise HostError, UsageError and StageFailed."""

    async def connect(self) -> list[dict[str, Any]]:
        """Connect to each target; return the description of each endpoint."""

    async def prepare(self, target: int, load: Load, repeat: int, watch: Watch | None) -> None:
        """Make this worker's requests of a load point, and connections for them."""

    async def drive(self, start_ns: int) -> Driven:
        """Drive the requests from `start_ns` on, by the clock of this process; from now on where it is 0."""

    def interrupt(self) -> None:
        """End the load point, now or as soon as it begins."""

    async def close(self) -> None:
        """Release connections."""


class LocalWorker:
    """Worker in this process and its event loop."""

    def __init__(self, options: BenchOptions, render: Render | None, share: Share = WHOLE) -> None:
        """Raises InputDataError or UsageError for work that cannot be made."""
        if any(target.protocol != "grpc" for target in options.targets):
            places = [load.concurrency for load in options.loads if isinstance(load, Closed)]
            check_connections(share.count(max(places, default=0)))
        tokenizer = load_tokenizer(options.tokenizer)
        self._options = options
        self._share = share
        self._count = partial(count_tokens, tokenizer)
        self._tokenize: Callable[[str], list[int]] = lambda text: tokenizer.encode(text).ids
        self._read_ids: ReadIds = lambda ids: tokenizer.decode([one for one in ids if 0 <= one < MOST_IDS])
        # One workload for the whole run: no prompt of a load point was sent, and cached, in an earlier one.
        chats = all(target.protocol == "chat" for target in options.targets)
        self._workload = Workload(options.work, tokenizer, options.seed, render or (unrendered if chats else None))
        self._asker = RequestFactory()
        self._clients: list[Client] = []
        self._running: LoadPointRun | None = None
        self._trying: ClosedLoop | None = None
        self._interrupted = False

    async def connect(self) -> list[dict[str, Any]]:
        options = self._options
        # Connect to all targets first: a wrong second URL should not cost the time of measuring the first.
        for target in options.targets:
            client = await connect(target.protocol, target.url, target.model, self._tokenize, options.wiring)
            self._clients.append(client)
            await self._try_one(client)
        return [client.described() for client in self._clients]

    async def _try_one(self, client: Client) -> None:
        """Send one request: a model that is ready may still fail on it, and then nothing can be measured."""
        one = self._asker.make(client.codec, next(self._workload.asks(WHOLE)))
        await client.sender.warm(1)
        self._trying = ClosedLoop(client.sender, self._limits(1), warmups=[[]], measured=iter([one]), starts_ns=[0])
        if self._interrupted:
            self._trying.interrupt()
        await self._trying.run()
        ended, self._trying = self._trying.ended, None
        failure = next(iter(settle(ended, client.codec.decode, self._count).failures), None)
        if failure is not None:
            raise StageFailed(
                f"the first request over {client.codec.protocol} failed",
                why=f"{failure.kind}: {failure.message}",
                remedy="see the server's log",
            )

    async def prepare(self, target: int, load: Load, repeat: int, watch: Watch | None) -> None:
        self._running = self._load_point_run(self._clients[target], load, repeat, self._share, watch)
        await self._running.prepare()
        if self._interrupted:
            self._running.interrupt()

    async def drive(self, start_ns: int) -> Driven:
        assert self._running is not None
        await self._running.drive(start_ns)
        driven = self._running.collect(self._count, self._read_ids)
        self._running = None
        return driven

    def interrupt(self) -> None:
        self._interrupted = True
        for driven in (self._trying, self._running):
            if driven is not None:
                driven.interrupt()

    async def close(self) -> None:
        for client in self._clients:
            await client.sender.close()

    def _load_point_run(
        self, client: Client, load: Load, repeat: int, share: Share, watch: Watch | None
    ) -> LoadPointRun:
        places = share.count(load.concurrency) if isinstance(load, Closed) else OPENED
        return LoadPointRun(
            load,
            client,
            self._asker,
            self._workload,
            limits=self._limits(places),
            seed=self._options.seed + repeat,
            share=share,
            watch=watch,
            sampled=self._options.sampled,
        )

    def _limits(self, places: int) -> Limits:
        options = self._options
        return Limits(request_s=options.timeout_s, token_s=options.token_timeout_s, failures=max(5, 2 * places))
