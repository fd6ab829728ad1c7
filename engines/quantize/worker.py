"""Worker process of quantization: reads a layer, gets its scales, and writes it while the next layer is calibrated."""

from __future__ import annotations

import functools
import importlib.metadata
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import config_json
from trtpipe.engines.checkpoint.layout import SAFETENSORS_DTYPE, plan_rank, rank_file
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import names_of
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.files import write_json
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.layout import lay_out
from trtpipe.engines.model_config import EmbeddingSharding, ModelConfig
from trtpipe.engines.process import Progress, serve_worker
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize import compressed, unified
from trtpipe.engines.quantize.algorithms import Tensors
from trtpipe.engines.quantize.encode import for_compressed_tensors, for_hugging_face, for_tensorrt_llm
from trtpipe.engines.quantize.scales import (
    LayerScales,
    check_widths,
    identity,
    load_scales,
    other_weights,
    save_scales,
)
from trtpipe.engines.quantize.source import Source
from trtpipe.engines.quantize.writer import Writer
from trtpipe.engines.reference.devices import find_device, named_memory_errors

TORCH_DTYPE = {
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT16: torch.float16,
    DataType.FLOAT32: torch.float32,
}
# Tokens in one forward pass: enough to fill a GPU, few enough for the caches of a CPU.
BATCH_TOKENS = {"cuda": 32768, "cpu": 4096}
# Layers that may wait while another layer is being written.
WAITING = 1
# Largest share of the device's free memory for hidden states; larger ones are stored in a file.
HIDDEN_SHARE = 0.4


