"""Settings with which the LLM API or vLLM gives the service of a TensorRT-LLM engine; nothing is written here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.configs import facts
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import Target
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.engines.families import families
from trtpipe.engines.model_source import FolderSource, GgufSource, HubSource
from trtpipe.engines.passport import WEIGHTS
from trtpipe.engines.precision import FLOAT_NAMES, SHORT_NAMES, resolve_precision
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo
from trtpipe.engines.short_repr import short_repr
from trtpipe.pipeline.layers import LORA, Layer
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.run_folder import RunFolder, find_run
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.store.manifest import Record
from trtpipe.triton_repo.deployment import Deployment, read_deployment
from trtpipe.triton_repo.deployment_settings import ENGINE
from trtpipe.triton_repo.migration import Row, Verdict, chosen, migration_table

# What --to takes -> the runtime.
RUNTIMES = {"llmapi": "trtllm_pytorch", "vllm": "vllm"}
# Sources of values, as `trtpipe build` prints them.
_ENGINE, _REPOSITORY, _PLAN, _PASSPORT = "the engine", "its repository", "its settings", "its passport"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What becomes of a deployment.

    source  folder of the engine that the settings are from
    spec    settings of the new target, for `build`
    rows    each setting of the deployment, and what becomes of it
    recipe  the same settings as a build recipe: those that the deployment or the options say
    """

    __repr__ = short_repr("source", "spec")

    source: Path
    spec: BuildSpec
    rows: tuple[Row, ...]
    recipe: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": str(self.source),
            "target": self.spec.target,
            "runtime": self.spec.runtime,
            "settings": self.spec.settings,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def find_migration(folder: Path, to: str, engine: Path | None, given: list[Layer]) -> Migration:
    """Read the deployment in `folder` and resolve what it becomes; the layers `given` outrank what it says. See
    `trtpipe.migrate`."""
    if to not in RUNTIMES:
        raise UsageError(f"unknown runtime '{to}'", remedy=suggestion(to, RUNTIMES))
    runtime = RUNTIMES[to]
    run, place = _place(folder)
    deployment = read_deployment(place, engine)
    _require_family(deployment)
    rows = migration_table(deployment, runtime)
    plan = None if run is None else run.spec()
    asked = {name for _, layer in given for name in layer}
    if _comes_quantized(given):
        asked.add("dtype")  # the model's files have one already
    dtype = _merged(given).get("dtype")
    adapters = {name: str(path) for name, path in deployment.adapters.items()}
    base: list[Layer] = [
        (_PASSPORT, _from_passport(deployment, asked)),
        (_REPOSITORY, {LORA: adapters} if adapters else {}),
        (_PLAN, {} if run is None or plan is None else _from_plan(plan, run.last("download"), asked, dtype)),
        (_ENGINE, {**_from_engine(deployment, runtime, asked), **_group(chosen(rows), "build")}),
        (_REPOSITORY, _group(chosen(rows), "serving")),
    ]
    found = [(label, layer) for label, layer in [*base, *given, ("--to", {"runtime": runtime})] if layer]
    if not any("model" in layer for _, layer in found):
        raise UsageError(
            f"nothing says which model {place} serves", why="no weights are taken out of an engine",
            remedy="give the model that it was built from with --model",
        )  # fmt: skip
    _require_runnable(found, runtime)
    spec = resolve(found)
    _require_same_model(deployment, spec)
    recipe, source = _merged(found), spec.model.source
    rows = [*_target_rows(deployment, spec), *_overruled(rows, spec)]
    if isinstance(source, FolderSource | GgufSource):
        recipe["model"] = source.path  # the recipe may be built from another folder
    return Migration(
        source=deployment.engine.path, spec=spec, recipe=recipe,
        rows=tuple(_with_adapters(row, deployment, spec) for row in rows),
    )  # fmt: skip


def _place(folder: Path) -> tuple[RunFolder | None, Path]:
    """The run folder that `folder` belongs to, if any, and the folder of the deployment. Raises InputDataError."""
    run = find_run(str(folder))
    if run is not None:
        makes = "repository" if (run.path / "repository").is_dir() else "engine"
        run.linked(makes)
        return run, run.path / makes  # messages name the target, not the store's folder
    inside = folder.parent / "plan.json"
    return RunFolder(folder.parent) if folder.is_dir() and inside.is_file() else None, folder


