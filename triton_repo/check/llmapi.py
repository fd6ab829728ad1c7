"""Check of an LLM API model: model.yaml, which its script passes to `LLM`, against config.pbtxt and this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError, kind_of
from trtpipe.engines.json_input import read_json
from trtpipe.engines.nvidia import Gpu
from trtpipe.engines.passport import NAME as PASSPORT
from trtpipe.engines.passport import Passport
from trtpipe.engines.toolchain import Toolchain
from trtpipe.engines.yaml_input import load_yaml
from trtpipe.triton_repo.check import facts, values
from trtpipe.triton_repo.check.engine_files import check_precision, check_weights
from trtpipe.triton_repo.check.engine_host import check_passport
from trtpipe.triton_repo.check.facts import Argument
from trtpipe.triton_repo.check.faults import Location, Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.paths import locate, may_be_hub_id, tell_not_here
from trtpipe.triton_repo.check.release import Release
from trtpipe.triton_repo.check.service import check_apart, check_present
from trtpipe.triton_repo.check.text import PLACEHOLDER, line_of

FILE = "model.yaml"
# Last release for which the list of arguments is complete, so that LLM refuses all others. Candidates of 1.3 differ.
_LISTED = (1, 2, 99)
# Most settings of one mapping that are checked; LLM has some 100.
_MOST = 256


def check_llmapi(
    model: Model, models: dict[str, Model], release: Release, toolchain: Toolchain | None, gpus: Sequence[Gpu] | None,
    report: Report,
) -> None:  # fmt: skip
    folder = model.version_folder
    if model.config is None or folder is None:
        return
    path = folder / FILE
    others = sorted(one.name for one in folder.glob("*.y*ml") if one.name != FILE)
    if not path.is_file():
        if not others:
            report.error(
                "llmapi-settings",
                folder,
                f"has no {FILE}",
                why="the script reads LLM's arguments from it",
                remedy=f"copy {FILE} of the release's llmapi template into it",
            )
        return  # LLM_CONFIG_PATH may name another file
    settings = _read(path, report)
    if settings is None:
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    known = facts.llm_arguments()
    check_rows(path, text, "", settings, known.arguments, release, report)
    for name, rows in known.nested.items():
        if isinstance(settings.get(name), dict):
            check_rows(path, text, f"{name}.", settings[name], rows, release, report)
    _check_triton(model, path, text, settings, known.triton, report)
    _check_backend(path, text, settings, known, release, report)
    place = _check_model(path, text, settings, models, release, report)
    _check_place((path, "tokenizer" + line_of(text, r"^tokenizer\b")), settings.get("tokenizer"), models, report)
    drafts = settings.get("speculative_config")
    if isinstance(drafts, dict):
        name = "speculative_model_dir"
        where = path, f"speculative_config.{name}" + line_of(text, rf"^\s+{name}\b")
        _check_place(where, drafts.get(name), models, report)
    _check_processors(path, settings, report)
    if place is not None and (place / PASSPORT).is_file():
        passport = check_passport((path, "model" + line_of(text, r"^model\b")), place, gpus, toolchain, report)
        if passport is not None:
            _check_ranks(path, text, settings, passport, report)
            config = _config(place / "config.json", report)
            if config is not None:
                check_precision(place, config, passport, report)
        gpus = None  # the check of the passport is enough
    _check_gpus(model, path, text, settings, gpus, report)


def _read(path: Path, report: Report) -> dict[str, Any] | None:
    try:
        value = load_yaml(path, repeats=True)  # the last of repeated keys counts, as in the script
    except OSError as error:
        report.error("llmapi-settings", path, "cannot be read", why=error.strerror or str(error))
    except ValueError as error:
        line = getattr(error, "line", None)
        report.error(
            "llmapi-settings", (path, f"line {line}" if line is not None else ""), "is not YAML", why=str(error)
        )
    else:
        if isinstance(value, dict):
            return value
        report.error("llmapi-settings", path, f"holds {kind_of(value)}, not a mapping")
    return None


def check_rows(
    path: Path, text: str, prefix: str, settings: dict[Any, Any], rows: dict[str, Argument], release: Release,
    report: Report,
) -> None:  # fmt: skip
    if len(settings) > _MOST:
        report.error(
            "llmapi-argument", (path, prefix.rstrip(".")), f"holds {len(settings):,} settings", "LLM takes fewer"
        )
        return
    for key, value in settings.items():
        name = str(key)
        where = path, prefix + name + line_of(text, rf"^\s*['\"]?{_escape(name)}\b")
        fact = rows.get(name)
        if fact is None:
            near = nearest(name, set(rows) - set(map(str, settings)), 0.8)
            exact = release.key is not None and release.key <= _LISTED
            if near or exact:
                report.error(
                    "llmapi-argument", where, "is none that LLM takes", "it refuses unknown ones",
                    did_you_mean(near) or "drop it",
                )  # fmt: skip
            else:
                report.warning("llmapi-argument", where, "is none that LLM is known to take")
        elif fact.until and release.has_left(fact.until):
            report.error(
                "llmapi-argument", where, f"is unknown to {release.told()}", f"{fact.until} was its last release",
                "see the release's LLM API",
            )  # fmt: skip
        elif fact.since and release.lacks(fact.since):
            report.error(
                "llmapi-argument", where, f"is unknown to {release.told()}", f"it came with {fact.since}",
                "drop it, or serve with a newer release",
            )  # fmt: skip
        else:
            _check_argument(where, value, fact, report)


def _escape(name: str) -> str:
    return "".join(char if char.isalnum() else f"\\{char}" for char in name)


def _check_argument(where: Location, value: Any, fact: Argument, report: Report) -> None:
    if value is None and not fact.required:
        return
    told = None
    number = _number(value) if fact.type in ("int", "float") else None
    if isinstance(value, str) and PLACEHOLDER.search(value):
        report.error("placeholder", where, f"still holds the placeholder {value}", remedy="fill it in")
        return
    if fact.type == "bool" and not (isinstance(value, bool) or str(value).lower() in values.TEXT_WORDS):
        told = "true or false"
    elif fact.type == "int" and (number is None or not number.is_integer()):
        told = "a whole number"
    elif fact.type == "float" and number is None:
        told = "a number"
    elif fact.type == "text" and not isinstance(value, (str, int, float)):
        told = "a text"
    elif fact.type == "mapping" and not isinstance(value, dict):
        told = "a mapping"
    elif fact.type == "list" and not isinstance(value, (list, tuple)):
        told = "a list"
    elif fact.choices and str(value) not in fact.choices:
        told = " or ".join(fact.choices)
    elif number is not None and fact.least is not None and number < fact.least:
        told = f"at least {fact.least:g}"
    elif number is not None and fact.most is not None and number > fact.most:
        told = f"at most {fact.most:g}"
    if told:
        report.error("llmapi-argument", where, f"is {value!r}", why="LLM refuses it", remedy=f"give {told}")


def _number(value: Any) -> float | None:
    """Convert to a number like pydantic, which also accepts a text that is a number; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def _check_triton(
    model: Model, path: Path, text: str, settings: dict[str, Any], rows: dict[str, Argument], report: Report
) -> None:
    """Check `triton_config`, which has the settings that config.pbtxt of this template leaves out."""
    section = settings.get("triton_config")
    where = path, "triton_config" + line_of(text, r"^triton_config\b")
    if not isinstance(section, dict):
        report.error(
            "llmapi-settings",
            where,
            "is missing" if section is None else "is not a mapping",
            why="the script looks up its decoupled and max_batch_size",
            remedy="add it with both",
        )
        return
    for name, fact in rows.items():
        place = path, f"triton_config.{name}" + line_of(text, rf"^\s+{name}\b")
        value = section.get(name)
        if name not in section:
            if fact.required:
                report.error(
                    "llmapi-settings", place, "is missing", "the script looks it up without a default",
                    "add it",
                )  # fmt: skip
        elif name == "decoupled" and isinstance(value, str):
            # The script calls bool(), and bool("False") is true.
            report.error(
                "llmapi-settings",
                place,
                f"is the text '{value}'",
                why="the script takes any text for true",
                remedy="write it without quotes",
            )
        else:
            _check_argument(place, value, fact, report)
    for name in section:
        if name not in rows:
            near = nearest(str(name), set(rows) - set(section), 0.8)
            add = report.error if near else report.warning
            at = path, f"triton_config.{name}"
            add("llmapi-settings", at, "is not read", remedy=did_you_mean(near) or "drop it")
    _check_policy(model, section, report)


