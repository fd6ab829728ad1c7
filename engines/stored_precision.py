"""Precision of a model whose files are quantized already, and the runtimes that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.backends.base import readers
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.stored import Stored
from trtpipe.engines.precision import SHORT_NAMES, Precision, QuantRecipe, check_sm, engine_sms
from trtpipe.engines.quantize.stored import CONVERTIBLE, require_convertible


def stored_precision(
    model: str,
    stored: Stored,
    requested: str,
    gpu: GpuSpec,
    recipes: Mapping[str, QuantRecipe],
    kv_cache: str | None = None,
    group_size: int | None = None,
    runtime: str | None = None,
) -> Precision:
    """The precision that the files of `model` have. What is requested may only name it, or be `auto`.

    Raises UsageError for another request, and for a GPU that cannot run it.
    """
    held = stored.quantization
    same = [recipe for recipe in recipes.values() if recipe.quant_algo is held.quant_algo]
    if not same:
        raise UsageError(
            f"{model} is already quantized, {stored.describe()}", why="no recipe of `trtpipe quants` is that"
        )
    exact = next((recipe for recipe in same if recipe.kv_cache_quant_algo is held.kv_cache_quant_algo), None)
    recipe = exact or replace(same[0], kv_cache_quant_algo=held.kv_cache_quant_algo)
    recipe = replace(recipe, group_size=held.group_size if held.packed else recipe.group_size)
    cache = held.kv_cache_quant_algo.value.lower() if held.kv_cache_quant_algo else "none"
    name = SHORT_NAMES[stored.dtype] if held.quant_algo is None else recipe.name
    name += f"-kv{cache}" if exact is None or held.quant_algo is None else ""
    # A recipe without a cache names the weights; one with another cache asks for it.
    named = [one for one in same if one.kv_cache_quant_algo in (None, held.kv_cache_quant_algo)]
    names = {"auto", name, *(alias for one in (recipe, *named) for alias in (one.name, *one.aliases))}
    asked = {
        "--dtype": requested if requested not in names else None,
        "--kv-cache": kv_cache if kv_cache not in (None, cache) else None,
        "--group-size": group_size if group_size not in (None, held.group_size) else None,
    }
    for option, value in asked.items():
        if value is not None:
            raise UsageError(
                f"{option} {value} is not the precision of {model}",
                why=f"it is already quantized: {stored.describe()}",
                remedy=f"leave {option} out, or start from the unquantized model",
            )
    try:
        check_sm(recipe, gpu, recipes, runtime)
    except UsageError as error:
        error.remedy = "choose another GPU, or start from the unquantized model"
        raise
    return Precision(
        name=name,
        dtype=stored.dtype,
        reason="the model is quantized already",
        sms=engine_sms(recipe, gpu, runtime),
        recipe=recipe,
        stored=stored.method,
    )


def require_readable(model: str, stored: Stored, runtime: str, *, experts: bool = False) -> None:
    """Raises UsageError, naming what would work, for a runtime that cannot execute the files of `model`.

    experts  whether the model has experts
    """
    backend = load_backend(runtime)
    if backend.FORM == "trtllm":
        require_convertible(stored, model, experts=experts)
        return
    algo = stored.quantization.quant_algo
    if algo in backend.READS.get(stored.method, ()):
        return
    others = [name for name in BACKENDS if _reads(name, stored, experts)]
    raise UsageError(
        f"the {runtime} runtime does not read {model}",
        why=f"it is already quantized: {stored.describe()}",
        remedy=f"use --runtime {' or '.join(others)}" if others else "start from the unquantized model",
    )


def _reads(runtime: str, stored: Stored, experts: bool) -> bool:
    algo = stored.quantization.quant_algo
    if load_backend(runtime).FORM == "trtllm":
        return algo in CONVERTIBLE and (not experts or algo is None or "trtllm" in algo.row.expert_formats)
    return runtime in readers(stored.method, algo, experts=experts)
