"""Prediction of which GPUs serve a model, how fast and at what cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.pipeline.api.arguments import checked

if TYPE_CHECKING:
    from trtpipe.pipeline.planner.advice import Advice
    from trtpipe.pipeline.planner.against import Comparison

# GPUs that are compared by default: those that data centres rent out.
USUAL = ("a100", "l40s", "h100", "h200", "h20")


@checked
def plan(
    model: str | Path, *, gpu: str | Sequence[str] = USUAL, dtype: str | Sequence[str] = "auto",
    kv_cache: str | None = None, group_size: int | None = None, tp: int | Sequence[int] = (),
    runtime: str = "tensorrt_llm", load: str | Path | None = None, input_tokens: int | str | None = None,
    output_tokens: int | str | None = None, rate: float | None = None, slo: str | Sequence[str] = (),
    price: Mapping[str, float] | None = None, reuse: bool = False, toolchain: str | None = None,
    adapters: int | None = None, adapter_rank: int | None = None, moe_tp: int | Sequence[int] = (),
    moe_ep: int | Sequence[int] = (),
) -> Advice:  # fmt: skip
    """Compare GPUs, precisions and tensor parallelism for serving a model; nothing is downloaded.

    model          a name of `trtpipe models`, or a folder
    gpu            names of `trtpipe gpus`
    dtype          auto, bf16, fp16, or quantization recipes such as fp8
    group_size     number of input features that share a scale (AWQ): 64 or 128
    tp             GPUs of one engine; 1, 2, 4 and 8 if empty
    load           load of configs/load, or a YAML file, for its lengths
    input_tokens, output_tokens  lengths: 512, or a distribution such as "lognormal:128,0.5"
    rate           clients per second to serve; sizes the number of GPUs
    slo            objectives: "ttft:500ms", "tpot:mean<50ms"
    price          price of one GPU per hour, by name of a GPU that is compared
    reuse          whether the KV cache of shared prefixes is reused
    toolchain      release of TensorRT-LLM; the default one if None
    adapters       LoRA adapters of `adapter_rank`, 16 if None, that are in the GPU's memory at once
    moe_tp, moe_ep  of a model with experts: GPUs that divide each expert, groups of GPUs that divide the experts

    Returns candidates, the best first; one without `best` cannot serve this, and `reason` says why. Raises UsageError.
    """
    import dataclasses

    from trtpipe.configs import facts
    from trtpipe.configs.home import default_home
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.bench.load.files import find_load
    from trtpipe.pipeline.bench.load.work import Work
    from trtpipe.pipeline.bench.results.slo import parse_objective
    from trtpipe.pipeline.planner.advice import Question, advise
    from trtpipe.pipeline.planner.demand import Demand
    from trtpipe.pipeline.planner.judgement import SHORTER_LOAD
    from trtpipe.pipeline.planner.memory import Adapters
    from trtpipe.pipeline.planner.preparation import recorded

    if adapter_rank is not None and adapters is None:
        raise UsageError("--adapter-rank is for --adapters", remedy="give both")
    rank = 16 if adapter_rank is None else adapter_rank
    name, shape = facts.find_shape(str(model))
    work = find_load(str(load)).work if load else Work(input_tokens="512", output_tokens="256")
    asked = {"--input-tokens": input_tokens, "--output-tokens": output_tokens}
    lower = " or ".join(option for option, given in asked.items() if given is not None)
    shorter = f"lower {lower}" if lower else SHORTER_LOAD if load else f"give {' and '.join(asked)}"
    if input_tokens is not None:
        work = dataclasses.replace(work, input_tokens=str(input_tokens))
    if output_tokens is not None:
        work = dataclasses.replace(work, output_tokens=str(output_tokens))
    gpus, dtypes = tuple(facts.find_gpu(name) for name in _several(gpu)), _several(dtype)
    tps, moe_tps, moe_eps = (tuple(one) if isinstance(one, Collection) else (one,) for one in (tp, moe_tp, moe_ep))
    compared: dict[str, Sequence[object]] = {
        "gpu": [one.name for one in gpus], "dtype": dtypes, "tp": tps, "moe-tp": moe_tps, "moe-ep": moe_eps,
    }  # fmt: skip
    for option, several in compared.items():
        twice = next((one for one in several if several.count(one) > 1), None)
        if twice is not None:
            raise UsageError(f"--{option} names {twice} more than once", remedy="name it once")
    question = Question(
        model=name, shape=shape, stored=facts.find_model(str(model), source=None, revision=None).stored,
        gpus=gpus, demand=Demand(work, reuse=reuse), dtypes=dtypes, kv_cache=kv_cache, group_size=group_size,
        tps=tps, moe_tps=moe_tps, moe_eps=moe_eps, rate=rate, runtime=runtime,
        release=facts.find_toolchain(toolchain).name,
        objectives=tuple(parse_objective(one) for one in _several(slo)),
        took=recorded(default_home()),
        adapters=None if adapters is None else Adapters(number=adapters, rank=rank),
        prices=_prices(price or {}, [one.name for one in gpus]), shorter=shorter,
    )  # fmt: skip
    return advise(question)


def against(file: Path, *, calibrate: bool = False) -> tuple[Comparison, Path | None]:
    """The planner beside the measured runs of a CSV file; with `calibrate` overheads are refitted to them first and
    kept in efficiency.yaml of TRTPIPE_HOME, whose path is returned too.

    Raises InputDataError for a bad table, UsageError and HostError.
    """
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.planner import against as compared
    from trtpipe.pipeline.planner.efficiency import load_efficiency
    from trtpipe.pipeline.planner.measured_runs import read

    figures = read(file)
    kept = compared.write(compared.calibrate(figures, load_efficiency())) if calibrate else None
    found = compared.compare(figures, load_efficiency())
    if not found.predicted:
        why = found.refused[0][1] if found.refused else "it has no rows"
        raise UsageError(f"no run of {file} can be planned", why=why)
    return found, kept


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _prices(given: Mapping[str, float], compared: Sequence[str]) -> dict[str, float]:
    """Prices by GPU. Raises UsageError for none, and for a GPU that is not compared or has two prices."""
    from trtpipe.configs import facts
    from trtpipe.engines.errors import UsageError

    prices: dict[str, float] = {}
    for word, price in given.items():
        name = facts.find_gpu(word).name
        if name not in compared:
            raise UsageError(
                f"--price {word} is of a GPU that is not compared", remedy=f"add it to --gpu {','.join(compared)}"
            )
        if name in prices:
            raise UsageError(f"--price {word} is given more than once", why=f"it is {name}", remedy="give it once")
        if not 0 < price < 1e6:
            raise UsageError(
                f"--price {word}={price:g} is not a price", remedy="write for example h100=2.5, of one GPU an hour"
            )
        prices[name] = price
    return prices
