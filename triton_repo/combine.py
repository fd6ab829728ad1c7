"""Models of one or several repositories in one folder, for one server; with several, their models are renamed.

Every repository has a `tensorrt_llm` and an `ensemble`, but names must be unique in a server. So each model's name gets
a prefix, and so does each reference to a model: ensemble steps, parameters, paths relative to the repository's root.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from trtpipe.configs.read import read_yaml
from trtpipe.engines.adapters import FOLDER
from trtpipe.engines.errors import InputDataError
from trtpipe.triton_repo.check.text import read_text
from trtpipe.triton_repo.layout import model_names
from trtpipe.triton_repo.llmapi import SETTINGS


def link_models(repository: Path, prefix: str, out: Path) -> dict[str, Path]:
    """Write the models of `repository` into the existing folder `out`, with names beginning with `prefix`. Scripts are
    copied: Python writes bytecode beside them. Weights and other files are links. Returns name -> folder.

    Raises InputDataError for a config.pbtxt that cannot be parsed; Triton cannot read it either.
    """
    names = set(model_names(repository))
    made = {}
    for name in sorted(names):
        folder = made[prefix + name] = out / (prefix + name)
        folder.mkdir()
        for source in (repository / name).iterdir():
            target = folder / source.name
            if source.name == "config.pbtxt" and prefix:
                target.write_text(_renamed_config(source, names, prefix), encoding="utf-8")
            elif source.is_dir() and source.name.isdigit():
                _link_version(source, target, names, prefix)
            else:
                target.symlink_to(source.resolve())
    return made


def _renamed_config(path: Path, names: set[str], prefix: str) -> str:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(read_text(path), config)
    except (text_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise InputDataError(f"{path} is not a model configuration", why=str(error)) from None
    config.name = prefix + path.parent.name
    for step in config.ensemble_scheduling.step:
        step.model_name = prefix + step.model_name
    for key, parameter in config.parameters.items():
        value = parameter.string_value
        is_model = key.endswith("_model_name") and value in names
        if is_model or _is_inside(value, names):
            parameter.string_value = prefix + value
    return str(text_format.MessageToString(config))


def _is_inside(path: str, names: set[str]) -> bool:
    """Whether a path is relative to the repository's root."""
    first, separator, _ = path.partition("/")
    return bool(separator) and first in names


def _link_version(source: Path, out: Path, names: set[str], prefix: str) -> None:
    """Write a version folder of a model. A script of the LLM API finds its weights by the settings beside it."""
    out.mkdir()
    for path in source.iterdir():
        if path.suffix == ".py" and path.is_file():
            shutil.copyfile(path, out / path.name)
        elif path.name == SETTINGS and prefix:
            # Of repeated keys the last counts, as in the script.
            settings = read_yaml(path, repeats=True)
            drafts = settings.get("speculative_config")
            places = ((settings, "model"), (drafts if isinstance(drafts, dict) else {}, "speculative_model_dir"))
            for holder, name in places:
                value = holder.get(name)
                if isinstance(value, str) and _is_inside(value, names):
                    holder[name] = prefix + value
            (out / SETTINGS).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        elif path.name == FOLDER and path.is_dir():
            # A folder of this server's own, in which adapters can be added and removed.
            (out / FOLDER).mkdir()
            for one in path.iterdir():
                (out / FOLDER / one.name).symlink_to(one.resolve())
        elif path.name != "__pycache__":
            (out / path.name).symlink_to(path.resolve())
