"""`trtpipe check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import AllowModelCode, Json


def check(
    repository: Annotated[
        Path,
        typer.Argument(
            help="A model repository, ours or anybody's, or a target in ./runs.", autocompletion=complete.targets
        ),
    ],
    toolchain: Annotated[
        str | None,
        typer.Option(
            help="TensorRT-LLM release that will serve it; detected if left out.",
            autocompletion=complete.of("toolchains"),
        ),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Also check that this machine's GPUs can serve it.")] = False,
    allow_model_code: AllowModelCode = False,
    as_json: Json = False,
) -> None:
    """Check a model repository before Triton loads it.

    Fails when something is wrong. Code that is of no known template is named: `serve` refuses it without
    --allow-model-code.

    \b
    Examples:
      trtpipe check llama3-8b.h100.fp8
      trtpipe check MODEL_REPOSITORY --json
    """
    import dataclasses

    from trtpipe.pipeline.api.check import check as find_faults
    from trtpipe.pipeline.cli import console
    from trtpipe.triton_repo.check import require_sound

    faults = find_faults(repository, toolchain=toolchain, here=here, allow_model_code=allow_model_code)
    if as_json:
        console.result_json([dataclasses.asdict(fault) for fault in faults])
    else:
        console.faults(faults)
    require_sound(str(repository), faults)
