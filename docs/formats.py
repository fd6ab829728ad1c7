"""The table of formats by runtime in engines.md: what ran where, what is written alone, what is refused and why.

What a runtime takes is asked of its backend, as `build` does; what ran is read from the pages of docs/measurements.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trtpipe.configs import facts
from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.backends.base import Target
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.json_input import read_json
from trtpipe.engines.precision import FLOAT_NAMES, SHORT_NAMES, check_sm
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization

MEASUREMENTS = Path(__file__).parent / "measurements"
# One GPU of each compute capability that has a file.
GPUS = ("a100", "a10", "l40s", "h100", "b200", "rtx5090")
# Runtime -> test of `make test` that executes all that it takes on a CPU.
TESTS = {"reference": "tests/unit/engines/reference/test_quantized.py"}
CPU = "CPU"


class Ran(NamedTuple):
    """A format that a runtime executed: on a CPU or a GPU, as a page says."""

    runtime: str
    format: str
    place: str
    page: str


def formats() -> dict[str, tuple[DataType, Quantization]]:
    """Name of each row -> its type and quantization: floats, recipes, KV caches."""
    rows = {name: (dtype, Quantization()) for dtype, name in SHORT_NAMES.items()}
    recipes = facts.load_quant_recipes().values()
    for one in recipes:
        if one.quant_algo is not None and one.kv_cache_quant_algo is None:
            rows[one.name] = DataType.BFLOAT16, one.quantization
    # Hugging Face folders have a quantized cache beside quantized weights alone.
    cached = {
        f"KV cache {cache.value.lower()}": Quantization(
            quant_algo=None if cache is KvCacheQuantAlgo.INT8 else QuantAlgo.FP8, kv_cache_quant_algo=cache
        )
        for cache in KvCacheQuantAlgo
    }
    return rows | {name: (DataType.BFLOAT16, quantization) for name, quantization in cached.items()}


def refusal(runtime: str, gpu: GpuSpec, dtype: DataType, quantization: Quantization) -> str | None:
    """Why `runtime` does not take a format on a GPU or the CPU; None where it does."""
    recipes = facts.load_quant_recipes()
    algo = quantization.quant_algo
    recipe = next(one for one in recipes.values() if one.quant_algo is algo)
    backend = load_backend(runtime)
    if gpu.is_cpu and not backend.ON_CPU:
        return "it has no CPU"
    try:
        if not backend.ANYWHERE:
            check_sm(replace(recipe, kv_cache_quant_algo=quantization.kv_cache_quant_algo), gpu, recipes, runtime)
        target = Target(
            gpu=gpu, mapping=Mapping(), quantization=quantization, toolchain=facts.find_toolchain(None), dtype=dtype
        )
        backend.resolve(BuildConfig(), target)
    except UsageError as error:
        return error.why or str(error)
    return None


def ran() -> Iterator[Ran]:
    """Formats that ran, read from the pages of docs/measurements."""
    for runtime, name in re.findall(r"^\| (reference|vllm) \| (\w+) \| [\d.]", _text("cpu.md"), re.MULTILINE):
        yield Ran(runtime, name, CPU, "cpu.md")
    for name in re.findall(r"^\| (\S+) \| trtllm \|", _text("accuracy.md"), re.MULTILINE):
        yield from _named("reference", name, CPU, "accuracy.md")
    card = re.findall(r"NVIDIA (\w+)", _text("vllm.md"))[0]
    for name in re.findall(r"^\| (?:compressed-)?(\S+) \| [\w-]+, \w+ \| [\d.]+ \|", _text("vllm.md"), re.MULTILINE):
        yield from _named("vllm", name, card, "vllm.md")
    for path in sorted(MEASUREMENTS.glob("h*.json")):
        for name, section in read_json(path, "measurements").items():
            where = re.sub(r"^NVIDIA (\w+).*", r"\1", section["machine"]["gpu"]), path.with_suffix(".md").name
            for runtime, form in _of_section(name, section["result"]):
                yield from _named(runtime, form, *where)


def _of_section(name: str, result: Any) -> Iterator[tuple[str, str]]:
    """(runtime, format) of what a section of a page of a GPU has figures for."""
    if name == "families":
        yield from (("reference", SHORT_NAMES[DataType(one)]) for one in ("float32", "bfloat16"))
    elif name == "accuracy":
        said = {words for pair in result["pairs"] for words in (pair["of"], pair["to"])}
        yield from ((words.split()[0].lower(), words.split()[1]) for words in said if not words.startswith("folder"))
    elif name in ("engine", "kv_cache", "study", "reference"):
        runtime = "reference" if name == "reference" else "vllm"
        yield from ((runtime, form) for form, figures in result.items() if "in_process" in figures)
    elif name == "pairs":
        for model in result.values():
            for stack, figures in model.items():
                if figures.get("in_process"):
                    yield stack.split()[0].lower(), stack.split()[1].rstrip(",")


def _named(runtime: str, name: str, place: str, page: str) -> Iterator[Ran]:
    """The rows of a recipe: that of its weights, and that of its KV cache."""
    if name in FLOAT_NAMES:
        yield Ran(runtime, name, place, page)
        return
    recipes = facts.load_quant_recipes().values()
    recipe = next((one for one in recipes if name in (one.name, *one.aliases)), None)
    if recipe is None:
        return
    weights = (one for one in recipes if one.quant_algo is recipe.quant_algo and one.kv_cache_quant_algo is None)
    yield from (Ran(runtime, one.name, place, page) for one in weights if one.quant_algo is not None)
    if recipe.kv_cache_quant_algo is not None:
        yield Ran(runtime, f"KV cache {recipe.kv_cache_quant_algo.value.lower()}", place, page)


def _text(page: str) -> str:
    return (MEASUREMENTS / page).read_text(encoding="utf-8")


@functools.cache
def rows() -> tuple[tuple[str, ...], ...]:
    """A row for each format: its name, and for each runtime where it ran, where it is written, why it is refused."""
    seen = sorted(set(ran()))
    return tuple(
        (name if " " in name else f"`{name}`", *(_cell(one, name, dtype, quantization, seen) for one in BACKENDS))
        for name, (dtype, quantization) in formats().items()
    )


def _cell(runtime: str, name: str, dtype: DataType, quantization: Quantization, seen: list[Ran]) -> str:
    refused = {gpu: refusal(runtime, facts.find_gpu(gpu), dtype, quantization) for gpu in ("cpu", *GPUS)}
    places = {one.place: f"[{one.place}](measurements/{one.page})" for one in seen if one[:2] == (runtime, name)}
    if runtime in TESTS and refused["cpu"] is None:
        places.setdefault(CPU, f"CPU (`{TESTS[runtime]}`)")
    written = [CPU] if refused["cpu"] is None and CPU not in places else []
    measured = {facts.find_gpu(place.lower()).sm for place in places if place != CPU}
    taken = {facts.find_gpu(gpu).sm for gpu in GPUS if refused[gpu] is None}
    written += [f"SM{sm}" for sm in sorted(sm for sm in taken - measured if sm)]
    parts = [f"runs: {', '.join(places[place] for place in sorted(places))}"] if places else []
    parts += [f"written: {', '.join(written)}"] if written else []
    return "; ".join(parts) or f"refused: {refused['h100']}"
