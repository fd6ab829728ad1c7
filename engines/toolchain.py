"""A toolchain: one release of TensorRT-LLM and all that belongs to it. Builds, checkpoints and servers name one.

TensorRT-LLM checks no version itself, so the whole tuple is pinned, and what was made by another one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtpipe.engines.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A known fault of a release, and how this project steers around it.

    setting  a setting of BuildConfig that the release fails on when it is not at its default; None for advice
    """

    what: str
    instead: str
    source: str
    setting: str | None = None


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Facts of a release.

    name      TensorRT-LLM's version, as an engine's config.json says it
    image     container image that both builds and serves
    driver    the lowest NVIDIA driver the image is documented for; older data-centre drivers need CUDA's
              forward-compatibility package
    runtimes  which of our runtimes it serves
    flags     trtllm-build's flags that concern a dense Llama, each with its default; None where it has none
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
    """A dotted version as numbers, for comparing: 575.51.03 -> (575, 51, 3). What is no number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.strip().split("."))
