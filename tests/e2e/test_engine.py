"""Engines from the command line: by the double of trtllm-build, in this environment and in a container, with a GPU
that is made up. What is real is everything else: checkpoints, Docker, passports, exports."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.conftest import Cli
from tests.e2e.dockerd import Daemon, build_image
from tests.support.doubles import install_trtllm_build
from tests.support.doubles import trtllm_build as double
from tests.support.factories import hf_folder
from tests.support.nvidia_smi import A100, H100, install
from trtpipe.configs.facts import find_toolchain
from trtpipe.pipeline.execution.hardware import require_image

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
pytest_plugins = ["tests.e2e.dockerd"]

DOUBLE = Path(double.__file__)
SERVER = DOUBLE.with_name("tritonserver.py")
TARGET = "tiny.h100.bf16"
BUILD = [
    "build", "--model", "tiny", "--gpu", "h100", "--dtype", "bf16", "--set", "build.max_input_len=64", "--set",
    "build.max_seq_len=128",
]  # fmt: skip


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A machine with one H100, trtllm-build, and a model in the working folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    hf_folder(folder / "tiny")
    install_trtllm_build(tmp_path / "bin")
    install(monkeypatch, tmp_path / "bin", H100)
    return Cli(folder, tmp_path / "home")


def test_an_engine_is_built_and_knows_where_it_runs(host: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = host.ok(*BUILD)
    assert done.out.rstrip().endswith(f"next: trtpipe serve {TARGET}")
    assert "  [TRT-LLM]" in done.err or "[TRT-LLM] [I]" in done.err, "its log is on the screen"
    engine = host.folder / "runs" / TARGET / "engine"
    assert sorted(path.name for path in engine.iterdir()) == ["config.json", "passport.json", "rank0.engine"]
    passport = json.loads(host.ok("passport", TARGET, "--json").out)
    assert (passport["gpu"], passport["sms"], passport["toolchain"]) == ("h100", [90], "1.2.1")
    assert passport["made"] == {"gpu": "NVIDIA H100 80GB HBM3", "driver": "595.10.01"}
    assert host.ok("passport", TARGET).out.endswith("this machine can run it\n")
    assert (host.folder / "runs" / TARGET / "repository" / "tensorrt_llm" / "1" / "rank0.engine").is_file()
    assert " reused " in host.ok(*BUILD).err

    served = host.run("serve", TARGET, "--server", "local")
    assert served.status == 6
    assert f"serve it with --server docker, from {find_toolchain(None).image}" in served.err
    install(monkeypatch, tmp_path / "bin", A100)
    for command in ("serve", "passport"):
        refused = host.run(command, TARGET)
        assert refused.status == 6
        assert "it is for h100 (SM90), and this machine has NVIDIA A100-SXM4-80GB (SM80)" in refused.err


@pytest.mark.parametrize(
    ("failure", "telling"),
    [
        ("oom", "the weights of a rank do not fit the GPU memory that is free"),
        pytest.param("killed", "most often because the machine's memory ran out", marks=pytest.mark.slow),
    ],
)
def test_a_failed_build_says_why_and_what_to_do(
    host: Cli, monkeypatch: pytest.MonkeyPatch, failure: str, telling: str
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", failure)
    done = host.run(*BUILD)
    assert done.status == 5
    last = done.err.splitlines()[-1]
    assert last.startswith("error: trtllm-build failed (")
    assert telling in last
    (log,) = (host.home / "logs").glob("build-*.log")
    assert last.endswith(f"; the log is {log}")
    assert not list((host.home / "artefacts" / "build").iterdir())
    monkeypatch.delenv("TRTLLM_DOUBLE_FAIL")
    host.ok(*BUILD)


def test_a_build_that_fills_the_disk(host: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "disk-full")
    done = host.run(*BUILD)
    assert done.status == 4
    last = done.err.splitlines()[-1]
    assert last.startswith("error: trtllm-build failed, the disk is full: No space left on device; free some space")
    assert not list((host.home / "artefacts" / "build").iterdir())


def test_ctrl_c_ends_a_build_that_hangs(host: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "hang")
    # A test run in the background ignores the signal, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    build = host.start(*BUILD)
    deadline = time.monotonic() + 60
    while not list((host.home / "logs").glob("build-*.log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    build.send_signal(signal.SIGINT)
    _, told = build.communicate(timeout=30)
    assert build.returncode == 130, told
    assert not list((host.home / "artefacts" / "build").iterdir())
    names = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.is_file()]
    assert not [name for name in names if b"trtllm-build" in name and str(host.folder.parent).encode() in name]


def test_what_a_machine_cannot_finish_travels(host: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path / "bin", A100)
    done = host.run(*BUILD)
    assert done.status == 4
    assert done.err.splitlines()[-1] == (
        "error: an engine for h100 (SM90) is built on that GPU: this machine has NVIDIA A100-SXM4-80GB (SM80); the "
        f"checkpoint is made; next: trtpipe export {TARGET}; where the GPU is: trtpipe build --from {TARGET}.tar"
    )
    host.ok("export", TARGET)

    there = Cli(tmp_path / "there", tmp_path / "other-home")
    there.folder.mkdir()
    (host.folder / f"{TARGET}.tar").rename(there.folder / f"{TARGET}.tar")
    install(monkeypatch, tmp_path / "bin", H100)
    assert there.ok("import", f"{TARGET}.tar").out == f"next: trtpipe build --from {TARGET}\n"
    refused = there.run("build", "--from", f"{TARGET}.tar", "--tp", "2")
    assert refused.status == 2
    assert refused.err.startswith("error: --from brings its own --tp: ")
    built = there.ok("build", "--from", TARGET)
    assert [line.split()[0] for line in built.err.splitlines() if "(first run)" in line] == ["build"] * 2 + [
        "package"
    ] * 2
    assert there.ok("passport", TARGET).out.endswith("this machine can run it\n")
    assert " reused " in there.ok("build", "--from", f"{TARGET}.tar").err


def test_a_machine_that_could_not_finish_is_told_before_it_begins(
    host: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path / "bin", H100, driver="575.57.08")
    done = host.run(*BUILD)
    assert done.status == 4
    assert "\nerror: TensorRT-LLM 1.2.1 needs driver 590.44.01, and this machine has 575.57.08; " in done.err
    assert not (host.home / "artefacts").exists()
    listed = host.ok("toolchains").out
    assert [line.split()[-1] for line in listed.splitlines() if line.startswith("1.0.0 ")] == ["yes"]
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", "1.0.0")
    host.ok(*BUILD, "--toolchain", "1.0")
    assert json.loads(host.ok("passport", f"{TARGET}.trtllm-1.0.0", "--json").out)["toolchain"] == "1.0.0"


@pytest.fixture(scope="module")
def toolchain(docker_client: DockerClient, toolchain_image: str) -> None:
    """Docker has the image of the toolchain."""
    repository, _, version = require_image(find_toolchain(None)).rpartition(":")
    docker_client.images.get(toolchain_image).tag(repository, version)


def test_a_docker_without_nvidias_runtime(
    host: Cli, dockerd: str, toolchain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", dockerd)
    done = host.run(*BUILD, "--executor", "docker")
    assert done.status == 4
    assert done.err.splitlines()[-1].startswith("error: Docker has no NVIDIA runtime here")


@pytest.fixture(scope="module")
def gpu_dockerd(daemon: Daemon, toolchain: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon takes GPU requests: Docker asks for no more than that NVIDIA's hook is there, and ends well."""
    hook = tmp_path_factory.mktemp("hook") / "nvidia-container-runtime-hook"
    hook.write_text("#!/bin/sh\ncat > /dev/null\n")
    hook.chmod(0o755)
    daemon.stop()
    daemon.start(hook.parent)
    yield daemon
    daemon.stop()
    daemon.start()


