"""Index of a target for transport to another machine, file by file, and the way back from it into a store.

An index is plain JSON: the settings of the build, the engine's passport, and for each artefact its record and the
digest of every file. A tar (`export`) and a registry (`transfer`) both carry one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from trtpipe import __version__
from trtpipe.engines import load_backend
from trtpipe.engines.errors import ArtefactRefused, InputDataError, UsageError
from trtpipe.engines.json_input import read_json
from trtpipe.engines.passport import Passport, passport_from, read_passport
from trtpipe.pipeline.registry.provenance import FILE as PROVENANCE
from trtpipe.pipeline.registry.provenance import check_chain, is_envelope, signed, statement, verified
from trtpipe.pipeline.registry.trust import ENVELOPE
from trtpipe.pipeline.resolve import read_spec
from trtpipe.pipeline.run_folder import RunFolder, require_run
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import Stage, carried, stages_of
from trtpipe.pipeline.stages.build import BUILD, draft_passport
from trtpipe.pipeline.store.digests import combined
from trtpipe.pipeline.store.folders import write_whole
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Artefact, Store

FORMAT = 1
# Artefacts of a target that are transported. The repository is made again where it is served.
# Files that an artefact may hold: data that is parsed. Code is refused under any name.
DATA_SUFFIXES = (".engine", ".html", ".jinja", ".json", ".npy", ".safetensors", ".yaml")

Index = dict[str, Any]


def describe(
    target: str, store: Store, wanted: Collection[str], *, verify: bool = False, sign_key: Path | None = None
) -> tuple[Index, dict[str, Artefact]]:
    """The index of a target, and its artefacts among `wanted`, by what their stages make.

    verify    hash every file again
    sign_key  private key (PEM) that signs the index's provenance

    Raises UsageError for an unknown target and for a name that an index refuses, InputDataError for a missing artefact.
    """
    from trtpipe.pipeline.registry.index_schema import NAME

    run = require_run(target)
    spec = run.spec()
    if not re.fullmatch(NAME, spec.target):
        raise UsageError(
            f"'{spec.target}' cannot be the name of what is carried elsewhere",
            remedy="build it from a folder or a link whose name has letters, digits, '.', '_', '+' and '-' alone",
        )
    made = {stage.makes: _made(stage, run, store, verify) for stage in stages_of(spec) if stage.makes in wanted}
    if "engine" in made:
        passport = read_passport(made["engine"].path)
    else:
        convert = next(stage for stage in stages_of(spec) if stage.makes == "checkpoint")
        passport = draft_passport(spec, made.get("checkpoint") or _made(convert, run, store, False))
    index = {
        "format": FORMAT,
        "trtpipe": __version__,
        "target": spec.target,  # the folder may have another name; what arrives is put into runs/<spec.target>
        "model": spec.model.to_json(),
        "settings": spec.settings,
        "passport": passport.to_json(),
        "artefacts": {name: _entry(artefact) for name, artefact in made.items()},
    }
    arrived = run.path / PROVENANCE
    if sign_key is None and arrived.is_file() and all(artefact.origin for artefact in made.values()):
        # As it came, with its signature: nothing of it was made here.
        index["provenance"] = read_json(arrived, "provenance")
        check_provenance(index, str(arrived))
    else:
        index["provenance"] = signed(statement(run, store), sign_key)
    store.digests.save()
    return index, made


def check_index(index: Any, where: str, again: str = "export") -> Index:
    """The checked index; `again` is the command that makes another one.

    Raises InputDataError for a malformed index, ArtefactRefused for an index of another version.
    """
    from trtpipe.pipeline.registry.index_schema import index_fault

    if isinstance(index, dict) and index.get("format", FORMAT) != FORMAT:
        raise ArtefactRefused(
            f"{where} is of format {index['format']}, this trtpipe reads {FORMAT}", remedy=f"{again} it again"
        )
    fault = index_fault(index)
    if fault is not None:
        raise InputDataError(f"{where} is damaged", why=fault, remedy=f"copy it again, or {again} it again")
    return dict(index)


def planned(index: Index, where: str) -> BuildSpec:
    """The spec of a checked index; it must be that of the named target, and the artefacts must be the spec's.

    Raises InputDataError otherwise, because paths are made from these names, and ArtefactRefused for an artefact that
    was made with other settings.
    """
    spec = read_spec(index, where)
    if spec.target != index["target"]:
        raise InputDataError(f"{where} is damaged", why=f"it is of {spec.target}, and says {index['target']}")
    makers = {stage.makes: stage for stage in stages_of(spec)}
    for name, entry in index["artefacts"].items():
        refuse_code(name, entry, where)
        check_files(name, entry, where)
        record, stage = Record(**entry["record"]), makers.get(name)
        if stage is None or record.stage != stage.name:
            raise InputDataError(
                f"{where} is damaged", why=f"the {name} of {spec.target} does not come from {record.stage}"
            )
        if other := stage.other_settings(spec, record):
            raise ArtefactRefused(
                f"{where}: the {name} was made with other settings than its plan's", why=", ".join(other),
                remedy="build the target again where it comes from",
            )  # fmt: skip
    passport, settings = passport_of(index), BUILD.settings(spec)
    for name, said, asked in (
        ("runtime", passport.runtime, settings.runtime),
        ("gpu", passport.gpu, settings.target.gpu.name),
        ("sms", passport.sms, settings.sms),
        ("tp_size", passport.tp_size, settings.target.mapping.tp_size),
        ("pp_size", passport.pp_size, settings.target.mapping.pp_size),
        ("moe_ep_size", passport.moe_ep_size, settings.target.mapping.moe_ep_size),
    ):
        if said != asked:
            raise InputDataError(f"{where} is damaged", why=f"{name}: its passport says {said}, its settings {asked}")
    return spec


def check_provenance(index: Index, where: str, keys: Sequence[Path] = ()) -> None:
    """Check that the index's provenance is consistent, describes its artefacts, and is signed by one of `keys`, if any.

    Raises as `provenance.verified` and `provenance.check_chain` do.
    """
    if "provenance" not in index:
        raise InputDataError(
            f"{where} is not complete",
            why="it holds no provenance",
            remedy="make it again with this version of trtpipe",
        )
    check_chain(verified(index["provenance"], keys), index["artefacts"])


def passport_of(index: Index) -> Passport:
    """The passport in a checked index."""
    return passport_from(index["passport"])


def files_of(index: Index) -> list[dict[str, Any]]:
    """Every file of every artefact: path, size, sha256."""
    return [file for entry in index["artefacts"].values() for file in entry["files"]]


def receive(
    entry: dict[str, Any], store: Store, take: Callable[[dict[str, Any], Path], None],
    again: Callable[[dict[str, Any]], None] = lambda file: None, inspect: Callable[[Path], None] = lambda out: None,
) -> Artefact:  # fmt: skip
    """Put the artefact of a checked entry into the store's part for its origin, or return the one that is there.

    What a pull has kept of its files in `store.incoming` goes, once the artefact is whole or refused.

    take     writes a file of the entry to a path, or raises where the file does not match its digest
    again    called with each file of an artefact that is there already
    inspect  called with the folder of a received artefact, before the store takes it; may refuse it
    """
    record = Record(**entry["record"])

    def work(out: Path) -> dict[str, Any]:
        for file in entry["files"]:
            (out / file["path"]).parent.mkdir(parents=True, exist_ok=True)
            take(file, out / file["path"])
        try:
            inspect(out)
        except ArtefactRefused:
            _drop_incoming(record, store)
            raise
        return {}

    waiting = f"waiting for another command, which makes or receives the same artefact of the {record.stage} stage"
    with store.locked(record, lambda: store.note(waiting)):
        found = store.find(record)
        if found is None:
            store.set_aside(record)
            found = store.make(record, work)
        else:
            for file in entry["files"]:
                again(file)
        _drop_incoming(record, store)
        return found


def _drop_incoming(record: Record, store: Store) -> None:
    folder = store.incoming(record)
    if folder.is_dir():
        with contextlib.suppress(OSError):  # what is left of it is for `gc`
            store.digests.remove_tree(folder)
        store.digests.save()


def link(spec: BuildSpec, artefacts: Mapping[str, Artefact], store: Store, told: Any) -> RunFolder:
    """The run folder of the spec's target, with links to these artefacts and their provenance statement `told`."""
    run = RunFolder.of(spec.target)
    run.start(spec, store)
    write_whole(run.path / PROVENANCE, json.dumps(told, indent=1) + "\n")
    if is_envelope(told):
        for artefact in artefacts.values():
            write_whole(artefact.path.parent / ENVELOPE, json.dumps(told) + "\n")
    for source in {artefact.origin.source for artefact in artefacts.values() if artefact.origin is not None}:
        run.drop_imports(keep=source)
    for stage in stages_of(spec):
        if stage.makes in artefacts:
            run.update(stage, artefacts[stage.makes], store)
    return run


