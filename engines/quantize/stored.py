"""Conversion of an already quantized Hugging Face folder to a TensorRT-LLM checkpoint, codes and scales as they are."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from trtpipe.engines.backends.base import readers
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.split import check_expert_format, check_mapping, check_stages
from trtpipe.engines.errors import UsageError
from trtpipe.engines.families import family_of
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.stored import Stored, read_stored
from trtpipe.engines.json_input import read_json
from trtpipe.engines.process import Progress, run_worker
from trtpipe.engines.quantization import QuantAlgo

# Algorithms whose tensors in a checkpoint are those of a folder under other names.
CONVERTIBLE = (
    None,  # a quantized KV cache alone
    QuantAlgo.FP8,
    QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN,
    QuantAlgo.W8A8_SQ_PER_CHANNEL,
    QuantAlgo.W4A16_AWQ,
)


def require_convertible(stored: Stored, name: str, *, experts: bool = False) -> None:
    """Raises UsageError when no TensorRT-LLM checkpoint computes what the folder of the model `name` computes, naming
    the runtimes that read the folder as it is. `experts`: whether the model has experts."""
    algo = stored.quantization.quant_algo
    able = readers(stored.method, algo, experts=experts)
    remedy = f"use --runtime {' or '.join(able)}, or " if able else ""
    remedy += "start from the unquantized model"
    if algo not in CONVERTIBLE:
        assert algo is not None
        known = ", ".join(one.value for one in CONVERTIBLE if one is not None)
        raise UsageError(
            f"{name}, quantized with {algo.value}, cannot become a TensorRT-LLM checkpoint",
            why=f"of quantized folders only {known} have the arithmetic of its kernels",
            remedy=remedy,
        )
    sizes = algo.row.group_sizes if algo is not None else ()
    if sizes and stored.quantization.group_size not in sizes:
        raise UsageError(
            f"{name} has groups of {stored.quantization.group_size}",
            why=f"TensorRT-LLM's kernel knows {' and '.join(map(str, sizes))}",
            remedy=remedy,
        )


def convert_stored(
    source: Path,
    out: Path,
    *,
    mapping: Mapping,
    toolchain: str | None = None,
    log: Path,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Write the checkpoint of the quantized folder `source` into the existing folder `out`; return notices.

    Linears that TensorRT-LLM runs as one matrix (q, k and v; in FP8 also fc and gate) have one FP8 scale there: codes
    of a smaller scale are rounded to the largest one, as vLLM and TensorRT-LLM's own loader do.

    Raises UsageError for a quantization that a checkpoint cannot hold or a mapping that does not fit, InputDataError
    for a damaged folder.
    """
    model, stored = read_model_config(source, quantized=True), read_stored(source)
    if stored is None:
        raise UsageError(f"{source} is not quantized", remedy="use `trtpipe convert` for it")
    family_of(model).check_source(source, model)
    require_convertible(stored, str(source), experts=model.experts is not None)
    check_expert_format(model, stored.quantization, "trtllm", stored.method)
    check_mapping(model, mapping, quantization=stored.quantization, stored=True)
    check_stages(model, mapping)
    with tempfile.TemporaryDirectory(prefix=".convert.", dir=log.parent) as scratch:
        notes = Path(scratch, "notes.json")
        spec = {
            "source": str(source), "out": str(out), "mapping": asdict(mapping), "toolchain": toolchain,
            "notes": str(notes),
        }  # fmt: skip
        run_worker("trtpipe.engines.quantize.stored_worker", spec, log, what="converting", progress=progress)
        rounded = read_json(notes, "notes")["rounded"]
    if not rounded:
        return []
    return [
        f"{rounded} matrices are rounded to the scale of the matrix that they are part of, as runtimes do on loading"
    ]