def _comes_quantized(given: list[Layer]) -> bool:
    """Whether the options give a model whose files are quantized already. Raises UsageError and InputDataError."""
    options = _merged(given)
    if not isinstance(options.get("model"), str):
        return False
    model = facts.find_model(options["model"], source=options.get("source"), revision=options.get("revision"))
    return model.stored is not None


def _require_family(deployment: Deployment) -> None:
    name = deployment.engine.pretrained.get("architecture")
    if str(name) not in families():
        raise UsageError(
            f"the engine in {deployment.engine.path} is of {name or 'no architecture'}, which trtpipe does not know",
            remedy=f"it knows {', '.join(sorted(families()))}",
        )


def _from_plan(plan: BuildSpec, download: Record | None, asked: set[str], dtype: str | None) -> dict[str, Any]:
    """What only a target of ours says: the model's source with the commit of its `download`, calibration, and the tasks
    of the accuracy gate, which judge any quantized precision. `dtype` is the one that is asked for, if any. Raises
    InputDataError."""
    names = ["calibration", "accept_accuracy", "tasks"] if "dtype" not in asked else []
    if dtype is not None and dtype not in FLOAT_NAMES:
        names.append("tasks")
    names += [LORA] if "model" in asked else [*WEIGHTS, LORA]
    kept = {name: plan.settings[name] for name in names if name in plan.settings}
    source = plan.model.source
    if "model" in kept and isinstance(source, FolderSource | GgufSource):
        if not Path(source.path).exists():
            raise InputDataError(
                f"the {source.describe()} is gone", why=f"{plan.target} was built from it",
                remedy="give the model with --model",
            )  # fmt: skip
        kept["model"] = source.path
    if isinstance(source, HubSource) and download is not None and not asked & {*WEIGHTS}:
        kept["revision"] = download.inputs.get(source.repo_id, source.revision)  # a branch may have gone on since
    return kept


def _from_passport(deployment: Deployment, asked: set[str]) -> dict[str, Any]:
    """Settings that name the source of the engine's weights."""
    passport = deployment.engine.passport
    if passport is None or "model" in asked:
        return {}
    return {name: passport.weights[name] for name in WEIGHTS if name in passport.weights}


def _from_engine(deployment: Deployment, runtime: str, asked: set[str]) -> dict[str, Any]:
    """GPU, precision, ranks and release of the engine, where they are known and not asked for otherwise."""
    engine, mapping = deployment.engine, deployment.mapping
    out: dict[str, Any] = {"tp": mapping.tp_size, "pp": mapping.pp_size}
    if mapping.moe_ep_size > 1:
        out["moe_ep"] = mapping.moe_ep_size
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
    algo, cache = deployment.quantization
    recipes = facts.load_quant_recipes().values()
    caches = {one.value: one.value.lower() for one in KvCacheQuantAlgo} | {None: "none"}
    alike = [one for one in recipes if (one.quant_algo and one.quant_algo.value) == algo]
    dtype = str(deployment.engine.pretrained.get("dtype"))
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
    group = deployment.group_size
    if alike[0].quantization.packed and group not in (None, alike[0].group_size):
        return {**out, "group_size": group}
    return out


def _require_runnable(found: list[Layer], runtime: str) -> None:
    """Raises UsageError for a GPU or a precision that `runtime` does not run; it names what would do."""
    merged = _merged(found)
    if not isinstance(merged.get("gpu"), str):
        return  # `resolve` says what is missing
    gpu, toolchain, recipes = facts.find_gpu(merged["gpu"]), facts.find_toolchain(None), facts.load_quant_recipes()
    if gpu.is_cpu and not load_backend(runtime).ON_CPU:
        able = " or ".join(to for to, other in RUNTIMES.items() if load_backend(other).ON_CPU)
        raise UsageError(
            f"the {runtime} runtime needs an NVIDIA GPU", why="the GPU of the new target is cpu",
            remedy=f"name the GPU with --gpu, or take --to {able}",
        )  # fmt: skip
    if not isinstance(merged.get("dtype"), str):
        return

    def refusal(dtype: str, runtime: str, kv_cache: str | None = None) -> UsageError | None:
        try:
            recipe = resolve_precision(dtype, gpu, recipes, kv_cache, runtime=runtime).recipe
            quantization = UNQUANTIZED if recipe is None else recipe.quantization
            target = Target(gpu=gpu, mapping=Mapping(), quantization=quantization, toolchain=toolchain)
            load_backend(runtime).resolve(BuildConfig(), target)
        except UsageError as error:
            return error
        return None

    asked = merged["dtype"], merged.get("kv_cache")
    refused = refusal(asked[0], runtime, asked[1])
    if refused is None:
        return
    names = ["bf16", *sorted(name for name in recipes if name != "none")]
    fits = [name for name in names if refusal(name, runtime) is None]
    others = [to for to, other in RUNTIMES.items() if other != runtime and refusal(asked[0], other, asked[1]) is None]
    ways = [f"--dtype {' or '.join(fits)}"] if fits else []
    ways += [f"--to {to}" for to in others]
    raise UsageError(refused.what, why=refused.why, remedy=f"take {', or '.join(ways)}" if ways else refused.remedy)


