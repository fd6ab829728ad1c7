"""The page of `make gpu-e2e`, from its JSON and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.benchmarks.gpu import accuracy_page, comparison, ranks_page, served_page, several_page, speed_page
from tests.benchmarks.gpu.page_parts import bandwidth, section_text, where

# What could not be run on any machine so far, and what stands in for it.
ABSENT = """\
## What was not run

- **TensorRT engines.** tensorrt-llm cannot be installed where this was measured: no `trtllm-build`, no C++ backend. In
  its place: the reference runtime executes the very checkpoint files that `trtllm-build` would compile; vLLM, an engine
  nobody here wrote, executes the same quantization from the Hugging Face folder; and the Triton repository is the one
  that goes to production but for its backend directory.
- **NVIDIA's Triton images.** The server is the one inside PyPI's nvidia-pytriton.
- **Transformer Engine and llama.cpp on the GPU.** Both are compiled on the machine that runs them, which was held for
  half an hour and reaches no package index: Transformer Engine 2.20 is a library of 277 MB and an extension for the
  torch that is there; llama-cpp-python 0.3.36 is 77 MB of source, and needs a GGUF file of these shapes, which the
  project reads and does not write.
- **The newest vLLM.** The machines have torch 2.11. On PyPI vLLM 0.26.0 is the last that requires it; 0.27 requires
  2.13 and 0.33 requires 2.14, whose wheel is 555 MB without the CUDA libraries that it needs.
"""


# The same of sections that are not there yet.
MISSING = {
    "accuracy": """\
- **Correctness with real weights** in vLLM. On an H200: [h200.md](h200.md).
""",
    "quantize": """\
- **FP8 calibration and write**, timed beside ModelOpt's flow. On an H200: [h200.md](h200.md).
""",
    "folders": """\
- **INT8 and 4-bit weights in vLLM**, from compressed-tensors folders. `trtpipe build` writes them, `verify` computes
  with them, and a test compares their bytes with llm-compressor's; what vLLM computes from them was measured with small
  models of random weights alone ([vllm.md](vllm.md)).
""",
    "kv_cache": """\
- **The speed of an FP8 KV cache** at these sizes. On an H200: [h200.md](h200.md).
""",
    "features": """\
- **LoRA, structured output and speculation** by cost at these sizes.
""",
    "reference_features": """\
- **LoRA, structured output and speculation in the reference runtime** by cost at these sizes.
""",
    "offload": """\
- **A KV cache in the host's memory**, which needs a GPU.
""",
    "tune": """\
- **Tuning** on a GPU. On a CPU: [tuning.md](../tuning.md).
""",
    "long": """\
- **Load for long** on a GPU. On a CPU, an hour of it: [soak.md](soak.md).
""",
    "parallel": """\
- **Several GPUs**, on this page. Two and four H100s: [h100-x4.md](h100-x4.md). Two H200s: [h200.md](h200.md). On a CPU,
  in every run of the tests: ranks in processes of their own over gloo against the same shards in one process, and these
  against transformers.
""",
}


_STACKS = """\
All stacks of the sections of this page, each in its own process without a server: Llama 3 8B's shapes, 128 tokens in
and 128 out, all requests starting together. What a front takes is above. The memory bound is the copy's rate over the
bytes of the weights that a token reads, for one stream. GPU hours per million output tokens are those of 256 in flight:
times a card's price for an hour they are the cost.
"""


# Section -> its title and what it says.
SERVED: dict[str, tuple[str, Callable[..., list[str]]]] = {
    "features": ("Features by cost", served_page.features),
    "reference_features": ("Features by cost in the reference runtime", served_page.features),
    "offload": ("A KV cache in the host's memory", served_page.offload),
    "tune": ("What tuning wins", served_page.tune),
    "long": ("Under load for long", served_page.long),
}


WRITERS = {
    "families": accuracy_page.families,
    "accuracy": accuracy_page.accuracy,
    "folders": accuracy_page.folders,
    "engine": speed_page.engine,
    "kv_cache": speed_page.kv_cache,
    "reference": speed_page.reference,
    "study": speed_page.study,
    "quantize": accuracy_page.quantize,
    "shared_gpu": ranks_page.shared_gpu,
    "parallel": ranks_page.parallel,
}


def render(kept: Mapping[str, Any], figure: str = "", tails: str = "") -> str:
    """figure, tails: names of the files that `comparison.figure` and `served_page.long_figure` were written to."""
    kept = {name: section for name, section in kept.items() if section["result"]}
    parts = ["# Measured on a GPU, end to end\n"]
    parts.append(
        "Written by `make gpu-e2e`, which says what each section does; the same figures are in the JSON beside this "
        "page. Every\nratio is of one run on one machine.\n"
    )
    for name, writer in WRITERS.items():
        if name in kept:
            parts.append(writer(kept[name], kept[name]["result"]))
        if name == "reference" and "engine" in kept:
            drawn = [f"![tokens a second of each stack]({figure})\n"] if figure else []
            parts += ["## Which one, when\n", _STACKS, *drawn, *comparison.table(kept, bandwidth(kept["engine"]))]
    parts += [_served(name, kept[name], tails) for name in SERVED if name in kept]
    if "sums" in kept:
        parts.append(section_text("Sums over several GPUs", kept["sums"], several_page.sums(kept["sums"]["result"])))
    several = [kept[name] for name in several_page.PARTS if name in kept]
    found = {
        model: {key: one for section in several for key, one in section["result"].get(model, {}).items()}
        for model in ("llama3-8b", *several_page.MODELS)
    }
    large = kept.get("large_served")
    if large and "in_process" not in large["result"]:
        found["llama3-70b"][several_page.SERVED] = large["result"]
    if found["llama3-8b"]:
        lines = several_page.tensor_parallel(found["llama3-8b"], kept.get("sums", {}).get("result", {}))
        parts.append(section_text("Tensor parallelism of the reference runtime", several[0], lines))
    for model, (title, said) in several_page.MODELS.items():
        if found[model]:
            first, *later = [section for section in several if model in section["result"]] or several[:1]
            others = [f"{'; '.join(section['result'][model])}: {where(section)}" for section in later]
            parts.append(section_text(title, first, [*others, *said(found[model])]))
    if large and "in_process" in large["result"]:
        lines = several_page.large_served(large["result"], speed_page.fronts)
        parts.append(section_text("Llama 3 70B's shapes behind our fronts", large, lines))
    if several:
        return "\n".join([*parts, ABSENT]) + "".join(several_page.absent(kept))
    return "\n".join([*parts, ABSENT]) + "".join(words for name, words in MISSING.items() if name not in kept)


def _served(name: str, section: Mapping[str, Any], tails: str) -> str:
    title, said = SERVED[name]
    lines = said(section["result"], *([tails] if name == "long" else []))
    return section_text(title, section, lines)