def test_an_engine_from_the_toolchains_image(host: Cli, gpu_dockerd: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", gpu_dockerd.url)
    done = host.ok(*BUILD, "--executor", "docker")
    assert "[TRT-LLM] [I]" in done.err
    engine = host.folder / "runs" / TARGET / "engine"
    assert (engine / "rank0.engine").read_bytes().startswith(b"CONTRACT DOUBLE, NO ENGINE\n")
    assert (engine / "rank0.engine").stat().st_uid == os.geteuid()
    made = json.loads((engine / "passport.json").read_text())["made"]
    assert made["image"] == find_toolchain(None).image
    assert made["image_digest"].startswith("sha256:")
    assert " reused " in host.ok(*BUILD).err, "where it was built does not matter"


@pytest.mark.slow
def test_ranks_are_served_by_the_toolchains_image(
    host: Cli, gpu_dockerd: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path / "bin", H100, H100)
    monkeypatch.setenv("DOCKER_HOST", gpu_dockerd.url)
    with gpu_dockerd.client() as client:
        build_image(client, require_image(find_toolchain(None)), DOUBLE, tritonserver=SERVER, mpirun=SERVER)
    name = f"{TARGET}.tp2"
    share = ("--set", "serving.kv_cache_free_gpu_mem_fraction=0.4")
    host.ok(*BUILD, "--tp", "2", *share)
    ports = [word for port in ("http", "grpc", "metrics", "openai") for word in (f"--{port}-port", "0")]
    served = host.ok("serve", name, "--detach", *ports, "--shm-size", "1g")
    assert "127.0.0.1" in served.out
    (server,) = json.loads(host.ok("ps", "--json").out)
    assert server["server"] == name
    told = [json.loads(line) for line in host.ok("logs").out.splitlines() if line.startswith("{")]
    assert len(told) == 2, "a process a rank"
    assert {one["uid"] for one in told} == {os.geteuid()}
    leader, worker = sorted(told, key=lambda one: -len(one["words"]))
    assert [word for word in worker["words"] if word.startswith("--load-model")] == ["--load-model=tensorrt_llm"]
    assert "--load-model=ensemble" in leader["words"]
    with gpu_dockerd.client() as client:
        (container,) = client.containers.list()
        assert container.attrs["HostConfig"]["DeviceRequests"][0]["Count"] == -1

    host.ok(*BUILD, "--tp", "2", "--set", "serving.max_queue_size=7")
    refused = host.run("reload")
    assert (refused.status, "0.4 of its free memory is taken, and the new engine takes 0.9" in refused.err) == (4, True)
    host.ok(*BUILD, "--tp", "2", "--set", "serving.max_queue_size=7", *share)
    assert host.ok("reload").out.startswith(f"{name} has loaded {name}\n")
    assert "loaded tensorrt_llm\n" in host.ok("logs", "-n", "100").out

    assert host.ok("stop").out == f"stopped {name}\n"
    with gpu_dockerd.client() as client:
        assert client.containers.list(all=True) == []
    last = host.run("serve", name, "--server", "local").err.splitlines()[-1]
    assert last.startswith("error: this engine is for the tensorrt_llm runtime on h100 (SM90): the tritonserver of")


def test_an_engine_becomes_a_target_of_vllm_and_of_the_llm_api(host: Cli) -> None:
    built = host.ok(
        *BUILD, "--set", "build.max_batch_size=16", "--set", "build.max_num_tokens=256", "--set",
        "serving.kv_cache_free_gpu_mem_fraction=0.8", "--set", "serving.max_queue_size=32",
    )  # fmt: skip
    assert "engines end with TensorRT-LLM 1.2: `trtpipe migrate`" in " ".join(built.err.split())
    done = host.ok("migrate", TARGET, "--to", "vllm")
    *_, table, after = done.out.splitlines()
    assert table == "the table is in runs/tiny.h100.bf16.vllm/migration.json"
    assert after == "next: trtpipe serve tiny.h100.bf16.vllm"
    run = host.folder / "runs" / "tiny.h100.bf16.vllm"
    assert yaml.safe_load((run / "engine" / "engine_args.yaml").read_text()) == {
        "tensor-parallel-size": 1, "pipeline-parallel-size": 1, "max-num-seqs": 16, "max-model-len": 128,
        "max-num-batched-tokens": 256, "block-size": 32, "max-cudagraph-capture-size": 256, "kv-cache-dtype": "auto",
        "dtype": "bfloat16",
    }  # fmt: skip
    serving = json.loads((run / "migration.json").read_text())["settings"]["serving"]
    assert (serving["max_queue_size"], serving["kv_cache_free_gpu_mem_fraction"]) == (32, 0.8)
    assert "max_queue_size: 32" in (run / "repository" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "error" not in host.ok("check", run.name).out

    host.ok("migrate", str(host.folder / "runs" / TARGET / "repository"), "--to", "llmapi", "-o", "new/llmapi.yaml")
    again = host.run("migrate", TARGET, "--to", "llmapi", "-o", "new/llmapi.yaml")
    assert "error: new/llmapi.yaml exists already" in again.err
    host.ok("build", "--recipe", "new/llmapi.yaml")
    repository = host.folder / "runs" / "tiny.h100.bf16.trtllm_pytorch" / "repository"
    assert yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text()) == {
        "model": "tensorrt_llm/1", "backend": "pytorch", "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "max_batch_size": 16, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 256, "max_beam_width": 1,
        "kv_cache_config": {
            "dtype": "auto", "tokens_per_block": 32, "free_gpu_memory_fraction": 0.8, "enable_block_reuse": True
        },
        "enable_chunked_prefill": True, "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "enable_iter_perf_stats": True, "guided_decoding_backend": "xgrammar",
        "triton_config": {
            "max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100, "stats_check_period_ms": 100,
            "max_queue_size": 32,
        },
    }  # fmt: skip