def _require_same_model(deployment: Deployment, spec: BuildSpec) -> None:
    """Raises UsageError for a model whose shapes are known here, and are not the engine's."""
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
    """Rows of what an engine is: weights, GPU, precision, ranks, release."""
    engine, now = deployment.engine, spec.quantization
    algo, cache = deployment.quantization
    dtype = engine.pretrained.get("dtype")
    same = (algo, cache) == tuple(one and one.value for one in (now.quant_algo, now.kv_cache_quant_algo))
    same = same and (algo is not None or dtype == spec.precision.dtype.value)
    had = ", ".join([str(algo or dtype), *([f"KV cache {cache}"] if cache else [])])
    why = "asked for" if spec.precision.reason == "requested" else spec.precision.reason
    released = spec.runtime in spec.toolchain.runtimes

    def row(name: str, value: Any, becomes: str, to: Any, *, kept: bool, why: str = "asked for") -> Row:
        verdict = Verdict.CARRIED if kept else Verdict.CHANGED
        return Row(
            place=ENGINE, setting=name, value=value, verdict=verdict, becomes=becomes, to=to, why="" if kept else why
        )

    rows = [
        row("weights", None, "model", spec.model.source.describe(), kept=False, why="none are taken out of an engine"),
        row("precision", had, "dtype", spec.precision.name, kept=same, why=why),
    ]
    for name, value, becomes, to in (
        ("gpu", None if engine.passport is None else engine.passport.gpu, "gpu", spec.gpu.name),
        ("tp_size", deployment.mapping.tp_size, "tp", spec.mapping.tp_size),
        ("pp_size", deployment.mapping.pp_size, "pp", spec.mapping.pp_size),
        *(
            [("moe_ep_size", deployment.mapping.moe_ep_size, "moe_ep", spec.mapping.moe_ep_size)]
            if deployment.mapping.moe_ep_size > 1
            else []
        ),
    ):
        if value is not None:
            rows.append(row(name, value, becomes, to, kept=value == to))
    if released:
        to, why = spec.toolchain.name, f"the release that serves {spec.runtime}"
        rows.append(row("version", engine.version, "toolchain", to, kept=engine.version == to, why=why))
    else:
        why = f"the release of {spec.runtime} that is installed"
        rows.append(row("version", engine.version, "", None, kept=False, why=why))
    return rows


def _overruled(rows: list[Row], spec: BuildSpec) -> list[Row]:
    """The rows with the values that the spec has in the end: an option outranks what the deployment says."""
    values = {value.name: value for value in spec.values}
    return [
        dataclasses.replace(row, verdict=Verdict.CHANGED, to=value.value, why=f"from {value.source}")
        if (value := values.get(row.becomes)) is not None and row.to is not None and row.to != value.value
        else row
        for row in rows
    ]


def _with_adapters(row: Row, deployment: Deployment, spec: BuildSpec) -> Row:
    """The row; that of the folder of adapters with what becomes of these."""
    names, count = [name for name, _ in spec.adapters], deployment.adapter_count
    if row.setting != "lora_prefetch_dir" or (count == 0 and not names):
        return row
    if len(names) < (1 if count is None else count):
        lost = "the folder is not here" if count is None else f"{count - len(names)} of {count} are not PEFT's files"
        return dataclasses.replace(row, verdict=Verdict.LOST, why=f"{lost}; {row.why}")
    return dataclasses.replace(row, verdict=Verdict.CARRIED, becomes=LORA, to=", ".join(names), why="")


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