def _check_policy(model: Model, section: dict[str, Any], report: Report) -> None:
    config, decoupled, batch = model.config, section.get("decoupled"), section.get("max_batch_size")
    assert config is not None
    if (
        config.HasField("model_transaction_policy")
        and isinstance(decoupled, (bool, int))
        and bool(decoupled) != model.decoupled
    ):
        report.error(
            "llmapi-policy",
            model.at_field("decoupled"),
            f"is {str(model.decoupled).lower()}, and {FILE} says {str(bool(decoupled)).lower()}",
            why="the script refuses to change it",
            remedy="give both the same, or leave it out here",
        )
    if isinstance(batch, int) and model.batch > batch:
        report.error(
            "llmapi-policy",
            model.at_field("max_batch_size"),
            f"is {model.batch}, and {FILE} says {batch}",
            why="the script refuses to lower it",
            remedy="leave it out here",
        )


def _check_backend(
    path: Path, text: str, settings: dict[str, Any], known: facts.LlmArguments, release: Release, report: Report
) -> None:
    backend = settings.get("backend")
    if backend is None or not isinstance(backend, str) or PLACEHOLDER.search(backend):
        return
    where = path, "backend" + line_of(text, r"^backend\b")
    if backend not in known.backends:
        report.error(
            "llmapi-argument",
            where,
            f"is '{backend}'",
            why="LLM refuses it",
            remedy=did_you_mean(nearest(backend, known.backends, 0.6)) or f"give {' or '.join(known.backends)}",
        )
    elif backend == "tensorrt" and release.has_left(known.tensorrt_until):
        report.error(
            "llmapi-argument",
            where,
            "is tensorrt",
            why=f"{release.told()} serves engines by the backend tensorrtllm only",
            remedy="give pytorch, or package the engine as inflight_batcher_llm",
        )