def work(spec: dict[str, Any], progress: Progress) -> None:
    """Run a job of `job.quantize`; `spec` has its arguments as plain values."""
    warnings.filterwarnings("ignore")
    source_folder, out = Path(spec["source"]), Path(spec["out"])
    model = read_model_config(source_folder)
    dtype, quantization = DataType(spec["dtype"]), _quantization(spec["quantization"])
    device, names = find_device(spec["device"]), names_of(model)
    source = Source(source_folder, model, TORCH_DTYPE[dtype], device)
    where = ["before the first layer"]
    with ExitStack() as stack:
        stack.enter_context(named_memory_errors(device, where, "lower --batch-tokens"))
        encode: Callable[..., Tensors] | None = None
        writer = stack.enter_context(Writer(SAFETENSORS_DTYPE[dtype]))
        if spec["format"] == "trtllm":
            encode = for_tensorrt_llm
            lay_out_checkpoint(spec, model, dtype, quantization, out, writer)
        elif spec["format"] == "hf":
            encode = for_hugging_face
            _lay_out_folder(unified.plan(model, quantization), dtype, out, writer)
            unified.write_settings(
                source_folder, out, dtype, quantization, model, importlib.metadata.version("nvidia-modelopt")
            )
        elif spec["format"] == "compressed-tensors":
            encode = functools.partial(for_compressed_tensors, head_size=model.head_size)
            _lay_out_folder(compressed.plan(model, quantization), dtype, out, writer)
            compressed.write_settings(source_folder, out, dtype, quantization, model)
        found = []
        # Progress counts the bytes of the weights, as converting does.
        total = source.nbytes
        with _Background(encode, writer, quantization, names, device) as background:
            background.put_others(source)
            unreached: dict[int, list[int]] = {}
            for index, (weights, scales) in enumerate(_layers(spec, source, model, quantization, where, unreached)):
                found.append(scales)
                background.put(index, weights, scales)
                progress((index + 1) * total // model.num_hidden_layers, total)
        if spec["scales_out"]:
            # Scales alone are an artefact of the store, whose key names the model.
            known = identity(model, source.digest()) if spec["format"] else None
            save_scales(found, Path(spec["scales_out"]), quantization, names, known)
        if spec.get("notes"):
            scales_in = spec["scales_in"]
            other = scales_in is not None and other_weights(Path(scales_in), identity(model, source.digest()))
            notes = {"unreached": {str(layer): of for layer, of in unreached.items()}, "other_weights": other}
            write_json(Path(spec["notes"]), notes)


def _layers(
    spec: dict[str, Any], source: Source, model: ModelConfig, quantization: Quantization, where: list[str],
    unreached: dict[int, list[int]],
) -> Iterator[tuple[Tensors, LayerScales]]:  # fmt: skip
    """Yield each layer's tensors and scales; the scales come from a file or from calibration.

    unreached  layer -> experts that no sample has reached, filled in here
    """
    names = names_of(model)
    if spec["scales_in"]:
        path = Path(spec["scales_in"])
        known = load_scales(path, model.num_hidden_layers, quantization, names, identity(model, ""))
        for index, scales in enumerate(known):
            where[0] = f"writing layer {index}"
            weights = source.layer(index)
            check_widths(path, index, scales, weights)
            yield weights, scales
        return
    if not quantization.calibrated:
        for index in range(model.num_hidden_layers):
            where[0] = f"writing layer {index}"
            yield source.layer(index), LayerScales()
        return
    # Imported here: importing ModelOpt takes seconds, and writing from known scales does not need it.
    from trtpipe.engines.quantize.calibrate import Calibrator

    embedding = source.tensor(f"{names.embedding}.weight")
    where[0] = "taking the samples in"
    calibrator = Calibrator(
        Path(spec["source"]),
        embedding,
        np.load(spec["samples"]),
        quantization,
        names,
        model.experts,
        model.window,
        modelopt=spec["modelopt"],
        batch_tokens=spec["batch_tokens"] or BATCH_TOKENS[embedding.device.type],
        scratch=Path(spec["scratch"]),
        hidden_bytes=spec["hidden_bytes"] if spec["hidden_bytes"] is not None else _room(embedding.device),
    )
    del embedding
    for index in range(model.num_hidden_layers):
        where[0] = f"calibrating layer {index}"
        weights = source.layer(index)
        yield weights, calibrator.layer(index, weights)
        unreached.update(calibrator.unreached)


class _Background:
    """Thread that encodes and writes layers during calibration; the next `put` raises the thread's failure."""

    def __init__(
        self,
        encode: Callable[..., Tensors] | None,
        writer: Writer,
        quantization: Quantization,
        names: SourceNames,
        device: torch.device,
    ) -> None:
        self._encode, self._writer, self._quantization, self._names = encode, writer, quantization, names
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Background:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None and self._failure is not None:
            raise self._failure

    def put_others(self, source: Source) -> None:
        """Queue the tensors outside the layers for writing: the embedding, the last norm, the head."""

        def write() -> None:
            for name in self._writer.missing:
                if not name.startswith(self._names.layers):
                    self._writer.write(name, source.tensor(name, on_device=False))

        self._put(write)

    def put(self, index: int, weights: Tensors, scales: LayerScales) -> None:
        """Queue a layer for encoding and writing."""
        self._put(lambda: self._write(index, weights, scales))

    def _put(self, work: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._encode is not None:
            self._queue.put(work)

    def _run(self) -> None:
        with torch.cuda.stream(self._stream), torch.no_grad():
            while (work := self._queue.get()) is not None:
                if self._failure is None:
                    try:
                        work()
                    except BaseException as error:
                        self._failure = error

    def _write(self, index: int, weights: Tensors, scales: LayerScales) -> None:
        assert self._encode is not None
        try:
            tensors = self._encode(weights, scales, self._quantization, self._names)
        except InputDataError as error:
            raise InputDataError(f"layer {index}: {error.what}", why=error.why, remedy=error.remedy) from None
        for name, tensor in tensors.items():
            calibrated = self._quantization.calibrated and name not in weights
            self._writer.write(self._names.layer(index) + name, tensor, calibrated=calibrated)


def lay_out_checkpoint(
    spec: dict[str, Any], model: ModelConfig, dtype: DataType, quantization: Quantization, out: Path, writer: Writer
) -> None:
    """Write config.json and create the rank files; `spec` has the mapping, the embedding and the toolchain."""
    mapping, embedding = Mapping(**spec["mapping"]), EmbeddingSharding(spec["embedding"])
    config = config_json(
        model, dtype, mapping, embedding=embedding, quantization=quantization, toolchain=spec["toolchain"]
    )
    write_json(out / "config.json", config)
    for rank in range(mapping.world_size):
        pp_rank, tp_rank = divmod(rank, mapping.tp_size)
        plans = plan_rank(
            model, mapping, tp_rank=tp_rank, pp_rank=pp_rank, embedding=embedding, quantization=quantization
        )
        writer.add_file(rank_file(out, rank), plans)


def _lay_out_folder(plans: Iterator[TensorPlan], dtype: DataType, out: Path, writer: Writer) -> None:
    for path, part in lay_out(out, list(plans), SAFETENSORS_DTYPE[dtype]):
        writer.add_file(path, part)


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * HIDDEN_SHARE)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return int(kilobytes * 1024 * HIDDEN_SHARE)


def _quantization(raw: dict[str, Any]) -> Quantization:
    algo, cache = raw["quant_algo"], raw["kv_cache_quant_algo"]
    return Quantization(
        quant_algo=algo and QuantAlgo[algo],
        kv_cache_quant_algo=cache and KvCacheQuantAlgo(cache),
        group_size=raw["group_size"],
    )


if __name__ == "__main__":
    serve_worker(work)
