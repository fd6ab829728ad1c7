"""Builds on a real Ray cluster of three machines, all on this one; their cards are made up, their programs doubles."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import write_adapter
from tests.support.doubles import install_trtllm_build
from tests.support.factories import hf_folder
from tests.support.nvidia_smi import A100, H100
from tests.support.paths import ROOT
from tests.support.registries import free_port
from tests.unit.test_runner import SIZES, Recorder, plan
from trtpipe.configs.facts import find_gpu
from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.passport import read_passport
from trtpipe.engines.process import python_command
from trtpipe.pipeline.cluster import driver
from trtpipe.pipeline.cluster.driver import Cluster
from trtpipe.pipeline.cluster.needs import accelerator
from trtpipe.pipeline.matrix import Outcome
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import stages_of
from trtpipe.pipeline.store.store import Store

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


# Begun while `hold` is there it says that it runs, and does nothing until whoever runs it is gone.
HELD = """
here=$(dirname "$0")
if [ -e {hold} ]; then
    echo $$ > "$here/running"
    while kill -0 $PPID 2> /dev/null; do sleep 0.1; done
    exit 1
fi
"""


def programs(folder: Path, gpu: str) -> str:
    """A PATH of a machine that has one such card, and a trtllm-build that can be held."""
    folder.mkdir(parents=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '0, {gpu}, 595.10.01, 81559, 4, GPU-0a8b'\n")
    (folder / "nvidia-smi").chmod(0o755)
    install_trtllm_build(folder, HELD.format(hold=folder.parent / "hold"))
    return f"{folder}:{os.environ['PATH']}"


class Site:
    """A cluster, and the folder where its machines have theirs."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster as Machines

        self.folder = folder
        self._node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        python = {"PYTHONPATH": str(ROOT)}
        self.ray: Any = Machines(initialize_head=True, head_node_args={**self._node, "num_gpus": 0, "env_vars": python})

    def add(self, name: str, kind: str, gpu: str) -> Any:
        made = self.ray.add_node(
            **self._node, num_gpus=1, resources={f"accelerator_type:{kind}": 1},
            env_vars={
                "PYTHONPATH": str(ROOT), "PATH": programs(self.folder / name, gpu),
                "TRTPIPE_HOME": str(self.folder / name / "home"),
            },
        )  # fmt: skip
        self.ray.wait_for_nodes()
        return made


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A head without a card, a machine with an H100 and one with an A100."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112  no processes before a task asks
    site = Site(tmp_path_factory.mktemp("machines"))
    site.add("first", "H100", H100)
    site.add("other", "A100", A100)
    yield site
    ray.shutdown()
    site.ray.shutdown()


Told = tuple[str, str, str, str]
Built = Callable[..., tuple[list[Outcome], list[Told]]]


@pytest.fixture
def built(machines: Site, tmp_path: Path) -> Built:
    """Build plans on the cluster; (outcomes, what was told meanwhile)."""

    def build(*plans: BuildSpec, exchange: str | None = None) -> tuple[list[Outcome], list[Told]]:
        told: list[Told] = []
        cluster = Cluster(machines.ray.address, Store(tmp_path / "home"), exchange, lambda *words: told.append(words))
        try:
            return cluster.build(list(plans), lambda made: Recorder(), None), told
        finally:
            cluster.close()

    return build


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        ("h100", "H100"), ("a100-pcie", "A100"), ("gh200", "GH200"), ("a10g", "A10G"), ("t4", "T4"), ("v100", "V100"),
        ("l40s", "L40S"), ("rtx4090", "GeForce-RTX-4090"), ("rtx5090", "GeForce-RTX-5090"),
    ],
)  # fmt: skip
def test_cards_are_called_as_ray_calls_them(gpu: str, kind: str) -> None:
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    spec = find_gpu(gpu)
    manager: Any = NvidiaGPUAcceleratorManager
    assert accelerator(spec) == kind
    # The driver's name has blanks where the label of a node has dashes.
    assert manager._gpu_name_to_accelerator_type(spec.product.replace("-", " ")) == kind
    workstation = dataclasses.replace(spec, product="NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition")
    assert accelerator(workstation) == "RTX-PRO-6000"


