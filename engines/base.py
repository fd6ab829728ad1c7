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


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Tensor and pipeline parallelism of a model: `rank = pp_rank * tp_size + tp_rank`."""

    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.pp_size < 1:
            raise UsageError(
                f"tp_size {self.tp_size} and pp_size {self.pp_size} must both be at least 1",
                remedy="pass --tp and --pp as positive numbers",
            )

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
