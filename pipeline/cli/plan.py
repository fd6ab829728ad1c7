"""`trtpipe plan`: turns the command line into a question for the planner."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from trtpipe.pipeline.api.plan import USUAL
from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.help import in_section
from trtpipe.pipeline.cli.options import FILE, GroupSize, Json, hardware_option, model_option, precision_option

_load = in_section("Load")


def plan(
    model: Annotated[
        str | None,
        model_option("Model: a name of `trtpipe models`, or a folder.", autocompletion=complete.of("models")),
    ] = None,
    gpu: Annotated[
        str, hardware_option("GPUs to compare, of `trtpipe gpus`.", autocompletion=complete.of("gpus"))
    ] = ",".join(USUAL),
    dtype: Annotated[
        str, precision_option("Precisions to compare: auto, bf16, fp16, or a recipe such as fp8.")
    ] = "auto",
    kv_cache: Annotated[
        str | None, precision_option("KV cache: none, fp8, int8 or nvfp4; the recipe's if left out.")
    ] = None,
    group_size: GroupSize = None,
    tp: Annotated[
        str | None, hardware_option("Numbers of GPUs of one engine; 1, 2, 4 and 8 if left out.", "--tp")
    ] = None,
    moe_tp: Annotated[
        str | None, hardware_option("Numbers of GPUs that divide each expert; all if left out.", "--moe-tp")
    ] = None,
    moe_ep: Annotated[
        str | None, hardware_option("Numbers of GPU groups that divide the experts; 1 if left out.", "--moe-ep")
    ] = None,
    runtime: Annotated[
        str | None,
        hardware_option(
            "Runtime: tensorrt_llm, trtllm_pytorch, vllm; `trtpipe config`'s, else tensorrt_llm.",
            autocompletion=complete.words("tensorrt_llm", "trtllm_pytorch", "vllm"),
        ),
    ] = None,
    toolchain: Annotated[
        str | None,
        hardware_option(
            "Release of TensorRT-LLM to plan for; the default toolchain's if left out.",
            autocompletion=complete.of("toolchains"),
        ),
    ] = None,
    load: Annotated[
        str | None,
        _load("Load of configs/load, or a YAML file, for its lengths.", autocompletion=complete.of("load")),
    ] = None,
    input_tokens: Annotated[str | None, _load("Tokens of a prompt, as in `trtpipe bench`.")] = None,
    output_tokens: Annotated[str | None, _load("Tokens of an answer, as in `trtpipe bench`.")] = None,
    rate: Annotated[float | None, _load("Request rate to serve, in requests/s; sizes the number of GPUs.")] = None,
    slo: Annotated[list[str] | None, _load("Service level objective: ttft:500ms, tpot:mean<50ms; repeatable.")] = None,
    price: Annotated[list[str] | None, hardware_option("Price of a GPU per hour: h100=2.5; repeatable.")] = None,
    reuse: Annotated[bool, _load("Assume KV-cache reuse of shared prefixes.", "--reuse")] = False,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Print the effect of single changes to the best option.")
    ] = False,
    acceptance: Annotated[
        float | None, typer.Option(help="Share of draft tokens that is accepted, for --what-if: 0.45, say.")
    ] = None,
    disaggregated: Annotated[
        int | None,
        hardware_option(
            "Rank splits of up to so many GPUs of one host into engines for prompts and engines for answers.",
            metavar="GPUS",
            max=256,  # the splits grow with its square
        ),
    ] = None,
    adapters: Annotated[
        int | None, model_option("LoRA adapters that are in the GPU's memory at once; none if left out.")
    ] = None,
    adapter_rank: Annotated[int | None, model_option("Rank of those adapters; 16 if left out.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print what each option's memory is used for.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="CSV table of measured runs: print how far off the planner is, and plan nothing.", **FILE),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="CSV table of measured runs: refit overheads to them and keep the result.", **FILE),
    ] = None,
    as_json: Json = False,
    page: Annotated[Path | None, typer.Option(help="HTML page to write, with each option's frontier.")] = None,
) -> None:
    """Predict which GPUs serve a model, how fast, at what cost.

    \b
    Examples:
      trtpipe plan --model llama3-70b --gpu a100,h100 --load chat --slo ttft:500ms
      trtpipe plan --against runs.csv
    """
    from trtpipe.engines import load_backend
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.api.plan import against as compared
    from trtpipe.pipeline.api.plan import plan as advise
    from trtpipe.pipeline.cli import config, console, console_plan
    from trtpipe.pipeline.planner.disaggregation import disaggregate
    from trtpipe.pipeline.planner.efficiency import load_efficiency
    from trtpipe.pipeline.planner.whatif import what_ifs
    from trtpipe.pipeline.store.folders import require_place

    if table := against or calibrate:
        if against and calibrate:
            raise UsageError("--calibrate also prints what --against does", remedy="leave out --against")
        if model is not None:
            raise UsageError(
                f"--{'against' if against else 'calibrate'} takes the models of its table", remedy="leave out --model"
            )
        if page is not None:
            raise UsageError("--page is of plans, not of a comparison with measured runs", remedy="leave it out")
        console_plan.comparison(*compared(table, calibrate=calibrate is not None), as_json=as_json)
        return
    if model is None:
        raise UsageError("no --model is given", remedy="name one of `trtpipe models`, or a folder")
    if page is not None:
        require_place(page, load, *Path(model).glob("*"))
    own = config.read_config()
    if runtime is None and own.runtime is not None:
        try:
            load_efficiency().of(own.runtime)
        except UsageError as error:
            raise UsageError(f"runtime of {config.path()}: {error.what}", remedy="give --runtime") from None
    runtime = runtime or own.runtime or "tensorrt_llm"
    if acceptance is not None and not what_if:
        raise UsageError("--acceptance is for --what-if", remedy="give both")
    with _uncollected():
        advice = advise(
            model, gpu=_list(gpu), dtype=_list(dtype), kv_cache=kv_cache, group_size=group_size,
            tp=_whole("--tp", tp), moe_tp=_whole("--moe-tp", moe_tp), moe_ep=_whole("--moe-ep", moe_ep),
            runtime=runtime, load=load,
            input_tokens=input_tokens, output_tokens=output_tokens, rate=rate, slo=slo or (),
            price=_prices(price or [], own.prices, _list(gpu)), reuse=reuse, toolchain=toolchain,
            adapters=adapters, adapter_rank=adapter_rank,
        )  # fmt: skip
        best = advice.candidates[0].option
        changes = what_ifs(best, advice.question, acceptance) if what_if and best is not None else []
        serves = advice.candidates[0].best is not None
        splits = disaggregate(advice, disaggregated) if disaggregated is not None and serves else []
    if page is not None:
        from trtpipe.pipeline.planner.page import write

        write(advice, changes, splits, page)
    console_plan.advice(advice, changes, splits, explain=explain, as_json=as_json)
    if all(one.best is None for one in advice.candidates):
        within = " within its objectives" if advice.question.objectives else ""
        others = "; leave out --tp to compare other numbers of GPUs" if advice.question.tps else ""
        raise UsageError(f"nothing here serves this load{within}", remedy=f"see above what each one lacks{others}")
    if notice := load_backend(runtime).NOTICE:
        console.note(notice)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: simulations make millions of tuples, of which none is in a cycle, and the collector
    would look at them again and again for a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(option: str, text: str | None) -> list[int]:
    from trtpipe.engines.errors import UsageError

    parts = _list(text or "")
    for part in parts:
        if not part.isdigit():
            raise UsageError(f"{option} {part} is not a number of GPUs", remedy="give for example 1,2,4")
    return [int(part) for part in parts]


def _prices(given: list[str], own: Mapping[str, float], gpus: list[str]) -> dict[str, float]:
    """Prices of --price by GPU, and the user's own for the other GPUs that are compared. Raises UsageError."""
    from trtpipe.configs import facts
    from trtpipe.configs.read import named_values
    from trtpipe.engines.errors import UsageError

    prices: dict[str, float] = {}
    for word, text in named_values(given, "--price ", form="a price", example="h100=2.5, of one GPU an hour").items():
        try:
            prices[word] = float(text)
        except ValueError:
            raise UsageError(
                f"--price {word}={text} is not a price", remedy="write for example h100=2.5, of one GPU an hour"
            ) from None
    if own:
        others = {facts.find_gpu(name).name for name in gpus} - {facts.find_gpu(name).name for name in prices}
        prices |= {name: price for name, price in own.items() if name in others}
    return prices
