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
class Sampler:
    """Default sampler of a release's LLM API: which options it ignores, and the arguments that choose another.

    ignores  sampling options, as SamplingParams names them, that it accepts without an effect
    instead  arguments of `LLM` that choose the sampler with all options, which does not draft; empty without one
    drawn_log_probs  whether it gives the log-probability of a token that it draws, and not of the likeliest alone
    guided_drafts  whether guided decoding goes with drafts; where it does not, `LLM` does not start with both
    """

    ignores: tuple[str, ...] = ()
    instead: dict[str, Any] = field(default_factory=dict)
    drawn_log_probs: bool = True
    guided_drafts: bool = True

    @property
    def draws(self) -> bool:
        """Whether it draws tokens at all, and does not take the likeliest whatever is asked."""
        return "temperature" not in self.ignores


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Facts of a release; None for what is not known of it.

    name      TensorRT-LLM's version, as an engine's config.json states it
    image     container image for building and serving
    driver    lowest NVIDIA driver that the image is documented for; older data-centre drivers need CUDA's
              forward-compatibility package
    runtimes  runtimes of this project that it serves
    flags     trtllm-build's flags for a dense Llama, each with its default; None for a flag without a default. Empty
              for a release without engines
    formats   of the LLM API: algorithm of `QuantAlgo` -> SMs that run it; an algorithm that is absent runs nowhere
    cache_formats  of the LLM API: algorithm of `KvCacheQuantAlgo` -> SMs that run it
    architectures  model architectures that the LLM API runs, as far as this project reads them
    sampler   of the LLM API
    """

    name: str
    aliases: tuple[str, ...] = ()
    image: str | None
    tensorrt: str | None
    cuda: str | None
    driver: str | None
    python: str | None
    torch: str | None
    modelopt: str | None
    runtimes: tuple[str, ...]
    flags: dict[str, Any]
    formats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cache_formats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    sampler: Sampler = field(default_factory=Sampler)
    defects: tuple[Defect, ...] = field(default=())
    source: str

    def supports_driver(self, version: str) -> bool:
        """Whether a driver is new enough, or nothing is known against it."""
        return self.driver is None or version_key(version) >= version_key(self.driver)

    def require_runtime(self, runtime: str) -> None:
        """Raises UsageError when this release does not serve `runtime`."""
        if runtime in self.runtimes:
            return
        if runtime == "tensorrt_llm":
            raise UsageError(
                f"TensorRT-LLM {self.name} builds no engines",
                why="they ended with 1.2; newer releases keep the LLM API alone",
                remedy=f"build with --runtime {self.runtimes[0]}, have `trtpipe migrate` carry a target over, or stay "
                "with --toolchain 1.2",
            )
        raise UsageError(
            f"toolchain {self.name} does not serve the runtime {runtime}",
            why=f"TensorRT-LLM {self.name} serves {' and '.join(self.runtimes)}",
            remedy="see `trtpipe toolchains`",
        )


def version_key(version: str) -> tuple[int, ...]:
    """Dotted version as numbers for comparison: 575.51.03 -> (575, 51, 3). A part that is not a number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.strip().split("."))
