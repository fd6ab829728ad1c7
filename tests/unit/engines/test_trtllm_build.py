"""trtllm-build as a stage runs it: by the double that keeps its contract, and what stands in an engine's way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.doubles import install_trtllm_build
from tests.support.factories import hf_folder
from trtpipe.configs.facts import find_toolchain
from trtpipe.engines.backends import tensorrt_llm
from trtpipe.engines.backends.base import Target, Workshop
from trtpipe.engines.base import Checkpoint, DataType, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.errors import ArtefactRefused, HostError, StageFailed, UsageError
from trtpipe.engines.files import DiskFull
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.quantization import UNQUANTIZED
from trtpipe.engines.trtllm_options import resolve
from trtpipe.pipeline.execution.executors import LocalExecutor

H100 = GpuSpec(name="h100", sm=90, memory_gib=80.0)
SMALL: dict[str, Any] = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 64}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The double on PATH, under the name of what it stands for."""
    path = install_trtllm_build(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    return path


def target(release: str | None = None, **mapping: int) -> Target:
    return Target(gpu=H100, mapping=Mapping(**mapping), quantization=UNQUANTIZED, toolchain=find_toolchain(release))


def made(tmp_path: Path, at: Target, **overrides: Any) -> Checkpoint:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    source = hf_folder(tmp_path / "hf", **overrides)
    return convert(source, folder, dtype=DataType.BFLOAT16, mapping=at.mapping, toolchain=at.toolchain.name)


def run(tmp_path: Path, checkpoint: Checkpoint, at: Target, **settings: Any) -> tuple[Path, list[str]]:
    out = tmp_path / "engine"
    out.mkdir()
    shown: list[str] = []
    workshop = Workshop(executor=LocalExecutor(), log=tmp_path / "log", show=shown.append)
    config, _ = resolve(BuildConfig(**SMALL, **settings), at)
    engine, facts = tensorrt_llm.build(checkpoint, out, config, at, workshop)
    assert (engine.path, facts) == (out, {})
    return out, shown


@pytest.mark.process
@pytest.mark.parametrize("release", ["1.2.1", "1.1.0", "1.0.0", "0.21.0"])
def test_every_release_builds_what_is_written_for_it(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", release)
    at = target(release, tp_size=2)
    out, shown = run(tmp_path, made(tmp_path, at), at)
    # The timing cache is the builder's own and no part of the engine.
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "rank0.engine", "rank1.engine"]
    config = json.loads((out / "config.json").read_text())
    assert config["version"] == release
    sizes = {name: config["build_config"][name] for name in SMALL}
    assert sizes == SMALL
    assert config["build_config"]["plugin_config"]["use_paged_context_fmha"] is True
    log = (tmp_path / "log").read_text()
    assert log.startswith(f"$ {program} --checkpoint_dir {tmp_path / 'checkpoint'} --output_dir {out} --output_timing")
    assert shown, "each line is shown as it comes"
    assert all(line in log for line in shown)


@pytest.mark.process
def test_another_release_on_the_machine_is_refused(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", "1.0.0")
    at = target("1.1")
    with pytest.raises(HostError) as error:
        run(tmp_path, made(tmp_path, at), at)
    assert str(error.value) == (
        "trtllm-build is TensorRT-LLM 1.0.0, the toolchain is 1.1.0; install tensorrt-llm==1.1.0, use --executor "
        "docker, or choose with --toolchain what is installed"
    )


def test_a_checkpoint_of_another_release_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, target("1.2.1"))
    with pytest.raises(ArtefactRefused) as error:
        run(tmp_path, checkpoint, target("0.21"))
    assert error.value.exit_code == 6
    assert str(error.value) == (
        f"the checkpoint in {checkpoint.path} was not written for TensorRT-LLM 0.21.0: its loader ends with a "
        "TypeError on the key mapping.attn_cp_size; convert the model again with --toolchain 0.21.0"
    )


def test_a_checkpoint_cut_for_other_ranks_is_refused(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, target())
    with pytest.raises(ArtefactRefused) as error:
        run(tmp_path, checkpoint, target(tp_size=2))
    assert str(error.value) == (
        f"the checkpoint in {checkpoint.path} is cut for tp 1 and pp 1: the engine is for tp 2 and pp 1; "
        "convert the model again with these"
    )


def test_reduce_fusion_of_a_mistral_is_refused_when_its_checkpoint_is_read(tmp_path: Path) -> None:
    at = target(tp_size=2)
    checkpoint = made(tmp_path, at, architectures=["MistralForCausalLM"])
    with pytest.raises(UsageError) as error:
        run(tmp_path, checkpoint, at, reduce_fusion=True)
    assert error.value.exit_code == 2
    assert str(error.value) == (
        "build.reduce_fusion is not for a MistralForCausalLM: trtllm-build would turn it off with only a line in its "
        "log; leave it out"
    )


def test_without_trtllm_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = made(tmp_path, target())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError) as error:
        run(tmp_path, checkpoint, target())
    assert error.value.exit_code == 4
    assert str(error.value).startswith("this environment has no trtllm-build")


def test_a_full_disk_is_seen_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = made(tmp_path, target())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(HostError, match=r"the engine needs about [\d.]+ kB of disk and .* has 1\.0 kB free; free some"):
        run(tmp_path, checkpoint, target())


@pytest.mark.process
@pytest.mark.parametrize(("failure", "status"), [("oom", "exit status 1"), ("killed", "ended by SIGKILL")])
def test_a_build_that_fails_shows_its_last_lines(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, status: str
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", failure)
    at = target()
    checkpoint = made(tmp_path, at)
    with pytest.raises(StageFailed) as error:
        run(tmp_path, checkpoint, at)
    assert error.value.exit_code == 5
    assert error.value.what.startswith(f"trtllm-build failed ({status}")
    assert error.value.why
    assert error.value.remedy == f"the log is {tmp_path / 'log'}"


@pytest.mark.process
def test_a_build_that_fills_the_disk(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "disk-full")
    with pytest.raises(DiskFull) as error:
        run(tmp_path, made(tmp_path, target()), target())
    assert error.value.exit_code == 4
    assert str(error.value).startswith("trtllm-build failed, the disk is full: No space left on device; ")
    assert "`trtpipe gc`" in error.value.remedy


@pytest.mark.process
def test_a_build_that_writes_less_than_it_says(program: Path, tmp_path: Path) -> None:
    program.write_text('#!/bin/sh\necho \'{"version": "1.2.1"}\' > $4/config.json\n')
    at = target()
    with pytest.raises(StageFailed, match=r"trtllm-build has written no rank0\.engine: it ended without an error"):
        run(tmp_path, made(tmp_path, at), at)


def test_release_and_tensorrt_are_part_of_the_key() -> None:
    assert tensorrt_llm.tool_versions(find_toolchain("1.2")) == {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}
