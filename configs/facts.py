"""Reader of the facts in configs/: GPUs, models, toolchains and quantization recipes, by name or alias."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trtpipe import configs
from trtpipe.configs.home import default_home
from trtpipe.configs.read import ConfigError, build, check_keys, read_yaml
from trtpipe.engines.errors import UsageError, nearest, suggestion
from trtpipe.engines.gpu import GpuSpec, Measured
from trtpipe.engines.hf.folder import parse_model_config, read_model_config
from trtpipe.engines.hf.stored import Stored, parse_stored, read_stored
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.model_source import SOURCE_KINDS, FolderSource, GgufSource, HubSource, ModelRef, Source
from trtpipe.engines.precision import QuantRecipe
from trtpipe.engines.toolchain import Toolchain

_T = TypeVar("_T")
# A YAML file, and what changes with its content: inode, bytes, time of the last change; zeros where it cannot be asked.
_File = tuple[Path, int, int, int]
CONFIGS = Path(configs.__file__).parent
# The last stable release of TensorRT-LLM that builds engines.
DEFAULT_TOOLCHAIN = "1.2.1"

# OWNER/NAME of a Hugging Face repository; other forms of a missing path do not match.
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Name of a model that names a target, which is a folder, and without '+' a tag of an OCI registry.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,95}")
HUB_ADDRESS = re.compile(rf"https?://(?:huggingface\.co|hf\.co)/({HUB_ID.pattern})")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model: a file of configs/models, with the sources in order of preference.

    config       fields of the model's config.json that a plan needs, under Hugging Face's names
    tool_format  format in which it writes calls of tools, one of the gateway's; None where it has none
    """

    name: str
    architecture: str
    license: str
    sources: tuple[Source, ...]
    config: dict[str, Any]
    aliases: tuple[str, ...] = ()
    tool_format: str | None = None


@dataclass(frozen=True, kw_only=True)
class UsualRuntime:
    """A row of configs/runtimes.yaml: the runtime of targets whose GPU and model it covers, where none is named.

    gpu            name of the GPU; "" covers all
    architectures  of models, under Hugging Face's names; none covers all
    label          source of the setting, in a few words
    reason         why this runtime
    """

    runtime: str
    label: str
    reason: str
    gpu: str = ""
    architectures: tuple[str, ...] = ()

    def covers(self, gpu: str, architecture: str | None) -> bool:
        return self.gpu in ("", gpu) and (not self.architectures or architecture in self.architectures)


@dataclass(frozen=True, kw_only=True)
class _Runtimes:
    runtimes: tuple[UsualRuntime, ...]


def load_usual_runtimes() -> tuple[UsualRuntime, ...]:
    """The rows of configs/runtimes.yaml, in their order."""
    return build(_Runtimes, read_yaml(CONFIGS / "runtimes.yaml"), "runtimes.yaml").runtimes


def usual_runtime(gpu: GpuSpec, architecture: str | None) -> UsualRuntime:
    """The runtime for a GPU and a model's architecture, None where it is not known before a download.

    Raises ConfigError where no row covers them.
    """
    for row in load_usual_runtimes():
        if row.covers(gpu.name, architecture):
            return row
    raise ConfigError(f"runtimes.yaml has no row for {gpu.name}", remedy="end it with a row that covers all GPUs")


def _loaded(read: Callable[..., dict[str, _T]], *folders: Path) -> dict[str, _T]:
    """The result of `read` for the YAML files of each folder; a later call reads them again if a file has changed."""
    return dict(_read_once(read, tuple(_files(folder) for folder in folders)))


@functools.lru_cache(maxsize=32)
def _read_once(read: Callable[..., dict[str, Any]], folders: tuple[tuple[_File, ...], ...]) -> dict[str, Any]:
    return read(*([path for path, *_ in files] for files in folders))


def _files(folder: Path) -> tuple[_File, ...]:
    return tuple((path, *_identity(path)) for path in sorted(folder.glob("*.yaml")))


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:  # whoever reads it says why
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


def load_gpus(own: Path | None = None) -> dict[str, GpuSpec]:
    """Load all GPUs of configs/gpus by name, with their measurements, if any.

    A file of the folder `own` (the user's, gpus/ of TRTPIPE_HOME) adds a GPU, or overrides fields of a known one.
    """
    return _loaded(_gpus, CONFIGS / "gpus", CONFIGS / "gpus" / "measured", own or default_home() / "gpus")


def _gpus(known: list[Path], measured: list[Path], own: list[Path]) -> dict[str, GpuSpec]:
    raw = {path.stem: (path.name, read_yaml(path)) for path in known}
    for path in (*measured, *own):
        facts = read_yaml(path)
        name = str(facts.get("name", path.stem))
        where, before = raw.get(name, ("", {}))
        if before:
            build(GpuSpec, before, where)  # a mistake in it is told by its own name
        if "memory_gib" in facts:  # goes before what the driver of a known card reports
            before = {key: value for key, value in before.items() if key != "memory_mib"}
        raw[name] = (str(path), {**before, **facts})
    gpus = []
    for where, facts in raw.values():
        gpu = build(GpuSpec, facts, where)
        _check_figures(gpu, where)
        if gpu.measured:
            _check_figures(gpu.measured, f"{where}: measured")
        gpus.append(gpu)
    return {gpu.name: gpu for gpu in gpus}


