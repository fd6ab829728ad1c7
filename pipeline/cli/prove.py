"""`trtpipe prove`: whether this machine runs what trtpipe builds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import Executor, Gpu, Json, Runtime, Set, Toolchain
from trtpipe.pipeline.cli.serve import ReadyTimeout


def prove(
    model: Annotated[
        str,
        typer.Option(
            help="A name of `trtpipe models`, a folder, or a Hugging Face id.", autocompletion=complete.of("models")
        ),
    ] = "smollm2-135m",
    gpu: Gpu = None,
    runtime: Runtime = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precisions, by commas; bf16 and every quantization recipe if left out.")
    ] = None,
    toolchain: Toolchain = None,
    executor: Executor = None,
    settings: Set = None,
    engine_python: Annotated[
        str | None, typer.Option(help="Python of the environment in which vLLM is installed, if it is another.")
    ] = None,
    ready_timeout: ReadyTimeout = 600,
    out: Annotated[Path, typer.Option("--output", "-o", help="Folder of the report.")] = Path("proof"),
    as_json: Json = False,
) -> int:
    """Prove that this machine builds, serves and computes right: a small model.

    Each precision that its GPU runs is built, served, compared and measured.

    Greedy answers are compared with those of the reference runtime, and the speed with what `plan` predicts. The report
    names no secret and no home folder, and is made to be attached to an issue.

    \b
    Examples:
      trtpipe prove
      trtpipe prove --runtime tensorrt_llm --dtype bf16,fp8 -o proof-h100
    """
    from trtpipe.engines.errors import StageFailed
    from trtpipe.pipeline.api.build import settings as resolve
    from trtpipe.pipeline.api.prove import prove as run
    from trtpipe.pipeline.api.prove import this_gpu
    from trtpipe.pipeline.cli import console, console_progress
    from trtpipe.pipeline.cli.config import read_config
    from trtpipe.pipeline.layers import assignments
    from trtpipe.pipeline.prove.proof import HTML_NAME, JSON_NAME

    assigned = assignments(settings or [])
    if engine_python is None:
        engine_python = read_config().python_for(
            lambda: resolve(model=model, gpu=gpu or this_gpu(), runtime=runtime, set=assigned).runtime
        )
    with console_progress.working("prove", announce=False) as work:
        proof = run(
            model, gpu=gpu, runtime=runtime, dtype=[one.strip() for one in dtype.split(",")] if dtype else (),
            toolchain=toolchain, executor=executor, set=assigned, engine_python=engine_python,
            ready_s=ready_timeout, output=out, note=console.note, progress=work.step,
        )  # fmt: skip
    if as_json:
        console.result_json(proof.to_json())
    else:
        rows = [(lane.dtype, step.name, step.state, step.told) for lane in proof.lanes for step in lane.steps]
        console.table(("precision", "step", "state", "found"), rows)
        console.result(*(f"{name}: not run: {why}" for name, why in proof.refused.items()))
        if proof.caution:
            console.note(proof.caution)
        console.result(f"report: {out / JSON_NAME}", f"page: {out / HTML_NAME}")
    return 0 if proof.held else StageFailed.exit_code
