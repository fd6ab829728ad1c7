"""Whether vLLM loads the quantized Hugging Face folders as they are written, and computes what our runtime computes.

A small model of random weights of each of MODELS is quantized by every recipe into each folder that can hold it,
ModelOpt's and compressed-tensors. vLLM takes each folder in a process of its own, gives the log-probability of every
token of a prompt, and continues it greedily. `report` computes the same numbers with our runtime, from the same folder
and from the original. vLLM's half needs nothing of this project; its CPU wheel runs what it has kernels for.

    python -m tests.benchmarks.vllm_folders make SCRATCH
    python tests/benchmarks/vllm_folders.py run SCRATCH
    python -m tests.benchmarks.vllm_folders report SCRATCH [--report FILE.md]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

PLAIN = "bf16"
# Folder -> its recipe and format.
FOLDERS = {
    **{name: (name, "hf") for name in ("fp8", "fp8-kv", "fp8-pc-pt", "fp8-block", "nvfp4")},
    **{name: (name, "hf") for name in ("int8-sq", "int4-awq", "w4a8-awq", "int8-wo")},
    **{
        f"compressed-{name}": (name, "compressed-tensors")
        for name in ("fp8", "fp8-kv", "fp8-pc-pt", "int8-sq", "int8-pc-pt", "int8-wo", "int4-awq")
    },
}
VOCABULARY, PROMPT, NEW = 1024, 192, 32
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Name -> transformers' class without its ending, and what its config has beside SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
}
SECONDS = 240
# What vLLM logs about a folder that it does not take as it is.
TROUBLE = re.compile(
    r"missing|unexpected|not found in(?! site-packages)|skip(?:ped|ping) loading|Unknown kv|scaling factor",
    re.IGNORECASE,
)


def make(scratch: Path, name: str) -> None:
    """Write SCRATCH/bf16, SCRATCH/<folder of FOLDERS> and the prompt, for a model of MODELS.

    What `quantize` refuses for the model is said in SCRATCH/<folder>.refused.
    """
    import numpy as np
    import torch
    import transformers

    from trtpipe.configs.facts import load_quant_recipes
    from trtpipe.engines.checkpoint.split import check_expert_format
    from trtpipe.engines.errors import TrtpipeError
    from trtpipe.engines.hf.folder import read_model_config
    from trtpipe.engines.quantize import job

    scratch.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16()
    for number, layer in enumerate(model.model.layers):
        # Random weights give activations without outliers, and matrices whose scales are all alike.
        layer.input_layernorm.weight.data *= torch.linspace(0.3, 2, 512).bfloat16()
        layer.post_attention_layernorm.weight.data *= torch.linspace(1.5, 0.5, 512).bfloat16()
        layer.self_attn.k_proj.weight.data *= 1 + number / 2
        layer.self_attn.v_proj.weight.data *= 0.7
        for parameter, value in layer.named_parameters():
            if parameter.endswith(("up_proj.weight", "gate_up_proj")):
                value.data *= 1.3
            elif parameter.endswith(".bias"):
                value.data.normal_(std=0.1)
    model.save_pretrained(scratch / PLAIN)
    generator = np.random.default_rng(0)
    (scratch / "prompt.json").write_text(json.dumps(generator.integers(3, VOCABULARY, PROMPT).tolist()))
    samples = generator.integers(3, VOCABULARY, (16, 256), dtype=np.int32)
    recipes, read = load_quant_recipes(), read_model_config(scratch / PLAIN)
    for folder, (recipe, form) in FOLDERS.items():
        out, scales = scratch / folder, scratch / f"{recipe}.scales"
        out.mkdir()
        try:
            check_expert_format(read, recipes[recipe].quantization, form)
            job.quantize(
                scratch / PLAIN, out, recipes[recipe], layout=job.Layout(form=form), samples=samples,
                scales=scales if scales.is_file() else None, save_scales=None if scales.is_file() else scales,
                log=scratch / "make.log",
            )  # fmt: skip
        except TrtpipeError as error:
            out.rmdir()
            (scratch / f"{folder}.refused").write_text(str(error))
        print(name, folder, flush=True)


def run(scratch: Path) -> None:
    """Have vLLM run every folder, the original first, then the others, side by side on a GPU; their .json and .log."""
    import torch

    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    # FlashInfer would be asked for only to sample, and nothing is sampled here.
    environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # Where it is installed without its compiled kernels, vLLM would compile for minutes what experts take.
    environment["VLLM_USE_FLASHINFER_MOE_FP8"] = "0"

    def start(name: str) -> subprocess.Popen[bytes]:
        log = (scratch / f"{name}.log").open("wb")
        command = ["timeout", str(SECONDS), sys.executable, __file__, "one", str(scratch / name)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    others = (tuple(FOLDERS),) if torch.cuda.is_available() else tuple((name,) for name in FOLDERS)
    for group in ((PLAIN,), *others):
        started = {name: start(name) for name in group if (scratch / name).is_dir()}
        for process in started.values():
            process.wait()


def error(log: str) -> str:
    """vLLM's reason for refusing a folder: the last exception of its log, without pydantic's additions; "" for none."""
    found: list[str] = re.findall(
        r"^(?:\[rank0\]: )?[\w.]*(?:Error|Exception): .*(?:\n +Value error, .*)?", log, re.MULTILINE
    )
    said = found[-1].split("Value error, ")[-1] if found else ""
    return said.partition(" [type=")[0].partition(". Please")[0]


def one(folder: Path) -> None:
    """Load `folder` in vLLM, nothing overridden that says how it is quantized, and write its numbers."""
    import torch
    import transformers
    import vllm
    from vllm import LLM, SamplingParams

    prompt = json.loads((folder.parent / "prompt.json").read_text())
    # A fixed cache needs no measuring of free memory, which processes side by side would disturb.
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, dtype="bfloat16",
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=256 << 20, max_num_seqs=4, enable_prefix_caching=False,
        max_num_batched_tokens=512,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0, max_tokens=NEW, min_tokens=NEW, ignore_eos=True, prompt_logprobs=0, logprobs=0, detokenize=False
    )
    out = llm.generate([{"prompt_token_ids": prompt}], params)[0]
    made = list(out.outputs[0].token_ids)
    settings = llm.llm_engine.vllm_config
    result = {
        "versions": {module.__name__: module.__version__ for module in (vllm, torch, transformers)},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
        "method": settings.model_config.quantization,
        "kv_cache": settings.cache_config.cache_dtype,
        "prompt": [step[token].logprob for step, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)],
        "made": made,
        "new": [step[token].logprob for step, token in zip(out.outputs[0].logprobs, made, strict=True)],
    }
    folder.with_name(folder.name + ".json").write_text(json.dumps(result))
    print("RESULT", result["method"], result["kv_cache"], result["prompt"][:4])


def reference(folder: Path, ids: list[int], dtype: str = "bfloat16") -> Any:
    """[len(ids) - 1] log-probabilities of every token after the first, as our runtime computes them in `dtype`."""
    import torch

    from tests.benchmarks.distributions import distributions

    told = distributions(folder, torch.tensor([ids]), getattr(torch, dtype), torch.device("cpu"))
    return told[0].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()


def merge(folder: Path, out: Path) -> Path:
    """A copy of an FP8 folder whose joined matrices share the largest of their scales, as vLLM has it in memory."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    joined = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
    for name in [*tensors]:
        block, _, linear = name.removesuffix(".weight").rpartition(".")
        parts = [parts for parts in joined if name.endswith(".weight") and linear == parts[0]]
        if not parts:
            continue
        stems = [f"{block}.{part}." for part in parts[0]]
        scale = torch.stack([tensors[stem + "weight_scale"] for stem in stems]).max()
        for stem in stems:
            exact = tensors[stem + "weight"].float() * tensors[stem + "weight_scale"] / scale
            tensors[stem + "weight"] = exact.to(torch.float8_e4m3fn)
            tensors[stem + "weight_scale"] = scale.clone()
    save_file(tensors, out / "model.safetensors")
    return out


