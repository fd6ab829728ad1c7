"""Resolution of layers of settings into a frozen BuildSpec, every value with its source. Pure: reads only YAML.

The layers, weakest first: defaults of the settings types, the recipe, command-line options, `--set`. A later layer
replaces the whole value. Whatever can be refused without the model's files is refused here. No network is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.configs import facts, read
from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.adapters import check_name
from trtpipe.engines.backends.base import Target, checkpoint_form, settings_of
from trtpipe.engines.base import CalibrationConfig, Mapping
from trtpipe.engines.build_config import LORA as LORA_SETTINGS
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import InputDataError, TrtpipeError, UsageError, suggestion
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.adapter import Adapter, located_pairs, read_adapter, require_rank
from trtpipe.engines.hf.draft import check_draft
from trtpipe.engines.lora_arrays import MODULES, require_type, whole_groups
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.model_source import HubSource, ModelRef
from trtpipe.engines.quantization import UNQUANTIZED, Precision, Quantization, resolve_precision
from trtpipe.engines.stored_precision import require_readable, stored_precision
from trtpipe.engines.toolchain import Toolchain
from trtpipe.pipeline.planner.defaults import planned_sizes
from trtpipe.pipeline.planner.judgement import judge
from trtpipe.pipeline.sources.calibration import require_length
from trtpipe.triton_repo.serving import ServingConfig, resolve_serving

# Settings that a recipe or `--set` may name; the two groups are mappings with the fields of their settings type.
SCALARS = (
    "model",
    "source",
    "revision",
    "gpu",
    "dtype",
    "kv_cache",
    "group_size",
    "runtime",
    "toolchain",
    "executor",
    "tp",
    "pp",
    "moe_tp",
    "moe_ep",
    "load",
    "accept_accuracy",
    "tasks",
)
# Setting whose fields are names of adapters, with their folders.
LORA = "lora"
# Keys of `BuildSpec.to_json`.
RECORDED = {"target", "model", "settings", "values"}
EXECUTORS = ("auto", "local", "docker")
GROUPS: dict[str, type[Any]] = {"calibration": CalibrationConfig, "build": BuildConfig, "serving": ServingConfig}

Layer = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Value:
    """One resolved setting: dotted name, value, its source (a layer or a reason), and its meaning."""

    name: str
    value: Any
    source: str
    meaning: str = ""


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """Everything a run needs to know.

    usual_runtime  runtime of the GPU's targets where neither a setting nor the model's family decides
    settings       resolves to this plan again on any machine: scalars as they were given, groups as they were resolved
    adapters       names of LoRA adapters, and their folders
    """

    model: ModelRef
    gpu: GpuSpec
    precision: Precision
    calibration: CalibrationConfig
    accept_accuracy: bool
    tasks: tuple[str, ...]
    runtime: str
    usual_runtime: str
    toolchain: Toolchain
    executor: str
    mapping: Mapping
    build: BuildConfig
    serving: ServingConfig
    settings: dict[str, Any]
    values: tuple[Value, ...]
    adapters: tuple[tuple[str, Path], ...] = ()

    @property
    def quantization(self) -> Quantization:
        return self.precision.recipe.quantization if self.precision.recipe else UNQUANTIZED

    @property
    def sms(self) -> tuple[int, ...] | None:
        """The compute capabilities that can run the engine; None when any machine can run it."""
        return load_backend(self.runtime).runs_on(self.engine_target, self.precision.sms)

    @property
    def engine_target(self) -> Target:
        """The target of the engine, in the engine backend's terms."""
        return Target(
            gpu=self.gpu, mapping=self.mapping, quantization=self.quantization, toolchain=self.toolchain,
            stored=self.precision.stored, dtype=self.precision.dtype,
        )  # fmt: skip

    @property
    def target(self) -> str:
        """The identifier used for folders, logs and reports: model.gpu.dtype, then values other than the defaults: tp,
        pp and ep (groups of experts) above 1, another runtime or toolchain."""
        parts = [self.model.name, self.gpu.name, self.precision.name]
        parts += [
            f"{name}{size}"
            for name, size in (
                ("tp", self.mapping.tp_size), ("pp", self.mapping.pp_size), ("ep", self.mapping.moe_ep_size),
            )
            if size > 1
        ]  # fmt: skip
        parts += [self.runtime] if self.runtime != self.usual_runtime else []
        parts += [f"trtllm-{self.toolchain.name}"] if self.toolchain.name != facts.DEFAULT_TOOLCHAIN else []
        return ".".join(parts)

    @property
    def form(self) -> str:
        """The checkpoint format that the runtime is given; that of a model which came quantized is left as it is."""
        stored, algo = self.precision.stored, self.quantization.quant_algo
        return load_backend(self.runtime).FORM if stored else checkpoint_form(self.runtime, algo)

    def judge(self, model: ModelConfig) -> None:
        """Raises UsageError for what `model`, the config of the spec's model, makes impossible. It costs nothing."""
        judge(
            model, self.model.name, self.engine_target, self.precision.dtype, self.build, self.serving,
            form=self.form, in_memory=not load_backend(self.runtime).ANYWHERE,
        )  # fmt: skip
        if self.quantization.calibrated and not self.precision.stored:
            require_length(model, self.calibration)

    def judge_draft(self, model: ModelConfig) -> None:
        """Raises InputDataError for a draft model that is none for `model`. It reads the config of its folder."""
        mode, folder = self.build.speculative_decoding_mode, self.build.speculative_model
        if mode is not None and folder is not None:
            check_draft(Path(folder), mode, model)

    def judge_adapters(self, model: ModelConfig) -> None:
        """Raises InputDataError for an adapter of another model. It reads the heads of the adapters' files."""
        for _, folder in self.adapters:
            located_pairs(read_adapter(folder), model)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "model": self.model.to_json(),
            "settings": self.settings,
            "values": [{"name": v.name, "value": v.value, "source": v.source} for v in self.values],
        }


