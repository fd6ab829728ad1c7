"""Resources that a stage needs on a machine, in Ray's terms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.gpu import GpuSpec
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import Stage


@dataclass(frozen=True, kw_only=True)
class Needs:
    """accelerator  the GPU, as Ray names it; "" for any"""

    cpus: int
    memory: int
    gpus: int
    accelerator: str = ""

    def options(self) -> dict[str, Any]:
        """The needs as arguments of Ray's `options`."""
        out: dict[str, Any] = {"num_cpus": self.cpus, "memory": self.memory, "num_gpus": self.gpus}
        return out | {"accelerator_type": self.accelerator} if self.accelerator else out

    def met(self, resources: Mapping[str, float]) -> bool:
        """Whether a machine with these resources could run the stage if nothing else ran there."""
        kind = f"accelerator_type:{self.accelerator}"
        if self.accelerator and kind not in resources:
            return False
        wanted = {"CPU": self.cpus, "memory": self.memory, "GPU": self.gpus}
        return all(resources.get(name, 0) >= least for name, least in wanted.items())


def needs(stage: Stage, spec: BuildSpec, machines: Sequence[Mapping[str, float]]) -> Needs:
    """`machines` are the resources of each machine of the cluster. A stage asks for no more than one of them
    has, except for the target's GPU. One that a GPU makes faster asks for a machine with a GPU where there is one."""
    uses = stage.resources(spec)
    kind = accelerator(spec.gpu) if uses.gpu == "target" else ""
    wanted = f"accelerator_type:{kind}" if kind else "GPU"
    able = [one for one in machines if one.get(wanted, 0) >= 1] if uses.gpu else []

    def share(one: Mapping[str, float]) -> tuple[int, int]:
        return min(uses.memory, int(one.get("memory", 0)) // 2), min(uses.cores, int(one.get("CPU", 0)))

    # The memory and cores of one machine, since no machine may have the most of both.
    memory, cpus = max(map(share, able or machines))
    return Needs(cpus=cpus, memory=memory, gpus=1 if kind or able else 0, accelerator=kind)


def accelerator(gpu: GpuSpec) -> str:
    """Ray's name of the card: of what comes after the maker's name the words in capitals up to the first with a digit,
    else all. Source: NvidiaGPUAcceleratorManager since Ray 2.57."""
    if not gpu.product:
        return gpu.name.upper()
    found = re.match(r"\w+-((?:[A-Z]+-)*[A-Z0-9]*\d[A-Z0-9]*)", gpu.product)
    return found[1] if found and len(found[1]) > 1 else gpu.product.removeprefix("NVIDIA-")
