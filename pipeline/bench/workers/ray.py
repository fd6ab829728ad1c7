"""Workers on other machines, as actors of a Ray cluster.

trtpipe must be installed on each machine in the same version; input files of the work are sent along. Each machine has
its own clock: its difference to ours is measured before every load point from the fastest of several round trips (with
an error of at most half of that round trip), and subtracted from the stamps. Latencies are differences of stamps of
one machine and do not depend on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from trtpipe.engines.errors import HostError, TrtpipeError, UsageError
from trtpipe.engines.extras import install_command
from trtpipe.pipeline.bench.load.loads import Load, Replay
from trtpipe.pipeline.bench.load.workload import Render
from trtpipe.pipeline.bench.loop.driver import Live
from trtpipe.pipeline.bench.loop.load_point import Driven
from trtpipe.pipeline.bench.options import BenchOptions, is_local
from trtpipe.pipeline.bench.workers.share import Share
from trtpipe.pipeline.bench.workers.worker import LocalWorker, Watch

if TYPE_CHECKING:
    from collections.abc import Awaitable

# Round trips to compare a clock.
ROUND_TRIPS = 20
# Seconds between queries of the live view.
LIVE_S = 0.5
# Seconds that a cluster's head may take to accept a connection.
CONNECT_S = 5.0
START = "start one with `ray start --head`, or name the host and port that it printed with --ray"


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str


def connect(address: str) -> Any:
    """Ray, connected to the cluster at `address` ("auto": the one that runs here). Raises HostError."""
    try:
        import ray as _ray
    except ModuleNotFoundError:
        raise HostError("a cluster needs Ray", remedy=f"run `{install_command('ray')}`") from None
    ray: Any = _ray  # most of Ray has no types
    if not ray.is_initialized():
        _check_listening(address)
        here = Path.cwd()
        try:
            os.chdir("/")  # Ray puts the current folder first on sys.path of every worker
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if address == "auto":  # Ray's own message is about Ray's own flags
                raise HostError("no Ray cluster runs on this machine", remedy=START) from None
            raise HostError(f"there is no Ray cluster at {address}", why=str(error), remedy=START) from None
        finally:
            os.chdir(here)
    return ray


def nodes(address: str, count: int) -> list[Node]:
    """The first `count` machines of the cluster at `address`. Raises HostError."""
    ray = connect(address)
    alive = [Node(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    if len(alive) < count:
        raise HostError(f"the Ray cluster at {address} has {len(alive)} machines, not {count}")
    # Sorted, so that every run takes the same machines in the same order.
    return sorted(alive, key=lambda node: (node.address, node.id))[:count]


def _check_listening(address: str) -> None:
    """Check that something listens at `address`, since Ray would retry for minutes. Raises HostError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        return  # "auto", and address forms that only Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        _check_grpc(address)
    except (OSError, OverflowError) as error:
        raise HostError(
            f"there is no Ray cluster at {address}",
            why=getattr(error, "strerror", None) or str(error),
            remedy=START,
        ) from None


def _check_grpc(address: str) -> None:
    """Check that the listener speaks gRPC, as a cluster does. Raises ConnectionError."""
    import grpc

    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"what listens there does not speak gRPC within {CONNECT_S:g} s") from None


def check_reach(options: BenchOptions, chosen: Sequence[Node]) -> None:
    """Raises UsageError for a target that only this machine reaches."""
    if len({node.address for node in chosen}) == 1:
        return
    for target in options.targets:
        if is_local(target.url):
            raise UsageError(
                f"{target.url} is each machine's own", remedy="serve with --host, and name an address that all reach"
            )


