"""What `make gpu-e2e` measures, a function a section; each fills what goes into the report's JSON.

`out` holds what an earlier run has left, where one is gone on with: what is whole in it is not measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu import predicted
from tests.benchmarks.gpu.place import Place
from trtpipe.engines.base import CalibrationConfig
from trtpipe.pipeline.sources import calibration

# Called when there is more, so that it is not lost with what fails later.
Keep = Callable[[], None]
PRECISIONS = ("bf16", "fp8", "fp8-kv")
# Other precisions that vLLM reads -> settings that SmolLM2's sizes need. Blocks of 128 do not divide its 576 features.
# Of NVFP4 vLLM computes with the weights alone before Blackwell, our arithmetic also with inputs in NVFP4.
FOLDERS: dict[str, tuple[str, ...]] = {
    "fp8-pc-pt": (), "nvfp4": (), "int8-sq": (), "int8-pc-pt": (), "int8-wo": (), "int4-awq": ("group_size=64",),
}  # fmt: skip
LEVELS = [1, 64, 256, 512]
BUSY = [256, 512]
# More than an engine's 512 places: a thousand requests wait.
CROWDED = [64, 256, 512, 1512]
# Our fronts and the runtime's own server -> loads.
FRONTS = {"grpc": CROWDED, "http": BUSY, "completions": CROWDED, "native": CROWDED}
# Stacks of the comparison beside those of other sections: precisions of vLLM, and ways of `stacks.compiled` -> loads.
OTHERS = ("int8-pc-pt", "int4-awq")
COMPILED = {"float8": (1, 64, 256), "bf16": (1, 64), "float8-weights": (1,)}
# Of a stack that torch compiles.
PATIENCE = 200.0
SECONDS = 6.0
ROWS, LENGTH = 16, 256
PROMPTS = (
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time, in a village by the sea,",
    "The three primary colours are", "To bake bread you need flour, water,", "In 1969, the first human",
    "Dear Sir or Madam,", "import numpy as np\n\ndef mean(values):", "Q: What is the largest planet?\nA:",
    "A list of European countries: Germany,", "Roses are red, violets are", "SELECT name FROM users WHERE",
    "The recipe for a good life is simple:", "Mount Everest is", "An algorithm is a finite sequence of",
)  # fmt: skip
NEW = 48


def families(place: Place, out: dict[str, Any]) -> None:
    """A small random model of each family: the reference runtime's greedy answers on the GPU, and transformers'."""
    out["rows"] = place.inside("families:compare", scratch=str(place.scratch / "families"))["rows"]


def accuracy(place: Place, smollm2: Path, out: dict[str, Any], keep: Keep) -> None:
    """A model of real weights: what vLLM computes from our folders against our runtime from our checkpoints."""
    from tokenizers import Tokenizer

    smollm2, rows = _heldout(place, smollm2)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    engines = {dtype: str(place.build(smollm2, dtype, "reference") / "engine") for dtype in (*PRECISIONS, "int8")}
    told: dict[str, str] = {}
    folders: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for dtype in PRECISIONS:
        engine = place.build(smollm2, dtype, "vllm") / "engine"
        folders[dtype] = str(engine)
        told[dtype] = str(place.scratch / f"{dtype}.npz")
        answers[dtype] = place.inside(
            "scores:vllm", engine=str(engine), rows=str(rows), out=told[dtype], greedy=prompts, new=NEW
        )
    found = place.inside(
        "scores:reference", engines=engines, folders=folders, vllm=told, rows=str(rows), greedy=prompts, new=NEW
    )
    greedy = []
    for dtype in PRECISIONS:
        pairs = list(zip(answers[dtype]["greedy"], found["greedy"][dtype], strict=True))
        greedy.append(
            {
                "precision": dtype, "vllm_method": answers[dtype]["method"],
                "vllm_kv_cache": answers[dtype]["kv_cache"],
                "answers": len(pairs), "same": sum(a == b for a, b in pairs),
                "same_tokens": sum(_alike(a, b) for a, b in pairs) / sum(len(b) for _, b in pairs),
                "text": tokenizer.decode(answers[dtype]["greedy"][0]),
                "ours": tokenizer.decode(found["greedy"][dtype][0]),
            }
        )  # fmt: skip
    place.forget()
    out.update(pairs=found["pairs"], greedy=greedy, rows=ROWS, length=LENGTH)


def folders(place: Place, smollm2: Path, out: dict[str, Any], keep: Keep) -> None:
    """Every other precision that vLLM reads: what it computes from a folder against our arithmetic on the same one."""
    from tokenizers import Tokenizer

    smollm2, rows = _heldout(place, smollm2)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    engines = {"bf16": str(place.build(smollm2, "bf16", "reference") / "engine")}
    told, made, answers = {}, {}, []
    for dtype, settings in FOLDERS.items():
        made[dtype] = str(place.build(smollm2, dtype, "vllm", *settings) / "engine")
        told[dtype] = str(place.scratch / f"{dtype}.npz")
        found = place.inside(
            "scores:vllm", engine=made[dtype], rows=str(rows), out=told[dtype], greedy=prompts, new=NEW
        )
        answers.append(
            {
                "precision": dtype, "vllm_method": found["method"], "vllm_kv_cache": found["kv_cache"],
                "text": tokenizer.decode(found["greedy"][0]),
            }
        )  # fmt: skip
    scores = place.inside(
        "scores:reference", engines=engines, folders=made, vllm=told, rows=str(rows), greedy=prompts[:1], new=NEW
    )
    place.forget()
    out.update(
        pairs=scores["pairs"], answers=answers, plain=tokenizer.decode(scores["greedy"]["bf16"][0]), rows=ROWS,
        length=LENGTH,
    )  # fmt: skip


def _heldout(place: Place, given: Path) -> tuple[Path, Path]:
    """The model under a name that commands can be told by, and a file of rows of held-out text."""
    smollm2, rows = place.scratch / "smollm2", place.scratch / "rows.npy"
    smollm2.unlink(missing_ok=True)
    smollm2.symlink_to(given)
    heldout = CalibrationConfig(data=calibration.HELDOUT, samples=ROWS, seq_len=LENGTH)
    np.save(rows, calibration.samples(smollm2, heldout).astype(np.int32))
    return smollm2, rows


def _alike(a: list[int], b: list[int]) -> int:
    """Tokens up to where two answers part."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))


