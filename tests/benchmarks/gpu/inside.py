"""What runs in the engine's environment: `python -m tests.benchmarks.gpu.inside WHAT RESULT JSON`.

WHAT is one of the functions below, or MODULE:FUNCTION of this folder, JSON its arguments, RESULT the file that what it
returns is written to. Nothing here needs more than torch, transformers and vLLM.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu import loop

# How many of its likeliest tokens vLLM is asked for at each place.
TOP = 64
# In the cache of engines that are compared.
TOKENS = 65536


class Vllm:
    """vLLM's own engine, as our runtime sets it up; its steps are vLLM's, without ours."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from trtpipe.engines.engine_process.vllm_runtime import Runtime

        self.runtime = Runtime(folder, **options)
        self.engine = self.runtime._engine
        self._params: Callable[[int], Any] = lambda new: SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

    @property
    def vocabulary(self) -> int:
        return int(self.engine.model_config.get_vocab_size())

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        self.engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, self._params(new))

    def step(self) -> Iterable[tuple[int, int, bool]]:
        for reply in self.engine.step():
            yield int(reply.request_id), len(reply.outputs[0].token_ids), reply.finished

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


class Reference:
    """The reference runtime."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from trtpipe.engines.reference.runtime import Runtime

        self.runtime = Runtime(folder, **options)

    @property
    def vocabulary(self) -> int:
        return self.runtime.config.vocab_size

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        from trtpipe.engines.engine_process.request import Request

        self.runtime.submit(Request(id=number, prompt=tuple(prompt), max_tokens=new))

    def step(self) -> Iterable[tuple[int, int, bool]]:
        for output in self.runtime.step():
            yield output.id, len(output.tokens), output.finish is not None

    def drain(self) -> None:
        while self.runtime.has_work:
            self.runtime.step()


ENGINES: dict[str, Any] = {"vllm": Vllm, "reference": Reference}


def synthetic(folder: str) -> dict[str, Any]:
    """Write a Llama of Llama 3 8B's shapes and random weights, with a tokenizer of as many tokens; its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.benchmarks.convert import COMMON, SIZES

    torch.manual_seed(0)
    config = LlamaConfig(**{**COMMON, **SIZES["8b"], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None})
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="5GB")
    tokenizer(Path(folder), config.vocab_size)
    return {"bytes": sum(parameter.nbytes for parameter in model.parameters())}


def tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE of `size` tokens: two specials, the bytes, then a space and up to three letters."""
    from string import ascii_letters

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: index for index, name in enumerate(["<s>", "</s>", *alphabet])}
    words = ["\u0120"]  # how byte-level BPE spells a space
    merges: list[tuple[str, str]] = []
    for _ in range(3):
        grown = [(word, letter) for word in words for letter in ascii_letters]
        merges += grown
        words = [word + letter for word, letter in grown]
    merges = merges[: size - len(vocab)]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


# `model_type` -> its own settings, beside those of all.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
        "head_dim": 128,
    },
}  # fmt: skip


def families(scratch: str) -> dict[str, Any]:
    """How many of 20 answers of 64 tokens our runtime gives as transformers does in float32, for each of FAMILIES.

    Both on the GPU; our runtime answers all at once, and then the first alone. In bfloat16 it is compared with
    transformers in float32 too: how many tokens come before rounding changes one.
    """
    import torch

    from tests.support.random_models import random_model
    from trtpipe.engines.base import DataType, Mapping
    from trtpipe.engines.checkpoint.convert import convert

    sizes = {
        "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    }  # fmt: skip
    prompts = np.random.default_rng(0).integers(3, 4096, (20, 64)).tolist()
    rows, device = [], "cuda" if torch.cuda.is_available() else "cpu"
    for name, more in FAMILIES.items():
        folder = Path(scratch) / name
        model = random_model(name, **{**sizes, **more})
        model.save_pretrained(folder)
        with torch.no_grad():
            told = model.to(device).generate(torch.tensor(prompts, device=device), max_new_tokens=64, do_sample=False)
        theirs = told[:, 64:].tolist()
        del model
        row: dict[str, Any] = {"family": name, "settings": more}
        for dtype in (DataType.FLOAT32, DataType.BFLOAT16):
            out = Path(scratch) / f"{name}.{dtype.value}"
            out.mkdir()
            convert(folder, out, dtype=dtype, mapping=Mapping())
            config = json.loads((out / "config.json").read_text())
            limits = {
                "max_batch_size": 20, "max_input_len": 128, "max_seq_len": 256, "max_num_tokens": 4096,
                "max_beam_width": 1, "plugin_config": {"tokens_per_block": 32},
            }  # fmt: skip
            whole = {"version": "test", "pretrained_config": config, "build_config": limits}
            (out / "config.json").write_text(json.dumps(whole))
            one = Reference(out, device=device, kv_cache_tokens=20 * 256)
            together = _greedy(one, prompts, 64)
            row[dtype.value] = {
                "same": sum(ours == answer for ours, answer in zip(together, theirs, strict=True)),
                "alone": _greedy(one, prompts[:1], 64)[0] == theirs[0],
                "before": [
                    next((place for place, pair in enumerate(zip(ours, answer, strict=True)) if pair[0] != pair[1]), 64)
                    for ours, answer in zip(together, theirs, strict=True)
                ],
            }
            del one
        rows.append(row)
    return {"rows": rows}


def vllm_scores(engine: str, rows: str, out: str, greedy: list[list[int]], new: int) -> dict[str, Any]:
    """Write vLLM's likeliest tokens at every place of each row, [rows, length - 1, TOP]; its greedy answers too.

    out  .npz of `ids` int32 and `logprobs` float32
    """
    import functools

    import vllm
    from vllm import SamplingParams

    # It tells at most 20 unless it is asked for more when it starts; compiling is for speed alone.
    vllm.EngineArgs = functools.partial(vllm.EngineArgs, max_logprobs=TOP, enforce_eager=True)
    one = Vllm(Path(engine))
    tokens = np.load(rows)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    for number, row in enumerate(tokens):
        one.engine.add_request(f"s{number}", {"prompt_token_ids": row.tolist()}, asked)
    answer = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(greedy):
        one.engine.add_request(f"g{number}", {"prompt_token_ids": prompt}, answer)
    ended = {}
    while one.engine.has_unfinished_requests():
        for reply in one.engine.step():
            if reply.finished:
                ended[reply.request_id] = reply
    ids = np.zeros((*tokens[:, 1:].shape, TOP), np.int32)
    logprobs = np.zeros(ids.shape, np.float32)
    for number in range(len(tokens)):
        for place, found in enumerate(ended[f"s{number}"].prompt_logprobs[1:]):
            # The token that is there is told as well, wherever it ranks.
            best = sorted(found.items(), key=lambda item: -item[1].logprob)[:TOP]
            ids[number, place] = [token for token, _ in best]
            logprobs[number, place] = [one.logprob for _, one in best]
    np.savez(out, ids=ids, logprobs=logprobs)
    settings = one.engine.vllm_config
    return {
        "greedy": [list(ended[f"g{number}"].outputs[0].token_ids) for number in range(len(greedy))],
        "method": settings.model_config.quantization,
        "kv_cache": str(settings.cache_config.cache_dtype),
    }


def reference_scores(
    engines: dict[str, str], folders: dict[str, str], vllm: dict[str, str], rows: str, greedy: list[list[int]], new: int
) -> Any:
    """How far the reference runtime's distributions are from each other's and from vLLM's, over the same rows.

    engines  the reference runtime's by precision, "bf16" first
    folders  vLLM's by precision; our arithmetic computes them as well, in bfloat16 and in float32
    vllm     what `vllm_scores` wrote of them
    """
    import torch

    from tests.benchmarks.distributions import distributions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = np.load(rows)
    out: dict[str, Any] = {"greedy": {}, "pairs": []}
    for name, folder in folders.items():
        same = [
            distributions(Path(folder), torch.from_numpy(tokens).long(), dtype, torch.device(device))
            for dtype in (torch.bfloat16, torch.float32)
        ]
        pairs = [_whole(exact, rounded) for rounded, exact in zip(*same, strict=True)]
        out["pairs"].append({"of": f"folder {name} in float32", "to": f"folder {name}", **_mean(pairs)})
        if name in vllm:
            pairs = _told(vllm[name], same[0])
            out["pairs"].append({"of": f"vLLM {name}", "to": f"folder {name}", **_mean(pairs)})
    plain: list[Any] = []
    for name, folder in engines.items():
        one = Reference(Path(folder))
        logs = [torch.from_numpy(logits).to(device).log_softmax(-1) for logits in _context_logits(one, tokens)]
        if name == "bf16":
            plain = logs
        else:
            pairs = [_whole(a, b) for a, b in zip(plain, logs, strict=True)]
            out["pairs"].append({"of": "reference bf16", "to": f"reference {name}", **_mean(pairs)})
        # Each of vLLM's against ours of the same precision, and against ours as it was before it was quantized.
        for other, path in vllm.items():
            if name in (other, "bf16"):
                out["pairs"].append({"of": f"vLLM {other}", "to": f"reference {name}", **_mean(_told(path, logs))})
        out["greedy"][name] = _greedy(one, greedy, new)
        del one, logs
        if device == "cuda":
            torch.cuda.empty_cache()
    return out


def _told(path: str, logs: Iterable[Any]) -> list[tuple[float, float, int]]:
    """`_partly` of what `vllm_scores` wrote in `path`, row by row."""
    import torch

    told = np.load(path)
    return [
        _partly(torch.from_numpy(ids).to(log.device).long(), torch.from_numpy(there).to(log.device), log)
        for ids, there, log in zip(told["ids"], told["logprobs"], logs, strict=True)
    ]


def _context_logits(one: Reference, tokens: Any) -> list[Any]:
    """[length - 1, vocabulary] of each row: what follows every token but the last."""
    from trtpipe.engines.engine_process.request import Request

    for number, row in enumerate(tokens):
        one.runtime.submit(Request(id=number, prompt=tuple(row.tolist()), max_tokens=1, return_context_logits=True))
    parts: dict[int, Any] = {}
    while one.runtime.has_work:
        for output in one.runtime.step():
            if output.context_logits is not None:
                parts[output.id] = output.context_logits
    return [parts[number][:-1] for number in range(len(tokens))]


def _greedy(one: Reference, prompts: list[list[int]], new: int) -> list[list[int]]:
    return [_tokens(outputs) for outputs in _decoded(one, prompts, new)]


def _tokens(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def _decoded(one: Reference, prompts: list[list[int]], new: int, *, logits: bool = False) -> list[list[Any]]:
    """What each prompt's steps put out, with their logits if asked for."""
    from trtpipe.engines.engine_process.request import Request

    for number, prompt in enumerate(prompts):
        wanted = Request(id=number, prompt=tuple(prompt), max_tokens=new, return_generation_logits=logits)
        one.runtime.submit(wanted)
    said: list[list[Any]] = [[] for _ in prompts]
    while one.runtime.has_work:
        for output in one.runtime.step():
            said[output.id].append(output)
    return said


