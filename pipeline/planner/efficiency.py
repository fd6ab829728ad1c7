"""Share of data-sheet figures that TensorRT-LLM reaches: configs/efficiency.yaml, fitted to published tables."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from trtpipe.configs import facts, read
from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.gpu import GpuSpec


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Efficiency of one runtime. Shares are of data-sheet figures; see `cost.StepCost` for the formulas.

    products       share of dense TFLOPS in large matrix products, by SM and by type: "90.fp8"
    attention      share of dense FP16 TFLOPS in the prompt's attention
    weights        share of memory bandwidth when weights are read
    kv             share of memory bandwidth when the KV cache is read
    sharpness      exponent of the norm that joins compute and bandwidth time of a product: 1 adds them, infinity takes
                   the larger
    elementwise    number of passes over a token's activations between products
    step_s         seconds of a step besides its layers
    layer_s        seconds of a layer besides its work: kernel launches
    request_s      seconds of a step for each sequence in it: sampling and bookkeeping
    nvlink, pcie   share of the link's bandwidth in an all-reduce
    allreduce_s    seconds of an all-reduce besides its bytes
    front_s        seconds from a client to the engine and back, once per request
    activations    share of the largest layer's activations that TensorRT reserves
    runtime_gib    GiB that are used before anything is loaded
    runtimes       values that differ from the above for runtimes other than TensorRT-LLM
    probed         measurements by `trtpipe probe` on a card that the fit holds for, as shares of its data sheet
    """

    products: dict[str, float]
    attention: float
    weights: float
    kv: float
    sharpness: float
    elementwise: float
    step_s: float
    layer_s: float
    request_s: float
    nvlink: float
    pcie: float
    allreduce_s: float
    front_s: float
    activations: float
    runtime_gib: float
    probed: dict[str, float]
    runtimes: dict[str, dict[str, float]]

    def of(self, runtime: str) -> Efficiency:
        """Efficiency of a runtime. Raises UsageError for one that cannot be predicted."""
        if runtime == "tensorrt_llm":
            return self
        if runtime not in self.runtimes:
            known = ["tensorrt_llm", *self.runtimes]
            raise UsageError(f"the speed of runtime {runtime} is not predicted", remedy=suggestion(runtime, known))
        return dataclasses.replace(self, **self.runtimes[runtime])  # type: ignore[arg-type]

    def product(self, sm: int, kind: str) -> float:
        """Share in matrix products for this SM, or for the nearest SM that has been fitted."""
        # No published figure of FP4 has been fitted: it is taken to reach the share that FP8 reaches.
        wanted = {"bf16": "fp16", "fp4": "fp8"}.get(kind, kind)
        known = {int(key.split(".")[0]): value for key, value in self.products.items() if key.endswith(f".{wanted}")}
        if not known:
            raise UsageError(f"no efficiency of {kind} is known", remedy="choose another --dtype")
        return known[min(known, key=lambda one: (abs(one - sm), one))]

    def bandwidth(self, gpu: GpuSpec) -> float:
        """Bytes per second of the data sheet; for a probed card, the data-sheet value that matches the measured one."""
        if gpu.measured is None:
            return gpu.require("bandwidth_gbs") * 1e9
        return gpu.measured.bandwidth_gbs / self.probed["bandwidth"] * 1e9

    def flops(self, gpu: GpuSpec, kind: str) -> float:
        """Dense operations per second, likewise."""
        sheet = gpu.require(f"tflops.{kind}") * 1e12
        measured = gpu.measured.tflops.get(kind) if gpu.measured else None
        return sheet if measured is None or kind not in self.probed else measured / self.probed[kind] * 1e12

    def nvlink_bandwidth(self, gpu: GpuSpec) -> float:
        """Bytes per second in one direction, likewise."""
        if gpu.measured is None or gpu.measured.nvlink_gbs is None:
            return gpu.require("nvlink_gbs") * 1e9
        return gpu.measured.nvlink_gbs / self.probed["nvlink"] * 1e9


def load_efficiency() -> Efficiency:
    path = facts.CONFIGS / "efficiency.yaml"
    return read.build(Efficiency, read.read_yaml(path), path.name)
