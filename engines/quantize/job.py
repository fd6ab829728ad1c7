"""Quantization job: checks the request and runs the worker process, which has torch and ModelOpt."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.split import check_expert_format, check_mapping, check_stages
from trtpipe.engines.errors import HostError, InputDataError, UsageError, suggestion
from trtpipe.engines.extras import install_command
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import EmbeddingSharding
from trtpipe.engines.precision import QuantRecipe
from trtpipe.engines.process import Progress, run_worker
from trtpipe.engines.quantization import COMPRESSED_TENSORS, FORMATS, KvCacheQuantAlgo

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Format of the output, one of FORMATS.

    mapping, embedding, toolchain  of a TensorRT-LLM checkpoint; the Hugging Face folders do not depend on them
    """

    form: str = "trtllm"
    mapping: Mapping = Mapping()  # noqa: RUF009  # frozen
    embedding: EmbeddingSharding = EmbeddingSharding.NONE
    toolchain: str | None = None


def check(
    source: Path, recipe: QuantRecipe, layout: Layout, *, device: str = "auto", scales: Path | None = None
) -> None:
    """Raises UsageError or InputDataError for an impossible request, before a process is started."""
    if device not in DEVICES:
        raise UsageError(f"unknown device '{device}'", remedy=suggestion(device, DEVICES))
    if scales is not None:
        if not scales.is_file():
            raise UsageError(f"{scales} is not a file of scales", remedy="make one with --save-scales")
        try:
            read_header(scales)
        except InputDataError as error:
            raise InputDataError(
                f"{scales} cannot be read as scales", why=error.why, remedy="make them again with --save-scales"
            ) from None
    model = read_model_config(source)
    if recipe.quant_algo is None and recipe.kv_cache_quant_algo is None:
        raise UsageError("nothing is to be quantized", remedy="use `trtpipe convert`, or ask for a KV cache type")
    if layout.form not in FORMATS:
        raise UsageError(f"unknown format '{layout.form}'", remedy=f"known: {', '.join(FORMATS)}")
    algo = recipe.quant_algo
    if algo is not None and layout.form not in algo.row.formats:
        raise UsageError(
            f"{recipe.name} cannot be written as {layout.form}",
            why=f"that format has no place for {algo.value}",
            remedy=f"use --format {' or '.join(algo.row.formats)}",
        )
    check_expert_format(model, recipe.quantization, layout.form)
    if layout.form == "trtllm":
        check_mapping(model, layout.mapping, layout.embedding, recipe.quantization)
        check_stages(model, layout.mapping)
        return
    if layout.mapping != Mapping():
        raise UsageError("a Hugging Face folder has no tp or pp", remedy="give them to what serves it")
    if recipe.kv_cache_quant_algo is KvCacheQuantAlgo.INT8:
        raise UsageError(
            "an INT8 KV cache has no place in a Hugging Face folder",
            why="neither ModelOpt nor vLLM knows one",
            remedy="use --kv-cache fp8 or none",
        )
    if layout.form == COMPRESSED_TENSORS and recipe.kv_cache_quant_algo is KvCacheQuantAlgo.NVFP4:
        raise UsageError(
            "an NVFP4 KV cache cannot be written as compressed-tensors",
            why="its scales of keys and values are for FP8",
            remedy="use --kv-cache fp8 or none, or --format hf",
        )
    if algo is None:
        raise UsageError("a Hugging Face folder needs quantized weights", remedy="choose another recipe")
    check_mapping(model, Mapping(), quantization=recipe.quantization)


def quantize(
    source: Path,
    out: Path | None,
    recipe: QuantRecipe,
    *,
    layout: Layout = Layout(),
    dtype: DataType | None = None,
    samples: npt.NDArray[np.int32] | None = None,
    scales: Path | None = None,
    save_scales: Path | None = None,
    device: str = "auto",
    batch_tokens: int | None = None,
    hidden_bytes: int | None = None,
    log: Path,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Calibrate the Hugging Face folder `source`, or read its `scales` from a file, and write `out`; return notices.

    out           an existing empty folder; None writes no model (then `save_scales` is the result)
    dtype         element type of what is not quantized; None keeps the source's type, but float32 becomes bfloat16
    samples       [samples, seq_len] token ids; needed when the recipe's scales depend on activations
    scales        file written through `save_scales` in an earlier call; then nothing is calibrated
    save_scales   file to write the scales to
    batch_tokens  tokens in one forward pass; None for the device's default
    hidden_bytes  most bytes of hidden states in memory before a file is used; None for a share of the free memory
    progress      called with (bytes of the weights done, bytes in all)

    Raises UsageError, InputDataError naming layer or sample, HostError without ModelOpt or memory.
    """
    check(source, recipe, layout, device=device, scales=scales)
    if save_scales is not None and not save_scales.parent.is_dir():
        raise UsageError(f"{save_scales} cannot be written", why=f"{save_scales.parent} is not a folder")
    quantization = recipe.quantization
    if quantization.calibrated and samples is None and scales is None:
        raise UsageError(f"{recipe.name} needs calibration samples", remedy="pass --calib")
    if quantization.calibrated and scales is None:
        require_modelopt()
    if samples is None:
        # Weight-only recipes read no activations, but the hidden states need a shape.
        samples = np.zeros((1, 1), np.int32)
    given = read_model_config(source).dtype
    target = dtype or given
    if target in (None, DataType.FLOAT32):
        target = DataType.BFLOAT16
    with tempfile.TemporaryDirectory(prefix=".quantize.", dir=log.parent) as scratch:
        np.save(Path(scratch, "samples.npy"), samples)
        spec: dict[str, Any] = {
            "source": str(source),
            "out": str(out) if out else "",
            "format": layout.form if out else None,
            "dtype": target.value,
            "quantization": asdict(quantization),
            "modelopt": recipe.modelopt,
            "mapping": asdict(layout.mapping),
            "embedding": layout.embedding.value,
            "toolchain": layout.toolchain,
            "samples": str(Path(scratch, "samples.npy")),
            "scales_in": str(scales) if scales else None,
            "scales_out": str(save_scales) if save_scales else None,
            "device": device,
            "batch_tokens": batch_tokens,
            "hidden_bytes": hidden_bytes,
            "scratch": scratch,
            "notes": str(Path(scratch, "notes.json")),
        }
        run_worker("trtpipe.engines.quantize.worker", spec, log, what="quantizing", progress=progress)
        notes = read_json(Path(scratch, "notes.json"), "notes")
    other = [f"{scales} was calibrated on other weights of a model of these sizes"] if notes["other_weights"] else []
    rounded = out is not None and (given, target) == (DataType.FLOAT16, DataType.BFLOAT16)
    cast = ["the float16 weights are rounded to bfloat16 before they are quantized"] if rounded else []
    return [*cast, *other] + [
        f"no sample reached expert{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of layer {layer}: "
        "the scale of its inputs is the other experts'; more samples would reach more: "
        "--samples of quantize, calibration.samples of build"
        for layer, numbers in notes["unreached"].items()
    ]


def require_modelopt() -> None:
    """Raises HostError when ModelOpt is not installed."""
    if importlib.util.find_spec("modelopt") is None:
        raise HostError("nvidia-modelopt is not installed", remedy=f"run `{install_command('quantize')}`")