class RayWorker:
    """Worker in an actor on `node`."""

    def __init__(self, node: Node, options: BenchOptions, render: Render | None, share: Share) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        files = {str(file): file.read_bytes() for file in (options.tokenizer.absolute(), *options.work.files)}
        where = NodeAffinitySchedulingStrategy(node.id, soft=False)
        # The actor reserves no CPU in Ray, and answers progress queries and interrupts while it drives.
        actor: Any = ray.remote(Remote)
        self._actor = actor.options(num_cpus=0, max_concurrency=4, scheduling_strategy=where).remote(
            options, render, share, ray.put(files)
        )
        self._node = node
        self._ahead_ns = 0
        self._watch: Watch | None = None

    async def connect(self) -> list[dict[str, Any]]:
        theirs, ours = await self._ask(self._actor.version.remote()), version()
        if theirs != ours:
            raise HostError(f"{self._node.address} has trtpipe {theirs}, this machine {ours}")
        described: list[dict[str, Any]] = await self._ask(self._actor.connect.remote())
        return described

    async def prepare(self, target: int, load: Load, repeat: int, watch: Watch | None) -> None:
        self._watch = watch
        await self._ask(self._actor.prepare.remote(target, load, repeat))
        self._ahead_ns = await self._ahead()

    async def drive(self, start_ns: int) -> Driven:
        watching = asyncio.ensure_future(self._follow()) if self._watch is not None else None
        try:
            driven: Driven = await self._ask(self._actor.drive.remote(start_ns and start_ns + self._ahead_ns))
        finally:
            if watching is not None:
                watching.cancel()
        return driven.shifted(-self._ahead_ns)

    def interrupt(self) -> None:
        self._actor.interrupt.remote()

    async def close(self) -> None:
        import ray

        with contextlib.suppress(TrtpipeError):  # the actor has ended already
            await self._ask(self._actor.close.remote())
        ray.kill(self._actor)

    async def _follow(self) -> None:
        assert self._watch is not None
        while True:
            await asyncio.sleep(LIVE_S)
            live = await self._ask(self._actor.live.remote())
            if live is not None:
                self._watch(live)

    async def _ahead(self) -> int:
        """Nanoseconds by which the node's clock is ahead of ours."""
        found = []
        for _ in range(ROUND_TRIPS):
            asked = monotonic_ns()
            theirs = await self._ask(self._actor.now.remote())
            answered = monotonic_ns()
            found.append((answered - asked, theirs - (asked + answered) // 2))
        return int(min(found)[1])

    async def _ask(self, reference: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        waiting: Awaitable[Any] = asyncio.wrap_future(reference.future())
        try:
            return await waiting
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, TrtpipeError) else error from None
        except RayActorError as error:
            why = str(error).strip().splitlines()[0]
            raise HostError(f"the load process on {self._node.address} ended", why=why) from None


class Remote:
    """The actor: calls come in several threads; all but `interrupt`, `live` and `now` run one after the other."""

    def __init__(self, options: BenchOptions, render: Render | None, share: Share, files: dict[str, bytes]) -> None:
        import uvloop

        self._folder = tempfile.TemporaryDirectory(prefix="trtpipe-bench-")
        self._options = placed(options, files, Path(self._folder.name))
        self._render = render
        self._share = share
        self._loop = uvloop.new_event_loop()
        self._hand: LocalWorker | None = None
        self._live: Live | None = None

    def version(self) -> str:
        return version()

    def now(self) -> int:
        return monotonic_ns()

    def live(self) -> Live | None:
        return self._live

    def connect(self) -> list[dict[str, Any]]:
        self._hand = LocalWorker(self._options, self._render, self._share)
        return self._loop.run_until_complete(self._hand.connect())

    def prepare(self, target: int, load: Load, repeat: int) -> None:
        assert self._hand is not None
        self._live = None
        if isinstance(load, Replay):
            load = replace(load, trace=moved(load.trace, Path(self._folder.name)))
        self._loop.run_until_complete(self._hand.prepare(target, load, repeat, self._note))

    def drive(self, start_ns: int) -> Driven:
        assert self._hand is not None
        return self._loop.run_until_complete(self._hand.drive(start_ns))

    def interrupt(self) -> None:
        if self._hand is not None:
            self._loop.call_soon_threadsafe(self._hand.interrupt)

    def close(self) -> None:
        if self._hand is not None:
            self._loop.run_until_complete(self._hand.close())
        self._folder.cleanup()

    def _note(self, live: Live) -> None:
        self._live = replace(live, first_ns=list(live.first_ns))


def version() -> str:
    return metadata.version("trtpipe")


def placed(options: BenchOptions, files: dict[str, bytes], folder: Path) -> BenchOptions:
    """The options, with `files` (contents by absolute path) written into `folder` under their original paths."""
    for name, content in files.items():
        place = moved(Path(name), folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    work = options.work
    named = {name: getattr(work, name) for name in ("prompts", "sharegpt", "trace")}
    places: dict[str, Any] = {name: moved(work.folder / file, folder) for name, file in named.items() if file}

    def told(value: Any) -> Any:
        """A length with its absolute files in `folder`."""
        return value.replace("empirical:/", f"empirical:{folder}/") if isinstance(value, str) else value

    sessions = work.sessions
    if sessions is not None:
        lengths = {name: told(getattr(sessions, name)) for name in ("turns", "think_s", "user_tokens")}
        sessions = replace(sessions, **lengths)
    places |= {name: told(getattr(work, name)) for name in ("input_tokens", "output_tokens")}
    work = replace(work, folder=moved(work.folder, folder), sessions=sessions, **places)
    return replace(options, tokenizer=moved(options.tokenizer, folder), work=work)


def moved(file: Path, folder: Path) -> Path:
    return folder / file.absolute().relative_to("/")
