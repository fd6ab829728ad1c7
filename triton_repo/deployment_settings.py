"""Settings of a TensorRT-LLM engine and of the models of its repository, as one list.

Values are what their readers make of them: a boolean that the C++ backend cannot read counts as its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trtpipe.configs.facts import find_toolchain
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import InputDataError
from trtpipe.triton_repo.check import facts, values
from trtpipe.triton_repo.check.engine import SPECULATION
from trtpipe.triton_repo.check.engine_folder import EngineFolder
from trtpipe.triton_repo.check.faults import Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.scripts import read_script

ENGINE = "engine"
SIZES = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "tokens_per_block")
# Modes of speculation under trtllm-build's names, and the number that has no decoding mode -> ours.
_MODES = {"2": "draft_tokens_external", "lookahead_decoding": "lookahead", "explicit_draft_tokens": "redrafter"}
_YES = ("true", "t", "1", "y", "yes")
# Fields of config.pbtxt that say what the model is, or are rows of their own.
_IDENTITY = (
    "name", "platform", "backend", "input", "output", "parameters", "default_model_filename", "instance_group",
    "ensemble_scheduling",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a deployment.

    place   `engine`, or the name of the model whose config.pbtxt has it
    role    the model's role, which says what its parameters mean; `engine` for an engine's own
    kind    `build`, `parameters`, `fields` (of config.pbtxt), `requests` (an input) or `model` (a whole model)
    stated  whether it is written there; else the value is the reader's default
    note    what is odd about the value: a text that its reader cannot read
    """

    place: str
    role: str
    kind: str
    name: str
    value: Any
    stated: bool = True
    note: str = ""


def engine_settings(engine: EngineFolder) -> Iterator[Setting]:
    """Settings of the build: sizes, and what differs from the defaults of trtllm-build. Raises InputDataError."""
    build = {**engine.build, **engine.plugins, "cp_size": engine.mapping.get("cp_size", 1)}
    adapters = engine.build.get("lora_config")
    if build.get("lora_plugin") and isinstance(adapters, dict):
        build |= adapters
    if "max_seq_len" not in build and all(is_size(build.get(name)) for name in ("max_input_len", "max_output_len")):
        build["max_seq_len"] = build["max_input_len"] + build["max_output_len"]  # before 0.11
    build.setdefault("max_input_len", build.get("max_seq_len"))
    mode = build.get("speculative_decoding_mode")
    known = SPECULATION.get(mode) if isinstance(mode, int) else None
    name = known or str(mode).lower()
    build["speculative_decoding_mode"] = None if mode in (None, 1, "none") else _MODES.get(name, name)
    usual = find_toolchain(None).flags | {"cp_size": 1}
    for name in facts.successors().build:
        value = build.get(name)
        if name in SIZES:
            if is_size(value):
                yield Setting(place=ENGINE, role=ENGINE, kind="build", name=name, value=value)
            elif name in ("max_batch_size", "max_seq_len"):
                raise InputDataError(
                    f"{engine.config}: build_config has no usable {name}",
                    remedy="name the folder that trtllm-build wrote, of 0.9 or newer",
                )
        elif value not in (None, False, 0, "disable", [], {}, usual.get(name), getattr(BuildConfig, name, None)):
            yield Setting(place=ENGINE, role=ENGINE, kind="build", name=name, value=value)


def is_size(value: Any) -> bool:
    """Whether a value of an engine's config.json is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def model_settings(model: Model, engine_model: str, *, scripted: bool) -> Iterator[Setting]:
    """Settings of a model's config.pbtxt; `scripted` says that the model `ensemble` is a script too."""

    def setting(kind: str, name: str, value: Any, **more: Any) -> Setting:
        return Setting(place=model.name, role=model.role, kind=kind, name=name, value=value, **more)

    if model.role == "ensemble":
        return
    if model.role == "" or (model.role == "engine" and model.name != engine_model):
        yield setting("model", "model", "another engine" if model.role else "of no known template")
        return
    known = facts.parameters().get(model.role, {})
    own = read_script(model, Report(repository=model.folder.parent)).own
    for name, text in sorted(model.parameters.items()):
        if name not in known:
            if not own and model.value(name) is not None:
                yield setting("parameters", name, text)
        elif not known[name].dead and not known[name].limit and model.value(name) is not None:
            value = read_value(known[name], model.parameters[name], model.role)
            if value is None:
                note = f"'{text}' cannot be read, and its reader takes its default"
                yield setting("parameters", name, default_value(known[name]), note=note)
            else:
                yield setting("parameters", name, value)
    for name, fact in known.items():
        if model.value(name) is None and default_value(fact) is not None and not (fact.dead or fact.limit):
            yield setting("parameters", name, fact.default, stated=False)
    assert model.config is not None
    if scripted and model.name == "ensemble":
        yield setting("fields", "ensemble", "script")
    if not (scripted and model.name == "tensorrt_llm_bls"):  # the ensemble's number counts for both
        yield setting("fields", "instance_group.count", model.instances)
    gpus = sorted({gpu for group in model.config.instance_group for gpu in group.gpus})
    if gpus:
        yield setting("fields", "instance_group.gpus", gpus)
    for name, value in _fields(model.config):
        yield setting("fields", name, value)


def default_value(fact: facts.Parameter) -> Any:
    """What the reader of a parameter takes without it; None where that depends on the engine or the release."""
    known = isinstance(fact.default, bool | int | float) or fact.default in fact.choices
    return fact.default if known else None


def read_value(fact: facts.Parameter, text: str, role: str) -> Any:
    """The value of a parameter as its reader takes it; None where it cannot read it, and takes its default."""
    word = text.strip()
    if fact.kind == "bool":
        yes, no = (values.CPP_TRUE, values.CPP_FALSE) if role == "engine" else (_YES, values.TEXT_WORDS)
        word = word if role == "engine" else word.lower()
        return True if word in yes else False if word in no else None
    if fact.kind in ("int", "size"):
        number = values.read_int(word, values.SIZE if fact.kind == "size" else values.INT32).value
        return None if number is None else int(number)
    if fact.kind == "float":
        return values.read_float(word).value
    if fact.kind == "enum":
        return word if word in fact.choices else None
    if fact.kind == "windows":
        numbers, _ = values.read_ints(word)
        return numbers or None
    return word


def _fields(message: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration that are set, by dotted name, without those that say what the model is."""
    for descriptor, value in message.ListFields():
        name = prefix + descriptor.name
        if name in _IDENTITY:
            continue
        if descriptor.type == descriptor.TYPE_MESSAGE and not hasattr(value, "__len__"):
            yield from _fields(value, f"{name}.")
        elif descriptor.type == descriptor.TYPE_MESSAGE or isinstance(value, bytes):
            yield name, "given"
        else:
            yield name, list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value


def request_settings(models: Iterable[Model]) -> Iterator[Setting]:
    """Inputs of the models that clients ask with text."""
    fronts = [model for model in models if model.role in ("ensemble", "bls")]
    for name in dict.fromkeys(name for model in fronts for name in model.inputs()):
        place = ", ".join(model.name for model in fronts if name in model.inputs())
        yield Setting(place=place, role="ensemble", kind="requests", name=name, value=None)
