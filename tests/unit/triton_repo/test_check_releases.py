"""The check by the release that will serve, and the facts about releases."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.repository_changes import world
from tests.support.repository_faults import expect
from tests.support.triton_repositories import inflight, llmapi
from trtpipe.configs.facts import find_toolchain
from trtpipe.triton_repo.check import ERROR, WARNING, check_repository, facts
from trtpipe.triton_repo.check.release import Release, release_key


def test_a_release_that_lacks_the_backend_is_named(tmp_path: Path) -> None:
    engines = inflight(tmp_path / "engines", "1.2.1")
    later = replace(find_toolchain("1.2.1"), runtimes=("trtllm_pytorch",))
    assert "which TensorRT-LLM 1.2.1 does not have" in expect(engines, "release-runtime", toolchain=later).what
    settings = llmapi(tmp_path / "settings")
    expect(settings, "release-runtime", toolchain=replace(later, runtimes=("tensorrt_llm",)))


def test_configurations_of_another_release_are_told_once(tmp_path: Path) -> None:
    older = inflight(tmp_path / "older", "0.16.0")
    older.engine("version", "1.2.1")
    fault = expect(older, "template-release")
    assert "is of TensorRT-LLM 0.19 or older, and the repository is served by TensorRT-LLM 1.2.1" in str(fault)
    newer = inflight(tmp_path / "newer", "1.2.1")
    newer.engine("version", "0.16.0")
    fault = expect(newer, "template-release")
    assert "is of TensorRT-LLM 0.20 or newer, and the repository is served by TensorRT-LLM 0.16.0" in str(fault)
    asked = inflight(tmp_path / "asked", "0.16.0")
    rules = {fault.rule for fault in check_repository(asked.path, toolchain=find_toolchain("1.2.1"))}
    assert rules == {"template-release", "engine-release"}


def test_what_a_release_does_not_know_yet_is_named(tmp_path: Path) -> None:
    repository = inflight(tmp_path / "models", "0.16.0")
    world(2)(repository)
    repository.parameter("tensorrt_llm", "num_nodes", "2")
    assert "does not read it: it came with 0.19.0" in str(expect(repository, "dead-parameter"))
    repository.parameter("tensorrt_llm", "num_nodes", "1")
    assert check_repository(repository.path) == []


def test_static_batching_is_refused_by_the_releases_that_dropped_it(tmp_path: Path) -> None:
    for release, severity in (("0.16.0", WARNING), ("0.21.0", ERROR)):
        repository = inflight(tmp_path / release, release, batching_strategy="V1")
        expect(repository, "static-batching", severity)
    padded = inflight(tmp_path / "padded", "0.16.0", batching_strategy="V1")
    padded.engine("build_config.plugin_config.remove_input_padding", False)
    assert check_repository(padded.path) == []


def test_releases_are_compared_by_their_numbers() -> None:
    assert release_key("0.17.0.post1") == release_key("v0.17") == (0, 17, 0)
    assert release_key("1.2.0rc3") == (1, 2, 0)
    assert release_key("reference-1") is release_key(None) is None
    known, guessed, unknown = Release(name="1.0.0"), Release(lowest=(0, 19, 0)), Release()
    assert (known.lacks("1.1.0"), guessed.lacks("1.1.0"), unknown.lacks("1.1.0")) == (True, False, False)
    assert (known.has_left("0.19.0"), guessed.has_left("0.19.0"), unknown.has_left("0.19.0")) == (True, False, False)
    assert (known.reaches("1.0.0"), guessed.reaches("0.19.0"), unknown.reaches("0.9.0")) == (True, True, False)


def test_facts_are_read_strictly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("parameters.yaml", "tensors.yaml", "llm_arguments.yaml"):
        shutil.copy(facts.FOLDER / name, tmp_path)
    monkeypatch.setattr(facts, "FOLDER", tmp_path)
    for name, text, read, telling in (
        ("parameters.yaml", "engine: {one: {kind: bool, defalt: 1}}", facts.parameters, "did you mean 'default'"),
        ("parameters.yaml", "engine: {one: {kind: boolean}}", facts.parameters, "unknown kind 'boolean'"),
        ("parameters.yaml", "engine: [one]", facts.parameters, "holds no rows"),
        ("parameters.yaml", "[]", facts.parameters, "holds no sections"),
        ("parameters.yaml", "engine: {one: 1}", facts.parameters, "one is not a mapping"),
        ("tensors.yaml", "engine: {inputs: {}, output: {}}", facts.tensors, "did you mean 'outputs'"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(facts.FactsError, match=telling):
            read.__wrapped__()


def test_facts_cover_what_we_render() -> None:
    from trtpipe.triton_repo import tensors as ours

    known = facts.tensors()
    for tensors, side in (
        (ours.ENGINE_INPUTS, known["engine"].inputs),
        (ours.ENGINE_OUTPUTS, known["engine"].outputs),
        (ours.PREPROCESSING_INPUTS, known["preprocessing"].inputs),
        (ours.PREPROCESSING_OUTPUTS, known["preprocessing"].outputs),
        (ours.POSTPROCESSING_INPUTS, known["postprocessing"].inputs),
        (ours.CLIENT_INPUTS, known["bls"].inputs),
        (ours.CLIENT_OUTPUTS, known["bls"].outputs),
    ):
        for tensor_ in tensors:
            assert tensor_.dtype.removeprefix("TYPE_") in side[tensor_.name].type, tensor_.name
            assert tensor_.dims in side[tensor_.name].dims, tensor_.name
