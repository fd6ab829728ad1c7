"""What this machine can finish: its GPUs as the driver tells them, and every reason why an engine cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import nvidia_smi
from tests.support.nvidia_smi import A100, H100
from trtpipe.configs.facts import find_gpu, find_toolchain, load_toolchains
from trtpipe.engines.backends.base import Target
from trtpipe.engines.base import Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import HostError
from trtpipe.engines.nvidia import NoDriver, read_gpus
from trtpipe.engines.passport import Passport, make_passport
from trtpipe.engines.quantization import UNQUANTIZED
from trtpipe.pipeline import compatibility
from trtpipe.pipeline.execution import executors, hardware
from trtpipe.pipeline.execution.executors import DockerExecutor, LocalExecutor
from trtpipe.pipeline.execution.hardware import GpuAbsent

pytestmark = pytest.mark.process
GIB = 2**30


def target(gpu: str = "h100", release: str | None = None) -> Target:
    return Target(gpu=find_gpu(gpu), mapping=Mapping(), quantization=UNQUANTIZED, toolchain=find_toolchain(release))


def engine() -> Passport:
    return make_passport(
        target(), BuildConfig(), runtime="tensorrt_llm", sms=(90,), versions={}, dtype="bfloat16", rank_bytes=GIB,
        checkpoint="", settings=(), made={}, accuracy=None, weights={},
    )  # fmt: skip


def test_gpus_as_the_driver_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, H100, "NVIDIA L4, 8.9", used=1000)
    first, second = read_gpus()
    assert (first.index, first.name, first.sm, first.driver) == (0, "NVIDIA H100 80GB HBM3", 90, "595.10.01")
    assert (first.total_mib, first.used_mib) == (81559, 1000)
    assert (second.index, second.describe(), second.device) == (1, "NVIDIA L4 (SM89)", "1")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("1", [1]), ("2,0", [0, 2]), ("", []),
        # CUDA ends at the first word that names no GPU.
        ("-1", []), ("0,-1", [0]), ("0,-1,1", [0]), ("none", []), ("3,0", []), ("0,,1", [0]), ("0,", [0]),
        ("GPU-1a8b", [1]), ("GPU-2a, 0", [0, 2]), ("GPU-9", []), ("GPU-", []), ("MIG-1", []),
    ],
)  # fmt: skip
def test_only_what_cuda_may_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[int]) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, H100, H100, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in read_gpus()] == seen


SLICES = """
if [ "$1" = -L ]; then
    echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0a8b)"
    echo "  MIG 3g.40gb     Device  0: (UUID: MIG-7f3e)"
    echo "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1a8b)"
    echo "  MIG 3g.40gb     Device  0: (UUID: MIG-c1d0)"
    echo "  MIG 3g.40gb     Device  1: (UUID: MIG-c2d0)"
else
    echo "0, NVIDIA H100 80GB HBM3, 9.0, 595.10.01, 81559, 4, GPU-0a8b"
    echo "1, NVIDIA H100 80GB HBM3, 9.0, 595.10.01, 81559, 4, GPU-1a8b"
