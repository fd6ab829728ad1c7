"""The types that flow between stages: a path plus what is true of it, and the settings of each step.

All are frozen and keyword-only and hold plain data. A setting is declared here once, with its default;
the YAML reader and the command line compose these types and never repeat a field.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engines.errors import UsageError
from engines.gpu import GpuSpec


class DataType(str, enum.Enum):
    """Element types of weights and activations, spelt as TensorRT-LLM spells them."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        return 4 if self is DataType.FLOAT32 else 2


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """How a model is spread over ranks: `rank = pp_rank * tp_size + tp_rank`."""

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
        """Layers of each pipeline stage; a remainder goes to the first stages, one layer each.

        TensorRT-LLM 1.x splits so (0.17 and older drop the remainder without a word).
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
class BuildConfig:
    """Limits fixed when an engine is built. Names and meanings are trtllm-build's.

    max_batch_size    requests that may be in flight in one step
    max_input_len     tokens of the longest prompt
    max_seq_len       tokens of prompt and output together
    max_num_tokens    tokens in one step, over all requests; sets activation memory and the prompt chunk
    tokens_per_block  tokens in one block of the paged KV cache; a power of two
    max_beam_width    beams per request

    Every size has a value here: upstream's deduced ones (131072 tokens, 2048 requests) do not fit most cards.
    """

    max_batch_size: int = 64
    max_input_len: int = 1024
    max_seq_len: int = 2048
    max_num_tokens: int = 2048
    tokens_per_block: int = 32
    max_beam_width: int = 1

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width"):
            if getattr(self, name) < 1:
                raise UsageError(f"build.{name} is {getattr(self, name)}", remedy="give a positive number")
        if self.tokens_per_block < 1 or self.tokens_per_block & (self.tokens_per_block - 1):
            raise UsageError(
                f"build.tokens_per_block is {self.tokens_per_block}", remedy="give a power of two, such as 32"
            )
        if self.max_input_len >= self.max_seq_len:
            raise UsageError(
                f"build.max_input_len {self.max_input_len} leaves no room for output "
                f"within build.max_seq_len {self.max_seq_len}",
                remedy="raise build.max_seq_len or lower build.max_input_len",
            )
        if self.max_num_tokens < self.tokens_per_block:
            raise UsageError(
                f"build.max_num_tokens {self.max_num_tokens} is below build.tokens_per_block {self.tokens_per_block}",
                remedy="raise build.max_num_tokens",
            )
        if self.max_num_tokens < self.max_batch_size * self.max_beam_width:
            raise UsageError(
                f"build.max_num_tokens {self.max_num_tokens} is below build.max_batch_size {self.max_batch_size} "
                f"times build.max_beam_width {self.max_beam_width}: a full batch could not decode in one step",
                remedy="raise build.max_num_tokens or lower build.max_batch_size",
            )


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Which samples calibrate a model.

    data     a name of configs/calibration, or a path to a .txt or .jsonl file
    samples  rows
    seq_len  tokens in each row
    seed     decides the order of the texts
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
    """A TensorRT-LLM checkpoint folder: config.json and rank{N}.safetensors."""

    path: Path


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine folder: config.json ({version, pretrained_config, build_config}), rank files, passport.json."""

    path: Path


class EngineBackend(Protocol):
    """What a runtime must offer the build stage. Implementations are modules named in `engines.BACKENDS`."""

    def tool_versions(self) -> dict[str, str]:
        """Versions that the engine's bytes depend on; part of the artefact's key."""

    def check(self, gpu: GpuSpec, mapping: Mapping, build: BuildConfig) -> None:
        """Refuse what cannot work, before anything is downloaded. Raises UsageError."""

    def build(self, checkpoint: Checkpoint, out: Path, build: BuildConfig, gpu: GpuSpec, log: Path) -> Engine:
        """Write the engine folder, without its passport, into the existing empty folder `out`."""