def row(scratch: Path, name: str, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    """A line of the table, and what vLLM wrote."""
    import numpy as np

    refused = scratch / f"{name}.refused"
    if refused.exists():
        return f"| {name} | not written | | | | | | | {refused.read_text()} |", {}
    log = (scratch / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    result = scratch / f"{name}.json"
    if not result.exists():
        told = f"refused | | | | | | | {error(log)}" if error(log) else f"no answer in {SECONDS} s | | | | | | | "
        return f"| {name} | {told} |", {}
    found = json.loads(result.read_text())
    ids = [*prompt, *found["made"]]
    theirs = np.array([*found["prompt"], *found["new"]])
    ours, plain = reference(scratch / name, ids), reference(scratch / PLAIN, ids)
    near, cut = np.abs(theirs - ours), len(prompt) - 1
    floor = np.abs(reference(scratch / name, ids, "float32") - ours).mean()
    notes = {line.rpartition("] ")[2].partition(". ")[0] for line in log.splitlines() if TROUBLE.search(line)}
    numbers = [near[:cut].mean(), near[cut:].mean(), floor, np.abs(theirs - plain).mean(), np.abs(ours - plain).mean()]
    cells = [f"{number:.3f}" for number in numbers]
    one_scale = FOLDERS.get(name, ("", ""))[0] in ("fp8", "fp8-kv")
    merged = merge(scratch / name, scratch / "merged") if one_scale else None
    cells.insert(2, f"{np.abs(theirs - reference(merged, ids)).mean():.3f}" if merged else "")
    method = f"{found['method'] or 'none'}, {found['kv_cache']}"
    return f"| {name} | {method} | {' | '.join(cells)} | {'; '.join(sorted(notes))} |", found


def table(scratch: Path, model: str) -> tuple[list[str], dict[str, Any]]:
    """A model's part of the page, and what vLLM wrote of the original."""
    prompt = json.loads((scratch / "prompt.json").read_text())
    known = [
        name for name in (PLAIN, *FOLDERS) if any((scratch / f"{name}.{end}").exists() for end in ("log", "refused"))
    ]
    made = [row(scratch, name, prompt) for name in known]
    kind, more = MODELS[model]
    config = ", ".join(f"{name} {value}" for name, value in more.items())
    return [
        f"## {kind}ForCausalLM",
        "",
        *([f"With {config}.", ""] if config else []),
        "| folder | vLLM's method, KV cache | vLLM to ours, prompt | vLLM to ours, new tokens "
        "| vLLM to ours, merged | ours to ours in float32 | vLLM to the original | ours to the original | note |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line for line, _ in made),
        "",
    ], made[0][1]


def report(scratch: Path) -> str:
    """The page: how far vLLM's log-probabilities are from our runtime's, of the same folder and of the original."""
    parts = [table(scratch / model, model) for model in MODELS if (scratch / model).is_dir()]
    facts = parts[0][1]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return "\n".join(
        [
            "# Our Hugging Face folders in vLLM",
            "",
            f"{datetime.now(timezone.utc):%Y-%m-%d}, {facts['gpu']}, {versions}. Models of 3 layers of",
            "random weights, quantized by each recipe on a CPU; vLLM loads the folder as written, told nothing about",
            "its quantization; FlashInfer had no compiled kernels. Written by `python -m",
            "tests.benchmarks.vllm_folders`.",
            "",
            "Numbers are mean differences of log-probabilities, nats: of a prompt of",
            f"{PROMPT} random tokens, and of the {NEW} tokens vLLM continued it with. Random weights magnify rounding,",
            "so what float32 instead of bfloat16 moves in our own runtime is the measure for the first three columns.",
            "vLLM brings q, k and v, and gate and up, to the largest of their FP8 scales, where our runtime keeps each",
            "its own: `merged` is our runtime with scales brought together likewise. A router's choice of experts is",
            "not continuous: where rounding moves a score past another, a token is computed by another expert.",
            "",
            *(line for part, _ in parts for line in part),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("make", "run", "one", "report"))
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    if args.half == "make":
        for model in MODELS:
            make(args.scratch / model, model)
    elif args.half == "run":
        for model in MODELS:
            if (args.scratch / model).is_dir():
                run(args.scratch / model)
    elif args.half == "one":
        one(args.scratch)
    else:
        text = report(args.scratch)
        print(text)
        if args.report:
            args.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
