"""The key is made of what the bytes depend on and of nothing else; the difference of two records says why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.pipeline.store import manifest
from trtpipe.pipeline.store.manifest import FileRecord, Manifest, Record, differences, read_manifest

RECORD = Record(
    stage="build",
    stage_version=3,
    inputs={"convert": "ab" * 32},
    settings={"gpu": "h100", "sm": 90, "build": {"max_batch_size": 8, "max_seq_len": 2048}},
    tools={"tensorrt_llm": "1.2.1"},
)
MADE = Manifest(
    record=RECORD,
    files=(FileRecord(path="rank0.engine", size=5, sha256="cd" * 32, mtime_ns=7), FileRecord(
        path="config.json", size=2, sha256="ef" * 32, mtime_ns=8)),
    content="12" * 32,
    notes={"models": ["ensemble"]},
    host={"system": "Linux"},
    started="2026-01-02T03:04:05+00:00",
    seconds=1.5,
)  # fmt: skip


def changed(**fields: Any) -> Record:
    return dataclasses.replace(RECORD, **fields)


def test_the_key_of_a_record_is_this_one() -> None:
    # Changes only with FORMAT: every artefact in every store is found by it.
    assert RECORD.key == "655bc9e54a1a2c304fd913219046fb9297589b4be961e0088f74cb64161ddc71"


def test_the_key_does_not_depend_on_the_order_of_settings() -> None:
    settings = {"sm": 90, "build": {"max_seq_len": 2048, "max_batch_size": 8}, "gpu": "h100"}
    assert changed(settings=settings).key == RECORD.key


@pytest.mark.parametrize(
    "other",
    [
        {"stage": "package"},
        {"stage_version": 4},
        {"inputs": {"convert": "ac" * 32}},
        {"inputs": {"quantize": "ab" * 32}},
        {"inputs": {**RECORD.inputs, "download": "ab" * 32}},
        {"settings": {**RECORD.settings, "sm": 89}},
        {"settings": {**RECORD.settings, "sm": None}},
        {"settings": {**RECORD.settings, "build": {"max_batch_size": 8, "max_seq_len": 2049}}},
        {"tools": {"tensorrt_llm": "1.2.0"}},
        {"tools": {}},
    ],
    ids=str,
)
def test_the_key_changes_with_every_hashed_field(other: dict[str, Any]) -> None:
    assert changed(**other).key != RECORD.key


def test_the_key_changes_with_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RECORD.key
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    assert RECORD.key != before


def test_a_record_holds_what_is_hashed_and_nothing_of_the_machine() -> None:
    assert [field.name for field in dataclasses.fields(Record)] == [
        "stage", "stage_version", "inputs", "settings", "tools",
    ]  # fmt: skip
    elsewhere = dataclasses.replace(MADE, host={"system": "other"}, started="2026-11-25", seconds=9.0, notes={})
    assert elsewhere.record.key == RECORD.key


NAMES = st.sampled_from(["a", "b", "c"])
SETTINGS = st.dictionaries(NAMES, st.none() | st.integers(0, 3) | st.dictionaries(NAMES, st.integers(0, 2), min_size=1))
RECORDS = st.builds(
    Record,
    stage=st.just("build"),
    stage_version=st.integers(1, 2),
    inputs=st.dictionaries(NAMES, st.sampled_from(["0", "1"])),
    settings=SETTINGS,
    tools=st.dictionaries(NAMES, st.sampled_from(["0", "1"])),
)


def without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if inner is not None}


@pytest.mark.parametrize(
    "field",
    [{"stage": ["build"]}, {"stage": "../build"}, {"stage_version": "3"}, {"inputs": {"convert": 1}}, {"tools": []}],
)
def test_a_record_from_a_file_has_fields_of_these_types(field: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Record(**{**dataclasses.asdict(RECORD), **field})


@given(RECORDS, RECORDS)
def test_two_records_have_one_key_exactly_when_nothing_differs(one: Record, other: Record) -> None:
    assert (one.key == other.key) == (one == other)
    # A setting that appears with the value None is a difference for the key, and none worth a phrase.
    same = dataclasses.replace(one, settings=without_none(one.settings)) == dataclasses.replace(
        other, settings=without_none(other.settings)
    )
    assert (differences(one, other) == []) == same


def test_why_in_words() -> None:
    wanted = Record(
        stage="build",
        stage_version=4,
        inputs={"convert": "ff" * 32},
        settings={"gpu": "h200", "sm": 90, "build": {"max_batch_size": 64, "max_beam_width": 2}},
        tools={"tensorrt_llm": "1.2.2", "tensorrt": "10.1"},
    )
    assert differences(RECORD, wanted) == [
        "input: convert changed",
        "settings: build.max_batch_size 8 -> 64",
        "settings: build.max_beam_width None -> 2",
        "settings: build.max_seq_len 2048 -> None",
        "settings: gpu h100 -> h200",
        "tools: tensorrt None -> 10.1",
        "tools: tensorrt_llm 1.2.1 -> 1.2.2",
        "stage version: 3 -> 4",
    ]
    assert differences(RECORD, RECORD) == []


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    MADE.write(path)
    assert read_manifest(path) == MADE
    assert MADE.size == 7
    raw = json.loads(path.read_text())
    assert list(raw) == ["format", "key", "record", "files", "content", "notes", "host", "started", "seconds"]
    assert raw["key"] == RECORD.key


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw.update(format=0),
        lambda raw: raw.update(key="0" * 64),
        lambda raw: raw["record"]["settings"].update(sm=80),
        lambda raw: raw.pop("files"),
        lambda raw: raw.update(files=[{"path": "x"}]),
        lambda raw: raw.update(files=None),
        lambda raw: raw["files"][0].update(path=["x"]),
        lambda raw: raw["files"][0].update(path="../x"),
        lambda raw: raw["files"][0].update(size="5"),
        lambda raw: raw.update(notes="none"),
        lambda raw: raw.update(notes={"notices": 7}),
        lambda raw: raw.update(host={"system": 1}),
        lambda raw: raw.update(started="yesterday"),
        lambda raw: raw.update(seconds="1.5"),
        lambda raw: raw.update(seconds=1e15),
        lambda raw: raw.update(seconds=float("nan")),
        lambda raw: raw.update(origin={"source": "x", "content": None}),
        lambda raw: raw.update(extra=1),
        lambda raw: raw.update(record=[]),
        lambda raw: raw["record"].pop("tools"),
    ],
)
def test_a_manifest_that_is_not_ours_is_none(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "manifest.json"
    MADE.write(path)
    raw = json.loads(path.read_text())
    spoil(raw)
    path.write_text(json.dumps(raw))
    assert read_manifest(path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"7"])
def test_an_unreadable_manifest_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "manifest.json"
    assert read_manifest(path) is None
    path.write_bytes(content)
    assert read_manifest(path) is None
