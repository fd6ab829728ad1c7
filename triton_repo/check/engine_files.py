"""Check of the files of an engine's folder: whether each arrived whole, and whether the passport is of this engine."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.folder import INDEX_NAME, MOST_INDEX_BYTES, MOST_INDEX_VALUES, PICKLE_PATTERNS
from trtpipe.engines.json_input import read_json
from trtpipe.engines.passport import NAME as PASSPORT
from trtpipe.engines.passport import Passport
from trtpipe.triton_repo.check.faults import Location, Report
from trtpipe.triton_repo.check.whole import check_leftovers, check_whole

if TYPE_CHECKING:
    from trtpipe.triton_repo.check.engine_folder import EngineFolder

# Sizes in the passport that trtllm-build takes over unchanged.
_SIZES = ("max_batch_size", "max_seq_len", "max_beam_width")


def check_rank_files(engine: EngineFolder, where: Location, report: Report) -> None:
    """Check that each rank has its file, and that each file is whole."""
    files = [path for path in engine.path.iterdir() if path.is_file()]
    reference = (engine.version or "").startswith("reference")
    compiled = not reference if engine.backend is None else engine.backend.COMPILED
    suffix = "engine" if compiled else "safetensors"
    old = not any(re.fullmatch(rf"rank\d+\.{suffix}", path.name) for path in files)
    if old and engine.passport is None and not engine.build and any(path.suffix == ".engine" for path in files):
        # An old build, whose files are named after the model.
        check_whole("engine-file", (path for path in files if path.suffix == ".engine"), report)
        return
    there = {
        int(found[1]): path for path in files if (found := re.fullmatch(rf"rank(0|[1-9]\d*)\.{suffix}", path.name))
    }
    world = engine.world_size
    # Existing files are counted, since config.json can state any number.
    wanted = world or 1
    missing = wanted - sum(number < wanted for number in there)
    if missing > 0:
        first = next(number for number in itertools.count() if number not in there)
        more = f" ({missing} of {wanted} are missing)" if missing > 1 else ""
        report.error(
            "engine-ranks",
            where,
            f"names an engine of {wanted} rank(s), and rank{first}.{suffix} is not in its folder{more}",
            why="each rank loads its own file",
            remedy="copy the whole folder that trtllm-build wrote",
        )
    elif world is not None and len(there) > world:
        report.warning(
            "engine-ranks",
            where,
            f"names an engine of {world} rank(s), and its folder has {len(there)} rank files",
            why="some are of another build",
            remedy="empty the folder and copy the build again",
        )
    if check_whole("engine-file", there.values(), report) and there and compiled:
        _check_rank_sizes(engine, sorted(there.values(), key=lambda path: path.stat().st_size), report)
    if missing <= 0:
        check_leftovers("engine-file", engine.path, report)


def _check_rank_sizes(engine: EngineFolder, files: list[Path], report: Report) -> None:
    """Report a compiled engine that is cut short. Its length is in no header, so it is compared with the size of the
    weights and, where all ranks hold equal shares, with the other ranks."""
    least, most = (path.stat().st_size for path in (files[0], files[-1]))
    weights = engine.passport.rank_bytes if engine.passport is not None else 0
    remedy = "fetch or copy it again"
    if most < weights / 2:  # a warning, since an engine may be built without its weights
        told = f"has {most:,} bytes, and its weights {weights:,}"
        report.warning("engine-file", files[-1], told, "an engine holds its weights", remedy)
    elif least < most / 2 and engine.world_size == engine.mapping.get("tp_size"):
        told = f"has {least:,} bytes, and {files[-1].name} has {most:,}"
        report.error("engine-file", files[0], told, "ranks have equal shares of the model", remedy)


def check_mapping(engine: EngineFolder, report: Report) -> None:
    """Check that config.json says how many ranks the engine has, and says one number."""
    stated = engine.mapping.get("world_size")
    if engine.pretrained and engine.world_size is None:
        report.warning(
            "engine-config", (engine.config, "mapping"), "does not say how many ranks the engine has",
            "its files and GPUs are not counted", "copy it from the build again",
        )  # fmt: skip
    elif stated is not None and engine.world_size is not None and stated != engine.world_size:
        report.error(
            "engine-config", (engine.config, "mapping"), f"says world_size {stated}, and sizes of {engine.world_size}",
            "the server waits for another number of ranks than the engine has", "copy it from the build again",
        )  # fmt: skip


def check_agreement(engine: EngineFolder, report: Report) -> None:
    """Report the first value in which the passport and the engine's own config.json disagree."""
    passport = engine.passport
    if passport is None:
        return
    if engine.hf:
        check_precision(engine.path, engine.hf, passport, report)
        return
    quantization = engine.pretrained.get("quantization")
    rows: list[tuple[str, Any, dict[str, Any]]] = [
        *((name, getattr(passport, name), engine.mapping) for name in ("tp_size", "pp_size")),
        ("dtype", passport.dtype, engine.pretrained),
        *(
            (name, getattr(passport, name), quantization if isinstance(quantization, dict) else {})
            for name in ("quant_algo", "kv_cache_quant_algo")
        ),
        *((name, passport.build_config.get(name), engine.build) for name in _SIZES if name in passport.build_config),
    ]
    for name, told, config in rows:
        if name in config and config[name] != told:
            _tell_passport(engine.path, name, told, config[name], report)
            return


