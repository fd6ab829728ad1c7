"""Where a target came from: a SLSA provenance statement of its stages, and whether its digests hold together.

Every stage's record names the content digests of what it read, so that the records of a target form a chain from the
commit of a model to the repository. The statement is an in-toto one: its subjects are the artefacts, its resolved
dependencies what came from outside, its byproducts the stages with their records and the digests of their files.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from engines.errors import ArtefactRefused, InputDataError
from engines.files import read_json
from pipeline import __version__
from pipeline.digests import combined
from pipeline.manifest import Manifest, Record
from pipeline.runner import RunFolder
from pipeline.stages import stages_of
from pipeline.store import Store

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:trtpipe:build:v1"
# In a run folder, beside what a pull has brought: the stages that ran elsewhere.
FILE = "provenance.json"

Statement = dict[str, Any]


def statement(run: RunFolder, store: Store) -> Statement:
    """The provenance of a target in ./runs. Raises InputDataError where the record of a stage is gone."""
    from pipeline.shipment import plan_of

    raw = read_json(run.path / "plan.json", "plan")
    known = _stages(read_json(run.path / FILE, "provenance")) if (run.path / FILE).is_file() else {}
    for stage in stages_of(plan_of(raw)):
        record = run.last(stage.name)
        if record is None:
            continue
        found = store.find(record)
        if found is not None:
            known[stage.makes] = _entry(stage.makes, found.manifest)
        elif known.get(stage.makes, {}).get("annotations", {}).get("key") != record.key:
            raise InputDataError(
                f"the {stage.makes} of {run.path.name} is no longer in the store", remedy="run `trtpipe build` again"
            )
    if not known:
        raise InputDataError(f"{run.path} has no artefacts", remedy="run `trtpipe build` first")
    ordered = list(known.values())
    times = [entry["annotations"] for entry in ordered]
    return {
        "_type": STATEMENT,
        "subject": [{"name": entry["name"], "digest": entry["digest"]} for entry in ordered],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"model": raw["model"], "settings": raw["settings"]},
                "resolvedDependencies": _dependencies(known),
            },
            "runDetails": {
                "builder": {"id": "urn:trtpipe", "version": {"trtpipe": __version__}},
                "metadata": {
                    "startedOn": min(entry["startedOn"] for entry in times),
                    "finishedOn": max(entry["finishedOn"] for entry in times),
                },
                "byproducts": ordered,
            },
        },
    }


def check_chain(told: Any, contents: Mapping[str, str] = {}) -> list[str]:
    """Replay a statement's digests; a line for each stage, from the source on.

    contents  content digests that artefacts are known to have, which must be those of the statement

    Raises InputDataError for what is no statement of ours, ArtefactRefused where two digests that must be equal are
    not.
    """
    try:
        stages = _stages(told)
        records = {makes: Record(**entry["annotations"]["record"]) for makes, entry in stages.items()}
        lines = [_replay(makes, entry, records[makes], stages) for makes, entry in stages.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputDataError("this is no provenance of trtpipe", why=f"{type(error).__name__}: {error}") from None
    for makes, content in contents.items():
        if makes not in stages:
            raise ArtefactRefused(f"the provenance says nothing of the {makes}")
        _equal(f"the {makes} is", content, stages[makes]["digest"]["sha256"], "the provenance says")
    return lines


def verify(run: RunFolder, store: Store, told: Any = None) -> list[str]:
    """Replay a target's provenance down to the bytes of every file that is here; a line for each stage.

    told  a statement from elsewhere, such as one whose signature was verified, which must say the same

    Raises as `statement` and `check_chain`, and ArtefactRefused for a file that has changed.
    """
    mine = statement(run, store)
    if told is not None:
        here = {makes: entry["digest"]["sha256"] for makes, entry in _stages(mine).items()}
        check_chain(told, {makes: content for makes, content in here.items() if makes in _stages(told)})
    for record in run.records():
        fault = store.fault(record, verify=True)
        if fault is not None:
            raise ArtefactRefused(f"the {record.stage} of {run.path.name} is damaged", why=fault)
    return check_chain(mine)


def keep(run: RunFolder, told: Statement) -> None:
    """Note in a run folder what is told of the stages that ran elsewhere."""
    (run.path / FILE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _stages(told: Any) -> dict[str, dict[str, Any]]:
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


def _dependencies(stages: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What stages read that no stage made: sources, and the programs whose versions are part of a record."""
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
            read.append(f"{notes['source'] or name} {digest[:12]}")
    return f"{makes} {entry['digest']['sha256'][:12]} by {record.stage} from {', '.join(read) or 'nothing'}"


def _equal(what: str, one: str, other: str, where: str) -> None:
    if one != other:
        raise ArtefactRefused("the provenance does not hold", why=f"{what} {one[:12]}, {where} {other[:12]}")


def read_statement(path: Path) -> Any:
    """Raises InputDataError for a file that is no JSON."""
    return read_json(path, "provenance")
