"""Folders of large models' shapes with weights from a seed, and engines of them, without a stage's store.

FP8 codes are written as they are: normal numbers with one scale for all matrices. All weights are cuts of one block of
numbers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.convert import COMMON
from tests.benchmarks.gpu.synthetic import tokenizer
from trtpipe.configs import facts
from trtpipe.engines.backends import reference, vllm
from trtpipe.engines.backends.base import Target, Workshop
from trtpipe.engines.base import Checkpoint, DataType, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.files import write_json
from trtpipe.engines.hf import engine
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.layout import lay_out, whole
from trtpipe.engines.hf.safetensors_file import ITEMSIZE, header_bytes
from trtpipe.engines.quantization import UNQUANTIZED, QuantAlgo, Quantization
from trtpipe.engines.quantize import unified
from trtpipe.engines.quantize.stored import convert_stored
from trtpipe.pipeline.execution.executors import LocalExecutor

TYPES = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}
FP8 = Quantization(quant_algo=QuantAlgo.FP8)
# Standard deviation of the weights, as of a model that is just made, and the largest of them in units of it.
SPREAD, MOST = 0.02, 5.0
# Of an input's numbers, which norms bring near 1.
INPUT_SCALE = 16 / 448
# Numbers in the block, and bytes that are written at once.
NUMBERS, AT_ONCE = 1 << 24, 1 << 26
WRITERS = 16
# As `place.SIZES`.
LIMITS = BuildConfig(max_batch_size=512, max_input_len=512, max_seq_len=1024, max_num_tokens=8192)


def write(folder: Path, model: str, *, fp8: bool, **changes: Any) -> int:
    """Write a folder of the shapes of `model`, one of configs/models, with `changes` to its config; its bytes."""
    named = facts.load_models()[model]
    settings = {**COMMON, **(named.config or {}), "architectures": [named.architecture], **changes}
    settings |= {"model_type": TYPES[named.architecture], "bos_token_id": 0, "eos_token_id": 1}
    folder.mkdir(parents=True)
    write_json(folder / "config.json", settings)
    shape = read_model_config(folder)
    if fp8:
        unified.write_settings(folder, folder, DataType.BFLOAT16, FP8, shape, "0.47.0")
        plans = list(unified.plan(shape, FP8))
    else:
        plans = [whole(name, shape_of, None) for name, shape_of in source_shapes(shape).items()]
    tokenizer(folder, shape.vocab_size)
    blocks = _blocks()
    with ThreadPoolExecutor(WRITERS) as threads:
        written = [threads.submit(_file, path, part, blocks) for path, part in lay_out(folder, plans, "BF16")]
        return sum(file.result() for file in written)


def _blocks() -> dict[str, memoryview]:
    """Bytes of weights in either type."""
    import torch

    numbers = torch.from_numpy(np.random.default_rng(0).standard_normal(NUMBERS, np.float32)).clamp(-MOST, MOST)
    codes = (numbers * (448 / MOST)).to(torch.float8_e4m3fn).view(torch.uint8)
    return {
        "F8_E4M3": codes.numpy().data,
        "BF16": (numbers * SPREAD).bfloat16().view(torch.uint8).numpy().data,
    }


def _file(path: Path, plans: Sequence[TensorPlan], blocks: dict[str, memoryview]) -> int:
    header, offsets = header_bytes([(plan.name, plan.dtype or "BF16", plan.shape) for plan in plans])
    with path.open("wb") as out:
        out.write(header)
        for plan in plans:
            _tensor(out, plan, blocks, offsets[plan.name])
        return out.tell()


def _tensor(out: Any, plan: TensorPlan, blocks: dict[str, memoryview], offset: int) -> None:
    dtype = plan.dtype or "BF16"
    nbytes = prod(plan.shape) * ITEMSIZE[dtype]
    if dtype == "F32":
        value = INPUT_SCALE if plan.name.endswith("input_scale") else SPREAD * MOST / 448
        out.write(np.full(plan.shape, value, np.float32).tobytes())
    elif "norm" in plan.name:
        out.write(np.full(plan.shape, 0x3F80, np.uint16).tobytes())  # 1 in bfloat16
    else:
        # Each tensor begins elsewhere in the block, so that no two are the same.
        block = blocks[dtype]
        start = offset // 8 * 16 % (len(block) // 2)
        while nbytes:
            cut = block[start : start + min(nbytes, AT_ONCE)]
            out.write(cut)
            nbytes, start = nbytes - len(cut), 0


def reference_engine(source: Path, out: Path, gpu: str, tp: int, ep: int = 1) -> Path:
    """Our TensorRT-LLM checkpoint of the folder, as an engine of the reference runtime."""
    target, fp8 = _target(source, gpu, tp, ep)
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    for folder in (checkpoint, out):
        folder.mkdir(parents=True)
    if fp8:
        convert_stored(source, checkpoint, mapping=target.mapping, log=out.with_name(f"{out.name}.log"))
    else:
        convert(source, checkpoint, dtype=DataType.BFLOAT16, mapping=target.mapping)
    with tempfile.TemporaryDirectory() as scratch:
        workshop = Workshop(executor=LocalExecutor(), log=Path(scratch, "log"))
        reference.build(Checkpoint(path=checkpoint), out, LIMITS, target, workshop)
    shutil.rmtree(checkpoint)  # the engine has links to its files
    return out


def vllm_engine(source: Path, out: Path, gpu: str, tp: int, ep: int = 1) -> Path:
    """The folder as an engine of vLLM."""
    target, _ = _target(source, gpu, tp, ep)
    build, _ = vllm.resolve(LIMITS, target)
    out.mkdir(parents=True)
    engine.lay_out(Checkpoint(path=source), out, vllm.rendered(build, target))
    return out


def _target(source: Path, gpu: str, tp: int, ep: int) -> tuple[Target, bool]:
    fp8 = "quantization_config" in json.loads((source / "config.json").read_text(encoding="utf-8"))
    target = Target(
        gpu=facts.find_gpu(gpu), mapping=Mapping(tp_size=tp, moe_ep_size=ep),
        quantization=FP8 if fp8 else UNQUANTIZED, toolchain=facts.find_toolchain(None),
        stored="modelopt" if fp8 else "",
    )  # fmt: skip
    return target, fp8
