"""passport.json of an engine: its target and origin, and the check whether a machine can run it.

TensorRT-LLM checks no version, and an engine for another compute capability fails only after its gigabytes are
loaded; the passport makes an earlier check possible.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from trtpipe.engines import find_backend
from trtpipe.engines.backends.base import Target
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import ArtefactRefused
from trtpipe.engines.files import write_json
from trtpipe.engines.json_input import read_json
from trtpipe.engines.nvidia import Gpu
from trtpipe.engines.toolchain import version_key

NAME = "passport.json"
# More ranks than any engine has; a deployment creates objects for each rank.
MAX_RANKS = 4096
# Facts that a passport leaves out where they have these values.
_OPTIONAL: dict[str, Any] = {"moe_ep_size": 1, "weights": {}}
# Settings that name the source of a model's weights.
WEIGHTS = ("model", "source", "revision")


@dataclass(frozen=True, kw_only=True)
class Passport:
    """Target and origin of an engine.

    runtime     runtime of this project that executes it
    gpu, sm     target of the build
    sms         compute capabilities that run it: the target's only for compiled code; None for any machine
    toolchain   release of TensorRT-LLM, None where it is not used; `image` is the release's container
    versions    versions that determine the engine's bytes
    dtype       element type of what is not quantized
    rank_bytes  bytes of the largest rank's weights; of all weights where the loader splits them (see `gpu_bytes`)
    checkpoint  content digest of the checkpoint
    made        where it was built: image digest, GPU product, driver
    accuracy    of a quantized checkpoint: its measurements against the original, and whether a failure was accepted
    moe_ep_size  groups of ranks that divide the experts
    weights     those of the settings WEIGHTS that were given; {} for a folder or file of the machine that built it
    """

    runtime: str
    gpu: str
    sm: int | None
    sms: tuple[int, ...] | None
    toolchain: str | None
    image: str | None
    versions: dict[str, str]
    tp_size: int
    pp_size: int
    dtype: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    rank_bytes: int
    checkpoint: str
    build_config: dict[str, Any]
    made: dict[str, str] = field(default_factory=dict)
    accuracy: dict[str, Any] | None = None
    moe_ep_size: int = 1
    weights: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a rank's weights: the least memory of a GPU."""
        backend = find_backend(self.runtime)
        split = backend is not None and backend.FORM == "hf"
        return -(-self.rank_bytes // self.world_size) if split else self.rank_bytes

    def target(self) -> str:
        return self.gpu if self.sm is None else f"{self.gpu} (SM{self.sm})"

    def to_json(self) -> dict[str, Any]:
        """Content of passport.json, without what it may leave out: passports were written before it was known."""
        return {
            name: value for name, value in asdict(self).items() if name not in _OPTIONAL or value != _OPTIONAL[name]
        }

    def write(self, folder: Path) -> None:
        write_json(folder / NAME, self.to_json())


def make_passport(
    target: Target, build: BuildConfig, *, runtime: str, sms: tuple[int, ...] | None, versions: dict[str, str],
    dtype: str, rank_bytes: int, checkpoint: str, settings: Sequence[str], made: dict[str, str],
    accuracy: dict[str, Any] | None, weights: dict[str, str],
) -> Passport:  # fmt: skip
    """Make the passport of an engine for `target`; `settings` names the settings of `build` that the runtime uses."""
    algo, cache = target.quantization.quant_algo, target.quantization.kv_cache_quant_algo
    released = runtime in target.toolchain.runtimes
    return Passport(
        runtime=runtime,
        gpu=target.gpu.name,
        sm=target.gpu.sm,
        sms=sms,
        toolchain=target.toolchain.name if released else None,
        image=target.toolchain.image if released else None,
        versions=versions,
        tp_size=target.mapping.tp_size,
        pp_size=target.mapping.pp_size,
        dtype=dtype,
        quant_algo=algo and algo.value,
        kv_cache_quant_algo=cache and cache.value,
        rank_bytes=rank_bytes,
        checkpoint=checkpoint,
        build_config={name: value for name, value in asdict(build).items() if name in settings},
        made=made,
        accuracy=accuracy,
        moe_ep_size=target.mapping.moe_ep_size,
        weights=weights,
    )


def read_passport(folder: Path) -> Passport:
    """Read the passport in an engine folder. Raises ArtefactRefused when there is none or it cannot be read."""
    path = folder / NAME
    if not path.is_file():
        raise ArtefactRefused(
            f"{folder} has no {NAME}",
            why="nothing says for which GPU and version it was built",
            remedy="build the engine again",
        )
    try:
        return passport_from(read_json(path, "passport"))
    except TypeError as error:
        raise ArtefactRefused(
            f"{path} is of another version", why=str(error), remedy="build the engine again"
        ) from None


def passport_from(raw: dict[str, Any]) -> Passport:
    """Passport from the JSON object that `Passport.write` writes. Raises TypeError for anything else."""
    import pydantic  # here: the engine process needs no passport and may run where pydantic is not installed

    unknown = raw.keys() - {one.name for one in fields(Passport)}
    if unknown:
        raise TypeError(f"unknown key '{min(unknown)}'")
    try:
        # JSON mode is strict about types but accepts a list for a tuple.
        passport: Passport = _adapter().validate_json(json.dumps(raw), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise TypeError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if min(passport.tp_size, passport.pp_size) < 1 or passport.world_size > MAX_RANKS:
        raise TypeError(f"tp_size {passport.tp_size} and pp_size {passport.pp_size} are not numbers of ranks")
    if passport.moe_ep_size < 1 or passport.tp_size % passport.moe_ep_size:
        raise TypeError(f"moe_ep_size {passport.moe_ep_size} does not divide tp_size {passport.tp_size}")
    if passport.rank_bytes < 0:
        raise TypeError(f"rank_bytes {passport.rank_bytes} is not a size")
    return passport


@cache
def _adapter() -> Any:
    import pydantic

    return pydantic.TypeAdapter(Passport)


def require_target(passport: Passport, target: Target, folder: Path) -> None:
    """Raises ArtefactRefused, naming both values, when the engine in `folder` was not built for `target`."""
    asked = {
        "gpu": target.gpu.name,
        "tp_size": target.mapping.tp_size,
        "pp_size": target.mapping.pp_size,
        "moe_ep_size": target.mapping.moe_ep_size,
    }
    if passport.toolchain is not None:
        asked["toolchain"] = target.toolchain.name
    for name, value in asked.items():
        if getattr(passport, name) != value:
            raise ArtefactRefused(
                f"the engine in {folder} is for {name} {getattr(passport, name)}, and {value} is asked for",
                remedy="build the engine again",
            )


def objections(passport: Passport, gpus: Sequence[Gpu], *, floor: str | None = None) -> list[str]:
    """Reasons why a machine with `gpus` cannot run the engine, each naming both values; empty when it can.

    `floor` is the lowest driver version of the engine's toolchain, None where it is not known.
    """
    if passport.sms is None:
        return []
    if not gpus:
        return [f"it is for {passport.target()}, and this machine has no NVIDIA GPU"]
    out = []
    same = [gpu for gpu in gpus if gpu.sm in passport.sms]
    if not same:
        here = ", ".join(sorted({gpu.describe() for gpu in gpus}))
        out.append(f"it is for {passport.target()}, and this machine has {here}")
    elif len(same) < passport.world_size:
        out.append(f"it has {passport.world_size} ranks, and this machine has {len(same)} GPU(s) that run it")
    small = [gpu.total_mib for gpu in same if gpu.total_mib is not None and gpu.total_mib * 2**20 <= passport.gpu_bytes]
    if len(same) >= passport.world_size > len(same) - len(small):
        held = max(small) / 1024
        out.append(f"a rank's weights take {passport.gpu_bytes / 2**30:.1f} GiB, and the GPU has {held:.1f}")
    driver = gpus[0].driver
    if floor and version_key(driver) < version_key(floor):
        out.append(f"TensorRT-LLM {passport.toolchain} needs driver {floor}, and this machine has {driver}")
    return out


def remarks(passport: Passport, gpus: Sequence[Gpu]) -> list[str]:
    """Notes that do not prevent a run: the machine's GPU is another product of the same compute capability."""
    built = passport.made.get("gpu")
    others = sorted({gpu.name for gpu in gpus if gpu.sm == passport.sm and built not in (None, gpu.name)})
    return [f"its kernels were chosen on {built}; on {name} it runs, and others may be faster" for name in others]