def refuse_code(name: str, entry: dict[str, Any], where: str) -> None:
    """Raises ArtefactRefused for an artefact that is not for transport, or that holds anything but data."""
    if name not in carried():
        raise ArtefactRefused(
            f"{where} holds a {name}", why="what a server runs is made here, from an engine and a tokenizer",
            remedy=f"of a target these travel: {', '.join(carried())}",
        )  # fmt: skip
    for file in entry["files"]:
        if PurePosixPath(file["path"]).suffix not in DATA_SUFFIXES:
            raise ArtefactRefused(
                f"{where}: the {name} holds {file['path']}", why=f"only data is taken: {', '.join(DATA_SUFFIXES)}",
                remedy="build the target here from its model",
            )  # fmt: skip


def check_files(name: str, entry: dict[str, Any], where: str) -> None:
    """Raises InputDataError for a file name that leads out of its folder or occurs twice, and for a digest of the
    artefact that does not match those of its files."""
    for file in entry["files"]:
        path = PurePosixPath(file["path"])
        if path.is_absolute() or ".." in path.parts or "\0" in file["path"]:
            raise InputDataError(f"{where} holds the file name {path}", why="it leads out of its folder")
    if len({PurePosixPath(file["path"]) for file in entry["files"]}) < len(entry["files"]):
        raise InputDataError(f"{where} is damaged", why=f"it names a file of the {name} twice")
    if combined((file["path"], file["sha256"]) for file in entry["files"]) != entry["content"]:
        raise InputDataError(f"{where}: the {name} is not what its digest says", remedy="copy it again")


