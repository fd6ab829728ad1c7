"""Changes of a model repository that are small enough to stand in a table, and this project's own repositories."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.factories import hf_folder, write_passport, write_safetensors, write_tokenizer
from tests.support.triton_repositories import ENGINE_CONFIG, MODEL_YAML, Repository
from trtpipe.engines.base import Engine
from trtpipe.engines.nvidia import Gpu
from trtpipe.triton_repo.render import render
from trtpipe.triton_repo.serving import ServingConfig

Change = Callable[[Repository], object]
H100 = Gpu(index=0, name="NVIDIA H100", sm=90, driver="590.44.01", total_mib=81920, used_mib=0)
A100 = replace(H100, name="NVIDIA A100", sm=80)


def edit(model: str, old: str, new: str) -> Change:
    return lambda repository: repository.edit(model, old, new)


def param(key: str, value: str, model: str = "tensorrt_llm") -> Change:
    return lambda repository: repository.parameter(model, key, value)


def params(**values: str) -> Change:
    return both(*(param(key, value) for key, value in values.items()))


def drop(key: str, model: str = "tensorrt_llm") -> Change:
    return lambda repository: repository.drop_parameter(model, key)


def tensor(name: str, old: str, new: str, model: str = "tensorrt_llm") -> Change:
    return lambda repository: repository.tensor(model, name, old, new)


def untensor(name: str, model: str = "tensorrt_llm") -> Change:
    return lambda repository: repository.drop_tensor(model, name)


def engine(place: str, value: Any) -> Change:
    return lambda repository: repository.engine(place, value)


def write(name: str, text: str) -> Change:
    def change(repository: Repository) -> None:
        (repository.path / name).parent.mkdir(parents=True, exist_ok=True)
        (repository.path / name).write_text(text)

    return change


def says(old: str, new: str) -> Change:
    """Another model.yaml."""
    assert old in MODEL_YAML
    return write("tensorrt_llm/1/model.yaml", MODEL_YAML.replace(old, new))


def adds(text: str) -> Change:
    return write("tensorrt_llm/1/model.yaml", MODEL_YAML + text)


def remove(name: str) -> Change:
    def change(repository: Repository) -> None:
        path = repository.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def move(name: str, to: str) -> Change:
    return lambda repository: (repository.path / name).rename(repository.path / to)


def both(*changes: Change) -> Change:
    def change(repository: Repository) -> None:
        for one in changes:
            one(repository)

    return change


def world(tp_size: int, files: int | None = None) -> Change:
    def change(repository: Repository) -> None:
        repository.engine("pretrained_config.mapping", {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1})
        for rank in range(tp_size if files is None else files):
            (repository.path / "tensorrt_llm" / "1" / f"rank{rank}.engine").write_bytes(b"engine")

    return change


def replace_all(old: str, new: str, *models: str) -> Change:
    def change(repository: Repository) -> None:
        for model in models:
            repository.edit(model, old, new, count=-1)

    return change


def made(folder: Path, **changes: Any) -> None:
    """The passport of an engine for an H100."""
    values: dict[str, Any] = {"runtime": "tensorrt_llm", "gpu": "h100", "sm": 90, "sms": (90,), "toolchain": "1.2.1"}
    write_passport(folder, **{**values, **changes})


def rendered(tmp_path: Path, runtime: str = "tensorrt_llm", *, tp_size: int = 1, **serving: Any) -> Repository:
    """This project's own repository, of an engine of one of its runtimes."""
    folder, tokenizer, out = tmp_path / "engine", tmp_path / "tokenizer", tmp_path / "out"
    for path in (folder, tokenizer, out):
        path.mkdir()
    write_tokenizer(tokenizer)
    made(folder, runtime=runtime, tp_size=tp_size)
    config = copy.deepcopy(ENGINE_CONFIG)
    config["pretrained_config"]["mapping"] = {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1}
    if runtime == "tensorrt_llm":
        (folder / "config.json").write_text(json.dumps(config))
        for rank in range(tp_size):
            (folder / f"rank{rank}.engine").write_bytes(b"engine")
    elif runtime == "reference":
        made(folder, runtime=runtime, gpu="cpu", sm=None, sms=None, toolchain=None, tp_size=tp_size)
        (folder / "config.json").write_text(json.dumps({**config, "version": "reference-1"}))
        for rank in range(tp_size):
            write_safetensors(folder / f"rank{rank}.safetensors", {"x": np.zeros(64, np.uint16)}, "BF16")
    else:
        hf_folder(folder, shards=2, tokenizer=False)
    if runtime == "trtllm_pytorch":
        arguments = {"backend": "pytorch", "tensor_parallel_size": tp_size, "kv_cache_config": {"dtype": "auto"}}
        (folder / "llm_args.yaml").write_text(yaml.safe_dump(arguments))
    return Repository(render(Engine(path=folder), tokenizer, ServingConfig(**serving), out).path)


PYTHON_RUNTIME = edit("tensorrt_llm", 'backend: "tensorrtllm"', 'backend: "python"')
