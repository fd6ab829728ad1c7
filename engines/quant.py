"""Which precision runs where, and why.

`QuantAlgo` names are TensorRT-LLM's. The SM rules are those its builder enforces.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engines.base import DataType
from engines.errors import UsageError, suggestion
from engines.gpu import GpuSpec


class QuantAlgo(str, enum.Enum):
    """Quantization algorithms a TensorRT-LLM checkpoint of a dense Llama can name."""

    FP8 = "FP8"
    FP8_PER_CHANNEL_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A16 = "W8A16"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"


class KvCacheQuantAlgo(str, enum.Enum):
    """How a checkpoint says that keys and values are stored in the cache."""

    FP8 = "FP8"
    INT8 = "INT8"


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What a checkpoint says about its quantization; both algorithms None when there is none.

    group_size  input features that share a scale, where the algorithm has groups
    """

    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: KvCacheQuantAlgo | None = None
    group_size: int = 128

    @property
    def packed(self) -> bool:
        """Whether weights are 4-bit codes, two to a byte, with a scale for each group."""
        return self.quant_algo in (QuantAlgo.W4A16_AWQ, QuantAlgo.W4A8_AWQ)

    @property
    def pre_quant_scale(self) -> bool:
        """Whether a linear's input is multiplied by a vector before it meets the weight."""
        return self.packed or self.quant_algo is QuantAlgo.W8A8_SQ_PER_CHANNEL


UNQUANTIZED = Quantization()


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A resolved precision: element type of the checkpoint, and why it was chosen."""

    name: str
    dtype: DataType
    reason: str


# What --dtype takes. Short names are the command line's, long ones the checkpoint's.
FLOAT_NAMES = {
    "bf16": DataType.BFLOAT16,
    "bfloat16": DataType.BFLOAT16,
    "fp16": DataType.FLOAT16,
    "float16": DataType.FLOAT16,
    "fp32": DataType.FLOAT32,
    "float32": DataType.FLOAT32,
}
SHORT_NAMES = {DataType.BFLOAT16: "bf16", DataType.FLOAT16: "fp16", DataType.FLOAT32: "fp32"}
QUANTIZED_NAMES = ("fp8", "int8")


def resolve_precision(requested: str, gpu: GpuSpec) -> Precision:
    """Turn --dtype into a Precision for `gpu`. Raises UsageError; never replaces what was asked for.

    `auto` takes the widest-range 16-bit type the device supports: bfloat16 from SM80 on and on the CPU.
    """
    if gpu.sm is not None and gpu.sm < 80:
        raise UsageError(
            f"{gpu.describe()} cannot run TensorRT-LLM engines",
            why="releases since 0.16 support SM80 and newer",
            remedy="choose a GPU listed by `trtpipe gpus`",
        )
    if requested == "auto":
        where = "the CPU computes" if gpu.sm is None else f"SM{gpu.sm} is at least SM80 and computes"
        return Precision(name="bf16", dtype=DataType.BFLOAT16, reason=f"auto: {where} bfloat16")
    if requested in QUANTIZED_NAMES:
        if requested == "fp8" and gpu.sm is not None and gpu.sm < 89:
            raise UsageError(
                f"fp8 needs SM89 or newer, {gpu.describe()} has none",
                remedy="use --dtype bf16 here, or a GPU with FP8 such as l40s or h100",
            )
        raise UsageError(
            f"--dtype {requested} is not available in this release",
            why="it writes unquantized checkpoints only",
            remedy="use --dtype bf16, fp16 or fp32",
        )
    dtype = parse_float(requested)
    return Precision(name=SHORT_NAMES[dtype], dtype=dtype, reason="requested")


def parse_float(name: str) -> DataType:
    """The unquantized type of that short or long name. Raises UsageError offering the nearest spelling."""
    if name not in FLOAT_NAMES:
        raise UsageError(f"unknown dtype '{name}'", remedy=suggestion(name, ["auto", *FLOAT_NAMES, *QUANTIZED_NAMES]))
    return FLOAT_NAMES[name]
