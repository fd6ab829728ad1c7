"""Where a target came from: a chain of digests, and every way in which it does not hold."""

from __future__ import annotations

import base64
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder
from tests.unit.test_runner import Recorder, plan
from trtpipe.engines.errors import ArtefactRefused, InputDataError
from trtpipe.pipeline.registry import provenance, transfer
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.store.store import Store

TARGET = "tiny.cpu.bf16"


@pytest.fixture
def made(in_folder: Path, tmp_path: Path) -> Store:
    store = Store(tmp_path / "home")
    execute(plan(hf_folder(in_folder / "tiny"), gpu="cpu", dtype="bf16"), store, Recorder())
    return store


def test_a_statement(made: Store) -> None:
    told = provenance.statement(RunFolder.of(TARGET), made)
    assert (told["_type"], told["predicateType"]) == (
        "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1",
    )  # fmt: skip
    assert [subject["name"] for subject in told["subject"]] == [
        "model", "tokenizer", "checkpoint", "engine", "repository",
    ]  # fmt: skip
    build = told["predicate"]["buildDefinition"]
    assert build["buildType"] == "urn:trtpipe:build:v1"
    assert build["externalParameters"]["settings"]["gpu"] == "cpu"
    (source,) = [one for one in build["resolvedDependencies"] if "digest" in one]
    assert (source["name"], source["uri"]) == ("folder", f"folder {Path('tiny').absolute()}")
    assert len(source["digest"]["sha256"]) == 64
    engine = next(one for one in told["predicate"]["runDetails"]["byproducts"] if one["name"] == "engine")
    assert engine["annotations"]["record"]["settings"]["gpu"] == "cpu"
    assert {file["path"] for file in engine["annotations"]["files"]} == {
        "config.json", "passport.json", "rank0.safetensors",
    }  # fmt: skip
    assert json.loads(json.dumps(told)) == told


def test_it_is_replayed_from_the_source_on(made: Store) -> None:
    found = provenance.verify(RunFolder.of(TARGET), made)
    lines = found.lines
    assert found.elsewhere == []
    assert [line.split()[0] for line in lines] == ["model", "tokenizer", "checkpoint", "engine", "repository"]
    assert lines[0].split(" by ")[1].startswith("download from folder /")
    assert lines[2].endswith(" by convert from model")
    assert lines[3].endswith(" by build from checkpoint")
    assert lines[4].endswith(" by package from tokenizer, engine")


def stage(told: Any, name: str) -> Any:
    return next(one for one in told["predicate"]["runDetails"]["byproducts"] if one["name"] == name)


def another_file(told: Any) -> None:
    stage(told, "engine")["annotations"]["files"][0]["sha256"] = "1" * 64


def another_checkpoint(told: Any) -> None:
    """All of a stage exchanged for that of another build."""
    entry = stage(told, "checkpoint")
    entry["annotations"]["files"][0]["sha256"] = "1" * 64
    from trtpipe.pipeline.store.digests import combined

    entry["digest"]["sha256"] = combined((file["path"], file["sha256"]) for file in entry["annotations"]["files"])


def another_setting(told: Any) -> None:
    stage(told, "engine")["annotations"]["record"]["settings"]["gpu"] = "h100"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (another_file, "the engine is [0-9a-f]{12}, its files give"),
        (another_checkpoint, "the engine was made from the checkpoint [0-9a-f]{12}, and there is"),
        (another_setting, "the key of the engine is [0-9a-f]{12}, its record gives"),
    ],
)
def test_a_chain_of_provenance_that_does_not_hold_is_refused(
    made: Store, edit: Callable[[Any], None], message: str
) -> None:
    told = provenance.statement(RunFolder.of(TARGET), made)
    assert provenance.check_chain(copy.deepcopy(told))
    edit(told)
    with pytest.raises(ArtefactRefused, match=message):
        provenance.check_chain(told)


def test_a_statement_from_elsewhere_must_say_the_same(made: Store, in_folder: Path, tmp_path: Path) -> None:
    told = provenance.statement(RunFolder.of(TARGET), made)
    told["predicate"]["runDetails"]["builder"]["version"] = {"trtpipe": "another that says the same"}
    assert provenance.verify(RunFolder.of(TARGET), made, told)
    other = Store(tmp_path / "other")
    execute(plan(hf_folder(in_folder / "tiny", seed=1), gpu="cpu", dtype="bf16"), other, Recorder())
    with pytest.raises(ArtefactRefused, match=f"the statement is not of this {TARGET}: its stages are others"):
        provenance.verify(RunFolder.of(TARGET), other, told)


def nothing_of_it(told: Any) -> None:
    told["predicate"]["runDetails"]["byproducts"] = []


def the_first_stage_alone(told: Any) -> None:
    del told["predicate"]["runDetails"]["byproducts"][1:]
    del told["subject"][1:]


def another_subject(told: Any) -> None:
    told["subject"][0]["digest"]["sha256"] = "0" * 64


def another_source(told: Any) -> None:
    told["predicate"]["buildDefinition"]["resolvedDependencies"][0]["uri"] = "hf evil/model"


