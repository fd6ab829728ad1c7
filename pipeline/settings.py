"""Typed values of merged settings; a mistake names the layer that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.configs import read
from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.adapters import check_name
from trtpipe.engines.base import Mapping
from trtpipe.engines.errors import TrtpipeError, UsageError, suggestion
from trtpipe.engines.gpu import GpuSpec
from trtpipe.pipeline.layers import LORA, error_of


def read_string(chosen: dict[str, tuple[Any, str]], name: str, required: str = "") -> str | None:
    if name not in chosen:
        if required:
            raise UsageError(f"no {name} is given", remedy=f"pass for example {required}")
        return None
    value, label = chosen[name]
    if not isinstance(value, str):
        raise error_of(label)(f"{label}: {name} is {value!r}, not a name")
    if not value:
        raise error_of(label)(f"{label}: {name} is empty")
    return value


def read_count(chosen: dict[str, tuple[Any, str]], name: str) -> int:
    value, label = chosen.get(name, (1, "default"))
    if not isinstance(value, int) or isinstance(value, bool):
        raise error_of(label)(f"{label}: {name} is {value!r}, not a whole number")
    return value


def read_flag(chosen: dict[str, tuple[Any, str]], name: str) -> bool:
    value, label = chosen.get(name, (False, "default"))
    if not isinstance(value, bool):
        raise error_of(label)(f"{label}: {name} is {value!r}, not true or false")
    return value


def read_mapping(chosen: dict[str, tuple[Any, str]]) -> Mapping:
    moe = (read_count(chosen, name) if name in chosen else None for name in ("moe_tp", "moe_ep"))
    return Mapping.of(read_count(chosen, "tp"), read_count(chosen, "pp"), *moe)


def read_tasks(chosen: dict[str, tuple[Any, str]], *, quantized: bool) -> tuple[str, ...]:
    """Files of the tasks that the accuracy gate scores."""
    value, label = chosen.get("tasks", ([], "default"))
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
        raise error_of(label)(f"{label}: tasks is {value!r}, not a file or a list of files")
    if files and not quantized:
        raise error_of(label)(
            "tasks are for a quantized model", why="they are scored where its accuracy is checked",
            remedy="choose a quantized --dtype, or leave them out",
        )  # fmt: skip
    return tuple(files)


def read_release(chosen: dict[str, tuple[Any, str]]) -> str | None:
    """The toolchain's name as text, because YAML reads 1.1 as a number."""
    value, _ = chosen.get("toolchain", (None, ""))
    if isinstance(value, float):
        return str(value)
    return read_string(chosen, "toolchain")


def read_runtime(requested: str | None, gpu: GpuSpec) -> str | None:
    """The runtime that was requested, if any. Raises UsageError."""
    if requested is None:
        return None
    if requested not in BACKENDS:
        raise UsageError(f"unknown runtime '{requested}'", remedy=suggestion(requested, BACKENDS))
    if gpu.is_cpu and not load_backend(requested).ON_CPU:
        able = " or ".join(name for name in BACKENDS if load_backend(name).ON_CPU)
        raise UsageError(f"runtime {requested} needs an NVIDIA GPU", remedy=f"use --runtime {able} with --gpu cpu")
    return requested


def read_adapters(chosen: dict[str, tuple[Any, str]]) -> tuple[tuple[str, Path], ...]:
    """Names and folders of the adapters, sorted. Raises UsageError or ConfigError."""
    out = []
    for name, (folder, label) in chosen.items():
        group, _, own = name.partition(".")
        if group == LORA:
            check_name(own)
            if not isinstance(folder, str) or not folder:
                raise error_of(label)(
                    f"{label}: {name} is {folder!r}, not a folder", remedy="name the adapter's folder"
                )
            out.append((own, Path(folder).expanduser().absolute()))
    return tuple(sorted(out))


def read_group(
    chosen: dict[str, tuple[Any, str]], group: str, cls: type[Any], given: dict[str, tuple[Any, str]]
) -> Any:
    """The settings of a group; a mistake is in the layers of `given`, not in values that were planned."""
    prefix = group + "."
    data = {name[len(prefix) :]: value for name, (value, _) in chosen.items() if name.startswith(prefix)}
    labels = list(dict.fromkeys(label for name, (_, label) in given.items() if name.startswith(prefix)))
    everyone = " and ".join(labels)
    try:
        return read.build(cls, data, f"{everyone}: {group}", error_of(*labels))
    except TrtpipeError as error:
        for label in labels:  # a value that is wrong by itself is a mistake of its layer alone
            own = {n[len(prefix) :]: v for n, (v, one) in given.items() if one == label and n.startswith(prefix)}
            try:
                read.build(cls, own, f"{label}: {group}", error_of(label))
            except TrtpipeError as alone:
                if str(alone).removeprefix(label) == str(error).removeprefix(everyone):
                    raise alone from None
        raise