def _check_model(
    path: Path, text: str, settings: dict[str, Any], models: dict[str, Model], release: Release, report: Report
) -> Path | None:
    """Check the `model` setting; return the model's folder if it is on this machine."""
    name = settings.get("model")
    where = path, "model" + line_of(text, r"^model\b")
    if name is None or name == "":
        report.error(
            "llmapi-model", where, "is missing", "LLM has nothing to load", "name a folder or a Hugging Face model"
        )
        return None
    if not isinstance(name, str) or PLACEHOLDER.search(name):
        return None
    place = locate(name, report.repository, models)
    folder = place.path
    if place.absent and not may_be_hub_id(name, report.repository) and not name.isalnum():
        report.error("llmapi-model", where, f"is '{name}', which is not there", place.why)
        return None
    if folder is None or (place.mapped and not (folder / "config.json").is_file()):
        tell_not_here(where, name, report, hub=place.absent)
        return None
    if not (folder / "config.json").is_file():
        report.error("llmapi-model", where, f"is '{name}', which has no config.json", "it is not a model folder")
        return None
    engine = any(folder.glob("rank*.engine"))
    torch = settings.get("backend") == "pytorch" or ("backend" not in settings and release.reaches("1.0.0"))
    if engine and torch:
        report.error(
            "llmapi-model",
            where,
            f"is '{name}', a compiled engine",
            why="the PyTorch backend loads Hugging Face folders",
            remedy="name the model's own folder, or package the engine as inflight_batcher_llm",
        )
    elif not engine:
        check_weights(folder, report)
    return folder


