"""The accuracy gate: checks a comparison with the original model against the recipe's thresholds.

Of a model that came quantized the original is not at hand. What is made of it is compared with it; where it is served
as it is, its perplexity alone is told, and the gate only refuses a model that predicts no better than a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtpipe.engines.accuracy.job import Alone, LayerError, Measured, Saturation, measure, measure_alone
from trtpipe.engines.errors import StageFailed
from trtpipe.engines.precision import QuantRecipe, Thresholds
from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.pipeline.accuracy.tasks import TaskScore

__all__ = [
    "Alone", "AloneReport", "LayerError", "Measured", "Report", "Saturation", "matching_recipe", "measure",
    "measure_alone",
]  # fmt: skip

# Rows of the held-out text that the gate runs: about 2000 tokens, half a minute for a small model on a laptop.
ROWS = 8
SEQ_LEN = 256

SCHEMA = 1
JSON_NAME = "accuracy.json"
HTML_NAME = "accuracy.html"
# Number of layers and of matrices in a table of the worst.
WORST = 5


@dataclass(frozen=True, kw_only=True)
class AloneReport:
    """The measurements of a model that came quantized, without its original; or of an unquantized one."""

    recipe: str
    measured: Alone
    tasks: Sequence[TaskScore] = ()

    @property
    def plain(self) -> bool:
        """Whether nothing of the model is quantized."""
        return self.measured.quant_algo is None and self.measured.kv_cache_quant_algo is None

    @property
    def kind(self) -> str:
        return "unquantized" if self.plain else "quantized"

    @property
    def failures(self) -> list[str]:
        found = self.measured
        if found.quantized_perplexity < found.vocab_size:
            return []
        perplexity = number(found.quantized_perplexity)
        return [f"perplexity {perplexity} is that of a guess among {found.vocab_size} tokens, or worse"]

    @property
    def unjudged(self) -> list[str]:
        """Notices of tasks that would judge a drop, which two models are needed for."""
        names = dict.fromkeys(one.task for one in self.tasks if one.max_drop is not None)
        return [f"max_drop of {name} judges nothing: the model was scored alone" for name in names]

    @property
    def saturated(self) -> list[Saturation]:
        """Inputs of matrices that are partly clipped, the largest share first."""
        return clipped(self.measured.saturation)

    def line(self) -> str:
        """The result in a line, for logs and manifests."""
        perplexity = number(self.measured.quantized_perplexity)
        if self.plain:
            return f"perplexity {perplexity}; the model is not quantized, and nothing was compared with it"
        return f"perplexity {perplexity}; the model came quantized, and its original was not compared with it"

    def refusal(self, report: Path | None = None) -> StageFailed:
        """The error for a failed gate; `report` is the folder of its files, if it is kept."""
        place = f"see {report / HTML_NAME}, then " if report is not None else ""
        # A build has no gate for an unquantized model.
        accept = "" if self.plain else ", or pass --accept-accuracy to build"
        return StageFailed(
            f"the accuracy gate failed: {self.failures[0]}",
            why=f"the model came {self.kind}, like this",
            remedy=f"{place}take another revision of the model{accept}",
        )

    def summary(self) -> list[tuple[str, str]]:
        """Rows of a table: (what, value)."""
        beyond, inputs = (sum(getattr(e, name) for e in self.measured.saturation) for name in ("beyond", "inputs"))
        return [
            ("perplexity", number(self.measured.quantized_perplexity)),
            ("clipped inputs", f"{beyond:,} of {inputs:,}" if inputs else "no static scales"),
            *((f"{one.metric} of {one.task}", scored(one.quantized, one.quantized_stderr)) for one in self.tasks),
        ]

    def to_dict(self) -> dict[str, Any]:
        """accuracy.json as a value: that of a comparison, with null for what two models would be needed for.

        An unquantized model is the original.
        """
        found = {"quantized_perplexity": self.measured.quantized_perplexity, **asdict(self.measured)}
        if self.plain:
            found = {name.replace("quantized_", "original_"): value for name, value in found.items()}
        both = ("original_perplexity", "quantized_perplexity", "perplexity_ratio", "mean_kl", "p99_kl")
        return {
            "schema": SCHEMA,
            "passed": not self.failures,
            "failures": self.failures,
            "recipe": self.recipe,
            "positions": self.measured.positions,
            **dict.fromkeys((*both, "top1_agreement")),
            **found,
            **_scores(self.tasks),
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """A comparison and its verdict. `recipe` names the source of the thresholds in messages."""

    recipe: str
    thresholds: Thresholds
    measured: Measured
    tasks: Sequence[TaskScore] = ()

    @property
    def failures(self) -> list[str]:
        """The measurements that are worse than the recipe allows, a clause each."""
        found, allowed, out = self.measured, self.thresholds, []
        if found.perplexity_ratio > allowed.perplexity_ratio:
            ratio, limit = _apart(found.perplexity_ratio, allowed.perplexity_ratio, 2)
            out.append(
                f"perplexity {number(found.quantized_perplexity)} is {ratio} times the original's "
                f"{number(found.original_perplexity)}, {self.recipe} allows {limit}"
            )
        if found.mean_kl > allowed.mean_kl:
            nats, limit = _apart(found.mean_kl, allowed.mean_kl, 3)
            out.append(f"the mean KL divergence is {nats} nats, {self.recipe} allows {limit}")
        if found.top1_agreement < allowed.top1_agreement:
            share, limit = _apart(100 * found.top1_agreement, 100 * allowed.top1_agreement, 1)
            out.append(f"both prefer the same token at {share} % of positions, {self.recipe} asks for {limit} %")
        return [*out, *(one.failure for one in self.tasks if one.failure is not None)]

    @property
    def worst(self) -> list[LayerError]:
        """The most harmful layers, the worst first."""
        return self.measured.worst(WORST)

    @property
    def saturated(self) -> list[Saturation]:
        """Inputs of matrices that are partly clipped, the largest share first."""
        return clipped(self.measured.saturation)

    def line(self) -> str:
        """The result in a line, for logs and manifests."""
        found = self.measured
        return (
            f"perplexity {number(found.quantized_perplexity)}, {number(found.perplexity_ratio)} times the original's; "
            f"KL divergence {number(found.mean_kl)} nats; same first choice at {percent(found.top1_agreement)}"
        )

    def refusal(self, report: Path | None = None) -> StageFailed:
        """The error for a failed gate; `report` is the folder of its files, if it is kept."""
        layer = self.worst[0]
        worst = f"most goes wrong in layer {layer.layer}, {percent(layer.local)} of what it adds"
        place = f"see {report / HTML_NAME}, then " if report is not None else ""
        return StageFailed(
            f"the accuracy gate failed: {self.failures[0]}",
            why=worst,
            remedy=f"{place}choose another recipe or better calibration text, or pass --accept-accuracy to build",
        )

    def summary(self) -> list[tuple[str, str | None, str | None, str | None]]:
        """Rows of a table: (what, original, quantized, limit); None where there is no such value."""
        found, allowed = self.measured, self.thresholds
        beyond, inputs = (sum(getattr(e, name) for e in found.saturation) for name in ("beyond", "inputs"))
        return [
            ("perplexity", number(found.original_perplexity), number(found.quantized_perplexity), None),
            ("perplexity ratio", None, number(found.perplexity_ratio), f"at most {allowed.perplexity_ratio:g}"),
            ("KL divergence, mean, nats", None, number(found.mean_kl), f"at most {allowed.mean_kl:g}"),
            ("KL divergence, p99, nats", None, number(found.p99_kl), None),
            ("same first choice", None, percent(found.top1_agreement), f"at least {percent(allowed.top1_agreement)}"),
            ("clipped inputs", None, f"{beyond:,} of {inputs:,}" if inputs else "no static scales", None),
            *(
                (
                    f"{one.metric} of {one.task}",
                    scored(one.original or 0.0, one.original_stderr or 0.0),
                    scored(one.quantized, one.quantized_stderr),
                    None if one.max_drop is None else f"at most {one.max_drop:g} lower",
                )
                for one in self.tasks
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """accuracy.json as a value: likelihoods and divergences in nats, errors and shares as fractions."""
        found = self.measured
        return {
            "schema": SCHEMA,
            "passed": not self.failures,
            "failures": self.failures,
            "recipe": self.recipe,
            "thresholds": asdict(self.thresholds),
            "original_perplexity": found.original_perplexity,
            "quantized_perplexity": found.quantized_perplexity,
            "perplexity_ratio": found.perplexity_ratio,
            "positions": found.positions,
            "worst_layers": [layer.layer for layer in self.worst],
            **asdict(found),
            **_scores(self.tasks),
        }


def clipped(saturation: Sequence[Saturation]) -> list[Saturation]:
    """Those with clipped inputs, the largest share first."""
    return sorted((entry for entry in saturation if entry.beyond), key=lambda entry: -entry.share)


def matching_recipe(measured: Measured | Alone, recipes: Mapping[str, QuantRecipe]) -> QuantRecipe:
    """The recipe whose thresholds apply: that of the measured weights, with the measured KV cache if there is one."""
    same = [recipe for recipe in recipes.values() if recipe.quant_algo == measured.quant_algo]
    name = measured.kv_cache_quant_algo
    cache = None if name is None else KvCacheQuantAlgo(name)
    exact = next((recipe for recipe in same if recipe.kv_cache_quant_algo == cache), None)
    return exact or replace(same[0], kv_cache_quant_algo=cache)


def number(value: float) -> str:
    """Four significant digits: 27.41, 0.001234, 1.234e+12."""
    return f"{value:.4g}"


def percent(share: float) -> str:
    """Three significant digits, or an order of magnitude for less than a thousandth of a percent: 97.1 %, 0.0123 %."""
    return f"{100 * share:.3g} %"


def _scores(tasks: Sequence[TaskScore]) -> dict[str, Any]:
    """Scores for accuracy.json, which has none where no task was scored."""
    return {"tasks": [asdict(one) for one in tasks]} if tasks else {}


def scored(mean: float, stderr: float) -> str:
    """A score and its standard error."""
    return f"{mean:.4f} ± {stderr:.4f}"


def _apart(value: float, limit: float, digits: int) -> tuple[str, str]:
    """Both with so many decimals, or as many more as it takes to tell them apart."""
    if value >= 1e6:
        return f"{value:.3g}", f"{limit:.{digits}f}"
    while f"{value:.{digits}f}" == f"{limit:.{digits}f}" and digits < 15:
        digits += 1
    return f"{value:.{digits}f}", f"{limit:.{digits}f}"