def engine(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """vLLM from our folders: stepped in its own process, then behind each of our fronts and its own, on one load."""
    _vllm(place, model, {"fp8": FRONTS, "bf16": {"grpc": BUSY}}, LEVELS, out, keep)


def kv_cache(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """vLLM with an FP8 KV cache beside the same weights without, whose fronts are in `engine`."""
    _vllm(place, model, {"fp8-kv": {"grpc": BUSY[:1]}, "fp8": {}}, BUSY, out, keep)


def _vllm(
    place: Place, model: Path, fronts: Mapping[str, Mapping[str, Sequence[int]]], levels: Sequence[int],
    out: dict[str, Any], keep: Keep,
) -> None:  # fmt: skip
    """`fronts`: by precision, loads of each front."""
    for dtype, loads in fronts.items():
        if dtype in out and len(out[dtype].get("served", ())) == sum(map(len, loads.values())):
            continue
        said = predicted.together(place.gpu, dtype, "vllm", levels)
        run = place.build(model, dtype, "vllm")
        out[dtype] = {"predicted": said, "bytes_a_token": bytes_a_token(run / "engine")}
        with place.served(run.name, levels, SECONDS) as inside:
            out[dtype] |= {"in_process": inside, "served": []}
            keep()
            _bench(place, {front: loads[front] for front in loads if front != "native"}, out[dtype], keep)
        if "native" in loads:
            with place.native(run.name):
                _bench(place, {"native": loads["native"]}, out[dtype], keep)
        place.forget()


def _bench(place: Place, loads: Mapping[str, Sequence[int]], out: dict[str, Any], keep: Keep) -> None:
    for front, levels in loads.items():
        for level in levels:
            row = place.bench(level, "completions" if front == "native" else front, SECONDS)
            out["served"].append({**row, "protocol": front})
            keep()


def bytes_a_token(engine: Path) -> int:
    """Bytes of the weights that a token reads: all but the embedding, of which it looks up one row."""
    settings = json.loads((engine / "config.json").read_text(encoding="utf-8"))
    settings = settings.get("pretrained_config", settings)
    weights = sum(path.stat().st_size for path in engine.glob("*.safetensors"))
    return weights - 2 * int(settings["vocab_size"]) * int(settings["hidden_size"])


def reference(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """Our runtime from our checkpoints, beside transformers from the original; and INT8."""
    if "transformers" not in out:
        out["transformers"] = place.inside(
            "stacks:transformers", model=str(model), generate=LEVELS[:3], batching=LEVELS[1:3], new=128
        )
        keep()
    for dtype in ("bf16", "fp8", "int8"):
        if dtype in out:
            continue
        run = place.build(model, dtype, "reference")
        with place.served(run.name, LEVELS[:3], None) as inside:
            out[dtype] = {"in_process": inside, "bytes_a_token": bytes_a_token(run / "engine")}
        keep()
        place.forget()


def study(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """What `engine` and `reference` do not measure of the stacks that people choose among, and of their kernels."""
    for kernels in ("products", "attention"):
        if "reason" in out.get(kernels, {"reason": ""}):
            out[kernels] = place.inside(f"stacks:{kernels}", limit=PATIENCE)
            keep()
    for dtype in OTHERS:
        if dtype in out:
            continue
        said = predicted.together(place.gpu, dtype, "vllm", LEVELS[:3])
        run = place.build(model, dtype, "vllm")
        found = place.inside("in_process:vllm_throughput", engine=str(run / "engine"), levels=LEVELS[:3])
        out[dtype] = {"predicted": said, "in_process": found, "bytes_a_token": bytes_a_token(run / "engine")}
        keep()
        place.forget()
    for way, levels in COMPILED.items():
        there = out.setdefault(way, {})
        for level in levels:
            if str(level) not in there:
                there[str(level)] = place.inside(
                    "stacks:compiled", limit=PATIENCE, model=str(model), way=way, streams=level, new=128
                )
                keep()


def quantize(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """FP8 calibration and write, ours and ModelOpt's flow, in this environment."""
    out.update(place.inside("quantized", sys.executable, model=str(model), scratch=str(place.scratch), samples=512))


def shared_gpu(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """Two ranks of our runtime over NCCL, which from 2.30 on lets them share a GPU: what they compute, not how fast."""
    _ranks(place, model, [], {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, out, keep)


def parallel(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """Two GPUs: our runtime over NCCL from a checkpoint of two ranks, and vLLM from the folder."""
    place.trtpipe("probe")
    probed = sorted((place.scratch / "home" / "gpus").rglob("*.yaml"))
    out["probe"] = [path.read_text(encoding="utf-8") for path in probed]
    _ranks(place, model, LEVELS[:3], {}, out, keep)
    said = predicted.together(place.gpu, "fp8", "vllm", LEVELS[:3], tp=2)
    run = place.build(model, "fp8", "vllm", "tp=2")
    out["vllm_fp8"] = place.inside("in_process:vllm_throughput", engine=str(run / "engine"), levels=LEVELS[:3])
    out["vllm_fp8_predicted"] = said
    place.forget()


def _ranks(
    place: Place, model: Path, levels: list[int], environment: Mapping[str, str], out: dict[str, Any], keep: Keep
) -> None:
    """A checkpoint of two ranks, over NCCL, against the same in one process and that of one rank."""
    random = np.random.default_rng(1)
    prompts = random.integers(2, 100_000, (8, 128)).tolist()
    for dtype in ("bf16", "fp8"):
        if dtype in out:
            continue
        two = place.build(model, dtype, "reference", "tp=2") / "engine"
        one = place.build(model, dtype, "reference") / "engine"
        out[dtype] = place.inside(
            "ranks:compare",
            environment=environment,
            engine=str(two),
            alone=str(one),
            prompts=prompts,
            new=32,
            levels=levels,
        )
        keep()
        place.forget()
