"""Execution of a spec: reuse each stage that is whole and current, or run it and report why."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trtpipe.engines import load_backend
from trtpipe.engines.errors import InputDataError, StageFailed, TrtpipeError, UsageError, nearest, suggestion
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.pipeline.execution import hardware
from trtpipe.pipeline.execution.diagnosis import explain
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import Job, Stage, stages_of
from trtpipe.pipeline.stages.adapters import ADAPTERS
from trtpipe.pipeline.store.manifest import Record, differences
from trtpipe.pipeline.store.store import Artefact, Store


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """How one stage was satisfied: `reused` or made now, and why."""

    stage: str
    makes: str
    reused: bool
    reason: str
    artefact: Artefact


class Perform(Protocol):
    """Runs a stage, or finds its artefact; `last` is the record of the stage's last run in this run folder."""

    def __call__(
        self, stage: Stage, spec: BuildSpec, inputs: dict[str, Artefact], last: Record | None
    ) -> StageResult: ...


class Trust(Protocol):
    """Decides which artefacts from elsewhere may be reused."""

    def find(self, record: Record, makes: str, store: Store) -> tuple[Artefact, str] | None:
        """An imported artefact of `record` that may be reused, and the reason to trust it."""


class Reporter(Protocol):
    """Receives the runner's progress and shows it to the user."""

    def stage(self, name: str, reason: str) -> contextlib.AbstractContextManager[Any]:
        """Report the start of a stage; the context's value is called with (bytes done, bytes in all)."""

    def finished(self, result: StageResult) -> None: ...

    def line(self, text: str) -> None:
        """Report a line printed by a program that a stage runs."""

    def note(self, text: str) -> None: ...


def execute(
    spec: BuildSpec, store: Store, reporter: Reporter, *, until: str | None = None, verify: bool = False,
    keep_failed: bool = False, given: Mapping[str, Artefact] | None = None, perform: Perform | None = None,
    trust: Trust | None = None, folder: Path | None = None,
) -> list[StageResult]:  # fmt: skip
    """Run the spec's stages up to and including `until`, or reuse them. Updates the run folder, ./runs/TARGET or
    `folder`, after each.

    `perform` runs stages elsewhere. `given` holds artefacts from elsewhere, by what their stages make; these stages do
    not run. Other artefacts from elsewhere are reused where `trust` admits them. Raises TrtpipeError; what was finished
    before a failure is kept.
    """
    made = dict(given or {})
    stages = _still_needed(spec, stages_until(stages_of(spec), until), made)
    run = RunFolder.of(spec.target) if folder is None else RunFolder(folder)
    # What disk space is needed for: stages whose artefacts are not there.
    later = [stage for stage in stages if run.find(stage.name, store) is None]
    on_target = next((stage for stage in stages if stage.resources(spec).gpu == "target"), None)
    if perform is None and on_target is not None and not (run.path / on_target.makes).exists():
        # Checked before the download, not after it. Without a GPU the earlier stages are still worth running.
        try:
            check_machine(spec)
        except hardware.GpuAbsent:
            later = [stage for stage in later if stage in stages[: stages.index(on_target)]]
    if perform is None:
        # A file that a stage reads, or a library that it needs, and that is not there, need not wait for the stages
        # before it.
        for stage in stages:
            try:
                stage.sources(stage.settings(spec), store.digests)
            except (InputDataError, UsageError) as error:
                if not any(artefact.origin for artefact in made.values()):
                    raise
                makes = [one.makes for one in stages if one.travels and stage.makes in (one.makes, *one.inputs(spec))]
                raise InputDataError(
                    f"{spec.target} came without its {' and its '.join(makes)}",
                    why=f"{error.what}: {error.why}",
                    remedy="pull or import it whole, or build it where its model is",
                ) from None
            if stage in later:
                stage.tools(stage.settings(spec))
        perform = partial(
            satisfy, store=store, reporter=reporter, verify=verify, keep_failed=keep_failed, trust=trust, later=later
        )
    for name, artefact in made.items():
        if artefact.origin is not None:
            reporter.note(f"{name}: {artefact.origin.describe()}")
    results: dict[str, StageResult] = {}
    for stage in stages:
        inputs = {name: made[name] for name in stage.inputs(spec)}
        result = perform(stage, spec, inputs, run.last(stage.name))
        if stage.makes == "model":
            model = read_model_config(result.artefact.path, quantized=True)
            spec.judge(model)
            digest = {"model": result.artefact.manifest.content}
            if ADAPTERS in stages and store.find(wanted_record(ADAPTERS, spec, digest, store)) is None:
                spec.check_adapters(model)
        if not results:
            run.start(spec, store)  # not before: a build that is refused leaves no target, or the one that was there
        while not run.update(stage, result.artefact, store):
            result = perform(stage, spec, inputs, run.last(stage.name))
        results[stage.makes] = result
        made[stage.makes] = result.artefact
        reporter.finished(result)
    return list(results.values())


