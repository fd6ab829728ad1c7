"""Resources that a stage needs on a machine, in Ray's terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.gpu import GpuSpec
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import Stage
from trtpipe.pipeline.stages.base import GIB


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


def needs(stage: Stage, spec: BuildSpec, largest: dict[str, float]) -> Needs:
    """`largest` is the most that one machine of the cluster has of each: nothing asks for more, except for GPUs."""
    uses = stage.resources(spec)
    cpus = min(uses.cores, int(largest.get("CPU", 1)))
    memory = min(uses.memory, int(largest.get("memory", GIB)) // 2)
    if uses.gpu == "target":
        return Needs(cpus=cpus, memory=memory, gpus=1, accelerator=accelerator(spec.gpu))
    gpus = 1 if uses.gpu == "faster" and largest.get("GPU", 0) >= 1 else 0
    return Needs(cpus=cpus, memory=memory, gpus=gpus)


def accelerator(gpu: GpuSpec) -> str:
    """Ray's name of the card: the word after the maker's, up to the first sign that is not a letter or digit."""
    found = re.match(r"\w+[ -]+([A-Za-z0-9]+)", gpu.product)
    return found[1] if found else gpu.name.upper()
