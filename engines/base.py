"""Types that stages exchange: artefacts, each a path with its facts, and the settings of a step.

All types are frozen and keyword-only and hold plain data. A setting is declared once, with its default;
the YAML reader and the command line compose these types and never repeat a field.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import UsageError


class DataType(str, enum.Enum):
    """Element types of weights and activations, under TensorRT-LLM's names."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        return 4 if self is DataType.FLOAT32 else 2

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120, "float32": 2.0**128 - 2.0**104}[self.value]


def divisors(number: int) -> list[int]:
    """Divisors of a number, ascending."""
    return [one for one in range(1, number + 1) if number % one == 0]


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Tensor and pipeline parallelism of a model: `rank = pp_rank * tp_size + tp_rank`.

    moe_ep_size  groups into which the tensor-parallel ranks divide a layer's experts; within a group of
                 `moe_tp_size` ranks each expert is divided. Everything but experts is divided by tp_size
    """

    tp_size: int = 1
    pp_size: int = 1
    moe_ep_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.pp_size < 1:
            raise UsageError(
                f"tp_size {self.tp_size} and pp_size {self.pp_size} must both be at least 1",
                remedy="pass --tp and --pp as positive numbers",
            )
        if self.moe_ep_size < 1 or self.tp_size % self.moe_ep_size:
            ep, fitting = self.moe_ep_size, ", ".join(map(str, divisors(self.tp_size)))
            raise UsageError(
                f"moe_ep_size {ep} does not divide tp_size {self.tp_size}",
                why="the tensor-parallel ranks share the experts",
                remedy=f"--moe-ep values that divide --tp {self.tp_size}: {fitting}"
                + (f"; or, if {ep} divides the number of experts, give a multiple of {ep} as --tp" if ep > 1 else ""),
            )

    @classmethod
    def of(cls, tp: int, pp: int, moe_tp: int | None = None, moe_ep: int | None = None) -> Mapping:
        """Mapping for two sizes of the experts' parallelism, whose product is tp; the one left out follows."""
        if moe_tp is None:
            return cls(tp_size=tp, pp_size=pp, moe_ep_size=1 if moe_ep is None else moe_ep)
        if moe_tp < 1 or tp % moe_tp or moe_ep not in (None, tp // moe_tp):
            product = f"moe_tp_size {moe_tp}" + ("" if moe_ep is None else f" times moe_ep_size {moe_ep}")
            raise UsageError(
                f"{product} does not make tp_size {tp}",
                why="the tensor-parallel ranks share the experts",
                remedy="give --moe-tp and --moe-ep numbers whose product is --tp",
            )
        return cls(tp_size=tp, pp_size=pp, moe_ep_size=tp // moe_tp)

    def describe(self) -> str:
        """In words: `tp 2 and pp 1`."""
        experts = f", with {self.moe_ep_size} groups of experts" if self.moe_ep_size > 1 else ""
        return f"tp {self.tp_size} and pp {self.pp_size}{experts}"

    @property
    def moe_tp_size(self) -> int:
        return self.tp_size // self.moe_ep_size

    def moe_ranks(self, tp_rank: int) -> tuple[int, int]:
        """(moe_tp_rank, moe_ep_rank) of a tensor-parallel rank: neighbours hold different experts."""
        return divmod(tp_rank, self.moe_ep_size)

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def rank(self, *, tp_rank: int, pp_rank: int) -> int:
        return pp_rank * self.tp_size + tp_rank

    def layers(self, num_hidden_layers: int) -> list[range]:
        """Layers of each pipeline stage; the first stages get one layer of the remainder each.

        TensorRT-LLM 1.x splits the layers this way (0.17 and older drop the remainder silently).
        """
        base, extra = divmod(num_hidden_layers, self.pp_size)
        out: list[range] = []
        start = 0
        for pp_rank in range(self.pp_size):
            stop = start + base + (1 if pp_rank < extra else 0)
            out.append(range(start, stop))
            start = stop
        return out


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Calibration samples of a model.

    data     calibration dataset: a name of configs/calibration, or a path to a .txt or .jsonl file
    samples  number of rows
    seq_len  tokens per row
    seed     seed of the order of the texts
    """

    data: str = "cnn_dailymail"
    samples: int = 512
    seq_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            raise UsageError("calibration.data is empty", remedy="name a data set or a .txt or .jsonl file")
        for name in ("samples", "seq_len"):
            if getattr(self, name) < 1:
                raise UsageError(f"calibration.{name} is {getattr(self, name)}", remedy="give a positive number")
        if self.seed < 0:
            raise UsageError(f"calibration.seed is {self.seed}", remedy="give 0 or a positive number")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Input of an engine build: a TensorRT-LLM checkpoint folder (config.json and rank{N}.safetensors), or a Hugging
    Face folder for the runtimes that read one."""

    path: Path


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine folder with passport.json, and either config.json ({version, pretrained_config, build_config}) and rank
    files, or a Hugging Face folder and its settings file."""

    path: Path