def _config(path: Path, report: Report) -> dict[str, Any] | None:
    try:
        return read_json(path, "model config")
    except InputDataError as error:
        remedy = "fetch the model again"
        report.error("llmapi-model", path, "cannot be read", error.why or error.what, remedy)
        return None


def _check_place(where: Location, name: Any, models: dict[str, Model], report: Report) -> None:
    """Check that a folder or a name on the hub, which a setting may give beside the model's, is there."""
    if not isinstance(name, str) or not name or PLACEHOLDER.search(name):
        return
    place = locate(name, report.repository, models)
    hub = may_be_hub_id(name, report.repository) or name.isalnum()
    if place.absent and not hub:
        report.error("llmapi-model", where, f"is '{name}', which is not there", place.why)
    elif place.path is None:
        tell_not_here(where, name, report, hub=place.absent)


def _check_ranks(path: Path, text: str, settings: dict[str, Any], passport: Passport, report: Report) -> None:
    """Report a number of ranks other than that of the passport, by which deployments count GPUs."""
    for name, size in (("tensor_parallel_size", passport.tp_size), ("pipeline_parallel_size", passport.pp_size)):
        if settings.get(name, 1) != size:
            report.error(
                "passport",
                (path, name + line_of(text, rf"^{name}\b")),
                f"is {settings.get(name, 1)}, and the model's {PASSPORT} says {size}",
                remedy="give both the same, or build it again",
            )


def _check_processors(path: Path, settings: dict[str, Any], report: Report) -> None:
    processors = settings.get("logits_post_processors")
    for name, spec in processors.items() if isinstance(processors, dict) else ():
        module, colon, attribute = str(spec).partition(":")
        if not (isinstance(spec, str) and module and colon and attribute):
            report.error(
                "llmapi-settings", (path, f"logits_post_processors.{name}"), f"is {spec!r}", "the script refuses it",
                "write it as module:attribute",
            )  # fmt: skip


def _check_gpus(
    model: Model, path: Path, text: str, settings: dict[str, Any], gpus: Sequence[Gpu] | None, report: Report
) -> None:
    sizes = [
        settings.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return
    world = sizes[0] * sizes[1] * sizes[2]
    ids = model.value("gpu_device_ids")
    if model.instances > 1:
        groups = [group.strip() for group in ids.split(";")] if ids else []
        if not ids:
            report.error(
                "instances",
                model.at_field("count"),
                f"is {model.instances}, and the parameter gpu_device_ids has no value",
                why="the script refuses to start",
                remedy="list the GPUs of each instance, as in 0;1",
            )
        elif len(groups) < model.instances:
            report.error(
                "gpu-ids",
                model.at_parameter("gpu_device_ids"),
                f"has {len(groups)} list(s), and the model {model.instances} instances",
                why="the script refuses to start",
                remedy="give one list for each instance, with semicolons between",
            )
        numbers = values.read_groups(ids or "")[0]
        check_apart(model, numbers, report)
        if gpus is not None:
            check_present(model, numbers, len(gpus), report)
        wrong = next((one for one in groups if one and len(one.rstrip(",").split(",")) != world), None)
        if wrong:
            report.error(
                "gpu-ids",
                model.at_parameter("gpu_device_ids"),
                f"lists '{wrong}', and {FILE} asks for {world} GPU(s) for each instance",
                remedy=f"list {world}",
            )
    if gpus is not None and world * model.instances > len(gpus):
        report.error(
            "engine-gpu",
            (path, "tensor_parallel_size" + line_of(text, r"^tensor_parallel_size\b")),
            f"asks for {world * model.instances} GPU(s) in all, and this machine has {len(gpus)}",
            remedy="serve it elsewhere, or lower it",
        )
