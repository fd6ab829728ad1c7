"""Push of a target to a registry, pull from it, and search in it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import ArtefactRefused, InputDataError, UsageError, suggestion
from trtpipe.engines.files import size_text
from trtpipe.engines.json_input import parse_json
from trtpipe.engines.passport import NAME as PASSPORT
from trtpipe.engines.passport import Passport
from trtpipe.engines.precision import FLOAT_NAMES
from trtpipe.pipeline import compatibility
from trtpipe.pipeline.registry.base import Blob, Registry
from trtpipe.pipeline.registry.export import Bundle
from trtpipe.pipeline.registry.fetch import Counter, Fetch, damaged
from trtpipe.pipeline.registry.package import (
    Index,
    check_index,
    check_provenance,
    describe,
    files_of,
    link,
    passport_of,
    planned,
    receive,
    refuse_objects,
    refuse_settings,
)
from trtpipe.pipeline.registry.provenance import check_chain, is_envelope, unwrapped
from trtpipe.pipeline.run_folder import RunFolder, require_run
from trtpipe.pipeline.stages import carried, to_serve
from trtpipe.pipeline.stages.base import Progress
from trtpipe.pipeline.store.manifest import Origin, Record
from trtpipe.pipeline.store.store import Store

# Limit of a passport's size, larger than any passport.
PASSPORT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """Bytes that a push or a pull has moved, and bytes that were there before; for a pull also what has arrived."""

    target: str
    artefacts: tuple[str, ...]
    moved: int
    there: int
    arrived: Bundle | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A target in a registry, as `search` lists it."""

    target: str
    model: str
    passport: Passport
    artefacts: tuple[str, ...]
    size: int


def choose(only: str | None) -> tuple[str, ...] | None:
    """The artefacts of a list such as "engine,tokenizer". Raises UsageError for an unknown one."""
    if only is None:
        return None
    words = tuple(word.strip() for word in only.split(","))
    for word in words:
        if word not in carried():
            raise UsageError(f"nothing of a target is called '{word}'", remedy=suggestion(word, carried()))
    return words


def push(
    target: str, registry: Registry, store: Store, wanted: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None, *, sign_key: Path | None = None,
) -> Shipped:  # fmt: skip
    """Push a target, file by file, its index last: what serving takes, or the artefacts `wanted`. Files that are there
    are not sent again; the registry's other artefacts of this very build stay. A run folder of another name is
    published under the name that the target's settings give it.

    Every file is hashed first. Raises as `describe` and the registry do, and UsageError for an artefact it lacks.
    """
    spec = require_run(target).spec()
    registry.require_name(spec.target)
    chosen = to_serve(spec) if wanted is None else wanted
    index, made = describe(target, store, chosen, verify=True, sign_key=sign_key)
    absent = [name for name in wanted or () if name not in made]
    if absent:
        remedy = f"of what is named it has: {', '.join(made)}" if made else "leave out --only for what serving takes"
        raise UsageError(f"{target} has no {' and no '.join(absent)}", remedy=remedy)
    blobs: dict[Blob, Path] = {}
    for name, entry in index["artefacts"].items():
        for file in entry["files"]:
            blobs.setdefault(Blob(file["sha256"], file["size"]), made[name].path / file["path"])
    counter = Counter(sum(blob.size for blob in blobs), progress)
    there = 0
    for blob, path in blobs.items():
        if registry.has(blob):
            there += blob.size
            counter.add(blob.size)
        else:
            registry.put(blob, path, counter.add)
    _keep_others(index, registry)
    name = index["target"]
    registry.publish(name, index, list({Blob(file["sha256"], file["size"]): None for file in files_of(index)}))
    return Shipped(target=name, artefacts=tuple(made), moved=counter.total - there, there=there)


def pull(
    target: str, registry: Registry, store: Store, wanted: Sequence[str] | None = None, *, any_machine: bool = False,
    trust_keys: Sequence[Path] = (), progress: Progress = lambda done, total: None,
) -> Shipped:  # fmt: skip
    """Pull a target into the store, apart from what is made here, with a run folder: what serving takes, all of it
    where the registry has no engine, or the artefacts `wanted`.

    An engine with other settings files than this version's, or that this machine cannot run, unless `any_machine`, is
    refused before its files are requested. Every file is verified. What an interrupted pull has received of an artefact
    is kept, and verified again by the next one.

    trust_keys  public keys (PEM), one of which must have signed the target's provenance

    Raises UsageError, ArtefactRefused, InputDataError for damaged or inconsistent data, HostError.
    """
    index = read_index(target, registry, trust_keys)
    where = f"{target} at {registry.url}"
    spec = planned(index, where)
    if wanted is None and "engine" in index["artefacts"]:
        wanted = [name for name in index["artefacts"] if name in to_serve(spec)]
    missing = [name for name in wanted or () if name not in index["artefacts"]]
    if missing:
        raise UsageError(
            f"{registry.url} has no {' and no '.join(missing)} of {target}",
            remedy=f"there are: {', '.join(index['artefacts'])}",
        )
    offered = index["artefacts"]
    if wanted is not None:
        index = {**index, "artefacts": {name: offered[name] for name in wanted}}
    if "engine" in index["artefacts"]:
        refuse_settings(spec, offered["engine"], where, offered)
        _require_own_passport(index, registry, where)
        if not any_machine:
            _require_fit(index)
    fetch = Fetch(registry, Counter(sum(file["size"] for file in files_of(index)), progress))
    artefacts = {}
    with store.importing(RunFolder.of(spec.target).key):
        for name, entry in index["artefacts"].items():
            folder = store.incoming(Record(**entry["record"]))
            part = store.of(Origin(source=registry.url, content=entry["content"]))
            inspect = refuse_objects(where) if name == "adapters" else lambda out: None
            artefacts[name] = receive(entry, part, partial(fetch.take, folder), fetch.skip, inspect)
            fetch.here.update({file["sha256"]: artefacts[name].path / file["path"] for file in entry["files"]})
        link(spec, artefacts, store, index["provenance"])
    return Shipped(
        target=target, artefacts=tuple(artefacts), moved=fetch.moved, there=fetch.there,
        arrived=Bundle(spec=spec, artefacts=artefacts),
    )  # fmt: skip


