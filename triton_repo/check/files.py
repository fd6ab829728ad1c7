"""Check of the other files that a model's parameters name."""

from __future__ import annotations

from pathlib import Path

from trtpipe.engines.hf.adapter import CONFIG, WEIGHTS
from trtpipe.engines.json_input import load_json
from trtpipe.engines.lora_arrays import ARRAY_CONFIG, ARRAY_WEIGHTS
from trtpipe.triton_repo.check.faults import Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.paths import locate, tell_not_here
from trtpipe.triton_repo.check.text import PLACEHOLDER

_FIELDS = ("encoded_vocab", "tokenizer_str", "stop_token_ids")


def check_files(model: Model, models: dict[str, Model], report: Report) -> None:
    names = ["lora_prefetch_dir"]
    if model.value("guided_decoding_backend"):
        names.append("tokenizer_dir" if model.python_runtime else "xgrammar_tokenizer_info_path")
    for name in names:
        text = model.value(name)
        if text is None or "${" in text:
            continue
        place = locate(text, report.repository, models)
        if place.absent and not (name == "tokenizer_dir" and "/" in text):
            guided = name != "lora_prefetch_dir"
            report.error(
                "guided-decoding" if guided else "engine-feature",
                model.at_parameter(name),
                f"is '{text}', which is not there",
                why="the model does not load without it" if guided else "no adapter is loaded",
                remedy="name a path of the server's",
            )
        elif place.path is None and not place.absent:
            tell_not_here(model.at_parameter(name), text, report)
        elif place.path is not None and name == "lora_prefetch_dir":
            _check_adapters(place.path, report)
        elif place.path is not None and name == "xgrammar_tokenizer_info_path":
            _check_info(model, place.path, report)


def check_environment(model: Model, models: dict[str, Model], report: Report) -> None:
    """Check the archive or folder with the Python packages of a script."""
    text, where = model.value("EXECUTION_ENV_PATH"), model.at_parameter("EXECUTION_ENV_PATH")
    if text is None or model.backend != "python" or PLACEHOLDER.search(text):
        return
    place = locate(text.replace("$$TRITON_MODEL_DIRECTORY", str(model.folder.resolve())), report.repository, models)
    if place.absent:
        report.error(
            "script-environment", where, f"is '{text}', which is not there", "the model does not load",
            "copy the archive of conda-pack there",
        )  # fmt: skip
    elif place.path is None:
        tell_not_here(where, text, report)


def _check_adapters(folder: Path, report: Report) -> None:
    """Check the subfolders of an adapter folder, whose names must be numbers. The C++ backend reads NumPy arrays in
    them, trtpipe's backend PEFT's files; a server does not start with a subfolder that lacks a file."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            continue
        if not (path.name.isascii() and path.name.isdigit()) or int(path.name) >= 1 << 31:
            report.warning(
                "engine-feature", path, "is not named by a number of 31 bits", "no adapter is loaded from it",
                "rename it to the number that clients send as lora_task_id",
            )  # fmt: skip
            continue
        kinds = ((ARRAY_WEIGHTS, ARRAY_CONFIG), (WEIGHTS, CONFIG))
        if not any(all((path / name).is_file() for name in names) for names in kinds):
            report.error(
                "engine-feature", path, f"holds neither {' and '.join(kinds[0])} nor {' and '.join(kinds[1])}",
                "the adapter does not load", "copy it again",
            )  # fmt: skip


def _check_info(model: Model, path: Path, report: Report) -> None:
    told = None
    try:
        value = load_json(path)
    except (OSError, ValueError) as error:
        told = f"cannot be read ({error})"
    else:
        missing = [name for name in _FIELDS if not isinstance(value, dict) or name not in value]
        told = f"lacks {', '.join(missing)}" if missing else None
    if told:
        report.error(
            "guided-decoding",
            path,
            told,
            why=f"{model.name} does not load without it",
            remedy="make it with TensorRT-LLM's generate_xgrammar_tokenizer_info.py",
        )
