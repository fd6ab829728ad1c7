"""Disaggregated serving as our planner ranks it, beside AIConfigurator's ranking of the same cases."""

from __future__ import annotations

import json
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.planner.peer import SYSTEMS, write_config
from trtpipe.configs import facts
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.results.slo import parse_objective
from trtpipe.pipeline.planner.advice import Question, advise
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.disaggregation import Split, disaggregate


@dataclass(frozen=True)
class Case:
    """A model in 16 bits on up to `gpus` GPUs, lengths in tokens, objectives in ms."""

    model: str
    gpu: str
    gpus: int
    isl: int
    osl: int
    ttft: int
    tpot: int


CASES = (
    Case("llama3.1-8b", "h100", 8, 4000, 500, 600, 12),
    Case("llama3.1-8b", "h100", 8, 500, 1000, 600, 30),
    Case("llama3.1-8b", "h200", 8, 8000, 200, 2000, 20),
    Case("llama3.1-8b", "a100", 8, 2000, 500, 1000, 25),
    Case("llama3.1-70b", "h200", 8, 4000, 500, 2000, 30),
    Case("llama3.1-70b", "h200", 8, 1000, 1000, 1000, 50),
)


def splits(python: Path, scratch: Path) -> list[str]:
    """The section of the page. Their ranking is kept in SCRATCH/ranked.jsonl: half a minute for each case."""
    given, out = scratch / "splits.json", scratch / "ranked.jsonl"
    for one in CASES:
        write_config(one.model, scratch)
    wanted = [{**asdict(one), "system": SYSTEMS[one.gpu]} for one in CASES]
    given.write_text(json.dumps(wanted))
    subprocess.run([python, Path(__file__).with_name("splits_worker.py"), given, out], check=True)
    ranked = [json.loads(line) for line in out.read_text().splitlines()]
    theirs_of = [next(one for one in ranked if one["case"] == case) for case in wanted]
    lines = [
        "## Engines of their own for prompts and answers",
        "",
        "The best split of up to so many GPUs and the best engine for both, in 16 bits on the PyTorch backend, by "
        "output tokens/s of a GPU; `--disaggregated` beside AIConfigurator's ranking of the same objectives. A split "
        "is written as engines x GPUs for prompts + for answers.",
        "",
        "| model, GPUs | in / out | TTFT, TPOT ms | ours: both | split | best split | gain | AIConfigurator: both | "
        "split | best split | gain |",
        "|" + "---|" * 11,
    ]
    alike = 0
    ratios: tuple[list[float], list[float]] = [], []  # ours over theirs, of engines for both and of splits
    for case, theirs in zip(CASES, theirs_of, strict=True):
        both, split = ours(case)
        mine = [one.per_gpu * case.osl if one else None for one in (both, split)]
        other = [theirs["together"], theirs["split"]]
        for row, own, of in zip(ratios, mine, other, strict=True):
            row += [own / of] if own and of else []
        alike += _gain(*mine)[:1] == _gain(*other)[:1]
        named = "" if split is None else _ways(
            (split.prompts, split.of_prompts.tp, split.answers, split.of_answers.tp)
        )  # fmt: skip
        lines.append(
            f"| {case.model}, {case.gpus} {case.gpu} | {case.isl} / {case.osl} | {case.ttft}, {case.tpot} | "
            + " | ".join([*map(_number, mine), named, _gain(*mine), *map(_number, other)])
            + f" | {_ways(theirs['ways']) if theirs['ways'] else ''} | {_gain(*other)} |"
        )
    both_ratio, split_ratio = map(statistics.median, ratios)
    return [
        *lines, "",
        f"In {alike} of {len(CASES)} cases both say alike whether to split. The medians of ours over theirs are "
        f"{both_ratio:.2f} for engines for both and {split_ratio:.2f} for splits. Why: our requests come at random and "
        "wait, also within the objectives, where theirs are always as many at once; and it takes 10% off the "
        "prompts' side of a split and 8% off the answers' for uneven load, where ours is an upper bound. Neither was "
        "measured.",
        "",
    ]  # fmt: skip


def ours(case: Case) -> tuple[Split | None, Split | None]:
    """The best engine for both, and the best split."""
    work = Work(input_tokens=str(case.isl), output_tokens=str(case.osl))
    question = Question(
        model=case.model, shape=facts.find_shape(case.model)[1], gpus=(facts.find_gpu(case.gpu),), demand=Demand(work),
        dtypes=("bf16",), runtime="trtllm_pytorch",
        objectives=(parse_objective(f"ttft:mean<{case.ttft}ms"), parse_objective(f"tpot:mean<{case.tpot}ms")),
    )  # fmt: skip
    found = disaggregate(advise(question), case.gpus)
    return tuple(next((one for one in found if bool(one.answers) == split), None) for split in (False, True))  # type: ignore[return-value]


def _gain(both: float | None, split: float | None) -> str:
    return f"{split / both - 1:+.0%}" if both and split else "+ only" if split else "- only" if both else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _ways(ways: tuple[int, int, int, int]) -> str:
    return f"{ways[0]}x{ways[1]} + {ways[2]}x{ways[3]}"
