"""Push a target to a registry, pull one from it, and look for one."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines.errors import ArtefactRefused, InputDataError, UsageError, suggestion
from engines.files import place
from engines.passport import Passport
from pipeline import guard
from pipeline.manifest import Record
from pipeline.provenance import check_chain, keep, statement
from pipeline.registry.base import Blob, Registry
from pipeline.registry.files import CHUNK
from pipeline.runner import RunFolder
from pipeline.shipment import Index, check_index, describe, files_of, link, plan_of, receive
from pipeline.store import Store

# What can travel, and what does so unless somebody says otherwise: what it takes to serve.
CARRIED = ("checkpoint", "scales", "tokenizer", "accuracy", "engine", "repository")
USUAL = ("tokenizer", "accuracy", "engine", "repository")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """What a push or a pull has moved, and what was there before; bytes."""

    target: str
    artefacts: tuple[str, ...]
    moved: int
    there: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """A target in a registry, as `search` tells it."""

    target: str
    model: str
    passport: Passport
    artefacts: tuple[str, ...]
    size: int


def choose(only: str | None) -> tuple[str, ...]:
    """The artefacts of a list such as "engine,tokenizer". Raises UsageError for one that is not known."""
    if only is None:
        return USUAL
    words = tuple(word.strip() for word in only.split(","))
    for word in words:
        if word not in CARRIED:
            raise UsageError(f"nothing of a target is called '{word}'", remedy=suggestion(word, CARRIED))
    return words


def push(
    target: str, registry: Registry, store: Store, wanted: Sequence[str], progress: Progress = lambda done, total: None
) -> Shipped:
    """Bring a target there, file by file, its index last; what is there is not sent again.

    Every file is hashed first. Raises as `describe` and the registry do.
    """
    index, made = describe(target, store, wanted, verify=True)
    index["provenance"] = statement(RunFolder.of(target), store)
    blobs: dict[Blob, Path] = {}
    for name, entry in index["artefacts"].items():
        for file in entry["files"]:
            blobs.setdefault(Blob(file["sha256"], file["size"]), made[name].path / file["path"])
    counter = _Counter(sum(blob.size for blob in blobs), progress)
    there = 0
    for blob, path in blobs.items():
        if registry.has(blob):
            there += blob.size
            counter.add(blob.size)
        else:
            registry.put(blob, path, counter.add)
    registry.publish(target, index, list(blobs))
    return Shipped(target=target, artefacts=tuple(made), moved=counter.total - there, there=there)


def pull(
    target: str, registry: Registry, store: Store, wanted: Sequence[str] | None = None, *, any_machine: bool = False,
    progress: Progress = lambda done, total: None,
) -> Shipped:  # fmt: skip
    """Bring a target here: into the store, with a run folder. Everything of it, or the artefacts `wanted`.

    An engine that this machine cannot run is refused before its files are asked for, unless `any_machine`. Every file
    is verified; what has arrived of one that breaks off is kept, and continued the next time. Raises UsageError,
    ArtefactRefused, InputDataError for what is not what it should be, HostError.
    """
    index = read_index(target, registry)
    missing = [name for name in wanted or () if name not in index["artefacts"]]
    if missing:
        raise UsageError(
            f"{registry.url} has no {' and no '.join(missing)} of {target}",
            remedy=f"there are: {', '.join(index['artefacts'])}",
        )
    if wanted is not None:
        index = {**index, "artefacts": {name: index["artefacts"][name] for name in wanted}}
    if "engine" in index["artefacts"] and not any_machine:
        _require_fit(index, registry)
    fetch = _Fetch(registry, _Counter(sum(file["size"] for file in files_of(index)), progress))
    artefacts = {}
    for name, entry in index["artefacts"].items():
        folder = store.incoming(Record(**entry["record"]))
        artefacts[name] = receive(name, entry, store, registry.url, partial(fetch.take, folder), fetch.skip)
        shutil.rmtree(folder, ignore_errors=True)
        fetch.here.update({file["sha256"]: artefacts[name].path / file["path"] for file in entry["files"]})
    run = link(plan_of(index), artefacts, store)
    if "provenance" in index:
        keep(run, index["provenance"])
    return Shipped(target=target, artefacts=tuple(artefacts), moved=fetch.moved, there=fetch.there)


def search(
    registry: Registry, *, model: str | None = None, gpu: str | None = None, dtype: str | None = None,
    toolchain: str | None = None,
) -> list[Found]:  # fmt: skip
    """The targets there whose model, GPU, precision and toolchain contain these words, in the order of their names."""
    out = []
    for name in registry.targets():
        try:
            index = read_index(name, registry)
        except (InputDataError, ArtefactRefused):
            continue  # somebody else's, or another version's
        passport = _passport(index)
        asked = (
            (model, _model(index)), (gpu, passport.target()), (dtype, precision(passport)),
            (toolchain, passport.toolchain or ""),
        )  # fmt: skip
        if all(word is None or word.lower() in value.lower() for word, value in asked):
            size = sum({file["sha256"]: file["size"] for file in files_of(index)}.values())
            out.append(
                Found(
                    target=name, model=_model(index), passport=passport, artefacts=tuple(index["artefacts"]), size=size
                )
            )
    return out


def read_index(target: str, registry: Registry) -> Index:
    """The index of a target there, and its provenance checked. Raises UsageError, InputDataError, ArtefactRefused."""
    index = check_index(registry.index(target), f"{target} at {registry.url}")
    if "provenance" in index:
        check_chain(index["provenance"], {name: entry["content"] for name, entry in index["artefacts"].items()})
    return index


def precision(passport: Passport) -> str:
    cache = f" + {passport.kv_cache_quant_algo} KV cache" if passport.kv_cache_quant_algo else ""
    return f"{passport.quant_algo or passport.dtype}{cache}"


def _require_fit(index: Index, registry: Registry) -> None:
    verdict = guard.examine(_passport(index))
    if verdict.objections:
        size = sum(file["size"] for file in index["artefacts"]["engine"]["files"])
        raise ArtefactRefused(
            f"the engine of {index['target']} does not run on this machine",
            why=f"{'; '.join(verdict.objections)}; nothing of its {size / 1e9:.1f} GB was fetched",
            remedy="pull it where it runs, or with --any-machine",
        )


def _passport(index: Index) -> Passport:
    value = dict(index["passport"])
    value["sms"] = None if value["sms"] is None else tuple(value["sms"])
    return Passport(**value)


def _model(index: Index) -> str:
    return str(index["model"].get("name", ""))


class _Counter:
    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self._done, self._progress = 0, progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self.total)


class _Fetch:
    """Files from a registry, each digest once."""

    def __init__(self, registry: Registry, counter: _Counter) -> None:
        self._registry = registry
        self._counter = counter
        # Where the files of earlier artefacts are, by digest.
        self.here: dict[str, Path] = {}
        self.moved = self.there = 0

    def skip(self, file: dict[str, Any]) -> None:
        self.there += file["size"]
        self._counter.add(file["size"])

    def take(self, folder: Path, file: dict[str, Any], out: Path) -> None:
        """Bring a file to `out`; what has arrived of it is in `folder` meanwhile. Raises InputDataError for a file
        that is not what its digest says."""
        blob = Blob(file["sha256"], file["size"])
        if blob.sha256 in self.here:
            place(self.here[blob.sha256], out)
            self.skip(file)
            return
        folder.mkdir(parents=True, exist_ok=True)
        arriving = folder / blob.sha256
        digest = hashlib.sha256()
        with arriving.open("a+b") as target:
            target.seek(0)
            while chunk := target.read(CHUNK):
                digest.update(chunk)
                self._counter.add(len(chunk))
            done = target.tell()
            while done < blob.size:
                chunk = self._registry.read(blob, done, min(done + CHUNK, blob.size))
                if not chunk:
                    raise InputDataError(f"{self._registry.url} ends {file['path']} early", remedy="push it again")
                target.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                self.moved += len(chunk)
                self._counter.add(len(chunk))
        if done != blob.size or digest.hexdigest() != blob.sha256:
            arriving.unlink()
            raise InputDataError(
                f"{file['path']} from {self._registry.url} is damaged", why="its digest is another",
                remedy="pull again; if it stays so, push it again",
            )  # fmt: skip
        arriving.rename(out)
        self.here[blob.sha256] = out  # for the same artefact: when that is whole, it has another place
