"""trtllm-build: its argument list word for word, and what its absence, failure or wrong version looks like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.base import BuildConfig, Checkpoint, Engine
from engines.errors import HostError, InputDataError, StageFailed
from engines.gpu import GpuSpec
from engines.tensorrt_llm.build import arguments, build, tool_versions

H100 = GpuSpec(name="h100", sm=90, memory_gib=80.0, source="test")


def test_every_size_is_explicit() -> None:
    config = BuildConfig(
        max_batch_size=16, max_input_len=100, max_seq_len=200, max_num_tokens=300, tokens_per_block=64,
        max_beam_width=2,
    )  # fmt: skip
    assert arguments(Path("checkpoint"), Path("engine"), config) == [
        "--checkpoint_dir", "checkpoint",
        "--output_dir", "engine",
        "--max_batch_size", "16",
        "--max_input_len", "100",
        "--max_seq_len", "200",
        "--max_num_tokens", "300",
        "--max_beam_width", "2",
        "--kv_cache_type", "paged",
        "--tokens_per_block", "64",
        "--remove_input_padding", "enable",
        "--context_fmha", "enable",
        "--use_paged_context_fmha", "enable",
        "--gpt_attention_plugin", "auto",
        "--gemm_plugin", "auto",
        "--output_timing_cache", "engine/model.cache",
    ]  # fmt: skip


def test_without_trtllm_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError) as error:
        build(Checkpoint(path=tmp_path), tmp_path / "engine", BuildConfig(), H100, tmp_path / "log")
    assert error.value.exit_code == 4
    assert str(error.value) == (
        "trtllm-build is not on this machine: an engine for h100 (SM90) is compiled on that GPU by TensorRT-LLM 1.2.1; "
        "on such a host run `pip install trtpipe[engine]` and build again; the checkpoint is kept"
    )
    assert not (tmp_path / "log").exists()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trtllm-build that a test may fill; $4 is the output folder."""
    path = tmp_path / "bin" / "trtllm-build"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    return path


def run(program: Path, script: str) -> Engine:
    program.write_text(f"#!/bin/sh\n{script}\n")
    folder = program.parents[1]
    (folder / "engine").mkdir()
    return build(Checkpoint(path=folder / "ckpt"), folder / "engine", BuildConfig(), H100, folder / "log")


@pytest.mark.process
def test_a_build(program: Path) -> None:
    config = json.dumps({"version": "1.2.1"})
    engine = run(program, f"echo '{config}' > $4/config.json; touch $4/rank0.engine $4/model.cache; echo built $2")
    folder = program.parents[1]
    assert engine.path == folder / "engine"
    # The timing cache is the builder's own and no part of the engine.
    assert sorted(path.name for path in engine.path.iterdir()) == ["config.json", "rank0.engine"]
    first, last = (folder / "log").read_text().splitlines()
    assert first.startswith(f"$ {program} --checkpoint_dir {folder / 'ckpt'} --output_dir {folder / 'engine'} --max_ba")
    assert last == f"built {folder / 'ckpt'}"


@pytest.mark.process
def test_a_build_that_fails_shows_its_last_lines(program: Path) -> None:
    with pytest.raises(StageFailed) as error:
        run(program, "echo '[TRT] out of memory' >&2; exit 3")
    assert error.value.exit_code == 5
    log = program.parents[1] / "log"
    assert str(error.value) == f"trtllm-build failed (exit status 3): [TRT] out of memory; the log is {log}"


@pytest.mark.process
def test_another_release_is_refused(program: Path) -> None:
    with pytest.raises(HostError) as error:
        run(program, """echo '{"version": "0.17.0"}' > $4/config.json""")
    assert str(error.value) == (
        "trtllm-build is TensorRT-LLM 0.17.0, this project builds with 1.2.1; install tensorrt-llm==1.2.1"
    )


@pytest.mark.process
def test_a_build_that_writes_nothing(program: Path) -> None:
    with pytest.raises(InputDataError, match=r"engine config .* cannot be read"):
        run(program, "exit 0")


def test_the_release_is_part_of_the_key() -> None:
    assert tool_versions() == {"tensorrt_llm": "1.2.1"}
