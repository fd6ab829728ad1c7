"""Run folder of a target, ./runs/<target>/: links to its artefacts, its settings, the records of its stages."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.json_input import load_json, read_bounded, read_json
from trtpipe.pipeline import stages
from trtpipe.pipeline.resolve import read_spec
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import Stage
from trtpipe.pipeline.store.folders import sync, write_together, write_whole
from trtpipe.pipeline.store.manifest import Origin, Record, read_manifest
from trtpipe.pipeline.store.store import KEY_DIGITS, Artefact, Store, machine

RUNS = Path("runs")
# File in a run folder with an id of its own: another machine may have another folder at the same path.
ID = ".id"
MAX_ID_BYTES = 100
# Limits updates of the age of a root to one a day.
WRITE_AGAIN_SECONDS = 86400
# What a message says to do about an artefact from elsewhere that was lost, and about an unknown target.
TAKE_AGAIN = "pull or import the target again"
SEE_TARGETS = "`trtpipe ls` lists the targets in ./runs"


class RunFolder:
    """./runs/<target>/: links to the current artefacts, the spec, and the records they were made from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, target: str) -> RunFolder:
        return cls(RUNS / target)

    def start(self, spec: BuildSpec, store: Store) -> None:
        """Create the folder, write the spec, and register it so that `gc` keeps the artefacts it links to. Artefacts of
        other settings are the target's no longer. Raises UsageError while `tune` measures the target."""
        self.require_untuned(store)
        self.path.mkdir(parents=True, exist_ok=True)
        if self.id is None or self._is_copy(store):
            write_whole(self.path / ID, uuid.uuid4().hex + "\n")
        write_whole(self.path / "plan.json", json.dumps(spec.to_json(), indent=2) + "\n")
        with store.referring():
            self._register(store, self._entries(retired=True))
        wanted = stages.stages_of(spec)
        self._retire(lambda stage, record: stage not in wanted or bool(stage.other_settings(spec, record)))
        sync(self.path.parent)

    def started(self, store: Store) -> bool:
        """Whether `start` was called for this folder and store."""
        return any(root.is_file() for root in (*self.roots(store), self._early_root(store)))

    @property
    def id(self) -> str | None:
        """What `start` wrote to tell the folder from others; None where it cannot be read."""
        try:
            return read_bounded(self.path / ID, MAX_ID_BYTES).decode().strip()
        except (OSError, ValueError):
            return None

    @property
    def inode(self) -> int | None:
        """Its inode number, which tells it from a copy that has the same id; None where it is not there."""
        try:
            return self.path.stat().st_ino
        except OSError:
            return None

    @property
    def key(self) -> str:
        """Names the folder in the store, which serves run folders of many places."""
        return hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:KEY_DIGITS]

    @property
    def tune_lock(self) -> str:
        """The name, for `Store.alone`, that `tune` holds while it measures the target."""
        return f"tune-{self.key}"

    def require_untuned(self, store: Store) -> None:
        """Raises UsageError while `tune` measures the target."""
        if store.held(self.tune_lock):
            raise UsageError(f"{self.path.name} is being tuned", remedy="wait until `trtpipe tune` has ended")

    def root(self, store: Store) -> Path:
        """File in the store that says where this folder is, and what it refers to."""
        if self.id is None:
            return self._early_root(store)
        digest = hashlib.sha256(os.fsencode(self.path.resolve()) + b"\0" + self.id.encode()).hexdigest()
        return store.home / "roots" / f"{digest[:KEY_DIGITS]}.json"

    def roots(self, store: Store) -> list[Path]:
        """The roots of this folder: `root`, and those of machines and containers that have it at another path."""
        found = [] if self._is_copy(store) else [self.root(store)]
        for root in sorted((store.home / "roots").glob("*.json")):
            told = _told(root)
            if root not in found and (told.get("id"), told.get("inode")) == (self.id, self.inode):
                found.append(root)
        return found

    def _is_copy(self, store: Store) -> bool:
        """Whether `root` is of another machine's folder, from which this one was copied with its id."""
        told = _told(self.root(store))
        return told.get("machine", machine()) != machine() and told.get("inode", self.inode) != self.inode

    def _early_root(self, store: Store) -> Path:
        """The root that earlier versions wrote, with the folder's path alone."""
        return store.home / "roots" / f"{self.key}.json"

    def _register(self, store: Store, entries: Mapping[str, tuple[Record, Origin | None]]) -> None:
        """Write the root, with the artefacts of `entries` for machines that do not see the folder. One in which nothing
        has changed is written once a day: its age is that of the last build."""
        root = self.root(store)
        root.parent.mkdir(parents=True, exist_ok=True)
        folders = [store.of(origin).folder(record) for record, origin in entries.values()]
        told = {
            "run": str(self.path.resolve()),
            "machine": machine(),
            "id": self.id,
            "inode": self.inode,
            "artefacts": sorted(folder.relative_to(store.home).as_posix() for folder in folders),
        }
        write_whole(root, json.dumps(told))
        if time.time() - root.stat().st_mtime > WRITE_AGAIN_SECONDS:
            write_together({root: json.dumps(told)})

    def spec(self) -> BuildSpec:
        """The spec of the target. Raises InputDataError where its file is absent or damaged, and UsageError where this
        version refuses what an earlier one wrote."""
        path = self.path / "plan.json"
        try:
            return read_spec(read_json(path, "plan"), f"plan {path}")
        except UsageError as error:
            remedy = f"{self.rebuild} and {error.remedy}" if error.remedy else self.rebuild
            raise UsageError(
                f"plan {path} is refused by this version: {error.what}", why=error.why, remedy=remedy
            ) from None

    def recorded(self) -> dict[str, Any]:
        """What the spec's file holds, unchecked; empty where there is none."""
        return _told(self.path / "plan.json")

    @property
    def rebuild(self) -> str:
        """What a message says to do about an artefact that was lost: the command that makes this target again."""
        plan = self.path / "plan.json"
        if plan.is_file():
            return f"run `trtpipe build --recipe {plan}`"
        return f"build it again with `trtpipe build`, or remove what is left of it with `trtpipe rm {self.path.name}`"

    @property
    def finish(self) -> str:
        """What a message says to do about an artefact that was never made: the command that runs the stages left."""
        name = self.path.name if self.path.parent.resolve() == RUNS.resolve() else self.path
        return f"run `trtpipe build --from {name}`" if self.origins() else self.rebuild

    def again(self, stage: str) -> str:
        """What a message says to do about the stage's artefact that was lost: a build does not make what came from
        elsewhere."""
        return TAKE_AGAIN if self.origin(stage) is not None else self.rebuild

    def last(self, stage: str) -> Record | None:
        """The record of the stage's last artefact, also one of other settings; None where none can be read."""
        found = self._entries(retired=True).get(stage)
        return None if found is None else found[0]

    def origin(self, stage: str) -> Origin | None:
        """The origin of the stage's last artefact; None for an artefact that was made here."""
        found = self._entries().get(stage)
        return None if found is None else found[1]

    def origins(self) -> dict[str, Origin]:
        """Origins of the target's imported artefacts, by what their stages make; artefacts made here have none."""
        origins = {stage: origin for stage, (_, origin) in self._entries().items() if origin is not None}
        return {stage.makes: origins[stage.name] for stage in stages.STAGES if stage.name in origins}

    def imports(self) -> list[str]:
        """A phrase for each artefact of the target that was made elsewhere."""
        return [f"the {makes} was {origin.describe()}" for makes, origin in self.origins().items()]

    def find(self, stage: str, store: Store, *, verify: bool = False) -> Artefact | None:
        """The stage's last artefact, made here or imported in its place, if it is whole."""
        found = self._entries().get(stage)
        return None if found is None else store.of(found[1]).find(found[0], verify=verify)

    def fault(self, stage: str, store: Store, *, verify: bool = False) -> str | None:
        found = self._entries().get(stage)
        return None if found is None else store.of(found[1]).fault(found[0], verify=verify)

    def update(self, stage: Stage, artefact: Artefact, store: Store) -> bool:
        """Refer to the stage's artefact and link to it. Returns False where `gc` has deleted it since it was found."""
        record = artefact.manifest.record
        last = self._entries().get(stage.name)
        known = last is not None and (last[0].key, last[1]) == (record.key, artefact.origin)
        with contextlib.nullcontext() if known else store.referring():
            if read_manifest(artefact.path.parent / "manifest.json") is None:
                return False
            self._register(store, {**self._entries(retired=True), stage.name: (record, artefact.origin)})
            raw = self._raw()
            entry = dataclasses.asdict(record)
            if artefact.origin is not None:
                entry["origin"] = dataclasses.asdict(artefact.origin)
            raw[stage.name] = entry
            write_whole(self.path / "run.json", json.dumps(raw, indent=2) + "\n")
        link = self.path / stage.makes
        partial = self.path / f".{link.name}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(artefact.path)
        partial.replace(link)
        content = artefact.manifest.content
        self._retire(lambda _, record: record.inputs.get(stage.makes, content) != content)
        sync(self.path)
        return True

    def _retire(self, other: Callable[[Stage, Record], bool]) -> None:
        """Unlink the artefacts for which `other` is true, and those that were made from them. Their records stay, which
        say why a stage runs again."""
        raw, entries, makes = self._raw(), self._entries(), set[str]()
        for stage in stages.STAGES:
            if stage.name in entries and (
                makes & entries[stage.name][0].inputs.keys() or other(stage, entries[stage.name][0])
            ):
                raw[stage.name]["retired"] = True
                makes.add(stage.makes)
                (self.path / stage.makes).unlink(missing_ok=True)
        if makes:
            write_whole(self.path / "run.json", json.dumps(raw, indent=2) + "\n")

    def drop_imports(self, *, keep: str) -> None:
        """Forget imported artefacts, except those from the source `keep`."""
        stale = [stage for stage, (_, origin) in self._entries().items() if origin and origin.source != keep]
        raw = {stage: entry for stage, entry in self._raw().items() if stage not in stale}
        write_whole(self.path / "run.json", json.dumps(raw, indent=2) + "\n")
        for stage in stages.STAGES:
            if stage.name in stale:
                (self.path / stage.makes).unlink(missing_ok=True)

    def stages(self) -> list[str]:
        """The stages with an artefact whose record this version can read."""
        return list(self._entries())

    def folders(self, store: Store) -> list[Path]:
        """The store's folders that this run refers to. Raises OSError or ValueError where they cannot be determined."""
        path = self.path / "run.json"
        if not path.exists():
            return []
        raw = load_json(path)
        if not isinstance(raw, dict) or raw.keys() != self._entries(retired=True).keys():
            raise ValueError("another version of trtpipe wrote it, or it is damaged")
        return [store.of(origin).folder(record) for record, origin in self._entries().values()]

    def linked(self, makes: str) -> Path:
        """The artefact that a stage made last, such as the repository. Raises InputDataError when there is none."""
        link, gone = self.path / makes, self.broken(makes)
        if gone is not None:
            remedy = f"set TRTPIPE_HOME to where the store is now, then {self.rebuild}, which reuses what is there"
            if self.origins():  # a build would make anew what came from elsewhere
                remedy = f"move the store back, or {TAKE_AGAIN}"
            raise InputDataError(
                f"{self.path} has no {makes}",
                why=f"its link points to {gone}, which is not there: the store was moved or removed",
                remedy=remedy,
            )
        if not link.is_dir():
            raise InputDataError(
                f"{self.path} has no {makes}", why="the stage that makes it has not run", remedy=self.finish
            )
        return link.resolve()

    def broken(self, makes: str) -> Path | None:
        """Destination of an artefact's link if it does not exist, as after the store was moved; else None."""
        link = self.path / makes
        return link.readlink() if link.is_symlink() and not link.exists() else None

    def _entries(self, *, retired: bool = False) -> dict[str, tuple[Record, Origin | None]]:
        """By stage, without those of other settings, or with them."""
        out = {}
        for stage, entry in self._raw().items():
            try:
                facts = dict(entry)
                if facts.pop("retired", False) and not retired:
                    continue
                origin = facts.pop("origin", None)
                out[stage] = Record(**facts), None if origin is None else Origin(**origin)
            except (TypeError, ValueError):
                continue  # written by another version
        return out

    def _raw(self) -> dict[str, Any]:
        return _told(self.path / "run.json")


def _told(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it cannot be read."""
    try:
        value = load_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def find_run(target: str) -> RunFolder | None:
    """The run folder of a target, which is given by its name or as a folder such as runs/<target>; None if there is
    none."""
    if target in {run.name for run in RUNS.glob("*")}:  # a path such as "a/.." must not pass as a name
        return RunFolder.of(target)
    path = Path(target).resolve()
    return RunFolder(path) if (path / "plan.json").is_file() else None


def require_run(target: str) -> RunFolder:
    """The run folder of a target. Raises UsageError for an unknown one."""
    run = find_run(target)
    if run is None:
        raise UsageError(f"there is no target '{target}' in ./runs", remedy=SEE_TARGETS)
    return run
