"""`trtpipe tune`: the settings with which a target serves most on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import Json, TargetArgument
from trtpipe.pipeline.cli.serve import ReadyTimeout


def tune(
    target: TargetArgument,
    slo: Annotated[list[str], typer.Option(help="Service level objective: ttft:p99<200ms, itl:30ms; repeatable.")],
    minutes: Annotated[float, typer.Option(help="Upper bound on the search's time, in minutes.")] = 30.0,
    find: Annotated[str, typer.Option(help="What is made highest within --slo: max-goodput or max-rate.")] = (
        "max-goodput"
    ),
    load: Annotated[
        str | None, typer.Option(help="Load of configs/load, or a YAML file.", autocompletion=complete.of("load"))
    ] = None,
    input_tokens: Annotated[str | None, typer.Option(help="Tokens of a prompt, as in `trtpipe bench`.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Tokens of an answer, as in `trtpipe bench`.")] = None,
    protocol: Annotated[str, typer.Option(help="Protocol: grpc, http, completions or chat.")] = "grpc",
    price: Annotated[
        float | None, typer.Option(help="Price of one GPU for an hour; that of the GPU's file if left out.")
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option(help="Python of the environment in which vLLM is installed, if it is another.")
    ] = None,
    ready_timeout: ReadyTimeout = 600,
    as_json: Json = False,
) -> int:
    """Search the settings with which a target serves most.

    The target is served and measured on this machine, with one setting changed at a time and then with the best changes
    together; what the planner expects most of is tried first. The target stays as it is: the result is a build recipe,
    with every measurement beside it. Ctrl-C keeps what was measured, and the same command goes on from there. Where no
    change could be measured, the exit status is 5.

    \b
    Examples:
      trtpipe tune llama3-8b.h100.fp8 --slo 'ttft:p99<500ms' --slo 'tpot:50ms'
      trtpipe tune smollm2-135m.cpu.fp32 --slo 'ttft:p90<2s' --minutes 10
    """
    from trtpipe.engines.errors import StageFailed
    from trtpipe.pipeline.api.tune import tune as search
    from trtpipe.pipeline.cli import console, console_bench
    from trtpipe.pipeline.cli.config import read_config
    from trtpipe.pipeline.run_folder import require_run
    from trtpipe.pipeline.tune.study import HTML_NAME, JSON_NAME, RECIPE_NAME, best_run, mean_rate

    if engine_python is None:
        engine_python = read_config().python_for(lambda: require_run(target).spec().runtime)
    with console_bench.progress() as progress:
        study = search(
            target, slo, minutes=minutes, find=find, load=load, input_tokens=input_tokens,
            output_tokens=output_tokens, protocol=protocol, price=price,
            engine_python=engine_python, ready_s=ready_timeout, note=console.note, progress=progress,
        )  # fmt: skip
    status = 0 if study.decided else StageFailed.exit_code
    if as_json:
        console.result_json(study.to_json())
        return status
    rows = []
    for candidate in study.candidates():
        runs = study.of(candidate)
        run, rate = best_run(runs), mean_rate(runs)
        tokens = run.tokens_per_s
        rows.append((candidate.name, str(run.round + 1), "" if rate is None else f"{rate:.4g}",
                     "" if tokens is None else f"{tokens:.4g}"))  # fmt: skip
    figures = ("round", study.unit, "tokens/s")
    console.table(("settings", *figures), rows, numeric=figures)
    for candidate in study.candidates():
        if told := best_run(study.of(candidate)).told:
            console.note(f"{candidate.name}: {told}")
    for why in dict.fromkeys(study.left.values()):
        console.note(f"not measured: {'; '.join(name for name, its in study.left.items() if its == why)}: {why}")
    console.result(study.said(), *(f"{name}: {study.folder / name}" for name in (JSON_NAME, HTML_NAME)))
    if study.decided:
        console.result(f"next: trtpipe build --recipe {study.folder / RECIPE_NAME}")
    return status
