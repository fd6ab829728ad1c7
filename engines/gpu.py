"""Properties of a GPU: figures from data sheets, and measurements of `trtpipe probe`."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtpipe.engines.errors import UsageError

# GPUs of a host whose file does not say it: those of a DGX or HGX.
HOST_GPUS = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a GPU by `trtpipe probe`; None and absent types were not measured.

    date, host     when and on which machine
    driver         version of the NVIDIA driver
    ranks          number of GPUs of the all-reduces
    other fields   see engines/probe_worker.py
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
    """One kind of device. Rates are for dense matrices with FP32 accumulation.

    sm              compute capability as one number, 90 for 9.0; None for the CPU
    memory_gib      nominal device memory in GiB (2**30 bytes); None for the CPU
    memory_mib      device memory as the driver reports it, in MiB
    bandwidth_gbs   memory bandwidth in GB/s (1e9 bytes per second)
    tflops          1e12 operations per second by type: fp16, bf16, fp8, int8, fp4; absent types have no tensor cores
    nvlink_gbs      GB/s in one direction, all links of one GPU together; None without NVLink
    nvlink_gpus     number of GPUs that a bridge joins; None where a switch joins all GPUs of a host
    host_gpus       number of GPUs of a host, or of several that one switch joins; None for 8
    pcie_gbs        GB/s in one direction
    tdp_w           watts
    price_per_hour  price of one GPU, in the user's currency
    mig             profile of a MIG slice such as 3g.40gb, whose figures these are; empty for a whole GPU
    product         name that the driver reports, for matching a host and for Kubernetes node labels
    refused         why no engine runs on it; empty if engines do
    sources         source -> names of the fields that it is the source of
    measured        measurements of `trtpipe probe`; they override the data sheet
    """

    name: str
    sm: int | None
    memory_gib: float | None = None
    memory_mib: int | None = None
    bandwidth_gbs: float | None = None
    tflops: dict[str, float] = field(default_factory=dict)
    nvlink_gbs: float | None = None
    nvlink_gpus: int | None = None
    host_gpus: int | None = None
    pcie_gbs: float | None = None
    tdp_w: float | None = None
    price_per_hour: float | None = None
    mig: str = ""
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
        """Device memory in bytes: as the driver reports it where known, else nominal; None for the CPU."""
        if self.memory_mib is not None:
            return self.memory_mib * 2**20
        return None if self.memory_gib is None else round(self.memory_gib * 2**30)

    def describe(self) -> str:
        return "CPU" if self.sm is None else f"{self.name} (SM{self.sm})"

    @property
    def ranks_of_host(self) -> int:
        """Most ranks of an engine on one host."""
        return 1 if self.mig else self.host_gpus or HOST_GPUS

    def require_ranks(self, ranks: int) -> None:
        """Raises UsageError for several ranks on MIG slices: NVIDIA's driver lets no two of them talk."""
        if self.mig and ranks > 1:
            raise UsageError(
                f"{ranks} ranks cannot be on MIG slices ({self.name})",
                why="slices do not reach each other's memory",
                remedy="take whole GPUs, or a larger slice for one rank",
            )

    def require(self, name: str) -> float:
        """Value of the field `name`, or of a type as `tflops.fp8`. Raises UsageError when it is not known."""
        value = self.tflops.get(name.removeprefix("tflops.")) if name.startswith("tflops.") else getattr(self, name)
        if value is None:
            raise UsageError(
                f"{name} of {self.name} is not known", remedy=f"write it into gpus/{self.name}.yaml of TRTPIPE_HOME"
            )
        return float(value)