def _check_figures(facts: GpuSpec | Measured, where: str) -> None:
    """Raise ConfigError for a figure that is not above zero."""
    figures = {name: value for name, value in vars(facts).items() if isinstance(value, (int, float))}
    figures |= {f"tflops.{kind}": value for kind, value in facts.tflops.items()}
    for name, value in figures.items():
        if value <= 0:
            remedy = "leave out a figure that is not known"
            raise ConfigError(f"{where}: {name}", why=f"{value:g} is not above zero", remedy=remedy)


def find_gpu(name: str) -> GpuSpec:
    """Find a GPU by name or alias. Raises UsageError offering the nearest spelling of the same card's name."""
    names = {alias: gpu for gpu in load_gpus().values() for alias in (gpu.name, *gpu.aliases)}
    if name.lower() in names:
        return names[name.lower()]
    if near := nearest(name, [known for known in names if _same_number(known, name)]):
        remedy = "did you mean " + " or ".join(f"'{one}'" for one in near) + "?"
    else:
        own = default_home() / "gpus/NAME.yaml"
        remedy = f"`trtpipe gpus` lists those that are known; {own} adds one, with the fields of `trtpipe gpus h100`"
    raise UsageError(f"unknown GPU '{name}'", remedy=remedy)


def gpu_of(name: str) -> GpuSpec | None:
    """The whole GPU that the driver reports by this name; None for one without a file. Its MIG slices bear it too."""
    product = name.replace(" ", "-")
    return next((gpu for gpu in load_gpus().values() if product and gpu.product == product and not gpu.mig), None)


def _same_number(known: str, name: str) -> bool:
    """Whether the first number of one name begins with that of the other. An RTX 3090 is not an RTX 5090 misspelt."""
    one, other = ("".join(re.findall(r"\d+", text)[:1]) for text in (known, name))
    return one.startswith(other) or other.startswith(one)


def load_quant_recipes() -> dict[str, QuantRecipe]:
    """Load all quantization recipes of configs/quant by name."""
    return _loaded(_recipes, CONFIGS / "quant")


def _recipes(files: list[Path]) -> dict[str, QuantRecipe]:
    recipes = [build(QuantRecipe, read_yaml(path), path.name) for path in files]
    return {recipe.name: recipe for recipe in recipes}


def load_toolchains() -> dict[str, Toolchain]:
    """Load all toolchains of configs/toolchains by release, the newest first.

    A file with `extends` inherits the fields that it does not set from the toolchain that it names.
    """
    return _loaded(_toolchains, CONFIGS / "toolchains")


def _toolchains(files: list[Path]) -> dict[str, Toolchain]:
    raw = {path.name: read_yaml(path) for path in reversed(files)}
    by_name = {str(facts.get("name")): facts for facts in raw.values()}
    out = {}
    for file, facts in raw.items():
        own = {key: value for key, value in facts.items() if key != "extends"}
        base = by_name.get(str(facts.get("extends")), {})
        if "extends" in facts and not base:
            raise ConfigError(f"{file}: extends {facts['extends']}, which no file is named")
        toolchain = build(Toolchain, {**base, **own}, file)
        out[toolchain.name] = toolchain
    return out


def find_toolchain(name: str | None) -> Toolchain:
    """Find the toolchain of a release or of its first two numbers; the default for None. Raises UsageError."""
    toolchains = load_toolchains()
    names = {alias: one for one in toolchains.values() for alias in (one.name, *one.aliases)}
    name = name or DEFAULT_TOOLCHAIN
    if name not in names:
        raise UsageError(f"unknown toolchain '{name}'", remedy=suggestion(name, toolchains))
    return names[name]


def load_models() -> dict[str, ModelFacts]:
    """Load all models of configs/models by name."""
    return _loaded(_models, CONFIGS / "models")


def _models(files: list[Path]) -> dict[str, ModelFacts]:
    models = [_model(path) for path in files]
    return {model.name: model for model in models}


