"""What a proof found on one machine: for each precision its steps, and the speed beside the plan's; as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trtpipe.engines.short_repr import short_repr

SCHEMA = "trtpipe.proof/1"
JSON_NAME, HTML_NAME = "proof.json", "proof.html"
# The step that compares answers with the reference runtime's.
ANSWERS = "reference text"
State = Literal["held", "failed", "left out"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a precision's way. `told` is what was found, or why it failed; `log` the end of the logs then."""

    name: str
    state: State
    seconds: float
    told: str
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured speed at a number of requests in flight, and the plan's; None where nothing is predicted."""

    concurrency: int
    tokens_per_s: float
    ttft_ms: float
    predicted_tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One precision of the model."""

    dtype: str
    target: str
    steps: tuple[Step, ...]
    speeds: tuple[Speed, ...] = ()

    @property
    def held(self) -> bool:
        return all(step.state != "failed" for step in self.steps)

    @property
    def compared(self) -> bool:
        """Whether `prove` compared answers of this precision with those of the reference runtime."""
        return any(step.name == ANSWERS and step.state != "left out" for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A whole report.

    machine  what the figures depend on: system, processor, GPU, driver, versions
    refused  precisions that this GPU or runtime does not run, and why
    named    whether the user named the precisions: then one that is refused has failed
    """

    __repr__ = short_repr("model", "runtime", "date")

    version: str
    date: str
    machine: Mapping[str, str]
    model: str
    runtime: str
    lanes: tuple[Lane, ...]
    refused: Mapping[str, str]
    named: bool = False

    @property
    def caution(self) -> str:
        """A warning that the reference runtime was compared with itself. Empty for another runtime, and where no
        answers were compared."""
        if self.runtime != "reference" or not any(lane.compared for lane in self.lanes):
            return ""
        return (
            "the reference runtime was compared with itself, served twice: this shows that its answers repeat, not "
            "that they are right; --runtime vllm or tensorrt_llm compares another runtime with it"
        )

    @property
    def held(self) -> bool:
        failed = self.named and bool(self.refused)
        return bool(self.lanes) and not failed and all(lane.held for lane in self.lanes)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "held": self.held, "caution": self.caution, **asdict(self)}
