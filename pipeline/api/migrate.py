"""Migration of a TensorRT-LLM engine and its model repository to the LLM API or vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.api.build import BuildOptions
    from trtpipe.pipeline.run_folder import RunFolder
    from trtpipe.pipeline.spec import BuildSpec, Layer
    from trtpipe.triton_repo.deployment import Deployment
    from trtpipe.triton_repo.migration import Row

# What --to takes -> the runtime.
RUNTIMES = {"llmapi": "trtllm_pytorch", "vllm": "vllm"}
# File in the run folder of a target that `trtpipe migrate` has built.
TABLE = "migration.json"
# Sources of values, as `trtpipe build` prints them.
_ENGINE, _REPOSITORY, _PLAN = "the engine", "its repository", "its settings"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What becomes of a deployment.

    source  folder of the engine that the settings are from
    spec    settings of the new target, for `build`
    rows    each setting of the deployment, and what becomes of it
    recipe  the same settings as a build recipe: those that the deployment or the options say
    """

    source: Path
    spec: BuildSpec
    rows: tuple[Row, ...]
    recipe: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        import dataclasses

        return {
            "source": str(self.source),
            "target": self.spec.target,
            "runtime": self.spec.runtime,
            "settings": self.spec.settings,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def migrate(
    folder: str | Path, *, to: str, engine: str | Path | None = None, **options: Unpack[BuildOptions]
) -> Migration:
    """Find the settings with which the LLM API or vLLM gives the service of a TensorRT-LLM engine; nothing is written.

    folder   a target in ./runs, a model repository (ours, or NVIDIA's inflight_batcher_llm), or an engine folder
    to       llmapi or vllm
    engine   folder of the engine, where the repository names a path of a container
    options  those of `build`, which outrank what the deployment says; `model` is needed where nothing says what the
             engine was built from: no weights are taken out of it

    Raises UsageError, InputDataError or ArtefactRefused for what cannot be migrated.
    """
    from trtpipe.engines.errors import UsageError, suggestion
    from trtpipe.pipeline.api.build import layers
    from trtpipe.pipeline.spec import resolve
    from trtpipe.triton_repo.deployment import read_deployment
    from trtpipe.triton_repo.migration import chosen, migration_table

    if to not in RUNTIMES:
        raise UsageError(f"unknown runtime '{to}'", remedy=suggestion(to, RUNTIMES))
    runtime = RUNTIMES[to]
    run, place = _place(Path(folder))
    deployment = read_deployment(place, None if engine is None else Path(engine))
    _require_family(deployment)
    rows = migration_table(deployment, runtime)
    plan = {} if run is None else run.spec().settings
    given = layers(**options)
    asked = {name for _, layer in given for name in layer}
    base: list[Layer] = [
        (_PLAN, _from_plan(run, plan, asked)),
        (_ENGINE, {**_from_engine(deployment, runtime, asked), **_group(chosen(rows), "build")}),
        (_REPOSITORY, _group(chosen(rows), "serving")),
    ]
    found = [(label, layer) for label, layer in [*base, *given, ("--to", {"runtime": runtime})] if layer]
    if not any("model" in layer for _, layer in found):
        raise UsageError(
            f"nothing says which model {place} serves", why="no weights are taken out of an engine",
            remedy="give the model that it was built from with --model",
        )  # fmt: skip
    _require_precision(deployment, found, runtime)
    spec = resolve(found)
    _require_same_model(deployment, spec)
    return Migration(
        source=deployment.engine.path, spec=spec, recipe=_merged(found),
        rows=(*_target_rows(deployment, spec), *_overruled(rows, spec)),
    )  # fmt: skip


def _place(folder: Path) -> tuple[RunFolder | None, Path]:
    """The run folder that `folder` belongs to, if any, and the folder of the deployment. Raises InputDataError."""
    from trtpipe.pipeline.run_folder import RunFolder, find_run

    run = find_run(str(folder))
    if run is not None:
        return run, run.linked("repository") if (run.path / "repository").is_dir() else run.linked("engine")
    inside = folder.parent / "plan.json"
    return RunFolder(folder.parent) if folder.is_dir() and inside.is_file() else None, folder


def _require_family(deployment: Deployment) -> None:
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.families import families

    name = deployment.engine.pretrained.get("architecture")
    if name not in families():
        raise UsageError(
            f"the engine in {deployment.engine.path} is of {name}, which trtpipe does not know",
            remedy=f"it knows {', '.join(sorted(families()))}",
        )


def _from_plan(run: RunFolder | None, plan: dict[str, Any], asked: set[str]) -> dict[str, Any]:
    """What only the settings of a target of ours say: the model's source, calibration. Raises InputDataError."""
    from trtpipe.engines.errors import InputDataError
    from trtpipe.engines.model_source import FolderSource, GgufSource

    if run is None:
        return {}
    names = ["group_size", "calibration", "accept_accuracy"] if "dtype" not in asked else []
    if "model" in asked:
        return {name: plan[name] for name in names if name in plan}
    source = run.spec().model.source
    kept = {name: plan[name] for name in ("model", "source", "revision", *names) if name in plan}
    if isinstance(source, FolderSource | GgufSource):
        if not Path(source.path).exists():
            raise InputDataError(
                f"the {source.describe()} is gone", why=f"{run.path} was built from it",
                remedy="give the model with --model",
            )  # fmt: skip
        kept["model"] = source.path
    return kept


def _from_engine(deployment: Deployment, runtime: str, asked: set[str]) -> dict[str, Any]:
    """GPU, precision, ranks and release of the engine, where they are known and not asked for otherwise."""
    from trtpipe.configs import facts

    engine, mapping = deployment.engine, deployment.mapping
    out: dict[str, Any] = {"tp": mapping.tp_size, "pp": mapping.pp_size}
    if engine.passport is not None and "gpu" not in asked:
        out["gpu"] = engine.passport.gpu
    if "dtype" not in asked:
        out |= _precision(deployment)
    releases = facts.load_toolchains()
    release = releases.get(engine.version or "")
    if release is not None and runtime in release.runtimes and release.name != facts.DEFAULT_TOOLCHAIN:
        out["toolchain"] = release.name
    return out


def _precision(deployment: Deployment) -> dict[str, Any]:
    """dtype, kv_cache and group_size that stand for the engine's quantization. Raises UsageError."""
    from trtpipe.configs.facts import load_quant_recipes
    from trtpipe.engines.base import DataType
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.quantization import SHORT_NAMES, KvCacheQuantAlgo

    said = deployment.quantization
    algo, cache = said.get("quant_algo"), said.get("kv_cache_quant_algo")
    recipes = load_quant_recipes().values()
    caches = {one.value: one.value.lower() for one in KvCacheQuantAlgo} | {None: "none"}
    alike = [one for one in recipes if (one.quant_algo and one.quant_algo.value) == algo]
    dtype = deployment.engine.pretrained.get("dtype")
    floats = {one.value: SHORT_NAMES[one] for one in DataType}
    if not alike or cache not in caches or dtype not in floats:
        what = f"{algo or dtype} with a KV cache in {cache}" if cache else algo or dtype
        raise UsageError(
            f"the engine's precision, {what}, is none that trtpipe makes", remedy="choose another with --dtype"
        )
    if algo is None:
        return {"dtype": floats[dtype], **({"kv_cache": caches[cache]} if cache else {})}
    same = [one for one in alike if (one.kv_cache_quant_algo and one.kv_cache_quant_algo.value) == cache]
    out = {"dtype": (same or alike)[0].name, **({} if same else {"kv_cache": caches[cache]})}
    group = said.get("group_size")
    if alike[0].quantization.packed and isinstance(group, int) and group != alike[0].group_size:
        out["group_size"] = group
    return out


def _require_precision(deployment: Deployment, found: list[Layer], runtime: str) -> None:
    """Raises UsageError for a precision that `runtime` does not run; it names precisions and runtimes that would do."""
    from trtpipe.configs import facts
    from trtpipe.engines.errors import UsageError

    merged = _merged(found)
    dtype, gpu = merged.get("dtype"), merged.get("gpu")
    if not isinstance(dtype, str) or not isinstance(gpu, str):
        return
    refusal = _refusal(runtime, dtype, gpu, merged.get("kv_cache"))
    if refusal is None:
        return
    names = ["bf16", "fp16", *sorted(name for name in facts.load_quant_recipes() if name != "none")]
    fits = [name for name in names if _refusal(runtime, name, gpu, None) is None]
    others = [
        to for to, other in RUNTIMES.items()
        if other != runtime and _refusal(other, dtype, gpu, merged.get("kv_cache")) is None
    ]  # fmt: skip
    ways = [f"--dtype {' or '.join(fits)}"] if fits else []
    ways += [f"--to {to}" for to in others]
    raise UsageError(refusal.what, why=refusal.why, remedy=f"take {', or '.join(ways)}" if ways else refusal.remedy)


def _refusal(runtime: str, dtype: str, gpu: str, kv_cache: str | None) -> UsageError | None:
    """The error with which a runtime refuses a precision on a GPU; None where it does not."""
    from trtpipe.configs import facts
    from trtpipe.engines import load_backend
    from trtpipe.engines.backends.base import Target
    from trtpipe.engines.base import Mapping
    from trtpipe.engines.build_config import BuildConfig
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.quantization import UNQUANTIZED, resolve_precision

    target, toolchain = facts.find_gpu(gpu), facts.find_toolchain(None)
    try:
        recipe = resolve_precision(dtype, target, facts.load_quant_recipes(), kv_cache).recipe
        quantization = UNQUANTIZED if recipe is None else recipe.quantization
        load_backend(runtime).resolve(
            BuildConfig(), Target(gpu=target, mapping=Mapping(), quantization=quantization, toolchain=toolchain)
        )
    except UsageError as error:
        return error
    return None


def _require_same_model(deployment: Deployment, spec: BuildSpec) -> None:
    """Raises UsageError for a model whose shapes are known here, and are not the engine's."""
    from trtpipe.configs import facts
    from trtpipe.engines.errors import UsageError

    try:
        shape = facts.find_shape(spec.settings["model"])[1]
    except UsageError:
        return  # its config.json comes with the download
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        there, here = deployment.engine.pretrained.get(name), getattr(shape, name)
        if there not in (None, here):
            raise UsageError(
                f"{spec.settings['model']} is not the engine's model",
                why=f"its {name} is {here}, and the engine in {deployment.engine.path} has {there}",
                remedy="give the model that the engine was built from with --model",
            )


def _target_rows(deployment: Deployment, spec: BuildSpec) -> list[Row]:
    """Rows of what an engine is: weights, precision, GPU, ranks, release."""
    from trtpipe.triton_repo.deployment import ENGINE
    from trtpipe.triton_repo.migration import Row, Verdict

    engine, said = deployment.engine, deployment.quantization
    algo, cache = said.get("quant_algo"), said.get("kv_cache_quant_algo")
    had = [str(algo or engine.pretrained.get("dtype")), *([f"KV cache {cache}"] if cache else [])]
    now = spec.quantization
    kept = (algo, cache) == tuple(one and one.value for one in (now.quant_algo, now.kv_cache_quant_algo))
    kept = kept and (algo is not None or engine.pretrained.get("dtype") == spec.precision.dtype.value)
    facts: list[tuple[str, Any, str, Any, bool, str]] = [
        ("weights", None, "model", spec.model.source.describe(), False, "none are taken out of an engine"),
        ("precision", ", ".join(had), "dtype", spec.precision.name, kept, "asked for"),
        ("tp_size", deployment.mapping.tp_size, "tp", spec.mapping.tp_size, True, "asked for"),
        ("pp_size", deployment.mapping.pp_size, "pp", spec.mapping.pp_size, True, "asked for"),
    ]
    if engine.passport is not None:
        facts.insert(1, ("gpu", engine.passport.gpu, "gpu", spec.gpu.name, True, "asked for"))
    if spec.runtime in spec.toolchain.runtimes:
        why = f"the release that serves {spec.runtime}"
        facts.append(("version", engine.version, "toolchain", spec.toolchain.name, True, why))
    else:
        why = f"the release of {spec.runtime} that is installed"
        facts.append(("version", engine.version, "", None, False, why))
    return [
        Row(
            place=ENGINE, setting=name, value=value, becomes=becomes, to=to,
            verdict=Verdict.CARRIED if same and (kept if name == "precision" else value == to) else Verdict.CHANGED,
            why="" if same and (kept if name == "precision" else value == to) else why,
        )
        for name, value, becomes, to, same, why in facts
    ]  # fmt: skip


def _overruled(rows: list[Row], spec: BuildSpec) -> list[Row]:
    """The rows with the values that the spec has in the end: an option outranks what the deployment says."""
    import dataclasses

    from trtpipe.triton_repo.migration import Verdict

    values = {value.name: value for value in spec.values}
    return [
        dataclasses.replace(row, verdict=Verdict.CHANGED, to=value.value, why=f"from {value.source}")
        if (value := values.get(row.becomes)) is not None and row.to is not None and row.to != value.value
        else row
        for row in rows
    ]


def _group(settings: dict[str, Any], group: str) -> dict[str, Any]:
    """A layer of the settings of one group, which have dotted names; {} for none."""
    found = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(f"{group}.")}
    return {group: found} if found else {}


def _merged(layers: list[Layer]) -> dict[str, Any]:
    """The layers as one, the last of a setting counts."""
    out: dict[str, Any] = {}
    for _, layer in layers:
        for name, value in layer.items():
            out[name] = {**out[name], **value} if isinstance(value, dict) and isinstance(out.get(name), dict) else value
    return out
