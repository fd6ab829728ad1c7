"""Would Triton load this folder? Answered from the files alone, by the protobuf definition Triton itself uses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engines.errors import InputDataError


class RepositoryError(InputDataError):
    """A model repository that Triton would not load, or would load wrongly."""


def check_configs(repository: Path, models: Iterable[str]) -> None:
    """Check each model's config.pbtxt: it parses, names its own folder, has a version, and holds no placeholder;
    an ensemble's graph refers to tensors that exist. Raises RepositoryError naming the file."""
    configs = {model: _parse(repository / model / "config.pbtxt", model) for model in models}
    for model, config in configs.items():
        if not any(
            p.is_dir() and p.name.isdigit() and not p.name.startswith("0") for p in (repository / model).iterdir()
        ):
            raise RepositoryError(f"{repository / model} has no version folder", remedy="create a folder named 1 in it")
        if config.HasField("ensemble_scheduling"):
            _check_graph(repository / model / "config.pbtxt", config, configs)


def _parse(path: Path, model: str) -> Any:
    # Imported here: protobuf and its generated module cost 0.2 s, which `trtpipe --help` must not pay.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        text = path.read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"{path} cannot be read", why=str(error)) from None
    except text_format.ParseError as error:
        raise RepositoryError(f"{path} is no model configuration", why=str(error)) from None
    if config.name not in ("", model):
        raise RepositoryError(f"{path} names the model '{config.name}', its folder is '{model}'")
    for key, value in config.parameters.items():
        if "${" in value.string_value:
            raise RepositoryError(f"{path}: parameter {key} still holds the placeholder {value.string_value}")
    return config


def _check_graph(path: Path, ensemble: Any, configs: dict[str, Any]) -> None:
    known = {tensor.name for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        config = configs.get(step.model_name)
        if config is None:
            raise RepositoryError(f"{path} uses the model '{step.model_name}', which is not in the repository")
        for theirs in step.input_map:
            if theirs not in {tensor.name for tensor in config.input}:
                raise RepositoryError(f"{path} feeds '{theirs}', which is no input of {step.model_name}")
            if step.input_map[theirs] not in known:
                raise RepositoryError(f"{path}: nothing produces '{step.input_map[theirs]}' for {step.model_name}")
        required = {tensor.name for tensor in config.input if not tensor.optional} - set(step.input_map)
        if required:
            raise RepositoryError(f"{path} leaves the input '{min(required)}' of {step.model_name} unfed")
        for theirs in step.output_map:
            if theirs not in {tensor.name for tensor in config.output}:
                raise RepositoryError(f"{path} reads '{theirs}', which is no output of {step.model_name}")
            known.add(step.output_map[theirs])
    unmade = {tensor.name for tensor in ensemble.output} - known
    if unmade:
        raise RepositoryError(f"{path} promises the output '{min(unmade)}', which no step produces")
