"""Distributions over held-out text: vLLM, the reference runtime and our arithmetic. In the engine's environment."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu import steps
from tests.benchmarks.gpu.divergence import mean, partly, whole
from tests.benchmarks.gpu.in_process import Reference, Vllm

# How many of its likeliest tokens vLLM is asked for at each place.
TOP = 64


def vllm(engine: str, rows: str, out: str, greedy: list[list[int]], new: int) -> dict[str, Any]:
    """Write vLLM's likeliest tokens at every place of each row, [rows, length - 1, TOP]; its greedy answers too.

    out  .npz of `ids` int32 and `logprobs` float32
    """
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


def reference(
    engines: dict[str, str], folders: dict[str, str], vllm: dict[str, str], rows: str, greedy: list[list[int]], new: int
) -> Any:
    """How far the reference runtime's distributions are from each other's and from vLLM's, over the same rows.

    engines  the reference runtime's by precision, "bf16" first
    folders  vLLM's by precision; our arithmetic computes them as well, in bfloat16 and in float32
    vllm     what `vllm` wrote of them
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
        pairs = [whole(exact, rounded) for rounded, exact in zip(*same, strict=True)]
        out["pairs"].append({"of": f"folder {name} in float32", "to": f"folder {name}", **mean(pairs)})
        if name in vllm:
            pairs = _told(vllm[name], same[0])
            out["pairs"].append({"of": f"vLLM {name}", "to": f"folder {name}", **mean(pairs)})
    plain: list[Any] = []
    for name, folder in engines.items():
        one = Reference(Path(folder))
        logs = [torch.from_numpy(logits).to(device).log_softmax(-1) for logits in steps.context_logits(one, tokens)]
        if name == "bf16":
            plain = logs
        else:
            pairs = [whole(a, b) for a, b in zip(plain, logs, strict=True)]
            out["pairs"].append({"of": "reference bf16", "to": f"reference {name}", **mean(pairs)})
        # Each of vLLM's against ours of the same precision, and against ours as it was before it was quantized.
        for other, path in vllm.items():
            if name in (other, "bf16"):
                out["pairs"].append({"of": f"vLLM {other}", "to": f"reference {name}", **mean(_told(path, logs))})
        out["greedy"][name] = steps.greedy(one, greedy, new)
        del one, logs
        if device == "cuda":
            torch.cuda.empty_cache()
    return out


def _told(path: str, logs: Iterable[Any]) -> list[tuple[float, float, int]]:
    """`partly` of what `vllm` wrote in `path`, row by row."""
    import torch

    told = np.load(path)
    return [
        partly(torch.from_numpy(ids).to(log.device).long(), torch.from_numpy(there).to(log.device), log)
        for ids, there, log in zip(told["ids"], told["logprobs"], logs, strict=True)
    ]