def read_spec(value: Any, where: str) -> BuildSpec:
    """The spec that `BuildSpec.to_json` wrote, for its model as it was then. Raises InputDataError naming `where`."""
    try:
        return resolve([("export", value["settings"])], model=ModelRef.from_json(value["model"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputDataError(f"{where} is damaged", why=f"{type(error).__name__}: {error}") from None


def recipe_layer(path: str) -> Layer:
    """A recipe file as a layer; `path` is a path, or a name in configs/recipes. What `trtpipe settings --json` printed
    is a recipe too. Raises ConfigError, UsageError."""
    shipped = {file.stem: file for file in (facts.CONFIGS / "recipes").glob("*.yaml")}
    file = shipped.get(path) or Path(path)
    if not file.is_file():
        raise UsageError(
            f"no recipe '{path}'", why="it is neither a file nor a recipe we ship", remedy=suggestion(path, shipped)
        )
    raw = read.read_yaml(file)
    return f"recipe {file.name}", raw["settings"] if raw.keys() == RECORDED else raw


def set_layer(words: list[str]) -> Layer:
    """A layer from `--set build.max_batch_size=16` options. Raises UsageError."""
    return dotted_layer(assignments(words))


def assignments(words: list[str]) -> dict[str, Any]:
    """The values of `--set` options by dotted name, each given once. Raises UsageError."""
    texts = read.named_values(words, "--set ", example="build.max_batch_size=16")
    return {name: read.parse_yaml_value(text, f"--set {name}") for name, text in texts.items()}


def dotted_layer(values: dict[str, Any]) -> Layer:
    """A layer from values by dotted name: {"build.max_batch_size": 16}. Raises UsageError."""
    layer: dict[str, Any] = {}
    for name, value in values.items():
        group, dot, key = name.partition(".")
        if not dot:
            layer[group] = value
        elif isinstance(layer.get(group, {}), dict):
            layer[group] = {**layer.get(group, {}), key: value}
        else:
            raise UsageError(f"--set {name}={value} contradicts --set {group}={layer[group]}")
    return "--set", layer


def resolve(
    layers: list[Layer], model: ModelRef | None = None, peek: Callable[[ModelRef], ModelRef] = lambda model: model
) -> BuildSpec:
    """Compose the layers, weakest first, into a BuildSpec. Raises UsageError or ConfigError.

    model  that of a recorded spec, used as it is: its source need not be on this machine, and the spec was judged when
           it was made
    peek   looks whether the model's files are quantized already, where its name alone does not say it
    """
    recorded = model is not None
    chosen = given = _merge(layers)
    model_name = _string(chosen, "model", required="--model smollm2-135m")
    gpu_name = _string(chosen, "gpu", required="--gpu cpu or --gpu h100")
    assert model_name is not None
    assert gpu_name is not None
    source, revision = _string(chosen, "source"), _string(chosen, "revision")
    gpu = facts.find_gpu(gpu_name)
    if model is None:
        model = facts.find_model(model_name, source=source, revision=revision)
        place = model.source
        # A model file of ours says whether the model is quantized; what it says of the quantization may have changed.
        if isinstance(place, HubSource) and (model.stored or place.repo_id == model_name):
            model = peek(model)
    requested, cache = _string(chosen, "dtype") or "auto", _string(chosen, "kv_cache")
    group_size = _count(chosen, "group_size") if "group_size" in chosen else None
    recipes = facts.load_quant_recipes()
    shape = None if recorded else _shape(model_name, required="load" in chosen)
    of_gpu = facts.usual_runtime(gpu, None)
    usual = of_gpu if shape is None else facts.usual_runtime(gpu, shape.architecture)
    runtime = _runtime(_string(chosen, "runtime"), gpu) or usual.runtime
    experts = shape is not None and shape.experts is not None
    if model.stored is None:
        precision = resolve_precision(requested, gpu, recipes, cache, group_size, runtime, experts=experts)
    else:
        precision = stored_precision(model.name, model.stored, requested, gpu, recipes, cache, group_size)
    accept_accuracy = _flag(chosen, "accept_accuracy")
    tasks = _tasks(chosen, quantized=precision.recipe is not None)
    toolchain = facts.find_toolchain(_release(chosen))
    executor = _string(chosen, "executor") or "auto"
    if executor not in EXECUTORS:
        raise UsageError(f"unknown executor '{executor}'", remedy=suggestion(executor, (*EXECUTORS, "ray")))
    quantization = precision.recipe.quantization if precision.recipe else UNQUANTIZED
    backend = load_backend(runtime)
    if model.stored is not None:
        require_readable(model.name, model.stored, runtime)
    if (backend.ANYWHERE or gpu.is_cpu) and "load" in chosen:
        raise UsageError("--load plans sizes for a GPU", why=f"the {runtime} runtime takes them as they are")
    if shape is not None:
        # Given values take precedence over planned ones.
        room = facts.find_gpu("cpu") if backend.ANYWHERE else gpu
        chosen = planned_sizes(chosen, model.name, shape, room, precision.dtype, quantization) | chosen
    calibration_config = _group(chosen, "calibration", CalibrationConfig, given)
    mapping = _mapping(chosen)
    target = Target(
        gpu=gpu, mapping=mapping, quantization=quantization, toolchain=toolchain, stored=precision.stored,
        dtype=precision.dtype,
    )  # fmt: skip
    adapters = _adapters(chosen)
    build_config = _group(chosen, "build", BuildConfig, given)
    if adapters and not recorded:
        if backend.ARRAYS:
            require_type(precision.dtype)
        build_config = _for_adapters(build_config, adapters, fixed="build.max_lora_rank" in chosen)
    if build_config.speculative_model is not None and not recorded:
        folder = Path(build_config.speculative_model).expanduser().absolute()
        build_config = dataclasses.replace(build_config, speculative_model=str(folder))
    build_config, reasons = backend.resolve(build_config, target)
    serving, serving_reasons = resolve_serving(
        _group(chosen, "serving", ServingConfig, given), build_config, runtime, toolchain
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
        return chosen[name][1] if name in chosen else otherwise

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


def _shape(name: str, *, required: bool) -> ModelConfig | None:
    """The model's config; None for a model that must be downloaded first, unless it is required."""
    try:
        return facts.find_shape(name)[1]
    except UsageError:
        if required:
            raise
        return None


def _adapters(chosen: dict[str, tuple[Any, str]]) -> tuple[tuple[str, Path], ...]:
    """Names and folders of the adapters, sorted. Raises UsageError or ConfigError."""
    out = []
    for name, (folder, label) in chosen.items():
        group, _, own = name.partition(".")
        if group == LORA:
            check_name(own)
            if not isinstance(folder, str) or not folder:
                raise _error(label)(f"{label}: {name} is {folder!r}, not a folder", remedy="name the adapter's folder")
            out.append((own, Path(folder).expanduser().absolute()))
    return tuple(sorted(out))


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


def _merge(layers: list[Layer]) -> dict[str, tuple[Any, str]]:
    """Dotted name -> (value, layer) of the strongest layer that has it. Raises ConfigError for unknown names."""
    out: dict[str, tuple[Any, str]] = {}
    for label, layer in layers:
        read.check_keys(layer, [*SCALARS, *GROUPS, LORA], label, _error(label))
        for key, value in layer.items():
            if key == LORA and value is not None:
                if not isinstance(value, dict):
                    raise _error(label)(f"{label}: {LORA} is not a mapping", remedy=f"name an adapter: {LORA}.NAME")
                out.update({f"{LORA}.{name}": (inner, label) for name, inner in value.items()})
                continue
            if key not in GROUPS:
                if value is not None:
                    out[key] = (value, label)
                continue
            fields = [field.name for field in dataclasses.fields(GROUPS[key])]
            if value is None:  # a group whose lines are all commented out
                continue
            if not isinstance(value, dict):
                remedy = f"name a setting, such as {key}.{fields[0]}"
                raise _error(label)(f"{label}: {key} is not a mapping", remedy=remedy)
            read.check_keys(value, fields, f"{label}: {key}", _error(label))
            out.update({f"{key}.{name}": (inner, label) for name, inner in value.items()})
    return out


def _group(chosen: dict[str, tuple[Any, str]], group: str, cls: type[Any], given: dict[str, tuple[Any, str]]) -> Any:
    """The settings of a group; a mistake is in the layers of `given`, not in values that were planned."""
    prefix = group + "."
    data = {name[len(prefix) :]: value for name, (value, _) in chosen.items() if name.startswith(prefix)}
    labels = list(dict.fromkeys(label for name, (_, label) in given.items() if name.startswith(prefix)))
    for label in labels if len(labels) > 1 else []:  # a value that is wrong by itself is a mistake of its layer alone
        own = {
            name[len(prefix) :]: value
            for name, (value, one) in given.items()
            if one == label and name.startswith(prefix)
        }
        read.build(cls, own, f"{label}: {group}", _error(label))
    return read.build(cls, data, f"{' and '.join(labels)}: {group}", _error(*labels))


def _error(*labels: str) -> type[TrtpipeError]:
    """The error class for a mistake: ConfigError in a recipe, UsageError on the command line."""
    return read.ConfigError if any(label.startswith("recipe ") for label in labels) else UsageError


def _source_origin(given: str, model: ModelRef) -> str:
    """Origin of the source when neither --source nor --revision gives it."""
    itself = model.source.kind in ("folder", "gguf") or getattr(model.source, "repo_id", None) == given
    return "the model itself" if itself else f"first source of {model.name}"


def _string(chosen: dict[str, tuple[Any, str]], name: str, required: str = "") -> str | None:
    if name not in chosen:
        if required:
            raise UsageError(f"no {name} is given", remedy=f"pass for example {required}")
        return None
    value, label = chosen[name]
    if not isinstance(value, str):
        raise _error(label)(f"{label}: {name} is {value!r}, not a name")
    if not value:
        raise _error(label)(f"{label}: {name} is empty")
    return value


def _count(chosen: dict[str, tuple[Any, str]], name: str) -> int:
    value, label = chosen.get(name, (1, "default"))
    if not isinstance(value, int) or isinstance(value, bool):
        raise _error(label)(f"{label}: {name} is {value!r}, not a whole number")
    return value


def _mapping(chosen: dict[str, tuple[Any, str]]) -> Mapping:
    moe = (_count(chosen, name) if name in chosen else None for name in ("moe_tp", "moe_ep"))
    return Mapping.of(_count(chosen, "tp"), _count(chosen, "pp"), *moe)


def _flag(chosen: dict[str, tuple[Any, str]], name: str) -> bool:
    value, label = chosen.get(name, (False, "default"))
    if not isinstance(value, bool):
        raise _error(label)(f"{label}: {name} is {value!r}, not true or false")
    return value


def _tasks(chosen: dict[str, tuple[Any, str]], *, quantized: bool) -> tuple[str, ...]:
    """Files of the tasks that the accuracy gate scores."""
    value, label = chosen.get("tasks", ([], "default"))
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
        raise _error(label)(f"{label}: tasks is {value!r}, not a file or a list of files")
    if files and not quantized:
        raise _error(label)(
            "tasks are for a quantized model", why="they are scored where its accuracy is checked",
            remedy="choose a quantized --dtype, or leave them out",
        )  # fmt: skip
    return tuple(files)


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


def _release(chosen: dict[str, tuple[Any, str]]) -> str | None:
    """The toolchain's name as text, because YAML reads 1.1 as a number."""
    value, _ = chosen.get("toolchain", (None, ""))
    if isinstance(value, float):
        return str(value)
    return _string(chosen, "toolchain")


def _runtime(requested: str | None, gpu: GpuSpec) -> str | None:
    """The runtime that was requested, if any. Raises UsageError."""
    if requested is None:
        return None
    if requested not in BACKENDS:
        raise UsageError(f"unknown runtime '{requested}'", remedy=suggestion(requested, BACKENDS))
    if gpu.is_cpu and not load_backend(requested).ON_CPU:
        able = " or ".join(name for name in BACKENDS if load_backend(name).ON_CPU)
        raise UsageError(f"runtime {requested} needs an NVIDIA GPU", remedy=f"use --runtime {able} with --gpu cpu")
    return requested