fi
"""


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("MIG-c2d0", [(1, "MIG-c2d0")]), ("MIG-c1,MIG-c2", [(1, "MIG-c1d0")]), ("MIG-c", []),
        ("MIG-c1d0,0", [(0, "0"), (1, "MIG-c1d0")]), ("1", [(1, "1")]),
    ],
)  # fmt: skip
def test_a_mig_slice_is_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[tuple[int, str]]
) -> None:
    nvidia_smi.install_script(monkeypatch, tmp_path, SLICES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [(gpu.index, gpu.device) for gpu in read_gpus()] == seen


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'NVRM: mismatch' >&2; exit 18", "nvidia-smi fails: NVRM: mismatch; see the kernel's log"),
        ("echo something else", "nvidia-smi says something unexpected: something else"),
    ],
)
def test_a_driver_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    nvidia_smi.install_script(monkeypatch, tmp_path, script)
    with pytest.raises(HostError) as error:
        read_gpus()
    assert (type(error.value), str(error.value)) == (HostError, message)
    assert compatibility.examine(engine()).objections == [message]


@pytest.mark.parametrize(
    ("chosen", "objections"),
    [
        (None, []), ((0,), []), ((0, 1), []),
        ((1,), ["it is for h100 (SM90), and this machine has NVIDIA L4 (SM89)"]),
        ((7, 8), ["GPU 7, 8 is not one of those that are visible here"]),
        ((0, 7), ["GPU 7 is not one of those that are visible here"]),
    ],
)  # fmt: skip
def test_an_engine_is_compared_with_the_gpus_that_serve_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: tuple[int, ...] | None, objections: list[str]
) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, H100, "NVIDIA L4, 8.9")
    assert compatibility.examine(engine(), chosen).objections == objections


def test_memory_of_a_slice_is_not_told_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = "[Insufficient Permissions]"
    line = f"0, NVIDIA A100-SXM4-80GB, 8.0, 590.44.01, {unknown}, {unknown}, GPU-0a8b"
    nvidia_smi.install_script(monkeypatch, tmp_path, f"echo '{line}'")
    (found,) = read_gpus()
    assert (found.sm, found.total_mib, found.used_mib) == (80, None, None)
    assert hardware.require_gpus(target("a100"), 90 * GIB, 1) == [found]


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoDriver):
        read_gpus()
    with pytest.raises(GpuAbsent) as error:
        hardware.matching_gpus(target())
    assert str(error.value) == "an engine for h100 (SM90) is built on that GPU: this machine has no NVIDIA driver"
    assert hardware.visible_gpus() == hardware.installed_gpus() == ()
    assert hardware.able(find_toolchain(None), ()) == "no NVIDIA GPU here"


def test_another_card_is_named_beside_the_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, A100, A100)
    with pytest.raises(GpuAbsent) as error:
        hardware.matching_gpus(target())
    assert str(error.value) == (
        "an engine for h100 (SM90) is built on that GPU: this machine has NVIDIA A100-SXM4-80GB (SM80)"
    )
    assert [gpu.index for gpu in hardware.matching_gpus(target("a100"))] == [0, 1]


def test_a_driver_too_old_for_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, H100, driver="575.57.08")
    with pytest.raises(HostError) as error:
        hardware.matching_gpus(target())
    assert not isinstance(error.value, GpuAbsent)
    assert str(error.value) == (
        "TensorRT-LLM 1.2.1 needs driver 590.44.01, and this machine has 575.57.08; choose with --toolchain one that "
        "`trtpipe toolchains` calls able to run, or update the driver"
    )
    assert hardware.matching_gpus(target(release="1.0"))
    able = {name: hardware.able(one, read_gpus()) for name, one in load_toolchains().items()}
    assert able == {
        "1.3.0rc29": "not known",
        "1.2.1": "no: driver 575.57.08 is older", "1.1.0": "no: driver 575.57.08 is older", "1.0.0": "yes",
        "0.21.0": "yes",
    }  # fmt: skip


def test_a_card_too_small_and_one_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, H100, total=81920, used=61440)
    assert [gpu.index for gpu in hardware.require_gpus(target(), 19 * GIB, 1)] == [0]
    with pytest.raises(HostError) as error:
        hardware.require_gpus(target(), 21 * GIB, 1)
    assert str(error.value) == (
        "GPU 0 has 20.0 GiB free, and the weights of a rank take 21.0: other programs use 60.0 GiB of it; "
        "end them (`nvidia-smi` lists them)"
    )
    with pytest.raises(HostError) as error:
        hardware.require_gpus(target(), 131 * GIB, 1)
    assert str(error.value) == (
        "the weights of a rank take 131.0 GiB, and NVIDIA H100 80GB HBM3 (SM90) has 80.0; "
        "spread them with --tp or --pp, or take a smaller --dtype"
    )


@pytest.mark.parametrize(
    ("gib", "most", "chosen"), [(1, 1, [3]), (1, 2, [3, 1]), (1, 8, [3, 1, 0]), (30, 8, [3, 1]), (50, 8, [3])]
)
def test_gpus_to_build_on_are_the_freest_of_the_target_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, most: int, chosen: list[int]
) -> None:
    lines = [f"{index}, {gpu}, 595.10.01, 81920, {used}, GPU-{index}" for index, (gpu, used) in enumerate(
        [(H100, 61440), (H100, 40960), (A100, 0), (H100, 20480)]
    )]  # fmt: skip
    nvidia_smi.install_script(monkeypatch, tmp_path, "\n".join(f"echo '{line}'" for line in lines))
    assert [gpu.index for gpu in hardware.require_gpus(target(), gib * GIB, most)] == chosen


def refusal(name: str) -> str:
    with pytest.raises(HostError) as error:
        hardware.choose_executor(name, find_toolchain(None))
    return str(error.value)


def test_the_executor_that_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = find_toolchain(None)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert isinstance(hardware.choose_executor("local", toolchain), LocalExecutor)
    assert refusal("docker").startswith("Docker cannot be reached at unix://")
    auto = refusal("auto")
    assert auto.startswith("this machine has neither trtllm-build nor Docker: Docker cannot be reached at ")
    assert auto.endswith("install Docker with NVIDIA's Container Toolkit, or tensorrt-llm==1.2.1 here")
    monkeypatch.setattr(DockerExecutor, "require", lambda self: "1.0")
    chosen = hardware.choose_executor("auto", toolchain)
    assert isinstance(chosen, DockerExecutor)
    assert chosen.image == toolchain.image
    (tmp_path / "trtllm-build").write_text("")
    (tmp_path / "trtllm-build").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert executors.find_program("trtllm-build") == str(tmp_path / "trtllm-build")
    assert isinstance(hardware.choose_executor("auto", toolchain), LocalExecutor)