def check_machine(spec: BuildSpec) -> None:
    """Check, before anything is downloaded, for what would stop the build at its end. Raises HostError."""
    if load_backend(spec.runtime).COMPILED:
        hardware.matching_gpus(spec.engine_target)
        hardware.choose_executor(spec.executor, spec.toolchain)


def stages_until(stages: tuple[Stage, ...], until: str | None) -> tuple[Stage, ...]:
    """The stages up to that one, all for None. Raises UsageError."""
    names = [stage.name for stage in stages]
    if until is None:
        return stages
    if until not in names:
        known = suggestion(until, names) if nearest(until, names) else "stages: " + ", ".join(names)
        raise UsageError(f"unknown stage '{until}'", remedy=known)
    return stages[: names.index(until) + 1]


def _still_needed(spec: BuildSpec, stages: tuple[Stage, ...], made: Mapping[str, Artefact]) -> tuple[Stage, ...]:
    """The stages without those whose artefacts are in `made`, and without those that only these needed."""
    if not made:
        return stages
    needed = {stages[-1].makes}
    out: list[Stage] = []
    for stage in reversed(stages):
        if stage.makes in needed and stage.makes not in made:
            out.insert(0, stage)
            needed.update(stage.inputs(spec))
    return tuple(out)


def wanted_record(stage: Stage, spec: BuildSpec, inputs: dict[str, str], store: Store) -> Record:
    """The record that the stage would have under this spec; `inputs` are content digests of the stages it reads."""
    settings = stage.settings(spec)
    return Record(
        stage=stage.name,
        stage_version=stage.version,
        inputs={**stage.sources(settings, store.digests), **inputs},
        settings=stage.hashed(settings),
        tools=stage.tools(settings),
    )


