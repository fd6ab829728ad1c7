"""What a GPU can do, by compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One kind of device.

    sm             compute capability as one number, 90 for 9.0; None for the CPU
    memory_gib     device memory in GiB (2**30 bytes); None for the CPU
    bandwidth_gbs  memory bandwidth in GB/s (1e9 bytes per second)
    product        name the driver reports, for matching a host and for Kubernetes node labels
    source         where the figures come from
    """

    name: str
    sm: int | None
    memory_gib: float | None = None
    bandwidth_gbs: float | None = None
    product: str = ""
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        return self.sm is None

    def describe(self) -> str:
        return "CPU" if self.sm is None else f"{self.name} (SM{self.sm})"