def find_model(name: str, *, source: str | None, revision: str | None) -> ModelRef:
    """Resolve --model: a name or alias of configs/models, a folder, a .gguf file, or a Hugging Face id.

    `source` picks one kind among a model file's sources; `revision` pins a Hugging Face one. Whether the files of a
    Hugging Face id are quantized is not known here. Raises UsageError, and InputDataError for a folder that is
    quantized in a way that is not read here.
    """
    models = load_models()
    names = {alias: model for model in models.values() for alias in (model.name, *model.aliases)}
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # `~user` of a user without a home folder
        path = path.expanduser()
    chosen: Source
    stored: Stored | None = None
    if name.lower() in names:
        facts = names[name.lower()]
        short, chosen = facts.name, _choose(facts, source or ("hub" if revision else None))
        stored = parse_stored(*_config(facts))
    elif path.is_dir():
        # The name that was given, also of a link: what it points to may be an artefact, and all of those have one name.
        place = path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
        short, chosen = place.name, FolderSource(path=str(place))
        stored = read_stored(path) if (path / "config.json").is_file() else None
    elif path.suffix == ".gguf" and path.is_file():
        short, chosen = path.stem, GgufSource(path=str(path.resolve()))
    elif HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        short, chosen = name.split("/")[1], HubSource(repo_id=name)
    else:
        if "/" in name or name.startswith(".") or path.suffix == ".gguf":
            address = HUB_ADDRESS.match(name)
            if address:
                remedy = f"a model of the Hub is named by its id, {address[1]}"
                raise UsageError(f"'{name}' is an address", remedy=remedy)
            raise UsageError(
                f"unknown model '{name}'",
                why="it is neither a folder nor a .gguf file" if path.exists() else "no such file or folder either",
                remedy="check the path, or take a name of `trtpipe models`",
            )
        raise UsageError(f"unknown model '{name}'", remedy=suggestion(name, names))
    if not NAME.fullmatch(short):
        raise UsageError(
            f"no target can be named after '{short}'",
            why="Triton does not start from a path with other characters, and no registry takes them",
            remedy=f"rename {name}, or make a link to it, with a name of letters, digits, '.', '_', '+' and '-'",
        )
    if source is not None and source != chosen.kind:
        raise UsageError(f"--source {source} does not apply to '{name}'", why=f"it is a {chosen.kind} source itself")
    if revision is not None:
        if not isinstance(chosen, HubSource):
            raise UsageError(f"--revision does not apply to a {chosen.kind} source ({chosen.describe()})")
        chosen = dataclasses.replace(chosen, revision=revision)
    return ModelRef(name=short.lower(), source=chosen, stored=stored)


def find_tool_format(name: str) -> str | None:
    """Format in which a model writes calls of tools; None where no file of configs/models says. `name` is a name or
    alias of such a file, or the Hugging Face id that is a source of one."""
    for model in load_models().values():
        hub = [source.repo_id for source in model.sources if isinstance(source, HubSource)]
        if name.lower() in (model.name, *model.aliases) or name in hub:
            return model.tool_format
    return None


def find_shape(name: str) -> tuple[str, ModelConfig]:
    """Short name and config of a model, given as a name or alias of configs/models, or as a folder with config.json.

    Raises UsageError for anything else: planning downloads nothing.
    """
    models = load_models()
    names = {alias: model for model in models.values() for alias in (model.name, *model.aliases)}
    facts = names.get(name.lower())
    if facts is not None:
        return facts.name, parse_model_config(*_config(facts), quantized=True)
    ref = find_model(name, source=None, revision=None)
    if isinstance(ref.source, FolderSource):
        return ref.name, read_model_config(Path(ref.source.path), quantized=True)
    raise UsageError(
        f"the shapes of {name} are not known here", remedy="give its folder; a config.json in it is all that is needed"
    )


def _config(facts: ModelFacts) -> tuple[dict[str, Any], Path]:
    """The config.json of a model file, as far as it is there, and the file."""
    return {"architectures": [facts.architecture], **facts.config}, CONFIGS / "models" / f"{facts.name}.yaml"


def _choose(facts: ModelFacts, kind: str | None) -> Source:
    if kind is None:
        return facts.sources[0]
    for source in facts.sources:
        if source.kind == kind:
            return source
    raise UsageError(
        f"{facts.name} has no {kind} source", remedy="it has: " + ", ".join(source.kind for source in facts.sources)
    )


def _model(path: Path) -> ModelFacts:
    raw = read_yaml(path)
    check_keys(raw, [field.name for field in dataclasses.fields(ModelFacts)], path.name)
    entries = raw.get("sources")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path.name}: sources must be a list of mappings")
    sources = []
    for entry in entries:
        kind = entry.get("kind")
        if kind not in SOURCE_KINDS:
            raise ConfigError(f"{path.name}: unknown source kind {kind!r}", remedy=suggestion(str(kind), SOURCE_KINDS))
        rest = {key: value for key, value in entry.items() if key != "kind"}
        sources.append(build(SOURCE_KINDS[kind], rest, f"{path.name}: sources"))
    plain = build(_PlainModelFacts, {key: value for key, value in raw.items() if key != "sources"}, path.name)
    return ModelFacts(**vars(plain), sources=tuple(sources))


@dataclass(frozen=True, kw_only=True)
class _PlainModelFacts:
    """ModelFacts without the sources, whose type depends on their kind."""

    name: str
    architecture: str
    license: str
    config: dict[str, Any]
    aliases: tuple[str, ...] = ()
    tool_format: str | None = None
