"""Build of a TensorRT-LLM engine: runs a toolchain's trtllm-build through an executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.engines.backends.base import Target, Workshop
from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.checkpoint.config import LOADERS, read_config
from trtpipe.engines.checkpoint.layout import rank_file
from trtpipe.engines.errors import ArtefactRefused, HostError, StageFailed
from trtpipe.engines.executor import Task
from trtpipe.engines.files import require_disk
from trtpipe.engines.json_input import read_json
from trtpipe.engines.toolchain import Toolchain
from trtpipe.engines.trtllm_options import arguments, check_architecture

PROGRAM = "trtllm-build"
# Size of an engine / size of its checkpoint: the weights, and what TensorRT adds to them.
DISK_FACTOR = 1.1
_MAPPING = ("world_size", "tp_size", "pp_size", "moe_tp_size", "moe_ep_size")


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {"tensorrt_llm": toolchain.name, "tensorrt": toolchain.tensorrt or ""}


def rendered(build: BuildConfig, target: Target) -> dict[str, str]:
    """See EngineBackend.rendered: an engine of this runtime has no settings file."""
    return {}


def build(
    checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
) -> tuple[Engine, dict[str, str]]:
    """Compile the checkpoint on a GPU. Raises ArtefactRefused for a checkpoint of another release or mapping,
    UsageError for a setting that its architecture cannot have, HostError when trtllm-build cannot run here,
    StageFailed when it fails."""
    check_checkpoint(checkpoint.path, target)
    # The target of a model that had to be downloaded does not know its architecture.
    check_architecture(build, read_config(checkpoint.path).architecture)
    size = sum(rank_file(checkpoint.path, rank).stat().st_size for rank in range(target.mapping.world_size))
    require_disk(out, round(DISK_FACTOR * size), "the engine")
    task = Task(
        command=(PROGRAM, *arguments(checkpoint.path, out, build, target.toolchain.flags)),
        reads=(checkpoint.path, *(Path(folder).resolve() for folder in build.lora_dir)),
        out=out,
        what=PROGRAM,
        gpus=workshop.gpus,
        log=workshop.log,
    )
    facts = workshop.executor.run(task, workshop.show)
    (out / "model.cache").unlink(missing_ok=True)
    _check_engine(out, target)
    return Engine(path=out), facts


def check_checkpoint(folder: Path, target: Target) -> None:
    """Raises ArtefactRefused or CheckpointError unless the target's release loads the checkpoint for its mapping."""
    config = read_config(folder)
    raw, release = read_json(folder / "config.json", "checkpoint config"), target.toolchain.name
    loader = LOADERS[release]
    for place, known in (("mapping", {*_MAPPING, *loader.mapping}), ("quantization", set(loader.quantization))):
        unknown = sorted(set(raw.get(place) or {}) - known - {"quant_algo", "kv_cache_quant_algo"})
        if unknown:
            raise ArtefactRefused(
                f"the checkpoint in {folder} was not written for TensorRT-LLM {release}",
                why=f"its loader ends with a TypeError on the key {place}.{unknown[0]}",
                remedy=f"convert the model again with --toolchain {release}",
            )
    if config.mapping != target.mapping:
        have, want = config.mapping, target.mapping
        raise ArtefactRefused(
            f"the checkpoint in {folder} is cut for {have.describe()}",
            why=f"the engine is for {want.describe()}",
            remedy="convert the model again with these",
        )


def _check_engine(out: Path, target: Target) -> None:
    """Raises an error unless trtllm-build was of the target's release and has written every rank."""
    config: dict[str, Any] = read_json(out / "config.json", "engine config")
    version = config.get("version")
    if version != target.toolchain.name:
        raise HostError(
            f"{PROGRAM} is TensorRT-LLM {version}, the toolchain is {target.toolchain.name}",
            remedy=f"install tensorrt-llm=={target.toolchain.name}, use --executor docker, "
            f"or choose with --toolchain what is installed",
        )
    for rank in range(target.mapping.world_size):
        if not (out / f"rank{rank}.engine").is_file():
            raise StageFailed(f"{PROGRAM} has written no rank{rank}.engine", why="it ended without an error")