def compare_steps(ours: list[list[Any]], theirs: list[list[Any]]) -> dict[str, float]:
    """Of the steps up to where two answers part: how many there are, in how many all logits are equal, and how far
    they are from each other at most."""
    steps = equal = 0
    largest = 0.0
    for pair in zip(ours, theirs, strict=True):
        for a, b in zip(*pair, strict=True):
            difference = float(np.abs(a.generation_logits - b.generation_logits).max())
            steps, equal, largest = steps + 1, equal + (difference == 0), max(largest, difference)
            if a.tokens != b.tokens:
                break
    return {"steps": steps, "equal": equal, "largest": largest}


def _whole(a: Any, b: Any) -> tuple[float, float, int]:
    """(sum of KL(a || b), places with the same likeliest token, places) of log-probabilities [places, vocabulary]."""
    divergence = (a.exp() * (a - b)).sum(-1)
    return float(divergence.sum()), float((a.argmax(-1) == b.argmax(-1)).sum()), len(a)


def _partly(ids: Any, logprobs: Any, b: Any) -> tuple[float, float, int]:
    """The same where only the likeliest tokens of the first are known: all others count as one.

    So it is a lower bound; near, for what the others weigh is little.
    """
    there = b.gather(1, ids)
    p, q = logprobs.exp().double(), there.exp().double()
    rest, others = (1 - p.sum(-1)).clamp(min=1e-9), (1 - q.sum(-1)).clamp(min=1e-9)
    divergence = (p * (p.log() - q.log())).sum(-1) + rest * (rest.log() - others.log())
    return float(divergence.sum()), float((ids[:, 0] == b.argmax(-1)).sum()), len(b)


def _mean(pairs: list[tuple[float, float, int]]) -> dict[str, float]:
    divergence, same, places = (sum(column) for column in zip(*pairs, strict=True))
    return {"kl": divergence / places, "top1": same / places, "places": places}


