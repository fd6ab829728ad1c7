"""What getting to a deployment costs: seconds of download, calibration, accuracy gate and build, each from what the
stage took on this machine, or estimated.

Estimates, whose sources are in docs/planning.md:

    download   the model's bytes over a link of 200 MB/s
    calibrate  forward passes over 512 samples of 512 tokens at 1.5 times the time of their products, and reading the
               model at 4 GB/s; a search of scales (AWQ) takes 125 times the products
    write      the model read and the checkpoint written, at 1 GB/s: conversion, or quantization
    verify     8 rows of 256 tokens by the model and by its checkpoint, likewise, reading both at 4 GB/s
    build      of an engine: 30 s for each rank and 1.1 s for each GB of weights

A stage that was recorded counts by its rate in bytes: of artefacts between a quarter of and four times the size, the
newest; a build only if it was for the same GPU and runtime.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.base import CalibrationConfig, Mapping
from trtpipe.engines.checkpoint.memory import checkpoint_bytes
from trtpipe.engines.quantization import UNQUANTIZED
from trtpipe.pipeline.planner.predict import Option, quantization
from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store

LINK, READ, WRITE = 200e6, 4e9, 1e9
# Time of calibration over that of its products: forward passes alone, and a search of scales.
PASSES, SEARCH = 1.5, 125.0
VERIFIED_TOKENS = 8 * 256
RANK_SECONDS, BUILD_SECONDS_PER_GB = 30.0, 1.1
# Sizes that are alike, as a factor.
ALIKE = 4.0
# Stages whose time depends on bytes more than on the machine's GPU.
RECORDED = ("download", "convert", "quantize", "build")


@dataclass(frozen=True, kw_only=True)
class Took:
    """A stage that ran on this machine, from its artefact's manifest."""

    stage: str
    seconds: float
    size: int
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Seconds of one stage, and whether they come from an earlier run on this machine."""

    stage: str
    seconds: float
    recorded: bool


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Stages before a deployment, and their price, where that of a GPU is known: its engine's GPUs are paid from the
    download on."""

    parts: tuple[Part, ...]
    hourly: float | None

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def money(self) -> float | None:
        return None if self.hourly is None else self.hourly * self.seconds / 3600

    def describe(self) -> str:
        parts = ", ".join(
            f"{part.stage} {duration(part.seconds)}{' (as it took here)' if part.recorded else ''}"
            for part in self.parts
        )
        money = "" if self.money is None else f" and {amount(self.money)}"
        return f"about {duration(self.seconds)}{money}: {parts}"

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "cost": self.money, "stages": [vars(part) for part in self.parts]}


def amount(money: float | None) -> str:
    """A price with two decimals, and with more where those would show fewer than two digits of it."""
    money = money or 0.0
    decimals = 2 if money <= 0 else max(2, 1 - math.floor(math.log10(money)))
    return f"{money:.{decimals}f}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# Options have the same checkpoints, and each time all their tensors are listed.
_checkpoint_bytes = functools.lru_cache(maxsize=256)(checkpoint_bytes)


def recorded(home: Path) -> tuple[Took, ...]:
    """Stages that ran on this machine, the newest first. An artefact whose manifest cannot be read is left out."""
    found: list[tuple[str, Took]] = []
    for folder in Store(home).artefacts():
        if folder.parent.name not in RECORDED:
            continue
        made = read_manifest(folder / "manifest.json")
        if made is not None and made.origin is None and made.seconds > 0 and made.size > 0:
            took = Took(stage=made.record.stage, seconds=made.seconds, size=made.size, settings=made.record.settings)
            found.append((made.started, took))
    return tuple(took for _, took in sorted(found, key=lambda one: one[0], reverse=True))


def preparation(
    option: Option, runtime: str, *, stored: bool, hourly: float | None, took: Sequence[Took] = ()
) -> Preparation:
    """From nothing to an engine of `option`. `stored` is a model that came quantized: it is neither calibrated nor
    compared. `hourly` is the price of the option's GPUs together."""
    model, precision, tp = option.model, option.precision, option.tp
    coded = quantization(precision)
    checkpoint = _checkpoint_bytes(model, precision.dtype, option.mapping, coded)
    source = checkpoint if stored else _checkpoint_bytes(model, precision.dtype, Mapping(), UNQUANTIZED)
    # Seconds of a token: one GPU computes all layers, in 16 bits.
    counts, how, gpu = option.cost.counts, option.cost.efficiency, option.gpu
    assert gpu.sm is not None
    products = 2 * counts.parameters * tp / (how.flops(gpu, counts.kind16) * how.product(gpu.sm, counts.kind16))

    def part(stage: str, size: int, estimate: float, **settings: Any) -> Part:
        for one in took:
            alike = one.stage == stage and size / ALIKE <= one.size <= size * ALIKE
            if alike and all(one.settings.get(key) == value for key, value in settings.items()):
                return Part(stage=stage, seconds=one.seconds * size / one.size, recorded=True)
        return Part(stage=stage, seconds=estimate, recorded=False)

    parts = [part("download", source, source / LINK)]
    quantized = coded.quant_algo is not None and not stored
    if quantized and coded.calibrated:
        usual = CalibrationConfig()
        passes = SEARCH if coded.quant_algo is not None and coded.quant_algo.row.passes > 1 else PASSES
        work = usual.samples * usual.seq_len * products * passes
        parts.append(Part(stage="calibrate", seconds=work + source / READ, recorded=False))
    compiled = load_backend(runtime).COMPILED
    if quantized or compiled:
        writing = source / READ + checkpoint / WRITE
        parts.append(part("quantize" if quantized else "convert", checkpoint, writing))
    if quantized:
        gate = 2 * VERIFIED_TOKENS * products * PASSES + (source + checkpoint) / READ
        parts.append(Part(stage="verify", seconds=gate, recorded=False))
    if compiled:
        building = RANK_SECONDS * tp + BUILD_SECONDS_PER_GB * checkpoint / 1e9
        parts.append(part("build", checkpoint, building, gpu=gpu.name, runtime=runtime))
    return Preparation(parts=tuple(parts), hourly=hourly)