def refuse_settings(spec: BuildSpec, engine: dict[str, Any], where: str, others: Collection[str]) -> None:
    """Raises ArtefactRefused for the entry of an engine whose settings files are not, to the byte, those that this
    version writes for the spec. The digests tell, so that no file is fetched for it.

    others  what else of the target is there
    """
    files = {PurePosixPath(file["path"]): file["sha256"] for file in engine["files"]}
    for name, text in load_backend(spec.runtime).rendered(spec.build, spec.engine_target).items():
        if files.get(PurePosixPath(name)) != hashlib.sha256(text.encode()).hexdigest():
            only = [one for one in ("checkpoint", "tokenizer", "accuracy") if one in others]
            raise ArtefactRefused(
                f"{where}: the engine's {name} is not what trtpipe {__version__} writes for its settings",
                why="it says what a runtime loads and runs",
                remedy=f"take its checkpoint (--only {','.join(only)}) and build the engine here"
                if "checkpoint" in only
                else "build the target with this version, here or where it comes from",
            )


def refuse_objects(where: str) -> Callable[[Path], None]:
    """An inspection of adapters: a NumPy file must hold numbers, since one of Python objects holds code."""

    def inspect(adapters: Path) -> None:
        import numpy as np

        for path in adapters.rglob("*.npy"):
            try:
                np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise ArtefactRefused(
                    f"{where}: {path.relative_to(adapters)} of the adapters is not an array of numbers",
                    why=str(error),
                    remedy="build the target here from its model",
                ) from None

    return inspect


def _made(stage: Stage, run: RunFolder, store: Store, verify: bool) -> Artefact:
    if stage.name not in run.stages():
        order = [one.makes for one in stages_of(run.spec())]
        if run.origins().keys() & set(order[order.index(stage.makes) :]):
            raise InputDataError(
                f"{run.path} has no {stage.makes}", why="it did not come with the target",
                remedy=f"take it from where the target was built (`trtpipe pull --only {stage.makes},tokenizer`)",
            )  # fmt: skip
        raise InputDataError(
            f"{run.path} has no {stage.makes}",
            why=f"its {stage.name} stage has not run to its end",
            remedy=run.finish,
        )
    artefact = run.find(stage.name, store, verify=verify)
    if artefact is None:
        why = run.fault(stage.name, store, verify=verify) or f"{store.home} has it no longer"
        raise InputDataError(f"{run.path} has lost its {stage.makes}", why=why, remedy=run.again(stage.name))
    return artefact


def _entry(artefact: Artefact) -> dict[str, Any]:
    manifest = artefact.manifest
    files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in manifest.files]
    return {"record": dataclasses.asdict(manifest.record), "content": manifest.content, "files": files}
