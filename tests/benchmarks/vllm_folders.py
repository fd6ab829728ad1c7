"""Whether vLLM loads the unified Hugging Face folders as they are written, and computes what our runtime computes.

A small Llama of random weights is quantized by every recipe that has such a folder. vLLM takes each folder in a process
of its own, gives the log-probability of every token of a prompt, and continues it greedily. `report` computes the same
numbers with our runtime, from the same folder and from the original. vLLM needs a GPU, and its half needs nothing of
this project; the other halves need no GPU.

    python -m tests.benchmarks.vllm_folders make SCRATCH
    python tests/benchmarks/vllm_folders.py run SCRATCH
    python -m tests.benchmarks.vllm_folders report SCRATCH [--report FILE.md]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

PLAIN = "bf16"
RECIPES = ("fp8", "fp8-kv", "fp8-pc-pt", "int8-sq", "int4-awq", "w4a8-awq", "int8-wo")
VOCABULARY, PROMPT, NEW = 1024, 192, 32
SECONDS = 240
# What vLLM logs about a folder that it does not take as it is.
TROUBLE = re.compile(
    r"missing|unexpected|not found in|not initialized|skip(?:ped|ping) loading|Unknown kv", re.IGNORECASE
)


def make(scratch: Path) -> None:
    """Write SCRATCH/bf16, SCRATCH/<recipe> and the prompt."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engines.quantize import job
    from pipeline.config import load_quant_recipes

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=512, rope_theta=10000.0, initializer_range=0.05,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for number, layer in enumerate(model.model.layers):
        # Random weights give activations without outliers, and matrices whose scales are all alike.
        layer.input_layernorm.weight.data *= torch.linspace(0.3, 2, 512).bfloat16()
        layer.post_attention_layernorm.weight.data *= torch.linspace(1.5, 0.5, 512).bfloat16()
        layer.self_attn.k_proj.weight.data *= 1 + number / 2
        layer.self_attn.v_proj.weight.data *= 0.7
        layer.mlp.up_proj.weight.data *= 1.3
    model.save_pretrained(scratch / PLAIN)
    generator = np.random.default_rng(0)
    (scratch / "prompt.json").write_text(json.dumps(generator.integers(3, VOCABULARY, PROMPT).tolist()))
    samples = generator.integers(3, VOCABULARY, (16, 256), dtype=np.int32)
    recipes = load_quant_recipes()
    for name in RECIPES:
        out = scratch / name
        out.mkdir()
        layout = job.Layout(form="hf")
        job.quantize(scratch / PLAIN, out, recipes[name], layout=layout, samples=samples, log=scratch / "make.log")
        print(name, flush=True)


def run(scratch: Path) -> None:
    """Have vLLM run every folder and write SCRATCH/<folder>.json; the original first, then the others side by side."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}

    def start(name: str) -> subprocess.Popen[bytes]:
        log = (scratch / f"{name}.log").open("wb")
        command = ["timeout", str(SECONDS), sys.executable, __file__, "one", str(scratch / name)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    for group in ((PLAIN,), RECIPES):
        started = {name: start(name) for name in group if (scratch / name).is_dir()}
        for name, process in started.items():
            code = process.wait()
            # Closing the engine may fail after the result was written, which is no matter of the folder.
            log = (scratch / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            result = scratch / f"{name}.json"
            if not result.exists():
                result.write_text(json.dumps({"error": _error(log) or f"it ended with status {code}"}))
            found = json.loads(result.read_text())
            found["trouble"] = sorted({line.strip() for line in log.splitlines() if TROUBLE.search(line)})
            result.write_text(json.dumps(found))


def _error(log: str) -> str:
    """The last line of a log that names an exception."""
    lines = [line.strip() for line in log.splitlines() if re.match(r"\s*(\(.*\) )?[\w.]*(Error|Exception)\b", line)]
    return lines[-1] if lines else ""


def one(folder: Path) -> None:
    """Load `folder` in vLLM, nothing overridden that says how it is quantized, and write its numbers."""
    import importlib.metadata

    import torch
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
        "versions": {name: importlib.metadata.version(name) for name in ("vllm", "torch", "transformers")},
        "gpu": torch.cuda.get_device_name(),
        "method": settings.model_config.quantization,
        "kv_cache": settings.cache_config.cache_dtype,
        "prompt": [step[token].logprob for step, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)],
        "made": made,
        "new": [step[token].logprob for step, token in zip(out.outputs[0].logprobs, made, strict=True)],
    }
    folder.with_name(folder.name + ".json").write_text(json.dumps(result))
    print("RESULT", result["method"], result["kv_cache"], result["prompt"][:4])


def reference(folder: Path, ids: list[int]) -> Any:
    """[len(ids) - 1] log-probabilities of every token after the first, as our runtime computes them."""
    import torch

    from engines.accuracy.models import embed, open_model
    from engines.reference.layer import rms_norm, run_layer
    from engines.reference.rope import rotary_tables

    source = open_model(folder, torch.device("cpu"))
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        hidden = embed(source, tokens)
        tables = rotary_tables(source.config, len(ids))
        for index in range(source.config.num_hidden_layers):
            hidden = run_layer(source.config, source.layer(index), hidden, *tables)
        norm, head = source.head()
        states = rms_norm(hidden[0, :-1], norm, source.config.norm_epsilon)
        logits = states.float() @ torch.cat(list(head)).float().t()
        return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()


def report(scratch: Path) -> str:
    """The page: how far vLLM's log-probabilities are from our runtime's, of the same folder and of the original."""
    import numpy as np

    prompt = json.loads((scratch / "prompt.json").read_text())
    rows, facts = [], {}
    for name in (PLAIN, *RECIPES):
        found = json.loads((scratch / f"{name}.json").read_text())
        notes = list(found["trouble"])
        if "error" in found:
            rows.append(f"| {name} | no | | | | | {' '.join([found['error'], *notes])} |")
            continue
        facts = found
        ids = [*prompt, *found["made"]]
        theirs = np.array([*found["prompt"], *found["new"]])
        near, far = (np.abs(theirs - reference(scratch / folder, ids)) for folder in (name, PLAIN))
        cut = len(prompt) - 1
        rows.append(
            f"| {name} | yes | {found['method'] or 'none'}, {found['kv_cache']} | {near[:cut].mean():.4f} "
            f"(max {near.max():.3f}) | {near[cut:].mean():.4f} | {far.mean():.4f} (max {far.max():.3f}) "
            f"| {' '.join(notes)} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    return "\n".join(
        [
            "# Our Hugging Face folders in vLLM",
            "",
            f"{datetime.now(timezone.utc):%Y-%m-%d}, {facts.get('gpu')}, {versions}. A Llama of 3 layers and random "
            "weights, quantized by each",
            "recipe on a CPU; vLLM loads the folder as written, told nothing about its quantization. Numbers are mean",
            f"differences of log-probabilities, nats, over a prompt of {PROMPT} random tokens and {NEW} that vLLM made,",
            "between vLLM and our runtime of the same folder, and between vLLM and the original in our runtime.",
            "Written by `python -m tests.benchmarks.vllm_folders`.",
            "",
            "| recipe | loads | vLLM's method, KV cache | to our runtime, prompt | new tokens | to the original | note |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("make", "run", "one", "report"))
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    if args.half == "make":
        args.scratch.mkdir(parents=True, exist_ok=True)
        make(args.scratch)
    elif args.half == "run":
        run(args.scratch)
    elif args.half == "one":
        one(args.scratch)
    else:
        text = report(args.scratch)
        print(text)
        if args.report:
            args.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
