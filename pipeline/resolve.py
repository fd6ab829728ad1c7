"""Resolution of layers of settings into a frozen BuildSpec, every value with its source. Pure: reads only YAML.

Whatever can be refused without the model's files is refused here. No network is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtpipe.configs import facts
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import Target, settings_of
from trtpipe.engines.base import CalibrationConfig
from trtpipe.engines.build_config import LORA as LORA_SETTINGS
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.checkpoint.split import check_expert_groups
from trtpipe.engines.errors import InputDataError, UsageError, malformed, suggestion
from trtpipe.engines.hf.adapter import Adapter, read_adapter, require_rank
from trtpipe.engines.lora_arrays import MODULES, require_type, whole_groups
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.model_source import HubSource, ModelRef
from trtpipe.engines.precision import Precision, resolve_precision
from trtpipe.engines.quantization import UNQUANTIZED
from trtpipe.engines.stored_precision import require_readable, stored_precision
from trtpipe.pipeline.layers import LORA, SCALARS, Layer, Recorded, merge
from trtpipe.pipeline.planner.defaults import planned_sizes
from trtpipe.pipeline.settings import (
    read_adapters,
    read_count,
    read_flag,
    read_group,
    read_mapping,
    read_release,
    read_runtime,
    read_string,
    read_tasks,
)
from trtpipe.pipeline.spec import BuildSpec, Value
from trtpipe.triton_repo.serving import ServingConfig, resolve_serving

EXECUTORS = ("auto", "local", "docker")


def resolve(
    layers: list[Layer],
    model: ModelRef | None = None,
    peek: Callable[[ModelRef], tuple[ModelRef, ModelConfig | None]] = lambda model: (model, None),
) -> BuildSpec:
    """Compose the layers, weakest first, into a BuildSpec. Raises UsageError or ConfigError.

    model  that of a recorded spec, used as it is: its source need not be on this machine, and the spec was judged when
           it was made
    peek   looks at the model's config, where its name alone does not say whether it has experts or is quantized already
    """
    recorded, seen = model is not None, None
    chosen = given = merge(layers)
    model_name = read_string(chosen, "model", required="--model smollm2-135m")
    gpu_name = read_string(chosen, "gpu", required="--gpu cpu or --gpu h100")
    assert model_name is not None
    assert gpu_name is not None
    source, revision = read_string(chosen, "source"), read_string(chosen, "revision")
    gpu = facts.find_gpu(gpu_name)
    if model is None:
        model = facts.find_model(model_name, source=source, revision=revision)
        place = model.source
        # A model file of ours says whether the model is quantized; what it says of the quantization may have changed.
        if isinstance(place, HubSource) and (model.stored or place.repo_id == model_name):
            model, seen = peek(model)
    requested, cache = read_string(chosen, "dtype") or "auto", read_string(chosen, "kv_cache")
    group_size = read_count(chosen, "group_size") if "group_size" in chosen else None
    recipes = facts.load_quant_recipes()
    shape = None if recorded else _shape(model_name, required="load" in chosen)
    of_gpu = facts.usual_runtime(gpu, None)
    usual = of_gpu if shape is None else facts.usual_runtime(gpu, shape.architecture)
    runtime = read_runtime(read_string(chosen, "runtime"), gpu) or usual.runtime
    # The config of a model of the hub is not its shape: sizes follow from what a machine without network knows too.
    experts = any(one is not None and one.experts is not None for one in (shape, seen))
    toolchain = facts.find_toolchain(read_release(chosen))
    if model.stored is None:
        precision = resolve_precision(
            requested, gpu, recipes, cache, group_size, runtime, experts=experts, toolchain=toolchain
        )
        if group_size is not None and precision.recipe is None:
            raise UsageError(f"{precision.name} has no groups to choose the size of", remedy="leave the group size out")
    else:
        precision = stored_precision(model.name, model.stored, requested, gpu, recipes, cache, group_size, runtime)
    accept_accuracy = read_flag(chosen, "accept_accuracy")
    tasks = read_tasks(chosen, quantized=precision.recipe is not None)
    executor = read_string(chosen, "executor") or "auto"
    if executor == "ray":
        raise UsageError(
            "ray is not the executor of a target", why="each machine of a Ray cluster chooses its own",
            remedy="leave it out, and build on the cluster with `trtpipe build --executor ray`",
        )  # fmt: skip
    if executor not in EXECUTORS:
        raise UsageError(f"unknown executor '{executor}'", remedy=suggestion(executor, EXECUTORS))
    quantization = precision.recipe.quantization if precision.recipe else UNQUANTIZED
    backend = load_backend(runtime)
    if model.stored is not None:
        require_readable(model.name, model.stored, runtime, experts=experts)
    if (backend.ANYWHERE or gpu.is_cpu) and "load" in chosen:
        raise UsageError(
            "--load plans sizes for a GPU", why=f"the {runtime} runtime takes them as they are",
            remedy="leave it out, and set sizes by --set build.max_batch_size=8 and the like",
        )  # fmt: skip
    if shape is not None:
        check_expert_groups(shape, read_count(chosen, "moe_ep"))
        # Given values take precedence over planned ones.
        room = facts.find_gpu("cpu") if backend.ANYWHERE else gpu
        chosen = planned_sizes(chosen, model.name, shape, room, precision.dtype, quantization, runtime) | chosen
    calibration_config = read_group(chosen, "calibration", CalibrationConfig, given)
    mapping = read_mapping(chosen)
    target = Target(
        gpu=gpu, mapping=mapping, quantization=quantization, toolchain=toolchain, stored=precision.stored,
        dtype=precision.dtype,
    )  # fmt: skip
    adapters = read_adapters(chosen)
    build_config = read_group(chosen, "build", BuildConfig, given)
    if adapters and not recorded:
        if backend.ARRAYS:
            require_type(precision.dtype)
        build_config = _for_adapters(build_config, adapters, fixed="build.max_lora_rank" in chosen)
    if build_config.speculative_model is not None and not recorded:
        folder = Path(build_config.speculative_model).expanduser().absolute()
        build_config = dataclasses.replace(build_config, speculative_model=str(folder))
    build_config, reasons = backend.resolve(build_config, target)
    serving, serving_reasons = resolve_serving(
        read_group(chosen, "serving", ServingConfig, given), build_config, runtime, toolchain
    )
    for name in ("max_attention_window_size", "kv_cache_host_memory_bytes"):
        if getattr(serving, name) and (full := f"serving.{name}") in backend.FIXED:
            raise UsageError(
                f"{full} is not for the {runtime} runtime", why=backend.FIXED[full][1], remedy="leave it out"
            )
    if gpu.is_cpu and serving.kv_cache_host_memory_bytes:
        raise UsageError(
            "serving.kv_cache_host_memory_bytes is for a GPU",
            why="on a CPU the whole KV cache is in the host's memory",
            remedy="leave it out",
        )

    def origin(name: str, otherwise: str = "default") -> str:
        label = chosen[name][1] if name in chosen else otherwise
        return label.derived.get(name, str(label)) if isinstance(label, Recorded) else label

    itself = _source_origin(model_name, model)
    values = [
        Value("model", model.name, origin("model")),
        Value("source", model.source.describe(), origin("source", origin("revision", itself))),
        Value("gpu", gpu.name, origin("gpu")),
        Value("dtype", precision.name, precision.reason if precision.reason != "requested" else origin("dtype")),
        *_quantization_values(precision, origin, accept_accuracy),
        Value("runtime", runtime, origin("runtime", usual.label), "" if "runtime" in chosen else usual.reason),
        Value("toolchain", toolchain.name, origin("toolchain")),
        Value("executor", executor, origin("executor")),
        *([Value("load", chosen["load"][0], origin("load"))] if "load" in chosen else []),
        *([Value("tasks", list(tasks), origin("tasks"))] if tasks else []),
        Value("tp", mapping.tp_size, origin("tp")),
        Value("pp", mapping.pp_size, origin("pp")),
        *(Value(n, getattr(mapping, f"{n}_size"), origin(n)) for n in ("moe_tp", "moe_ep") if n in chosen),
        *(Value(f"{LORA}.{name}", str(folder), origin(f"{LORA}.{name}")) for name, folder in adapters),
    ]
    groups: list[tuple[str, Any]] = [("build", build_config), ("serving", serving)]
    if quantization.calibrated and not precision.stored:
        groups.insert(0, ("calibration", calibration_config))
    made = {f"build.{name}": reason for name, reason in reasons.items()}
    if adapters:
        made |= dict.fromkeys((f"build.{name}" for name in LORA_SETTINGS), "for the adapters")
    made |= {f"serving.{name}": reason for name, reason in serving_reasons.items()}
    for group, settings in groups:
        for field in dataclasses.fields(settings):
            name = f"{group}.{field.name}"
            if group != "build" or field.name in settings_of(build_config, backend.SETTINGS):
                source = origin(name, made.get(name, "default"))
                meaning = field.metadata.get("meaning", "")
                values.append(Value(name, getattr(settings, field.name), source, meaning))
    # The executor depends on the machine, not on the target.
    plain = {name: chosen[name][0] for name in SCALARS if name in chosen and name != "executor"}
    if runtime != of_gpu.runtime:
        plain["runtime"] = runtime  # on another machine the family is not known again
    if experts and requested == "auto":
        plain["dtype"] = precision.recipe.name if precision.recipe else precision.name  # likewise
    grouped: dict[str, Any] = {}
    for value in values:
        group, dot, name = value.name.partition(".")
        if dot and value.value is not None:
            grouped.setdefault(group, {})[name] = value.value
    spec = BuildSpec(
        model=model, gpu=gpu, precision=precision, calibration=calibration_config, accept_accuracy=accept_accuracy,
        tasks=tasks, runtime=runtime, usual_runtime=of_gpu.runtime, toolchain=toolchain, executor=executor,
        mapping=mapping, build=build_config, serving=serving, settings={**plain, **grouped}, values=tuple(values),
        adapters=adapters,
    )  # fmt: skip
    if shape is not None:
        spec.judge(shape)
        spec.judge_adapters(shape)
        spec.judge_draft(shape)
    return spec


def read_spec(value: Any, where: str) -> BuildSpec:
    """The spec that `BuildSpec.to_json` wrote, for its model as it was then. Raises InputDataError naming `where`."""
    try:
        return resolve([("export", value["settings"])], model=ModelRef.from_json(value["model"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputDataError(f"{where} is damaged", why=malformed(error)) from None


def _shape(name: str, *, required: bool) -> ModelConfig | None:
    """The model's config; None for a model that must be downloaded first, unless it is required."""
    try:
        return facts.find_shape(name)[1]
    except UsageError:
        if required:
            raise
        return None