def test_a_target_is_built_where_its_card_is(built: Built, in_folder: Path) -> None:
    ((outcome,), told) = built(plan(hf_folder(in_folder / "tiny", seed=8), gpu="a100", dtype="bf16"))
    assert outcome.error is None
    assert [stage for _, stage, kind, _ in told if kind == "begins"] == ["tokenizer", "convert", "build", "package"]
    assert read_passport(Path("runs") / outcome.spec.target / "engine").made["gpu"] == "NVIDIA A100-SXM4-80GB"


def test_what_the_settings_name_is_read_on_the_machine_of_the_command(built: Built, in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny", seed=9)
    adapter = write_adapter(in_folder / "fr", model, rank=4)
    ((outcome,), told) = built(plan(model, gpu="a100", dtype="fp16", lora={"fr": str(adapter)}))
    assert outcome.error is None
    assert [stage for _, stage, kind, _ in told if kind == "begins"] == ["tokenizer", "convert", "build", "package"]
    assert (Path("runs") / outcome.spec.target / "adapters").is_dir()
    # Other files by paths that hold in any working folder.
    (in_folder / "text.jsonl").write_text("{}")
    quantized = plan(model, "calibration.data=text.jsonl", gpu="h100", dtype="fp8", tasks=["task.yaml"])
    order = driver._portable(quantized)
    assert order["settings"]["calibration"]["data"] == str(in_folder / "text.jsonl")
    assert order["settings"]["tasks"] == [str(in_folder / "task.yaml")]
    assert quantized.settings["calibration"]["data"] == "text.jsonl"
    shipped = driver._portable(plan(model, "calibration.data=demo", gpu="h100", dtype="fp8"))
    assert shipped["settings"]["calibration"]["data"] == "demo"


def test_an_error_of_another_machine_names_it() -> None:
    error = driver._error("gpu-7", "UsageError", "no text '/x'", "it is neither a file nor a data set", "give another")
    assert (type(error), str(error)) == (
        UsageError, "on gpu-7: no text '/x': it is neither a file nor a data set; give another",
    )  # fmt: skip
    error = driver._error("gpu-7", "HostError", "gpu-7 does not see /x", "", "mount it")
    assert str(error) == "gpu-7 does not see /x; mount it"


@pytest.mark.slow
def test_targets_for_two_cards_share_what_they_have_in_common(built: Built, in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny")
    plans = [plan(model, gpu=gpu, dtype="bf16") for gpu in ("h100", "a100")]
    outcomes, told = built(*plans)
    assert [outcome.error for outcome in outcomes] == [None, None]
    began = sorted(stage for _, stage, kind, _ in told if kind == "begins")
    assert began == ["build", "build", "convert", "package", "package", "tokenizer"]
    for outcome, product in zip(outcomes, ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"), strict=True):
        engine = Path("runs") / outcome.spec.target / "engine"
        assert read_passport(engine).made["gpu"] == product
    assert any(kind == "line" and "TRT-LLM" in text for _, _, kind, text in told), "the program's own words"
    again, told = built(*plans)
    assert [result.reused for outcome in again for result in outcome.results] == [True] * 10
    assert told == []


@pytest.mark.slow
def test_build_runs_on_a_cluster_without_the_users_own_modules(machines: Site, in_folder: Path, tmp_path: Path) -> None:
    hf_folder(in_folder / "tiny", seed=2)
    for name in ("pipeline", "engines"):  # Ray would have its workers look for modules here
        (in_folder / name).mkdir()
        (in_folder / name / "__init__.py").write_text("raise RuntimeError('a folder of the user ran')")
    sizes = [word for size in SIZES for word in ("--set", size)]
    done = subprocess.run(
        [
            *python_command("trtpipe"), "build", "--model", "tiny", "--gpu", "h100,a100,l4", "--dtype", "bf16",
            "--executor", "ray", "--ray", machines.ray.address, *sizes,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRTPIPE_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4, "one waits for its card"
    assert "tiny.h100.bf16: build     running  on " in done.stderr
    assert "(made for another target)" in done.stderr
    assert re.findall(r"^(tiny\.\w+\.bf16) +(ready|waits for its GPU)", done.stdout, re.MULTILINE) == [
        ("tiny.h100.bf16", "ready"), ("tiny.a100.bf16", "ready"), ("tiny.l4.bf16", "waits for its GPU"),
    ]  # fmt: skip
    assert "of 3 targets 1 wait for their GPU" in done.stderr


def test_no_cluster(in_folder: Path, tmp_path: Path) -> None:
    hf_folder(in_folder / "tiny")
    with pytest.raises(HostError, match=r"there is no Ray cluster at 127\.0\.0\.1:9"):
        Cluster("127.0.0.1:9", Store(tmp_path / "home"), None, lambda *words: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(HostError, match="what listens there does not speak gRPC"):
            Cluster(f"127.0.0.1:{other.server_port}", Store(tmp_path / "home"), None, lambda *words: None)
        other.shutdown()


def test_two_targets_of_one_name(built: Built, in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny")
    with pytest.raises(UsageError, match=r"two targets are called tiny\.h100\.bf16; give the models' folders other"):
        built(*[plan(model, gpu="h100", dtype="bf16")] * 2)


@pytest.mark.slow
def test_a_card_that_no_machine_has(built: Built, in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny")
    (outcome,), _ = built(plan(model, gpu="l40s", dtype="bf16"))
    assert outcome.state == "waits for its GPU"
    assert "no machine of the cluster has l40s (SM89)" in str(outcome.error)


@pytest.mark.slow
def test_machines_that_share_no_files(built: Built, machines: Site, in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny", seed=3)
    plans = [plan(model, gpu=gpu, dtype="bf16") for gpu in ("h100", "a100")]
    outcomes, _ = built(*plans, exchange="exchange")
    assert [outcome.error for outcome in outcomes] == [None, None]
    for name in ("first", "other"):
        assert list((machines.folder / name / "home" / "artefacts" / "build").glob("[!.]*")), "made there"
    for outcome in outcomes:
        assert (Path("runs") / outcome.spec.target / "engine" / "rank0.engine").is_file()


def waited(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def held(built: Built, machines: Site, name: str, made: BuildSpec) -> Callable[[], tuple[list[Outcome], list[Told]]]:
    """Begin to build, until the engine's stage stands still on the machine `name`; what is returned waits for the end.

    It goes on when `hold` is gone.
    """
    running = machines.folder / name / "running"
    (machines.folder / "hold").touch()
    found: list[tuple[list[Outcome], list[Told]]] = []
    thread = threading.Thread(target=lambda: found.append(built(made)))
    thread.start()
    waited(lambda: running.exists() or bool(found))
    assert not found, [str(outcome.error) for outcome in found[0][0]]

    def end() -> tuple[list[Outcome], list[Told]]:
        thread.join(240)
        return found[0]

    return end


@pytest.mark.slow
def test_a_machine_that_is_lost_in_mid_stage(built: Built, machines: Site, in_folder: Path) -> None:
    lost = machines.add("lost", "L40S", "NVIDIA L40S, 8.9")
    made = plan(hf_folder(in_folder / "tiny", seed=4), gpu="l40s", dtype="bf16")
    end = held(built, machines, "lost", made)
    machines.add("instead", "L40S", "NVIDIA L40S, 8.9")
    (machines.folder / "hold").unlink()
    machines.ray.remove_node(lost, allow_graceful=False)
    ((outcome,), told) = end()
    assert outcome.error is None
    assert [stage for _, stage, kind, _ in told if kind == "begins"].count("build") == 2
    assert read_passport(Path("runs") / made.target / "engine").made["gpu"] == "NVIDIA L40S"


@pytest.mark.slow
def test_the_only_machine_that_could_is_lost(
    built: Built, machines: Site, in_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(driver, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(driver, "ABSENT_SECONDS", 1.0)
    only = machines.add("only", "L4", "NVIDIA L4, 8.9")
    end = held(built, machines, "only", plan(hf_folder(in_folder / "tiny", seed=6), gpu="l4", dtype="bf16"))
    machines.ray.remove_node(only, allow_graceful=False)
    (machines.folder / "hold").unlink()
    ((outcome,), _) = end()
    assert "no machine of the cluster can run build of tiny.l4.bf16 any more: it asks for num_cpus 2" in str(
        outcome.error
    )


@pytest.mark.slow
def test_a_build_that_is_cancelled_leaves_nothing(machines: Site, in_folder: Path, tmp_path: Path) -> None:
    hold, running = machines.folder / "hold", machines.folder / "first" / "running"
    running.unlink(missing_ok=True)
    hold.touch()
    store = Store(tmp_path / "home")
    cluster = Cluster(machines.ray.address, store, None, lambda *words: None)
    made = plan(hf_folder(in_folder / "tiny", seed=5), gpu="h100", dtype="bf16")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(cluster.build([made], lambda made: Recorder(), None)))
    thread.start()
    waited(lambda: running.exists() and bool(running.read_text()))
    program = os.pidfd_open(int(running.read_text()))
    cluster.close()
    thread.join(60)
    hold.unlink()
    (outcome,) = found[0]
    assert "was cancelled" in str(outcome.error)
    assert select.select([program], [], [], 10)[0], "the program has ended"
    assert not [path for path in store.artefacts() if path.name.startswith(".")]


def test_a_cluster_that_is_gone(
    machines: Site, in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would wait for a minute and then end the process."""
    monkeypatch.setattr(driver, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(driver, "SILENT_SECONDS", 1.0)
    hold = machines.folder / "hold"
    hold.touch()
    store = Store(tmp_path / "home")
    cluster = Cluster(machines.ray.address, store, None, lambda *words: None)
    head = f"127.0.0.1:{free_port()}"
    cluster._head = head
    (outcome,) = cluster.build([plan(hf_folder(in_folder / "tiny", seed=7), gpu="h100")], lambda made: Recorder(), None)
    cluster.close()
    hold.unlink()
    told = (
        rf"the Ray cluster at {head} is gone: nobody listens there while \w+ of tiny\.h100\.fp32 runs; start it and run"
    )
    assert re.match(told, str(outcome.error))
    assert not list((store.home / "cluster").iterdir())


def test_ctrl_c_does_not_wait_for_work_of_this_machine(monkeypatch: pytest.MonkeyPatch, in_folder: Path) -> None:
    """Such as the reading of a GGUF file, which no thread can be interrupted in."""
    begun: list[threading.Thread] = []
    ended = threading.Event()

    def execute(spec: BuildSpec, *given: object, **named: object) -> None:
        begun.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        ended.wait(60)

    monkeypatch.setattr(driver, "execute", execute)
    monkeypatch.setattr(driver, "LEAVE_SECONDS", 0.1)
    cluster = object.__new__(Cluster)
    cluster._store, cluster._lock, cluster._refs, cluster._lost = Store(in_folder / "home"), threading.Lock(), {}, False
    spec = plan(hf_folder(in_folder / "tiny"), gpu="h100", dtype="bf16")
    begin = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.build([spec], lambda made: Recorder(), None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 30
    (thread,) = begun
    assert thread.daemon, "nor does Python's end"
    with pytest.raises(KeyboardInterrupt):  # of a thread that comes to its next stage
        cluster._perform(stages_of(spec)[0], spec, {}, None, reporter=Recorder())
    ended.set()
    thread.join(30)


def test_the_marks_of_killed_drivers_go(tmp_path: Path) -> None:
    (tmp_path / "left").touch()
    one = driver._mark(tmp_path)
    other = driver._mark(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(Path(mark.lock_file) for mark in (one, other))
