"""Share of data-sheet figures that TensorRT-LLM reaches: configs/efficiency.yaml, fitted to published tables."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.configs import facts, read
from trtpipe.configs.home import default_home
from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.gpu import GpuSpec

# What an engine spends besides computing and reading.
OVERHEADS = ("step_s", "layer_s", "request_s", "allreduce_s")
# Keys of a runtime in a user's file; `slower` is of earlier files, in place of the factor of each release.
OWN = (*OVERHEADS, "work", "front_s", "slower")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Efficiency of one runtime. Shares are of data-sheet figures; see `cost` for the formulas.

    Measured on single operations (docs/measurements/planner.md says where):
    products       share of dense TFLOPS in large matrix products, by SM and by type: "90.fp8"
    attention      share of dense FP16 TFLOPS in the prompt's attention, likewise
    weights        share of memory bandwidth when weights are read
    kv             share of memory bandwidth when the KV cache is read
    own_heads      8-bit values of a KV cache without grouped queries that are read, for each FP16 operation
    sharpness      exponent of the norm that joins compute and bandwidth time of a product: 1 adds them, infinity takes
                   the larger
    allreduce_s    seconds of a one-shot all-reduce over NVLink besides its bytes
    starts         factor on that by SM: GPUs of SM80 wait for one another's flags
    one_shot       share of the link's bandwidth at which a one-shot all-reduce reads
    ring_s         seconds of a ring all-reduce of two GPUs besides its bytes
    nvlink         share of the link's bandwidth in a ring all-reduce

    routing_s      seconds of a layer with experts for the kernels besides its products
    int4_s         seconds of a product with INT4 weights besides its work, by runtime and SM ("vllm 90"), 0 elsewhere:
                   the kernel that decodes them starts and ends slowly. Of vLLM 0.25 on an H100, measured whole
                   (docs/measurements/h100.md): a token of Llama 3 8B alone takes 4.24 ms, without this term 2.94, and a
                   layer has four products. The runs with 64 and 256 requests are not used
    again          exponent of the blocks of an expert's rows in the reading of its weights: 1 where each reads all
                   of them, 1/2 where blocks are computed in squares of rows and columns that share what they read, 0
                   where all blocks are computed beside one another

    Fitted to published runs:
    allreduce_share  share of an all-reduce's speed over NVLink that is left inside an engine, where ranks come at
                   different times
    pcie           share of PCIe's bandwidth in an all-reduce, by number of GPUs: a guess where nothing was measured,
                   since it depends on the host's switches and sockets
    elementwise    number of passes over a token's activations between products
    step_s         seconds of a step besides its layers
    layer_s        seconds of a layer besides its work: kernels start and end
    request_s      seconds of a step for each sequence in it: sampling and bookkeeping
    front_s        seconds from a client to the engine and back, once per request
    slower         factor on a step of this release
    ahead          1 where a step is put together while the one before runs, else 0
    activations    share of the largest layer's activations that TensorRT reserves
    runtime_gib    GiB that are used before anything is loaded
    runtimes       values that differ from the above for runtimes other than TensorRT-LLM's engines; a user's own also
                   have `work`, a factor on `slower` of every release
    releases       `slower` by runtime and release of TensorRT-LLM
    errors         by quantity, runtime, SM and type: what 8 of 10 errors of held-out figures are within
    probed         measurements by `trtpipe probe` on a card that the fit holds for, as shares of its data sheet
    """

    products: dict[str, float]
    attention: dict[str, float]
    weights: float
    kv: float
    own_heads: float
    sharpness: float
    one_shot: float
    ring_s: float
    nvlink: float
    allreduce_share: float
    pcie: dict[int, float]
    starts: dict[int, float]
    elementwise: float
    routing_s: float
    int4_s: dict[str, float]
    step_s: float
    layer_s: float
    request_s: float
    allreduce_s: float
    front_s: float
    activations: float
    runtime_gib: float
    probed: dict[str, float]
    runtimes: dict[str, dict[str, float]]
    releases: dict[str, dict[str, float]]
    errors: dict[str, dict[str, float]]
    slower: float = 1.0
    ahead: float = 0
    again: float = 0.0
    runtime: str = "tensorrt_llm"

    def of(self, runtime: str, release: str | None = None) -> Efficiency:
        """Efficiency of a runtime, in a release of TensorRT-LLM: the nearest at or before `release` that was fitted,
        else the oldest; without `release` the newest. Raises UsageError for a runtime that cannot be predicted."""
        if runtime != "tensorrt_llm" and runtime not in self.runtimes:
            known = sorted({"tensorrt_llm", *self.runtimes})
            raise UsageError(f"the speed of runtime {runtime} is not predicted", remedy=suggestion(runtime, known))
        rows = self.releases.get(runtime, {})
        slower = 1.0
        if rows:
            fitted = sorted(rows, key=_version)
            before = [one for one in fitted if release is None or _version(one) <= _version(release)]
            slower = rows[(before or fitted[:1])[-1]]
        own = dict(self.runtimes.get(runtime, {}))
        values: dict[str, Any] = {"slower": slower * own.pop("work", 1.0), **own}
        return dataclasses.replace(self, runtime=runtime, **values)

    def confidence(self, sm: int, kind: str) -> tuple[dict[str, float], bool]:
        """How far off 8 of 10 held-out figures were, as shares by quantity, and whether figures of this SM, type of
        operands and runtime were among them; where none were, twice the widest of the others."""
        wanted = {"bf16": "fp16"}.get(kind, kind)
        here = {quantity: rows.get(f"{self.runtime} {sm}.{wanted}") for quantity, rows in self.errors.items()}
        wide = {quantity: 2 * max(rows.values()) for quantity, rows in self.errors.items()}
        known = here.get("output_tokens_per_s") is not None
        return {quantity: wide[quantity] if value is None else value for quantity, value in here.items()}, known

    def product(self, sm: int, kind: str) -> float:
        """Share in matrix products for this SM, or for the nearest SM that has been measured."""
        return _nearest(self.products, sm, kind)

    def prompt(self, sm: int, kind: str) -> float:
        """Share of FP16 TFLOPS in the prompt's attention, likewise."""
        return _nearest(self.attention, sm, kind)

    def starting(self, sm: int) -> float:
        """Factor on `allreduce_s`, for this SM or the nearest that was measured."""
        return self.starts[min(self.starts, key=lambda one: (abs(one - sm), one))]

    def int4(self, sm: int) -> float:
        """Seconds of a product with INT4 weights besides its work; 0 where none was measured."""
        return self.int4_s.get(f"{self.runtime} {sm}", 0.0)

    def pcie_share(self, tp: int) -> float:
        return self.pcie[min((known for known in self.pcie if known >= tp), default=max(self.pcie))]

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
    """The shipped efficiencies, with the overheads that `trtpipe plan --calibrate` wrote. Raises ConfigError."""
    path = facts.CONFIGS / "efficiency.yaml"
    shipped = read.build(Efficiency, read.read_yaml(path), path.name)
    if not own_file().is_file():
        return shipped
    own = read.build(Own, read.read_yaml(own_file()), str(own_file()))
    for name, values in own.runtimes.items():
        read.check_keys(values, OWN, f"{own_file()}, {name}")
    rows = {name: {**shipped.runtimes.get(name, {}), **values} for name, values in own.runtimes.items()}
    return dataclasses.replace(shipped, runtimes={**shipped.runtimes, **rows})


@dataclass(frozen=True, kw_only=True)
class Own:
    """A user's efficiency.yaml."""

    runtimes: dict[str, dict[str, float]]


def own_file() -> Path:
    return default_home() / "efficiency.yaml"


def _nearest(shares: dict[str, float], sm: int, kind: str) -> float:
    wanted = {"bf16": "fp16"}.get(kind, kind)
    known = {int(key.split(".")[0]): value for key, value in shares.items() if key.endswith(f".{wanted}")}
    if not known:
        raise UsageError(f"no efficiency of {kind} is known", remedy="choose another --dtype")
    return known[min(known, key=lambda one: (abs(one - sm), one))]


def _version(release: str) -> tuple[int, ...]:
    """Numbers of a release: (1, 3, 0) of 1.3.0rc29."""
    return tuple(int(part) for part in re.findall(r"\d+", release.partition("rc")[0]))
