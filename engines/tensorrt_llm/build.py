"""BuildConfig -> trtllm-build's argument list, and the run itself in this environment."""

from __future__ import annotations

import shutil
from pathlib import Path

from engines.base import BuildConfig, Checkpoint, Engine, Mapping
from engines.errors import HostError
from engines.files import read_json
from engines.gpu import GpuSpec
from engines.process import run

# The tuple this release builds with: the last stable line of TensorRT-LLM that has the engine path.
TENSORRT_LLM = "1.2.1"


def tool_versions() -> dict[str, str]:
    return {"tensorrt_llm": TENSORRT_LLM}


def check(gpu: GpuSpec, mapping: Mapping, build: BuildConfig) -> None:
    """Nothing beyond what BuildConfig and the precision rules refuse already."""


def arguments(checkpoint: Path, out: Path, build: BuildConfig) -> list[str]:
    """trtllm-build's arguments. Sizes are always explicit: its deduced ones do not fit most cards."""
    return [
        "--checkpoint_dir", str(checkpoint),
        "--output_dir", str(out),
        "--max_batch_size", str(build.max_batch_size),
        "--max_input_len", str(build.max_input_len),
        "--max_seq_len", str(build.max_seq_len),
        "--max_num_tokens", str(build.max_num_tokens),
        "--max_beam_width", str(build.max_beam_width),
        "--kv_cache_type", "paged",
        "--tokens_per_block", str(build.tokens_per_block),
        "--remove_input_padding", "enable",
        "--context_fmha", "enable",
        "--use_paged_context_fmha", "enable",
        "--gpt_attention_plugin", "auto",
        "--gemm_plugin", "auto",
        # The default writes it to the current directory.
        "--output_timing_cache", str(out / "model.cache"),
    ]  # fmt: skip


def build(checkpoint: Checkpoint, out: Path, build: BuildConfig, gpu: GpuSpec, log: Path) -> Engine:
    """Compile the checkpoint on this machine's GPU. Raises HostError without trtllm-build, StageFailed if it fails."""
    program = shutil.which("trtllm-build")
    if program is None:
        raise HostError(
            "trtllm-build is not on this machine",
            why=f"an engine for {gpu.describe()} is compiled on that GPU by TensorRT-LLM {TENSORRT_LLM}",
            remedy="on such a host run `pip install trtpipe[engine]` and build again; the checkpoint is kept",
        )
    run([program, *arguments(checkpoint.path, out, build)], log, what="trtllm-build")
    version = read_json(out / "config.json", "engine config").get("version")
    if version != TENSORRT_LLM:
        raise HostError(
            f"trtllm-build is TensorRT-LLM {version}, this project builds with {TENSORRT_LLM}",
            remedy=f"install tensorrt-llm=={TENSORRT_LLM}",
        )
    (out / "model.cache").unlink(missing_ok=True)
    return Engine(path=out)
