"""Remote side of a cluster build: one stage, run in a Ray worker on the machine that has what it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe import __version__
from trtpipe.configs.home import default_home
from trtpipe.engines.errors import HostError, TrtpipeError
from trtpipe.pipeline.resolve import read_spec
from trtpipe.pipeline.runner import satisfy
from trtpipe.pipeline.stages import stages_of
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Artefact, Store

# Least time between two progress reports of a stage.
PROGRESS_SECONDS = 0.5
# (kind, text): a report of the remote side while it works.
Tell = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A stage to run.

    spec      the target's spec, as JSON
    inputs    records of the artefacts that it reads, by name, and `contents` their digests
    last      the record of its last run
    home      home of the store, where machines share it; else each machine has its own, and `exchange` is a URL
    seen      a file in the shared home, by which a machine knows that it shares the home
    """

    trtpipe: str
    spec: dict[str, Any]
    stage: str
    inputs: dict[str, dict[str, Any]]
    contents: dict[str, str]
    last: dict[str, Any] | None
    home: str
    seen: str
    exchange: str | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Result of a stage: the record of its artefact and the digest of the artefact's files, or an error."""

    record: dict[str, Any] | None = None
    content: str = ""
    reused: bool = False
    reason: str = ""
    node: str = ""
    error: tuple[str, str, str, str] | None = None


def run_stage(order: Order, tell: Tell) -> Answer:
    """Run the stage or find its artefact; errors are returned as values."""
    node = os.uname().nodename
    try:
        if order.trtpipe != __version__:
            raise HostError(
                f"{node} has trtpipe {__version__}, not {order.trtpipe}", remedy="install the same on all machines"
            )
        store = Store(default_home() if order.exchange else Path(order.home))
        if not order.exchange and not Path(order.seen).exists():
            raise HostError(
                f"{node} does not see {order.home}",
                why="artefacts travel through the store",
                remedy="mount it there under the same path, or give --exchange",
            )
        exchange = None
        if order.exchange:
            from trtpipe.pipeline.cluster.exchange import Exchange
            from trtpipe.pipeline.registry.address import open_registry

            exchange = Exchange(open_registry(order.exchange))
        inputs = {}
        for name, raw in order.inputs.items():
            record = Record(**raw)
            found = store.find(record) or (exchange and exchange.fetch(record, order.contents[name], store))
            if not found:
                raise HostError(f"{node} does not find the {name}", remedy="run again")
            inputs[name] = found
        spec = read_spec(order.spec, "the order")
        stage = next(one for one in stages_of(spec) if one.name == order.stage)
        last = None if order.last is None else Record(**order.last)
        result = satisfy(stage, spec, inputs, last, store=store, reporter=_Remote(tell))
        if exchange is not None:
            exchange.offer(result.artefact)
        return Answer(
            record=dataclasses.asdict(result.artefact.manifest.record), content=result.artefact.manifest.content,
            reused=result.reused, reason=result.reason, node=node,
        )  # fmt: skip
    except TrtpipeError as error:
        return Answer(error=(type(error).__name__, error.what, error.why, error.remedy), node=node)


class _Remote:
    """A runner's reporter that sends its messages to the driver."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    @contextlib.contextmanager
    def stage(self, name: str, reason: str) -> Iterator[Callable[[int, int], None]]:
        told = time.monotonic()
        self._tell("begins", f"on {os.uname().nodename}  ({reason})")

        def progress(done: int, total: int) -> None:
            nonlocal told
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                self._tell("progress", f"{done}/{total}")

        yield progress

    def finished(self, result: Any) -> None: ...

    def line(self, text: str) -> None:
        self._tell("line", text)

    def note(self, text: str) -> None:
        self._tell("note", text)


def artefact(answer: Answer, store: Store, exchange: Any) -> Artefact:
    """The artefact of an answer without an error, in the local store."""
    assert answer.record is not None
    wanted = Record(**answer.record)
    found = store.find(wanted) or (exchange and exchange.fetch(wanted, answer.content, store))
    if not found:
        raise HostError(f"the artefact of {wanted.stage} has not arrived", remedy="run again")
    return found
