"""Toolchain: a release of TensorRT-LLM with its image, driver and flags. Builds, checkpoints and servers name one.

TensorRT-LLM does not check versions, so a toolchain pins all of them, and artefacts of another one are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtpipe.engines.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A known fault of a release, and how this project avoids it.

    setting  setting of BuildConfig with which the release fails unless it has its default; None for advice
    """

    what: str
    instead: str
    source: str
    setting: str | None = None


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Facts of a release.

    name      TensorRT-LLM's version, as an engine's config.json states it
    image     container image for building and serving
    driver    lowest NVIDIA driver that the image is documented for; older data-centre drivers need CUDA's
              forward-compatibility package
    runtimes  runtimes of this project that it serves
    flags     trtllm-build's flags for a dense Llama, each with its default; None for a flag without a default
    """

    name: str
    aliases: tuple[str, ...] = ()
    image: str
    tensorrt: str
    cuda: str
    driver: str
    python: str
    torch: str
    modelopt: str
    runtimes: tuple[str, ...]
    flags: dict[str, Any]
    defects: tuple[Defect, ...] = field(default=())
    source: str

    def supports_driver(self, version: str) -> bool:
        return version_key(version) >= version_key(self.driver)

    def require_runtime(self, runtime: str) -> None:
        """Raises UsageError when this release does not serve `runtime`."""
        if runtime not in self.runtimes:
            raise UsageError(
                f"toolchain {self.name} does not serve the runtime {runtime}",
                why=f"TensorRT-LLM {self.name} serves {' and '.join(self.runtimes)}",
                remedy="see `trtpipe toolchains`",
            )


def version_key(version: str) -> tuple[int, ...]:
    """Dotted version as numbers for comparison: 575.51.03 -> (575, 51, 3). A part that is not a number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.strip().split("."))