def _for_adapters(build: BuildConfig, adapters: tuple[tuple[str, Path], ...], *, fixed: bool) -> BuildConfig:
    """`build` for an engine that takes the adapters; `fixed` says that their highest rank is given. Raises UsageError,
    InputDataError."""
    read: list[Adapter] = [read_adapter(folder) for _, folder in adapters]
    most = build.max_lora_rank if fixed else max(adapter.rank for adapter in read)
    for adapter in read:
        require_rank(adapter, most)
    modules = {MODULES[name] for adapter in read for name in adapter.modules if name in MODULES}
    return dataclasses.replace(
        build,
        lora_plugin="auto" if not build.takes_adapters else build.lora_plugin,
        lora_target_modules=whole_groups({*build.lora_target_modules, *modules}),
        max_lora_rank=most,
    )


def _source_origin(given: str, model: ModelRef) -> str:
    """Origin of the source when neither --source nor --revision gives it."""
    itself = model.source.kind in ("folder", "gguf") or getattr(model.source, "repo_id", None) == given
    return "the model itself" if itself else f"first source of {model.name}"


def _quantization_values(precision: Precision, origin: Callable[..., str], accept: bool) -> list[Value]:
    recipe = precision.recipe
    if recipe is None:
        return []
    cache = recipe.kv_cache_quant_algo
    otherwise = precision.reason if precision.stored else "recipe"
    group = [Value("group_size", recipe.group_size, origin("group_size", otherwise))]
    return [
        Value("kv_cache", cache.value.lower() if cache else "none", origin("kv_cache", otherwise)),
        *(group if recipe.quantization.packed else []),
        Value("accept_accuracy", accept, origin("accept_accuracy")),
    ]