def _tell_passport(folder: Path, name: str, told: Any, found: Any, report: Report) -> None:
    report.error(
        "passport",
        (folder / PASSPORT, name),
        f"is {told}, and the engine's config.json says {found}",
        why="one of the two is of another engine",
        remedy="build the engine again",
    )


def check_precision(folder: Path, config: dict[str, Any], passport: Passport, report: Report) -> None:
    """Report a Hugging Face folder whose files have another precision than its passport."""
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str) and dtype != passport.dtype:
        _tell_passport(folder, "dtype", passport.dtype, dtype, report)
        return
    quantized = "quantization_config" in config or (folder / "hf_quant_config.json").is_file()
    if quantized != (passport.quant_algo is not None or passport.kv_cache_quant_algo is not None):
        report.error(
            "passport",
            (folder / PASSPORT, "quant_algo"),
            f"is {passport.quant_algo}, and the model's files are {'' if quantized else 'not '}quantized",
            why="one of the two is of another model",
            remedy="build it again",
        )


def check_weights(folder: Path, report: Report) -> None:
    """Check that the weights of a Hugging Face folder are there, and that each file is whole."""
    shards, index = list(folder.glob("*.safetensors")), folder / INDEX_NAME
    remedy = "fetch the model again to complete it"
    if not check_whole("engine-file", shards, report):
        return
    if index.is_file():
        try:
            named = read_json(index, "weight index", max_bytes=MOST_INDEX_BYTES, max_values=MOST_INDEX_VALUES)
        except InputDataError as error:
            report.error("engine-file", index, "cannot be read", error.why or error.what, remedy)
            return
        weights = named.get("weight_map")
        if not isinstance(weights, dict):
            report.error("engine-file", (index, "weight_map"), "is missing", "it names the files of weights", remedy)
            return
        names = {str(name) for name in weights.values()}
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
            report.error("engine-file", index, f"names {missing[0]}, which{more} not there", "", remedy)
            return
    elif any((found := re.fullmatch(r"model-\d+-of-(\d+)\.safetensors", path.name)) for path in shards) and found:
        if len(shards) < int(found[1]):
            told = f"has {len(shards)} of {int(found[1])} files of weights"
            report.error("engine-file", folder, told, f"there is no {INDEX_NAME} either", remedy)
            return
    elif not shards and not any(path for pattern in PICKLE_PATTERNS for path in folder.glob(pattern)):
        report.error("engine-file", folder, "has no weights", "a model needs its safetensors files", remedy)
        return
    check_leftovers("engine-file", folder, report)
