"""Migration of a TensorRT-LLM engine and its model repository to the LLM API or vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.pipeline.api.arguments import checked
from trtpipe.pipeline.api.build import BuildOptions, layers

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trtpipe.pipeline.migration import Migration


@checked
def migrate(
    folder: str | Path, *, to: str, engine: str | Path | None = None, **options: Unpack[BuildOptions]
) -> Migration:
    """Find the settings with which the LLM API or vLLM gives the service of a TensorRT-LLM engine; nothing is written.

    folder   a target in ./runs, a model repository (ours, or NVIDIA's inflight_batcher_llm), or an engine folder
    to       llmapi or vllm
    engine   folder of the engine, where the repository names a path of a container
    options  those of `build`, which outrank what the deployment says; `model` is needed where nothing says what the
             engine was built from: no weights are taken out of it

    The result's `spec` is for `build`, its `rows` say what becomes of each setting. Raises UsageError, InputDataError
    or ArtefactRefused for what cannot be migrated.
    """
    from trtpipe.pipeline.migration import find_migration

    return find_migration(Path(folder), to, None if engine is None else Path(engine), layers(**options))
