"""Provenance of a target: a SLSA statement of its stages, and the check that its digests are consistent.

Every stage's record names the content digests of what it read, so that the records of a target form a chain from the
commit of a model to the repository. The statement is an in-toto one: its subjects are the artefacts, its resolved
dependencies the inputs from outside, its byproducts the stages with their records and the digests of their files.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from trtpipe import __version__
from trtpipe.engines.errors import ArtefactRefused, InputDataError, kind_of, malformed
from trtpipe.engines.json_input import parse_json, read_json
from trtpipe.pipeline.registry.signatures import PAYLOAD_TYPE, sign_statement
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.stages import STAGES, Stage, stages_of
from trtpipe.pipeline.stages.package import PACKAGE
from trtpipe.pipeline.store.digests import combined
from trtpipe.pipeline.store.manifest import Manifest, Record
from trtpipe.pipeline.store.store import Store

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:trtpipe:build:v1"
# Parts that are equal in two statements of one target.
SAID = ("stages", "settings", "subjects")
WHERE_AND_WHEN = ("host", "startedOn", "finishedOn", "imported")
TYPES = [STATEMENT, PREDICATE, BUILD_TYPE]
# File in a run folder, beside the artefacts of a pull: the stages that ran elsewhere.
FILE = "provenance.json"

Statement = dict[str, Any]


def statement(run: RunFolder, store: Store) -> Statement:
    """The provenance of a target in ./runs. Raises InputDataError where the record of a stage is missing."""
    spec = run.spec()
    makers = {stage.makes for stage in stages_of(spec)}
    told = stages(unwrapped(read_json(run.path / FILE, "provenance"))) if (run.path / FILE).is_file() else {}
    known = {makes: entry for makes, entry in told.items() if makes in makers}  # it may have been built here since
    for stage in stages_of(spec):
        record = run.last(stage.name)
        if record is None or stage.name not in run.stages():
            continue
        found = run.find(stage.name, store)
        if found is not None and found.origin is not None and stage.makes in told:
            # The manifest here says when the artefact arrived, not how it was made.
            notes = {**told[stage.makes]["annotations"], "imported": found.origin.describe()}
            known[stage.makes] = {**told[stage.makes], "annotations": notes}
        elif found is not None:
            known[stage.makes] = _entry(stage.makes, found.manifest)
        elif known.get(stage.makes, {}).get("annotations", {}).get("key") != record.key:
            raise _lost(stage, run, store)
    if not known:
        raise InputDataError(f"{run.path} has no artefacts", remedy=run.rebuild)
    for makes, entry in known.items():
        untold = (entry["annotations"]["record"]["inputs"].keys() & makers) - known.keys()
        if untold:
            raise InputDataError(
                f"nothing tells where the {min(untold)} of {run.path.name} came from, of which the {makes} was made",
                remedy="pull it again, or build it here",
            )
    ordered = list(known.values())
    settings = parse_json(json.dumps(spec.settings))  # as a statement in a file has them: lists, no tuples
    times = [entry["annotations"] for entry in ordered]
    builder: dict[str, Any] = {"id": "urn:trtpipe"}
    if not _of_other_versions(known):  # else which version built the target is not known
        builder["version"] = {"trtpipe": __version__}
    return {
        "_type": STATEMENT,
        "subject": _subjects(known),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"model": spec.model.to_json(), "settings": settings},
                "resolvedDependencies": _dependencies(known),
            },
            "runDetails": {
                "builder": builder,
                "metadata": {
                    "startedOn": min(entry["startedOn"] for entry in times),
                    "finishedOn": max(entry["finishedOn"] for entry in times),
                },
                "byproducts": ordered,
            },
        },
    }


def outdated(run: RunFolder, told: Any = None) -> str:
    """A sentence that names what another version of trtpipe made of a target; "" where there is nothing of the kind.

    told  a statement of the target; that which came with it if left out
    """
    try:
        if told is None and (run.path / FILE).is_file():
            told = read_statement(run.path / FILE)
        found = [] if told is None else _of_other_versions(stages(told))
    except (InputDataError, KeyError, TypeError, AttributeError):
        return ""  # `verify-provenance` says what is wrong with a statement
    if not found:
        return ""
    return (
        f"another version of trtpipe made the {' and the '.join(found)} of {run.path.name}, and this one makes it "
        "otherwise: build the target again from its model, since CHANGELOG.md names results that were wrong"
    )


def _of_other_versions(entries: Mapping[str, dict[str, Any]]) -> list[str]:
    """The artefacts that another version of a stage made, each with both versions. The repository is none of them,
    because it is made again where it is served."""
    versions = {stage.name: stage.version for stage in STAGES if stage is not PACKAGE}
    records = {makes: entry["annotations"]["record"] for makes, entry in entries.items()}
    return [
        f"{makes} (version {record['stage_version']} of {record['stage']}, here {versions[record['stage']]})"
        for makes, record in records.items()
        if record["stage_version"] != versions.get(record["stage"], record["stage_version"])
    ]


def check_chain(told: Any, entries: Mapping[str, Mapping[str, Any]] = {}) -> list[str]:
    """Replay a statement's digests; return a line for each stage, from the source on.

    entries  artefacts of an index, whose content and record must be those of the statement

    Raises InputDataError for anything but a statement of ours, ArtefactRefused where two digests that must be equal
    differ.
    """
    try:
        found = stages(told)
        records = {makes: Record(**entry["annotations"]["record"]) for makes, entry in found.items()}
        lines = [_replay(makes, entry, records[makes], found) for makes, entry in found.items()]
        definition = told["predicate"]["buildDefinition"]
        for what, said, given in (
            ("subjects", told["subject"], _subjects(found)),
            ("dependencies", definition["resolvedDependencies"], _dependencies(found)),
            ("types", [told["_type"], told["predicateType"], definition["buildType"]], TYPES),
        ):
            if said != given:
                raise ArtefactRefused("the provenance does not hold", why=f"its {what} are not those of its stages")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputDataError("this is not provenance of trtpipe", why=malformed(error)) from None
    for makes, known in entries.items():
        if makes not in found:
            raise ArtefactRefused(f"the provenance says nothing of the {makes}")
        _equal(f"the {makes} is", known["content"], found[makes]["digest"]["sha256"], "the provenance says")
        key = Record(**known["record"]).key
        _equal(f"the record of the {makes} is", key, found[makes]["annotations"]["key"], "the provenance says")
    return lines


@dataclass(frozen=True)
class Verified:
    """A line for each stage, and the artefacts that are not here, for which only the statement speaks."""

    lines: list[str]
    elsewhere: list[str]


def verify(run: RunFolder, store: Store, told: Any = None) -> Verified:
    """Replay a target's provenance down to the bytes of every file that is here.

    told  a statement from elsewhere, such as one with a verified signature; its content must be the same

    Raises as `statement` and `check_chain`, ArtefactRefused for a file that has changed, and InputDataError for an
    artefact of the target that the store has lost.
    """
    mine = statement(run, store)
    keys = set()
    for stage in stages_of(run.spec()):
        record = run.last(stage.name)
        if record is None or stage.name not in run.stages():
            continue
        fault = run.fault(stage.name, store, verify=True)
        if fault is not None:
            raise ArtefactRefused(
                f"the {stage.makes} of {run.path.name} is damaged", why=fault, remedy=run.again(stage.name)
            )
        if run.find(stage.name, store) is None:
            raise _lost(stage, run, store)
        keys.add(record.key)
    lines = check_chain(mine)
    if told is not None:
        check_chain(told)
        for what, one, other in zip(SAID, _said(told), _said(mine), strict=True):
            if one != other:
                raise ArtefactRefused(
                    f"the statement is not of this {run.path.name}", why=f"its {what} are others",
                    remedy="take the one that was made of it",
                )  # fmt: skip
    elsewhere = [makes for makes, entry in stages(mine).items() if entry["annotations"]["key"] not in keys]
    return Verified(lines, elsewhere)


def _lost(stage: Stage, run: RunFolder, store: Store) -> InputDataError:
    why = run.fault(stage.name, store) or "it is no longer in the store"
    return InputDataError(f"the {stage.makes} of {run.path.name} cannot be used", why=why, remedy=run.again(stage.name))


def _said(told: Statement) -> tuple[Any, ...]:
    """The parts SAID of a statement, without its author and its order."""
    definition = told["predicate"]["buildDefinition"]
    inner = {**definition, "resolvedDependencies": _sorted(definition["resolvedDependencies"])}
    return _made(told), inner, _sorted(told["subject"])


def _made(told: Statement) -> dict[str, Any]:
    """The stages of a statement, without place and time, because a pulled target's repository is made again here."""
    out = {}
    for name, entry in stages(told).items():
        notes = {key: value for key, value in entry["annotations"].items() if key not in WHERE_AND_WHEN}
        out[name] = {**entry, "annotations": notes}
    return out