def search(
    registry: Registry, *, model: str | None = None, gpu: str | None = None, dtype: str | None = None,
    toolchain: str | None = None, unread: Callable[[str], None] = lambda told: None,
) -> list[Found]:  # fmt: skip
    """The registry's targets whose model, GPU, precision and toolchain contain these words, sorted by name. `unread` is
    told of each index that is damaged."""
    out = []
    for name in registry.targets():
        try:
            found = registry.index(name)
            if found is None:
                continue  # another program's
            index = _checked(found, name, registry)
        except InputDataError as error:
            unread(str(error))
            continue
        except (UsageError, ArtefactRefused):
            continue  # another version's, or removed meanwhile
        passport = passport_of(index)
        asked = (
            (model, _model(index)), (gpu, passport.target()), (dtype, f"{precision(passport)} {_short(passport)}"),
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


def read_index(target: str, registry: Registry, trust_keys: Sequence[Path] = ()) -> Index:
    """A target's index, with its provenance checked. Raises UsageError, InputDataError, ArtefactRefused."""
    return _checked(registry.index(target), target, registry, trust_keys)


def _checked(found: Any, target: str, registry: Registry, trust_keys: Sequence[Path] = ()) -> Index:
    where = f"{target} at {registry.url}"
    index = check_index(found, where, "push")
    if index["target"] != target:
        raise InputDataError(f"{where} is damaged", why=f"it is of {index['target']}")
    # Version 0.1 also carried repositories.
    index["artefacts"] = {name: entry for name, entry in index["artefacts"].items() if name != "repository"}
    check_provenance(index, where, trust_keys)
    return index


def _keep_others(index: Index, registry: Registry) -> None:
    """Keep in the index the registry's artefacts of this very build that are not pushed now."""
    try:
        before = read_index(index["target"], registry)
    except (UsageError, InputDataError, ArtefactRefused):
        return  # nothing is there, or the push replaces it
    ours = {one["name"]: one["digest"]["sha256"] for one in unwrapped(index["provenance"])["subject"]}
    others = {
        name: entry for name, entry in before["artefacts"].items()
        if name not in index["artefacts"] and entry["content"] == ours.get(name)
    }  # fmt: skip
    index["artefacts"] |= others
    if "engine" in others:
        index["passport"] = before["passport"]
    if is_envelope(before["provenance"]) and not is_envelope(index["provenance"]):
        # A statement is of all stages: what it says of this very build, signed, holds for what is pushed now too.
        with contextlib.suppress(ArtefactRefused):
            check_chain(unwrapped(before["provenance"]), index["artefacts"])
            index["provenance"] = before["provenance"]


def precision(passport: Passport) -> str:
    cache = f" + {passport.kv_cache_quant_algo} KV cache" if passport.kv_cache_quant_algo else ""
    return f"{passport.quant_algo or passport.dtype}{cache}"


def _require_own_passport(index: Index, registry: Registry, where: str) -> None:
    """Check that the index's passport is the engine's own, which is read first and alone, before any other file."""
    found = [file for file in index["artefacts"]["engine"]["files"] if file["path"] == PASSPORT]
    if len(found) != 1 or found[0]["size"] > PASSPORT_BYTES:
        raise InputDataError(f"{where} is damaged", why=f"its engine has no {PASSPORT}")
    blob = Blob(found[0]["sha256"], found[0]["size"])
    data = b"".join(registry.read(blob))
    if hashlib.sha256(data).hexdigest() != blob.sha256:
        raise damaged(PASSPORT, blob, registry)
    if parse_json(data) != index["passport"]:
        raise InputDataError(f"{where} is damaged", why=f"its passport is not the engine's {PASSPORT}")


def _require_fit(index: Index) -> None:
    verdict = compatibility.examine(passport_of(index))
    if verdict.objections:
        size = sum(file["size"] for file in index["artefacts"]["engine"]["files"])
        raise ArtefactRefused(
            f"the engine of {index['target']} does not run on this machine",
            why=f"{'; '.join(verdict.objections)}; nothing of its {size_text(size)} was fetched",
            remedy="pull it where it runs, or with --any-machine",
        )


def _short(passport: Passport) -> str:
    """The names that `build` takes for the type of unquantized weights."""
    return "" if passport.quant_algo else " ".join(name for name, kind in FLOAT_NAMES.items() if kind == passport.dtype)


def _model(index: Index) -> str:
    return str(index["model"].get("name", ""))
