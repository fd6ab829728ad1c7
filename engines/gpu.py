"""What a GPU can do: facts from data sheets, and what `trtpipe probe` has measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtpipe.engines.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What this card did under `trtpipe probe`; None and absent types were not measured.

    date, host     when and on what
    driver         of the NVIDIA driver
    ranks          GPUs that the all-reduces ran over
    the rest       as engines/probe_worker.py measures it
    """

    date: str
    host: str
    driver: str
    bandwidth_gbs: float
    tflops: dict[str, float]
    host_gbs: float | None = None
    nvlink_gbs: float | None = None
    allreduce_us: float | None = None
    ranks: int | None = None
    launch_us: float | None = None
    cpu_score: float | None = None


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One kind of device. Rates are dense ones with FP32 accumulation, never sparse.

    sm              compute capability as one number, 90 for 9.0; None for the CPU
    memory_gib      device memory as it is sold, in GiB (2**30 bytes); None for the CPU
    memory_mib      device memory as the driver reports it, in MiB
    bandwidth_gbs   memory bandwidth in GB/s (1e9 bytes per second)
    tflops          1e12 operations a second by type: fp16, bf16, fp8, int8; a type that is absent has no tensor cores
    nvlink_gbs      GB/s in one direction, all links of one GPU together; None without NVLink
    nvlink_gpus     how many GPUs a bridge joins; None where a switch joins all of a host's
    pcie_gbs        GB/s in one direction
    tdp_w           watts
    price_per_hour  of one GPU, in the user's currency
    product         name the driver reports, for matching a host and for Kubernetes node labels
    refused         why no engine runs on it; empty if engines do
    sources         where figures come from: a source, and the fields it is the source of
    measured        by `trtpipe probe`; goes before the data sheet
    """

    name: str
    sm: int | None
    memory_gib: float | None = None
    memory_mib: int | None = None
    bandwidth_gbs: float | None = None
    tflops: dict[str, float] = field(default_factory=dict)
    nvlink_gbs: float | None = None
    nvlink_gpus: int | None = None
    pcie_gbs: float | None = None
    tdp_w: float | None = None
    price_per_hour: float | None = None
    product: str = ""
    refused: str = ""
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    measured: Measured | None = None

    @property
    def is_cpu(self) -> bool:
        return self.sm is None

    @property
    def memory_bytes(self) -> int | None:
        """As the driver reports it where that is known."""
        if self.memory_mib is not None:
            return self.memory_mib * 2**20
        return None if self.memory_gib is None else round(self.memory_gib * 2**30)

    def describe(self) -> str:
        return "CPU" if self.sm is None else f"{self.name} (SM{self.sm})"

    def require(self, name: str) -> float:
        """A figure that must be known. Raises UsageError naming the GPU and the field."""
        value = self.tflops.get(name.removeprefix("tflops.")) if name.startswith("tflops.") else getattr(self, name)
        if value is None:
            raise UsageError(
                f"{name} of {self.name} is not known", remedy=f"write it into gpus/{self.name}.yaml of TRTPIPE_HOME"
            )
        return float(value)