def _sorted(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: json.dumps(entry, sort_keys=True))


def stages(told: Any) -> dict[str, dict[str, Any]]:
    """The stages of a statement by what they make. Raises KeyError or TypeError for something else."""
    entries: list[dict[str, Any]] = told["predicate"]["runDetails"]["byproducts"]
    return {entry["name"]: entry for entry in entries}


def _entry(makes: str, manifest: Manifest) -> dict[str, Any]:
    started = datetime.fromisoformat(manifest.started)
    finished = started + timedelta(seconds=round(manifest.seconds))
    return {
        "name": makes,
        "digest": {"sha256": manifest.content},
        "annotations": {
            "stage": manifest.record.stage,
            "key": manifest.record.key,
            "record": dataclasses.asdict(manifest.record),
            "files": [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in manifest.files],
            "source": manifest.notes.get("source"),
            "host": manifest.host,
            "startedOn": manifest.started,
            "finishedOn": finished.isoformat(timespec="seconds"),
        },
    }


def _subjects(stages: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": entry["name"], "digest": entry["digest"]} for entry in stages.values()]


def _dependencies(stages: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Inputs that no stage made: sources, and the programs whose versions are part of a record."""
    out = []
    for entry in stages.values():
        notes = entry["annotations"]
        for name, digest in notes["record"]["inputs"].items():
            if name not in stages:
                kind = "gitCommit" if re.fullmatch(r"[0-9a-f]{40}", digest) else "sha256"
                out.append({"name": name, "uri": notes["source"] or name, "digest": {kind: digest}})
        for name, version in notes["record"]["tools"].items():
            out.append({"name": name, "uri": f"pkg:generic/{name}@{version}"})
    return [one for index, one in enumerate(out) if one not in out[:index]]


def _replay(makes: str, entry: dict[str, Any], record: Record, stages: Mapping[str, dict[str, Any]]) -> str:
    notes = entry["annotations"]
    _equal(f"the key of the {makes} is", notes["key"], record.key, "its record gives")
    files = combined((file["path"], file["sha256"]) for file in notes["files"])
    _equal(f"the {makes} is", entry["digest"]["sha256"], files, "its files give")
    read = []
    for name, digest in record.inputs.items():
        if name in stages:
            _equal(f"the {makes} was made from the {name}", digest, stages[name]["digest"]["sha256"], "and there is")
            read.append(name)
        else:
            same = digest == entry["digest"]["sha256"]  # a folder that was taken as it is
            read.append(f"{notes['source'] or name}{'' if same else ' ' + digest[:12]}")
    origin = f", {notes['imported']}" if "imported" in notes else ""
    return f"{makes} {entry['digest']['sha256'][:12]} by {record.stage} from {', '.join(read) or 'nothing'}{origin}"


def _equal(what: str, one: str, other: str, where: str) -> None:
    if one != other:
        raise ArtefactRefused("the provenance does not hold", why=f"{what} {one[:12]}, {where} {other[:12]}")


def read_statement(path: Path, keys: Sequence[Path] = ()) -> Statement:
    """The statement in a file, bare or in a signed envelope; where there are `keys`, one of them must have signed it.

    Raises InputDataError, and as `signatures.verify_envelope` does.
    """
    return verified(read_json(path, "provenance"), keys)


def verified(told: Any, keys: Sequence[Path]) -> Statement:
    """The statement, bare or in an envelope; where there are `keys`, one of them must have signed it."""
    if not keys:
        return unwrapped(told)
    from trtpipe.pipeline.registry.signatures import verify_envelope

    if not is_envelope(told):
        raise ArtefactRefused(
            "the provenance is not signed", why="a key was given that should have signed it",
            remedy="have it pushed or exported with --sign-key, or leave --trust-key out",
        )  # fmt: skip
    return verify_envelope(json.dumps(told).encode(), keys)


def signed(told: Statement, key: Path | None) -> Any:
    """The statement in an envelope signed with the private key (PEM); the bare statement where there is no key."""
    return told if key is None else parse_json(sign_statement(told, key))


def is_envelope(told: Any) -> bool:
    return isinstance(told, dict) and told.get("payloadType") == PAYLOAD_TYPE


def unwrapped(told: Any) -> Statement:
    """The statement, bare or in an envelope; its signature is not checked. Raises InputDataError."""
    try:
        found = parse_json(base64.b64decode(told["payload"], validate=True)) if is_envelope(told) else told
    except (KeyError, TypeError, ValueError) as error:
        raise InputDataError("the provenance is a damaged envelope", why=malformed(error)) from None
    if not isinstance(found, dict):
        raise InputDataError("this is not provenance of trtpipe", why=f"it is {kind_of(found)}")
    return found
