"""Section of `make gpu-e2e`: what `trtpipe tune` wins over the default settings of a vLLM target."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.place import Failed, Place
from tests.benchmarks.gpu.sections import Keep

# A server takes a minute and more to start: the target as it is and some changes.
DTYPE, MINUTES = "fp8", 10.0
OBJECTIVES = ("ttft:p99<500ms", "itl:p99<50ms")
INPUT, OUTPUT = "normal:256,64", "128"


def tune(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """The search, and what it measured."""
    run = place.build(model, DTYPE, "vllm")
    slo = [word for one in OBJECTIVES for word in ("--slo", one)]
    with suppress(Failed):  # a search without an answer has its record too
        place.trtpipe(
            "tune", run.name, *slo, "--minutes", f"{MINUTES:g}", "--input-tokens", INPUT, "--output-tokens", OUTPUT,
            "--engine-python", place.engine_python,
        )  # fmt: skip
    (found,) = run.glob("tune/*/tune.json")
    study = json.loads(found.read_text(encoding="utf-8"))
    kept = ("candidate", "round", "seconds", "start_s", "rate", "told")
    runs = [{**{name: one[name] for name in kept}, "best": _best(one)} for one in study["runs"]]
    told = {name: study[name] for name in ("said", "state", "winner", "not_measured")}
    out.update(**told, minutes=MINUTES, dtype=DTYPE, runs=runs)
    place.forget()


def _best(run: dict[str, Any]) -> dict[str, Any]:
    """The load point of the highest rate that met the objectives; empty for none."""
    return max((one for one in run["points"] if one["met"]), key=lambda one: one["rate"] or 0.0, default={})