def ranks(engine: str, alone: str, prompts: list[list[int]], new: int, levels: list[int]) -> dict[str, Any]:
    """A tensor-parallel engine over NCCL, the same shards in one process, and the engine of one rank.

    Every place of every prompt and greedy answer is compared, once read and once decoded; the first also with itself.
    Tokens a second are measured at `levels`.
    """
    import torch

    settings = {"kv_cache_tokens": TOKENS, "enable_kv_cache_reuse": False}
    apart = Reference(Path(engine), apart=True, **settings)
    said = _decoded(apart, prompts, new, logits=True)
    out: dict[str, Any] = {"again": compare_steps(said, _decoded(apart, prompts, new, logits=True)), "pairs": []}
    answers = [_tokens(outputs) for outputs in said]
    rows = np.array([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    theirs = _context_logits(apart, rows)
    out["tokens_per_s"] = loop.measure(apart, levels, None)
    apart.runtime.close()
    for name, folder in (("the same shards in one process", engine), ("one rank", alone)):
        one = Reference(Path(folder), apart=False, **settings)
        steps = _decoded(one, prompts, new, logits=True)
        pairs, largest = [], 0.0
        for ours, their in zip(_context_logits(one, rows), theirs, strict=True):
            a, b = torch.from_numpy(ours), torch.from_numpy(their)
            pairs.append(_whole(a.log_softmax(-1), b.log_softmax(-1)))
            largest = max(largest, float((a - b).abs().max()))
        answered = sum(_tokens(outputs) == answer for outputs, answer in zip(steps, answers, strict=True))
        out["pairs"].append(
            {
                "to": name, **_mean(pairs), "largest": largest, "answers": answered, "of": len(prompts),
                "decoded": compare_steps(said, steps),
            }
        )  # fmt: skip
        if folder == alone:
            out["tokens_per_s_of_one"] = loop.measure(one, levels, None)
        del one
        torch.cuda.empty_cache()
    return out


def vllm_throughput(engine: str, levels: list[int]) -> dict[str, dict[str, float]]:
    """Output tokens a second of vLLM in this process, by requests in flight."""
    without_multicast()
    return loop.measure(Vllm(Path(engine)), levels, None)


def without_multicast() -> None:
    """Have vLLM's ranks add up without NVLink's multicast, which can put the GPUs of a shared host out of service."""
    import functools
    import os

    import vllm

    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"}
    passes = {"pass_config": {"fuse_allreduce_rms": False}}
    vllm.EngineArgs = functools.partial(vllm.EngineArgs, compilation_config=passes)


def quantized(model: str, scratch: str, samples: int) -> dict[str, Any]:
    """Seconds of FP8 calibration and writing: ModelOpt's flow, and ours a layer at a time and all at once."""
    from tests.benchmarks import quantize

    folder, place = Path(model), Path(scratch)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocabulary, (samples, quantize.SEQ_LEN), dtype=np.int32)
    np.save(place / "samples.npy", ids)
    rows = quantize.theirs(folder, place / "theirs", ids)
    shutil.rmtree(place / "theirs", ignore_errors=True)
    quantize.ours(folder, place / "ours", place / "samples.npy", "hf")  # warms up
    seconds, peak = quantize.ours(folder, place / "ours", place / "samples.npy", "hf")
    shutil.rmtree(place / "ours", ignore_errors=True)
    return {"modelopt_s": float(rows[-1].split("= ")[1].split(" ")[0]), "ours_s": seconds, "ours_peak_gib": peak}


def machine() -> dict[str, Any]:
    """The GPU, its memory's rate as a copy shows it, and versions."""
    import importlib.metadata

    import torch

    from trtpipe.engines import probe_worker as probe

    names = ("vllm", "torch", "transformers", "triton", "numpy")
    there = {one.name for one in importlib.metadata.distributions()}
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "bandwidth_gbs": probe.bandwidth(torch),
        "versions": {name: importlib.metadata.version(name) for name in names if name in there},
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "python": sys.version.split()[0],
    }


def nccl_version() -> list[int]:
    """Of the library that is loaded; torch tells the one that it was built with."""
    code = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    return [code.value // 10_000, code.value // 100 % 100, code.value % 100]


def main() -> None:
    what, result, arguments = sys.argv[1:]
    module, _, name = what.rpartition(":")
    there = importlib.import_module(f"tests.benchmarks.gpu.{module or 'inside'}")
    Path(result).write_text(json.dumps(getattr(there, name)(**json.loads(arguments))), encoding="utf-8")


if __name__ == "__main__":
    main()
