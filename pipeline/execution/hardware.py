"""Checks that this machine can finish a target: its GPUs, its driver, and an executor for the toolchain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtpipe.engines.backends.base import Target
from trtpipe.engines.errors import HostError
from trtpipe.engines.executor import Executor
from trtpipe.engines.nvidia import Gpu, NoDriver, read_gpus
from trtpipe.engines.toolchain import Toolchain
from trtpipe.engines.trtllm_build import PROGRAM
from trtpipe.pipeline.execution.executors import DockerExecutor, LocalExecutor, find_program


class GpuAbsent(HostError):
    """This machine has no GPU of the target's kind; stages that need no GPU can still run here."""


def matching_gpus(target: Target) -> list[Gpu]:
    """This machine's GPUs of the target's compute capability. Raises GpuAbsent, or HostError for an old driver."""
    wanted = target.gpu.describe()
    try:
        gpus = read_gpus()
    except NoDriver as error:
        raise GpuAbsent(f"an engine for {wanted} is built on that GPU", why=error.what) from None
    same = [gpu for gpu in gpus if gpu.sm == target.gpu.sm]
    if not same:
        here = ", ".join(sorted({gpu.describe() for gpu in gpus})) or "no GPU that is visible"
        raise GpuAbsent(f"an engine for {wanted} is built on that GPU", why=f"this machine has {here}")
    toolchain = target.toolchain
    if not toolchain.supports_driver(same[0].driver):
        raise HostError(
            f"TensorRT-LLM {toolchain.name} needs driver {toolchain.driver}, and this machine has {same[0].driver}",
            remedy="choose with --toolchain one that `trtpipe toolchains` calls able to run, or update the driver",
        )
    return same


def require_gpus(target: Target, rank_bytes: int, most: int) -> list[Gpu]:
    """GPUs to build on, with room for a rank's weights: the freest first, one at least and `most` at most. Raises
    HostError where all are too small or in use."""
    gpus = sorted(matching_gpus(target), key=_free_mib, reverse=True)
    need = rank_bytes / 2**20
    best = gpus[0]
    if best.total_mib is None or best.used_mib is None:
        return gpus[:most]
    if best.total_mib < need:
        raise HostError(
            f"the weights of a rank take {need / 1024:.1f} GiB, and {best.describe()} has {best.total_mib / 1024:.1f}",
            remedy="spread them with --tp or --pp, or take a smaller --dtype",
        )
    if _free_mib(best) < need:
        raise HostError(
            f"GPU {best.index} has {_free_mib(best) / 1024:.1f} GiB free, "
            f"and the weights of a rank take {need / 1024:.1f}",
            why=f"other programs use {best.used_mib / 1024:.1f} GiB of it",
            remedy="end them (`nvidia-smi` lists them)",
        )
    return [gpu for gpu in gpus[:most] if _free_mib(gpu) >= need]


def _free_mib(gpu: Gpu) -> float:
    """Infinite where nvidia-smi does not tell it."""
    return math.inf if gpu.total_mib is None or gpu.used_mib is None else gpu.total_mib - gpu.used_mib


def choose_executor(name: str, toolchain: Toolchain) -> Executor:
    """The executor of that name, ready to run; auto takes this environment if it has the program. Raises HostError."""
    if name == "local" or (name == "auto" and find_program(PROGRAM)):
        return LocalExecutor()
    executor = DockerExecutor(require_image(toolchain))
    try:
        executor.require()
    except HostError as error:
        if name == "docker":
            raise
        raise HostError(
            f"this machine has neither {PROGRAM} nor Docker",
            why=error.what,
            remedy=f"install Docker with NVIDIA's Container Toolkit, or tensorrt-llm=={toolchain.name} here",
        ) from None
    return executor


def require_image(toolchain: Toolchain) -> str:
    """Raises HostError for a release whose image is not known."""
    if toolchain.image is None:
        raise HostError(
            f"no container image with TensorRT-LLM {toolchain.name} is known",
            remedy="choose another of `trtpipe toolchains`",
        )
    return toolchain.image


def facts(gpu: Gpu) -> dict[str, str]:
    """The passport's facts about the GPU that an engine was built on."""
    return {"gpu": gpu.name, "driver": gpu.driver}


def installed_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none without a driver. Raises HostError when the driver does not answer."""
    try:
        return read_gpus()
    except NoDriver:
        return ()


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none where no driver answers."""
    try:
        return read_gpus()
    except HostError:
        return ()


def able(toolchain: Toolchain, gpus: Sequence[Gpu]) -> str:
    """Whether this machine's driver can run a toolchain, as text for a table."""
    if not gpus:
        return "no NVIDIA GPU here"
    driver = gpus[0].driver
    if toolchain.driver is None:
        return "not known"
    return "yes" if toolchain.supports_driver(driver) else f"no: driver {driver} is older"
