"""Parts of `make gpu-e2e`'s page on several GPUs, from the JSON of the sections of `several`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.benchmarks.gpu import comparison
from tests.benchmarks.gpu.several import FOURS, LARGE, PAIRS

EXPECTED = [(job.model, job.key) for jobs in (*PAIRS, FOURS, LARGE) for job in jobs]
# Sections whose engines are shown by model.
PARTS = ("pairs", "fours", "large")
# The engine of `large_served`, and two of Mixtral that are compared.
SERVED = "vLLM fp8, tp 4"
ONE_GPU, TWO_GPUS = "vLLM fp8, tp 1", "reference fp8, tp 2"
WAYS = {"nccl": "NCCL", "one_shot": "one-shot", "two_shot": "two-shot"}
# Sums in a step of Llama 3 8B's 32 layers, and the measured size that is next above one token's 8 KB.
SUMS, SUM_OF_ONE = 64, "16384"
# Ranks -> where the speed is that was measured with the sums that they make of one token.
WAY_OF_ONE = (("2", "two", "nccl", "nccl"), ("4", "four", "in_process", "one_shot"))
HEAD = [
    "| engine | in flight | tok/s | TTFT p50 ms | joules a token | in the model |",
    "|---|---|---|---|---|---|",
]


def large_served(result: Mapping[str, Any], fronts: Callable[[Mapping[str, Any]], list[str]]) -> Iterator[str]:
    """fronts: the table of what was served, of results by name."""
    yield (
        "Llama 3 70B's shapes in FP8 on four GPUs, built by `trtpipe build` from the folder: the engine in its own "
        "process,\nthen behind tritonserver, our gateway and its own server, six seconds a load.\n"
    )
    whole = {"fp8, tp 4": {"in_process": result["in_process"], "served": result["served"]}}
    yield "| in flight | tok/s, waves | steady | TTFT p50 ms | joules a token |"
    yield "|---|---|---|---|---|"
    for level, speed in result["in_process"].items():
        spent = speed.get("joules_per_token")
        yield (
            f"| {level} | {speed['waves']:,.0f} | {speed['steady']:,.0f} | {speed.get('ttft_p50_ms', 0):,.0f} "
            f"| {'' if spent is None else format(spent, '.3g')} |"
        )
    yield ""
    yield from fronts(whole)
    yield from comparison.predictions({SERVED: (result["predicted"], result["in_process"])})


def sums(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "A sum of bfloat16 over two GPUs and over all, microseconds of one in a CUDA graph. One-shot: each rank reads "
        "the\nparts of all others from their memory. Two-shot: each adds up its share, then reads the other shares. "
        "The reference\nruntime takes one-shot up to 1 MB that a rank reads, two-shot up to 8 MB, NCCL beyond, and for "
        "two ranks below\n1 MB too. NVLink's multicast is off.\n"
    )
    for ranks, found in result.items():
        measured = found["by_bytes"]
        ways = [way for way in WAYS if way in measured]
        yield f"{ranks} GPUs:\n"
        yield f"| bytes | {' | '.join(WAYS[way] for way in ways)} |"
        yield "|---" * (len(ways) + 1) + "|"
        for nbytes in measured["nccl"]:
            times = [measured[way].get(nbytes) for way in ways]
            yield f"| {int(nbytes):,} | {' | '.join('' if one is None else f'{one:.1f}' for one in times)} |"
        ordered = [WAYS[way] for way in ways if measured["in_order"][way]]
        yield f"\nThe same bits as a sum in the order of the ranks: {', '.join(ordered) or 'none'}.\n"
    probes = [found["probe"].rstrip() for found in result.values() if "probe" in found]
    if probes:
        yield "What `trtpipe probe` measured:\n"
        yield "\n".join(["```yaml", "\n".join(probes), "```\n"])


def tensor_parallel(result: Mapping[str, Any], sums: Mapping[str, Any]) -> Iterator[str]:
    """sums: what the section of that name found, where it ran."""
    yield (
        "Llama 3 8B's shapes, our TensorRT-LLM checkpoint of each number of ranks, a process and a GPU a rank. One "
        'GPU and two\nran while other GPUs of the host worked. "NCCL alone" is the same engine without sums in shared '
        "memory.\n"
    )
    if any(name.endswith("tp 2") and "nccl_below" not in one for name, one in result.items()):
        yield (
            "When two ranks were measured they made all sums of up to 8 MB in shared memory. NCCL was the faster way "
            "for few requests,\nso that two ranks take it below 1 MB since then.\n"
        )
    yield "| precision | in flight | GPUs | tok/s, shared memory | over one GPU | tok/s, NCCL alone | over one GPU |"
    yield "|---|---|---|---|---|---|---|"
    for dtype in ("bf16", "fp8"):
        alone = result.get(f"reference {dtype}, tp 1", {}).get("in_process", {})
        for ranks in (1, 2, 4):
            one = result.get(f"reference {dtype}, tp {ranks}", {})
            for level, speed in one.get("in_process", {}).items():
                through = one.get("nccl", {}).get(level)
                ratios = [_over(way, alone.get(level)) if ranks > 1 else "" for way in (speed, through)]
                yield (
                    f"| {dtype} | {level} | {ranks} | {speed['waves']:,.0f} | {ratios[0]} | {_nccl(one, level)} "
                    f"| {ratios[1]} |"
                )
    yield ""
    yield from _equality(result, "not compared")
    yield from _bound(result, sums)


def _over(speed: Mapping[str, float] | None, alone: Mapping[str, float] | None) -> str:
    return f"{speed['waves'] / alone['waves']:.2f}" if speed and alone else ""


def _bound(result: Mapping[str, Any], sums: Mapping[str, Any]) -> Iterator[str]:
    """Bounds on the speedup of more GPUs: from the time outside the model, and from the time of all-reduces."""
    yield "Why two GPUs are not twice as fast, nor four four times:\n"
    for dtype in ("bf16", "fp8"):
        alone = result.get(f"reference {dtype}, tp 1", {}).get("in_process", {})
        for level, speed in alone.items():
            outside = 1 - speed["model_share"]
            faster = [f"{1 / (outside + speed['model_share'] / times):.2f}" for times in (2, 4)]
            yield (
                f"- {dtype}, {level} in flight: {outside:.0%} of one GPU's time passes outside the model, in the "
                f"process that plans, samples and answers. Were the model twice as fast, all would be {faster[0]} "
                f"times as fast, and {faster[1]} times with a model four times as fast."
            )
        for ranks, said, measured, way in WAY_OF_ONE:
            one = result.get(f"reference {dtype}, tp {ranks}", {}).get(measured, {}).get("1")
            if one and "1" in alone and ranks in sums:
                took, added = 1 / one["waves"], SUMS * sums[ranks]["by_bytes"][way][SUM_OF_ONE] * 1e-6
                yield (
                    f"- {dtype}, 1 in flight: of the {took * 1e3:.2f} ms between two tokens on {said} GPUs {SUMS} sums "
                    f"of one token take {added * 1e3:.2f}. If sums took no time, {said} GPUs would be "
                    f"{1 / (took - added) / alone['1']['waves']:.2f} times as fast as one."
                )
    yield ""


def engines(result: Mapping[str, Any]) -> Iterator[str]:
    """Engines by name, whatever their runtime, number of GPUs and precision."""
    if any("in_process" in one for one in result.values()):
        yield from HEAD
    for name, one in result.items():
        for level, speed in one.get("in_process", {}).items():
            spent = speed.get("joules_per_token")
            share = f"{speed['model_share']:.0%}" if "model_share" in speed else ""
            yield (
                f"| {name} | {level} | {speed['waves']:,.0f} | {speed['ttft_p50_ms']:,.0f} "
                f"| {'' if spent is None else format(spent, '.3g')} | {share} |"
            )
    yield ""
    waiting = {name: one["predicted"] for name, one in result.items() if "predicted" in one and "in_process" not in one}
    if waiting:
        yield "What the planner predicted of engines that have not been measured:\n"
        yield "| engine | in flight | tok/s | TTFT p50 ms |"
        yield "|---|---|---|---|"
        for name, said in waiting.items():
            for level, one in said.items():
                yield f"| {name} | {level} | {one['tokens_per_s']:,.0f} | {one['ttft_p50_ms']:,.0f} |"
        yield ""
    for name, one in result.items():
        if "reason" in one:
            yield f"- {name} was not measured: {one['reason']}.\n"
    beside = [name for name, one in result.items() if one.get("beside") and "in_process" in one]
    if beside:
        yield f"Measured while other GPUs of the host worked: {'; '.join(beside)}.\n"
    yield from _equality(result, "one GPU does not hold them")
    yield from comparison.predictions(
        {
            name: (one["predicted"], one["in_process"])
            for name, one in result.items()
            if "predicted" in one and "in_process" in one
        }
    )


def _nccl(one: Mapping[str, Any], level: str) -> str:
    found = one.get("nccl", {}).get(level)
    return f"{found['waves']:,.0f}" if found else ""


def _equality(result: Mapping[str, Any], otherwise: str) -> Iterator[str]:
    """otherwise: why an engine was not compared with one process."""
    compared = {name: one for name, one in result.items() if "again" in one and ", tp 1" not in name}
    if not compared:
        return
    yield "Steps of eight greedy answers whose logits are the same bits:\n"
    yield "| engine | ranks apart, and in one process | ranks apart, once more |"
    yield "|---|---|---|"
    for name, one in compared.items():
        together = _steps(one["one_process"]) if "one_process" in one else otherwise
        yield f"| {name} | {together} | {_steps(one['again'])} |"
    yield ""


def _steps(steps: Mapping[str, Any]) -> str:
    most = "" if steps["equal"] == steps["steps"] else f", else {steps['largest']:.3g} at most"
    return f"{steps['equal']:,} of {steps['steps']:,}{most}"


def mixtral(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "vLLM from the folder, in four waves; the reference runtime from our checkpoint, in two, where tp divides "
        "every\nexpert among the ranks and ep gives each rank whole experts.\n"
    )
    yield from engines(result)
    fast, slow = (result.get(name, {}).get("in_process", {}) for name in (ONE_GPU, TWO_GPUS))
    if "64" in fast and "64" in slow:
        times = [f"{fast[level]['waves'] / slow[level]['waves']:.1f}" for level in ("1", "64")]
        yield (
            f"With one request in flight vLLM on one GPU is {times[0]} times as fast as the reference runtime on two, "
            f"and with 64\n{times[1]} times. The reference runtime records no step of a model with experts as a CUDA "
            "graph: how many tokens an expert\nhas is counted on the host.\n"
        )
    if any(", ep" in name and "predicted" in one and "predicted_ep" not in one for name, one in result.items()):
        yield (
            "When this was measured the planner knew no expert parallelism: its figures of an engine with ep are of "
            "tp alone, where every\nGPU reads its part of each expert that a step needs. With ep a GPU reads whole "
            "experts, and a step waits for the GPU with the\nmost of them, which it knows now: "
            "[planner.md](planner.md) has what it says of these engines since.\n"
        )


def llama70b(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Weights from a seed, 70 GB in FP8 and 141 in BF16, 128 tokens in and 128 out, all requests starting together. "
        "vLLM\nfrom the folder, in four waves; the reference runtime from our TensorRT-LLM checkpoint, in two.\n"
    )
    yield from engines(result)
    if not any("in_process" in one for one in result.values()):
        return
    yield (
        "The study's table says of Llama 3 on an H100 in FP8: 4.6 times the throughput of an A100 and 4.4 times lower "
        "latency to\nthe first token. No A100 was at hand: these figures are the H100's side of that ratio alone.\n"
    )


# Model -> the title of its part, and what that says; Llama 3 8B's is `tensor_parallel`.
MODELS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Iterator[str]]]] = {
    "llama3-70b": ("Llama 3 70B's shapes", llama70b),
    "mixtral-8x7b": ("Mixtral 8x7B's shapes", mixtral),
}


def absent(kept: Mapping[str, Any]) -> Iterator[str]:
    """Measurements that are not there, and why."""
    found = {
        (model, name)
        for section in PARTS
        for model, engines in kept.get(section, {}).get("result", {}).items()
        for name, one in engines.items()
        if "in_process" in one
    }
    missing = [f"{model}: {name}" for model, name in EXPECTED if (model, name) not in found]
    if "in_process" not in kept.get("large_served", {}).get("result", {}):
        missing.append(f"llama3-70b: {SERVED}, alone and behind the fronts")
    if missing:
        yield (
            "- **Engines of which there are no figures**: the time on machines of four GPUs was used up before they "
            f"were measured.\n  {'; '.join(missing)}.\n"
        )
    yield "- **Eight GPUs**: no such machine was at hand.\n"
    yield "- What one GPU of this kind was measured for is in [h100.md](h100.md).\n"