def satisfy(
    stage: Stage, spec: BuildSpec, inputs: dict[str, Artefact], last: Record | None, *,
    store: Store, reporter: Reporter, verify: bool = False, keep_failed: bool = False, trust: Trust | None = None,
    later: Sequence[Stage] = (),
) -> StageResult:  # fmt: skip
    """The stage's artefact, found in the store or made here; `later` stages will run after it. Raises TrtpipeError."""
    digests = {name: artefact.manifest.content for name, artefact in inputs.items()}
    record = wanted_record(stage, spec, digests, store)
    found = store.find(record, verify=verify)
    if found is not None:
        return StageResult(
            stage=stage.name, makes=stage.makes, reused=True, reason="same inputs and settings", artefact=found
        )
    trusted = None if trust is None else trust.find(record, stage.makes, store)
    if trusted is not None:
        artefact, by = trusted
        assert artefact.origin is not None
        return StageResult(
            stage=stage.name, makes=stage.makes, reused=True, reason=f"{artefact.origin.describe()}; {by}",
            artefact=artefact,
        )  # fmt: skip
    with store.locked(record, lambda: reporter.note(f"{stage.name}: another process is making it, waiting")):
        found = store.find(record, verify=verify)
        if found is not None:
            return StageResult(
                stage=stage.name, makes=stage.makes, reused=True, reason="made by another process", artefact=found
            )
        damage = store.set_aside(record, verify=verify)
        reason = f"damaged: {damage}" if damage else why(last, record, imported=bool(store.imported(record)))
        log = store.log_path(record)
        log.parent.mkdir(parents=True, exist_ok=True)
        with reporter.stage(stage.name, reason) as progress:
            others = [one for one in later if one is not stage]
            if stage.makes == "model" and trust is None:
                # What is made of a model that is not here has to be made here too, unless it may come from elsewhere.
                for one in others:
                    one.require(one.settings(spec))
            stage.check(spec, others, store.home)

            def work(out: Path) -> dict[str, Any]:
                settings = stage.settings(spec)
                notes = stage.run(
                    Job(
                        settings=settings,
                        inputs={name: artefact.path for name, artefact in inputs.items()},
                        digests=digests,
                        out=out,
                        log=log,
                        progress=progress,
                        show=reporter.line,
                    )
                )
                # Files whose size and times are the same are not read again.
                for name, digest in stage.sources(settings, store.digests).items():
                    if record.inputs[name] != digest:
                        raise InputDataError(
                            f"the input '{name}' of {stage.name} changed while it was read",
                            why="the result may be of old and new files",
                            remedy="run again once nothing writes into it",
                        )
                return notes

            begin = log.stat().st_size if log.exists() else 0
            try:
                artefact = store.make(record, work, keep_failed=keep_failed)
            except BaseException as error:
                for left in store.leftovers(record):
                    reporter.note(f"{stage.name}: what it made so far is kept in {left}")
                if isinstance(error, StageFailed) and stage.failures is not None:
                    raise explain(error, log, stage.failures, begin) from None
                raise
        return StageResult(stage=stage.name, makes=stage.makes, reused=False, reason=reason, artefact=artefact)


def why(last: Record | None, wanted: Record, *, imported: bool = False) -> str:
    """Why a stage must run, from the record of its last run in this run folder; `imported` where the store has an
    imported artefact of it, which the caller does not trust."""
    if last is None:
        return "first run"
    gone = "what was imported is not trusted by --trust-origin or --trust-key" if imported else "its artefact is gone"
    return ", ".join(differences(last, wanted)) or gone


@dataclass(frozen=True)
class StageStatus:
    """State of a stage for `status`: current, stale, missing or imported, and why."""

    stage: str
    state: str
    reason: str
    path: Path | None


def status(spec: BuildSpec, store: Store) -> list[StageStatus]:
    """Return what the next build would do with each stage, and write nothing. A stage after a stale one is stale.

    `build --from` uses imported artefacts; a plain build makes its own.
    """
    run = RunFolder.of(spec.target)
    out: list[StageStatus] = []
    known: dict[str, str] = {}
    stages = stages_of(spec)
    for stage in stages:
        brought = run.find(stage.name, store)
        if brought is not None and brought.origin is not None:
            known[stage.makes] = brought.manifest.content
            reason, version = brought.origin.describe(), brought.manifest.record.stage_version
            if version != stage.version:
                reason += f"; another version of trtpipe made it ({version}, here {stage.version})"
            out.append(StageStatus(stage.name, "imported", reason, brought.path))
            continue
        stale = [maker.name for maker in stages if maker.makes in stage.inputs(spec) and maker.makes not in known]
        if stale:
            out.append(StageStatus(stage.name, "stale", f"input: {stale[0]} must run first", None))
            continue
        try:
            record = wanted_record(stage, spec, {name: known[name] for name in stage.inputs(spec)}, store)
        except TrtpipeError as error:
            out.append(StageStatus(stage.name, "unknown", str(error), None))
            continue
        artefact = store.find(record)
        if artefact is None:
            last, damage = run.last(stage.name), store.fault(record)
            reason = f"damaged: {damage}" if damage else why(last, record)
            out.append(StageStatus(stage.name, "missing" if last is None else "stale", reason, None))
        else:
            known[stage.makes] = artefact.manifest.content
            out.append(StageStatus(stage.name, "current", "same inputs and settings", artefact.path))
    return out
