"""passport.json beside an engine: where it may run. TensorRT-LLM itself checks no version, and an engine for
another compute capability fails only after its gigabytes are loaded, so we write down and compare.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.base import Engine
from engines.errors import ArtefactRefused
from engines.files import read_json, write_json
from engines.gpu import GpuSpec

NAME = "passport.json"


@dataclass(frozen=True, kw_only=True)
class Passport:
    """What an engine was made for and by.

    sm        None for the reference runtime, which runs on any machine
    accuracy  of a quantized checkpoint: what it measured against its original, and whether a failure was accepted
    """

    runtime: str
    gpu: str
    sm: int | None
    versions: dict[str, str]
    tp_size: int
    pp_size: int
    dtype: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    build_config: dict[str, Any]
    accuracy: dict[str, Any] | None = None

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size


def write_passport(
    engine: Engine, *, runtime: str, gpu: GpuSpec, versions: dict[str, str], accuracy: dict[str, Any] | None = None
) -> Passport:
    """Write the passport of an engine just built, from the engine's own config.json."""
    config = read_json(engine.path / "config.json", "engine config")
    pretrained = config["pretrained_config"]
    quantization = pretrained.get("quantization") or {}
    passport = Passport(
        runtime=runtime,
        gpu=gpu.name,
        sm=gpu.sm,
        versions=versions,
        tp_size=pretrained["mapping"]["tp_size"],
        pp_size=pretrained["mapping"]["pp_size"],
        dtype=pretrained["dtype"],
        quant_algo=quantization.get("quant_algo"),
        kv_cache_quant_algo=quantization.get("kv_cache_quant_algo"),
        build_config=config["build_config"],
        accuracy=accuracy,
    )
    write_json(engine.path / NAME, asdict(passport))
    return passport


def read_passport(folder: Path) -> Passport:
    """The passport in an engine folder. Raises ArtefactRefused when there is none or it cannot be read."""
    path = folder / NAME
    if not path.is_file():
        raise ArtefactRefused(
            f"{folder} has no {NAME}",
            why="nothing says for which GPU and version it was built",
            remedy="build it with `trtpipe build`",
        )
    try:
        return Passport(**read_json(path, "passport"))
    except TypeError as error:
        raise ArtefactRefused(
            f"{path} is of another version", why=str(error), remedy="build the engine again"
        ) from None