def another_source_throughout(told: Any) -> None:
    another_source(told)
    stage(told, "model")["annotations"]["source"] = "hf evil/model"


def another_precision(told: Any) -> None:
    told["predicate"]["buildDefinition"]["externalParameters"]["settings"]["dtype"] = "fp8"


def another_kind(told: Any) -> None:
    told["predicateType"] = "https://slsa.dev/provenance/v2"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (nothing_of_it, "its subjects are not those of its stages"),
        (the_first_stage_alone, "its dependencies are not those|its stages are others"),
        (another_subject, "its subjects are not those of its stages"),
        (another_source, "its dependencies are not those of its stages"),
        (another_source_throughout, "its stages are others"),
        (another_precision, "its settings are others"),
        (another_kind, "its types are not those of its stages"),
    ],
)
def test_a_statement_that_was_edited(made: Store, edit: Callable[[Any], None], message: str) -> None:
    told = json.loads(json.dumps(provenance.statement(RunFolder.of(TARGET), made)))
    edit(told)
    with pytest.raises(ArtefactRefused, match=message):
        provenance.verify(RunFolder.of(TARGET), made, told)


def test_a_statement_in_the_envelope_of_its_signature(made: Store, tmp_path: Path) -> None:
    told = provenance.statement(RunFolder.of(TARGET), made)
    file = tmp_path / "signed.json"
    payload = base64.b64encode(json.dumps(told).encode()).decode()
    envelope = {"payloadType": "application/vnd.in-toto+json", "payload": payload, "signatures": [{"sig": "AA=="}]}
    file.write_text(json.dumps(envelope))
    assert provenance.read_statement(file) == told
    file.write_text(json.dumps({**envelope, "payload": "?"}))
    with pytest.raises(InputDataError, match="is a damaged envelope"):
        provenance.read_statement(file)


def test_a_file_that_has_changed(made: Store) -> None:
    engine = RunFolder.of(TARGET).linked("engine") / "config.json"
    engine.write_bytes(engine.read_bytes().replace(b"paged", b"PAGED"))
    with pytest.raises((ArtefactRefused, InputDataError), match=r"the engine of .*: config\.json has changed; "):
        provenance.verify(RunFolder.of(TARGET), made)


def pulled(made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of another machine, to which the target was pulled."""
    transfer.push(TARGET, open_registry(str(tmp_path / "shelf")), made)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    store = Store(tmp_path / "other" / "home")
    transfer.pull(TARGET, open_registry(str(tmp_path / "shelf")), store)
    return store


@pytest.mark.process
def test_what_the_store_has_lost_is_not_vouched_for(
    made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came with the target says its digests, of which nothing is read."""
    store = pulled(made, tmp_path, monkeypatch)
    run = RunFolder.of(TARGET)
    assert provenance.verify(run, store).elsewhere == ["model", "checkpoint", "repository"]
    lost = r"the {} of tiny\.cpu\.bf16 cannot be used: it is no longer in the store; pull or import the target again$"
    with pytest.raises(InputDataError, match=lost.format("tokenizer")):
        provenance.verify(run, Store(tmp_path / "empty"))
    shutil.rmtree(run.linked("engine").parent)
    with pytest.raises(InputDataError, match=lost.format("engine")):
        provenance.verify(run, store)
    transfer.pull(TARGET, open_registry(str(tmp_path / "shelf")), store)
    rank = run.linked("engine") / "rank0.safetensors"
    rank.chmod(0o644)
    rank.write_bytes(bytes(rank.stat().st_size))
    with pytest.raises(ArtefactRefused, match=r"the engine of .* is damaged: .* has changed; pull or import the targ"):
        provenance.verify(run, store)


@pytest.mark.process
def test_what_came_is_not_told_of_a_target_that_is_built_without_it(
    in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "home")
    model = hf_folder(in_folder / "tiny")
    adapter = write_adapter(in_folder / "fr", model, rank=4)
    execute(plan(model, gpu="cpu", dtype="bf16", lora={"fr": str(adapter)}), store, Recorder())
    store = pulled(store, tmp_path, monkeypatch)
    assert "adapters" in provenance.stages(provenance.statement(RunFolder.of(TARGET), store))
    execute(plan(model, gpu="cpu", dtype="bf16"), store, Recorder())
    assert list(provenance.stages(provenance.statement(RunFolder.of(TARGET), store))) == [
        "model", "tokenizer", "checkpoint", "engine", "repository",
    ]  # fmt: skip
    again = open_registry(str(tmp_path / "again"))
    transfer.push(TARGET, again, store)
    assert transfer.pull(TARGET, again, Store(tmp_path / "third")).artefacts == ("tokenizer", "engine")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({}, "it lacks 'predicate'"),
        ([], "TypeError"),
        (None, "TypeError"),
        ({"predicate": None}, "TypeError"),
        ({"predicate": {}}, "it lacks 'runDetails'"),
        ({"predicate": {"runDetails": {"byproducts": [{}]}}}, "it lacks 'name'"),
    ],
)
def test_what_is_no_statement(told: Any, why: str) -> None:
    with pytest.raises(InputDataError, match=f"this is not provenance of trtpipe: {why}"):
        provenance.check_chain(told)
