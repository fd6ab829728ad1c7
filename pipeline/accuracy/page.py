"""Accuracy report as files: JSON, and one self-contained HTML page that needs neither network nor script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.accuracy.job import LayerError
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.accuracy.gate import HTML_NAME, JSON_NAME, Report, number, percent
from trtpipe.pipeline.pages import render as pages
from trtpipe.pipeline.pages.axes import round_step
from trtpipe.pipeline.store.folders import write_whole

# Sizes of the plot, in CSS pixels.
HEIGHT = 220
LEFT = 56
TOP = 12
BOTTOM = 40
BAR = 8
GAP = 2
# Space between the bars of two layers.
SPACE = 8
NARROWEST = 640
# Least space for a label: with one under every layer, labels would run into each other.
LABEL_WIDTH = 24
TICKS = 5


@dataclass(frozen=True)
class Tick:
    """A line across the plot; `y` in pixels from the top."""

    y: float
    text: str


@dataclass(frozen=True)
class Group:
    """A layer's two bars: pixels from the left, and their tops and heights."""

    layer: LayerError
    local_x: float
    accumulated_x: float
    local_height: float
    accumulated_height: float
    label: bool

    @property
    def center(self) -> float:
        return self.accumulated_x - GAP / 2


@dataclass(frozen=True)
class Chart:
    """Layout of the plot."""

    width: int
    ticks: tuple[Tick, ...]
    groups: tuple[Group, ...]
    height: int = TOP + HEIGHT + BOTTOM
    left: int = LEFT
    base: int = TOP + HEIGHT
    bar: int = BAR


def write(report: Report, folder: Path) -> None:
    """Write accuracy.json and accuracy.html into `folder`, which is made if need be. Raises HostError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / JSON_NAME, json.dumps(report.to_dict(), indent=4, allow_nan=False) + "\n")
        write_whole(folder / HTML_NAME, render(report))
    except OSError as error:
        raise HostError(
            f"the accuracy report cannot be written to {folder}",
            why=error.strerror or str(error),
            remedy="give another place for it",
        ) from None


def render(report: Report) -> str:
    """The page for a report."""
    return pages.render(
        "accuracy.html.j2", report=report, measured=report.measured, chart=chart(report.measured.layers),
        number=number, percent=percent,
    )  # fmt: skip


def chart(layers: Sequence[LayerError]) -> Chart:
    """Lay out the bars of `layers` on one scale that starts at 0."""
    step, top = scale(max(max(layer.local, layer.accumulated) for layer in layers))
    pitch = max(2 * BAR + GAP + SPACE, (NARROWEST - LEFT) / len(layers))
    every = math.ceil(LABEL_WIDTH / pitch)
    groups = []
    for place, layer in enumerate(layers):
        x = LEFT + (place + 0.5) * pitch
        local, accumulated = layer.local / top * HEIGHT, layer.accumulated / top * HEIGHT
        groups.append(Group(layer, x - GAP / 2 - BAR, x + GAP / 2, local, accumulated, label=place % every == 0))
    count = round(top / step)
    ticks = (Tick(TOP + HEIGHT * (1 - i / count), f"{100 * i * step:.3g} %") for i in range(count + 1))
    return Chart(math.ceil(LEFT + pitch * len(layers)), tuple(ticks), tuple(groups))


def scale(largest: float) -> tuple[float, float]:
    """(distance of ticks, top of the scale): the distance is 1, 2 or 5 times a power of ten."""
    # Equal models have no errors, but the plot still needs a scale.
    wanted = max(largest, 1e-6) / TICKS
    step = round_step(wanted)
    return step, step * math.ceil(max(largest, 1e-6) / step * (1 - 1e-9))
