"""Driver of a cluster build: targets in parallel, each stage of equal inputs and settings once, on a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import trtpipe.engines.errors
from trtpipe import __version__
from trtpipe.engines import threads
from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError
from trtpipe.engines.model_source import FolderSource, GgufSource
from trtpipe.pipeline.cluster.needs import Needs, needs
from trtpipe.pipeline.cluster.work import Answer, Order, Tell, artefact, run_stage
from trtpipe.pipeline.execution import hardware
from trtpipe.pipeline.matrix import Outcome, failure, require_distinct
from trtpipe.pipeline.runner import Reporter, StageResult, execute, satisfy, wanted_record
from trtpipe.pipeline.sources.calibration import absolute
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import Stage
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Artefact, Store

# How often a stage is retried on another machine when its machine is lost.
RETRIES = 3
# Targets that are supervised at once; the cluster decides how many stages run at once.
AT_ONCE = 64
# Interval of the check that some machine could run a stage, and how long there may be none.
LOOK_SECONDS = 5.0
ABSENT_SECONDS = 60.0
# How long the cluster's head may be silent: Ray ends the whole process after a minute.
SILENT_SECONDS = 15.0
# A thread that waits for a cluster that is gone has this long to end: Ray ends the process where one asks it later.
GONE_SECONDS = 10.0
# How long a stage that is cancelled may take to clean up.
CANCEL_SECONDS = 30.0
# How long the targets' threads may take to notice that, before the command leaves them.
LEAVE_SECONDS = 5.0
# (target, stage, kind, text): "begins", "progress", "line", "note", "ends"
Told = Callable[[str, str, str, str], None]


class Cluster:
    """A Ray cluster for one command. Closing it cancels what still runs.

    address   as `ray.init` takes it
    exchange  URL of a registry through which artefacts travel; None where all machines share the store's home
    work      function that a Ray worker calls with (order, tell)
    """

    def __init__(
        self, address: str, store: Store, exchange: str | None, told: Told,
        work: Callable[[Order, Tell], Answer] = run_stage,
    ) -> None:  # fmt: skip
        from trtpipe.pipeline.bench.workers.ray import connect

        self._ray: Any = connect(address)
        self._store = store
        if exchange and "://" not in exchange:
            exchange = str(Path(exchange).absolute())  # a worker's working folder is another one
        self._url = exchange
        self._exchange: Any = None
        if exchange is not None:
            from trtpipe.pipeline.cluster.exchange import Exchange
            from trtpipe.pipeline.registry.address import open_registry

            self._exchange = Exchange(open_registry(exchange))
        self._told = told
        self._machines: list[dict[str, float]] = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._head: str = self._ray.get_runtime_context().gcs_address
        self._lost = False
        self._mark = _mark(store.home / "cluster")
        self._lock = threading.Lock()
        self._flying: dict[str, Future[Answer]] = {}
        self._refs: dict[Any, tuple[str, str]] = {}
        self._closed = False
        self._work = work
        self._remote = self._ray.remote(_stage)
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Placed on this machine, not on one that may be lost.
        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        self._queue: Any = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def build(
        self, specs: list[BuildSpec], reporter: Callable[[BuildSpec], Reporter], until: str | None
    ) -> list[Outcome]:
        """Build every target, in parallel; a failed target does not stop the others. Raises as `require_distinct`."""
        require_distinct(specs)

        def one(spec: BuildSpec) -> Outcome:
            told = reporter(spec)
            try:
                perform = partial(self._perform, reporter=told)
                results = execute(spec, self._store, told, until=until, perform=perform)
                return Outcome(spec=spec, results=tuple(results), error=None)
            except Exception as error:
                return Outcome(spec=spec, results=(), error=failure(error))

        outcomes: list[Future[Outcome]] = []
        try:
            # What they do on this machine, such as the reading of a GGUF file or an upload, ends with the command.
            outcomes = threads.begin(one, specs, AT_ONCE)
            return [threads.result(outcome) for outcome in outcomes]
        except BaseException:
            self._cancel()
            wait(outcomes, LEAVE_SECONDS)
            raise

    def close(self) -> None:
        self._cancel()
        self._closed = True
        self._listener.join(GONE_SECONDS if self._lost else None)
        if not self._lost:
            self._queue.shutdown()
        Path(self._mark.lock_file).unlink(missing_ok=True)
        self._mark.release()
        self._ray.shutdown()

    def _perform(
        self, stage: Stage, spec: BuildSpec, inputs: dict[str, Artefact], last: Record | None, *, reporter: Reporter
    ) -> StageResult:
        if self._closed:
            raise KeyboardInterrupt
        digests = {name: one.manifest.content for name, one in inputs.items()}
        record = wanted_record(stage, spec, digests, self._store)
        result = partial(StageResult, stage=stage.name, makes=stage.makes)
        found = self._store.find(record)
        if found is not None:
            self._offer(found)
            return result(reused=True, reason="same inputs and settings", artefact=found)
        if stage.local or isinstance(stage.settings(spec), (FolderSource, GgufSource)):
            # Only this machine has these files.
            made = satisfy(stage, spec, inputs, last, store=self._store, reporter=reporter)
            self._offer(made.artefact)
            return made
        with self._lock:
            flying = self._flying.get(record.key)
            mine = flying is None
            if flying is None:
                flying = self._flying[record.key] = Future()
        if mine:
            try:
                flying.set_result(self._run(stage, spec, inputs, last))
            except BaseException as error:
                flying.set_exception(error)
        answer = flying.result()
        if answer.error is not None:
            raise _error(answer.node, *answer.error)
        here = artefact(answer, self._store, self._exchange)
        if not mine:
            return result(reused=True, reason="made for another target", artefact=here)
        return result(reused=answer.reused, reason=f"{answer.reason}, on {answer.node}", artefact=here)

    def _run(self, stage: Stage, spec: BuildSpec, inputs: dict[str, Artefact], last: Record | None) -> Answer:
        wanted = needs(stage, spec, self._machines)
        if wanted.accelerator and not any(f"accelerator_type:{wanted.accelerator}" in one for one in self._machines):
            raise hardware.GpuAbsent(
                f"no machine of the cluster has {spec.gpu.describe()}",
                why=f"building asks for the accelerator type {wanted.accelerator}",
                remedy="add one to the cluster",
            )
        order = Order(
            trtpipe=__version__,
            spec=_portable(spec),
            stage=stage.name,
            inputs={name: dataclasses.asdict(one.manifest.record) for name, one in inputs.items()},
            contents={name: one.manifest.content for name, one in inputs.items()},
            last=None if last is None else dataclasses.asdict(last),
            home=str(self._store.home),
            seen=self._mark.lock_file,
            exchange=self._url,
        )
        task = self._remote.options(
            **wanted.options(), max_retries=RETRIES, name=f"{spec.target} {stage.name}", scheduling_strategy="SPREAD"
        )
        with self._lock:
            if self._closed:
                raise KeyboardInterrupt
            ref = task.remote(self._work, order, spec.target, self._queue)
            self._refs[ref] = spec.target, stage.name
        try:
            answer = self._await(ref, wanted, f"{stage.name} of {spec.target}")
        except self._ray.exceptions.TaskCancelledError:
            raise StageFailed(f"{stage.name} of {spec.target} was cancelled") from None
        except self._ray.exceptions.RayTaskError as error:
            why = f"{type(error.cause).__name__}: {error.cause}"
            raise StageFailed(f"{stage.name} of {spec.target} failed", why=why) from None
        except self._ray.exceptions.RayError as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise StageFailed(
                f"{stage.name} of {spec.target} was lost {RETRIES + 1} times", why=why, remedy="see `ray status`"
            ) from None
        finally:
            with self._lock:
                self._refs.pop(ref)
        return answer

    def _await(self, ref: Any, wanted: Needs, what: str) -> Answer:
        """The answer of a task. Raises HostError where no machine is left that could run the task, for which Ray would
        wait, and where the cluster itself is gone."""
        absent_s = silent_s = 0.0
        while not self._ray.wait([ref], timeout=LOOK_SECONDS)[0]:
            if not _listens(self._head):
                silent_s += LOOK_SECONDS
                if silent_s >= SILENT_SECONDS:
                    self._lost = True
                    raise HostError(
                        f"the Ray cluster at {self._head} is gone", why=f"nobody listens there while {what} runs",
                        remedy="start it and run again; what was finished is kept",
                    )  # fmt: skip
                continue
            silent_s = 0.0
            alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            absent_s = 0.0 if any(map(wanted.met, alive)) else absent_s + LOOK_SECONDS
            if absent_s >= ABSENT_SECONDS:
                self._ray.cancel(ref, force=True)
                asked = ", ".join(f"{name} {value}" for name, value in wanted.options().items())
                raise HostError(
                    f"no machine of the cluster can run {what} any more", why=f"it asks for {asked}",
                    remedy="add one to the cluster, and run again",
                )  # fmt: skip
        answer: Answer = self._ray.get(ref)
        return answer

    def _offer(self, found: Artefact) -> None:
        if self._exchange is not None:
            self._exchange.offer(found)

    def _cancel(self) -> None:
        """Cancel what runs: first as Ctrl-C would, so that it cleans up, then at once."""
        with self._lock:
            self._closed = True
            refs = {} if self._lost else dict(self._refs)
        for ref, (target, stage) in refs.items():
            self._told(target, stage, "ends", "cancelled")
            self._ray.cancel(ref, force=False)
        if refs:
            _, left = self._ray.wait(list(refs), num_returns=len(refs), timeout=CANCEL_SECONDS)
            for ref in left:
                self._ray.cancel(ref, force=True)

    def _listen(self) -> None:
        from ray.util.queue import Empty

        while True:
            try:
                self._told(*self._queue.get(timeout=0.2))
            except Empty:
                if self._closed:
                    return
            except BaseException:  # the cluster is gone, which Ray signals to a thread by SystemExit: others report it
                return


def _stage(work: Callable[[Order, Tell], Answer], order: Order, target: str, queue: Any) -> Answer:
    """Run a stage; called in a Ray worker."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.pop("RAY_ADDRESS", None)
    return work(order, lambda kind, text: queue.put((target, order.stage, kind, text)))


def _mark(folder: Path) -> FileLock:
    """A new file in `folder`, locked for as long as this process lives. Removes those of killed processes."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        with contextlib.suppress(Timeout), FileLock(left, timeout=0):
            left.unlink(missing_ok=True)
    mark = FileLock(folder / uuid.uuid4().hex)
    mark.acquire()
    return mark


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def _portable(spec: BuildSpec) -> dict[str, Any]:
    """The spec as JSON, its files by absolute paths: a worker's working folder is another one."""
    told = spec.to_json()
    settings = dict(told["settings"])
    if "calibration" in settings:
        settings["calibration"] = {**settings["calibration"], "data": absolute(spec.calibration.data)}
    if spec.tasks:
        settings["tasks"] = [str(Path(file).absolute()) for file in spec.tasks]
    return {**told, "settings": settings}


def _error(node: str, kind: str, what: str, why: str, remedy: str) -> TrtpipeError:
    """An error of the machine `node` as a local exception."""
    what = what if what.startswith(f"{node} ") else f"on {node}: {what}"
    found = hardware.GpuAbsent if kind == "GpuAbsent" else getattr(trtpipe.engines.errors, kind, HostError)
    made: TrtpipeError = found(what, why=why, remedy=remedy)
    return made
