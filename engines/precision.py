"""Quantization recipes, and the choice of a precision for a GPU.

A recipe (configs/quant) lists the SMs that run its algorithm; the build enforces the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import Target, reads, runtimes_of
from trtpipe.engines.base import DataType
from trtpipe.engines.base import Mapping as Ranks
from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.toolchain import Toolchain


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits for a quantized model against the original on held-out text; `build` stops beyond them.

    perplexity_ratio  perplexity of the quantized model / perplexity of the original
    mean_kl           mean Kullback-Leibler divergence of the next token, nats
    top1_agreement    share of positions where both models prefer the same token
    """

    perplexity_ratio: float
    mean_kl: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class QuantRecipe:
    """Quantization recipe: a file of configs/quant.

    modelopt             name of ModelOpt's configuration; None quantizes no weights
    sms                  SMs that have kernels for it
    kv_cache_quant_algo  default of the recipe; `--kv-cache` overrides it
    group_size           number of input features that share a scale, for recipes with groups
    exclude_modules      modules that are not quantized: the head, and the embedding if the algorithm could quantize it
    """

    name: str
    description: str
    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KvCacheQuantAlgo | None
    modelopt: str | None
    sms: tuple[int, ...]
    exclude_modules: tuple[str, ...]
    thresholds: Thresholds
    group_size: int = 128
    aliases: tuple[str, ...] = ()

    @property
    def quantization(self) -> Quantization:
        return Quantization(
            quant_algo=self.quant_algo, kv_cache_quant_algo=self.kv_cache_quant_algo, group_size=self.group_size
        )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A resolved precision: element type of what is not quantized, recipe if any, reason of the choice, and compute
    capabilities that run it.

    stored  method by which the model's files are quantized already; "" where the pipeline quantizes them
    """

    name: str
    dtype: DataType
    reason: str
    sms: tuple[int, ...]
    recipe: QuantRecipe | None = None
    stored: str = ""


# Values of --dtype besides recipes. The command line has short names, the checkpoint long ones.
FLOAT_NAMES = {
    "bf16": DataType.BFLOAT16,
    "bfloat16": DataType.BFLOAT16,
    "fp16": DataType.FLOAT16,
    "float16": DataType.FLOAT16,
    "fp32": DataType.FLOAT32,
    "float32": DataType.FLOAT32,
}
SHORT_NAMES = {DataType.BFLOAT16: "bf16", DataType.FLOAT16: "fp16", DataType.FLOAT32: "fp32"}
# SMs with FP8 tensor cores; other SMs convert an FP8 KV cache at every step, or cannot use one.
FP8_SMS = (89, 90, 100, 103, 120)
# The build for Blackwell refuses all INT8, including an INT8 KV cache.
INT8_KV_SMS = (80, 86, 89, 90)
# SM120 has FP4 tensor cores, but no attention that reads such a cache.
NVFP4_KV_SMS = (100, 103)


def dtype_names(recipes: Mapping[str, QuantRecipe]) -> list[str]:
    """All values of --dtype."""
    return ["auto", *FLOAT_NAMES, *_recipe_names(recipes)]


def resolve_precision(
    requested: str,
    gpu: GpuSpec,
    recipes: Mapping[str, QuantRecipe],
    kv_cache: str | None = None,
    group_size: int | None = None,
    runtime: str | None = None,
    *,
    experts: bool = False,
    toolchain: Toolchain | None = None,
) -> Precision:
    """Precision for `gpu` from --dtype, --kv-cache and a group size; a requested value is never replaced.

    `auto` takes FP8 weights and KV cache from SM89 on, INT8 SmoothQuant on SM80 and SM86, or INT8 weights alone for a
    model with experts, bfloat16 on the CPU and where `runtime`, if it is known, does not read the other.
    Raises UsageError naming what would work.
    """
    if gpu.sm is not None and gpu.sm < 80:
        own = load_backend(runtime).OLD_GPUS if runtime else ""
        raise UsageError(
            f"{gpu.describe()} cannot run engines of the {runtime} runtime"
            if own
            else f"{gpu.describe()} cannot run TensorRT-LLM engines",
            why=own or gpu.refused.rstrip(".") or "releases since 0.16 support SM80 and newer",
            remedy="choose a GPU listed by `trtpipe gpus`",
        )
    reason, automatic = "requested", requested == "auto"
    if automatic:
        requested, reason = _automatic(gpu, runtime, experts=experts)
        reason = f"auto: {reason}"
    names = _recipe_names(recipes)
    if requested in FLOAT_NAMES:
        dtype = FLOAT_NAMES[requested]
        recipe = None
        if kv_cache not in (None, "none"):
            recipe = find_recipe("none", recipes)
    elif requested in names:
        dtype, recipe = DataType.BFLOAT16, names[requested]
    else:
        raise UsageError(f"unknown dtype '{requested}'", remedy=suggestion(requested, dtype_names(recipes)))
    plain = Precision(name=SHORT_NAMES[dtype], dtype=dtype, reason=reason, sms=find_recipe("none", recipes).sms)
    if recipe is None:
        return plain
    if automatic:
        reason += f" (runtimes {', '.join(runtimes_of(recipe.quant_algo))})"
    usual = recipe.kv_cache_quant_algo
    recipe = with_group_size(with_kv_cache(recipe, kv_cache), group_size)
    if recipe.quant_algo is None and recipe.kv_cache_quant_algo is None:
        return plain  # the recipe `none`
    # A changed KV cache may make the recipe equal another one, whose thresholds `verify` then uses.
    became = (recipe.quant_algo, recipe.kv_cache_quant_algo)
    same = next((r for r in recipes.values() if (r.quant_algo, r.kv_cache_quant_algo) == became), recipe)
    recipe = replace(recipe, thresholds=same.thresholds)
    check_sm(recipe, gpu, recipes, runtime, experts=experts, toolchain=toolchain)
    name = SHORT_NAMES[dtype] if recipe.quant_algo is None else recipe.name
    if kv_cache is not None and (recipe.kv_cache_quant_algo or usual):
        name += f"-kv{recipe.kv_cache_quant_algo.value.lower() if recipe.kv_cache_quant_algo else 'none'}"
    sms = engine_sms(recipe, gpu, runtime)
    return Precision(name=name, dtype=dtype, reason=reason, sms=sms, recipe=recipe)


def _automatic(gpu: GpuSpec, runtime: str | None, *, experts: bool) -> tuple[str, str]:
    """(name, reason) of the precision that `auto` stands for on `gpu`, with `runtime` if it is known."""
    if gpu.sm is None:
        return "bf16", "the CPU computes bfloat16"
    if gpu.sm in FP8_SMS:
        return "fp8-kv", f"SM{gpu.sm} computes FP8, weights and KV cache"
    algo, name = QuantAlgo.W8A8_SQ_PER_CHANNEL, "int8-sq"
    why = f"SM{gpu.sm} has no FP8, and computes INT8"
    if experts:
        algo, name, why = QuantAlgo.W8A16, "int8-wo", f"SM{gpu.sm} has no FP8, and experts take no INT8 inputs"
    if runtime is not None and not reads(runtime, algo, experts=experts):
        return "bf16", f"SM{gpu.sm} has no FP8, and {runtime} reads no INT8 that would do"
    return name, why


def find_recipe(name: str, recipes: Mapping[str, QuantRecipe]) -> QuantRecipe:
    """Find a recipe by name or alias. Raises UsageError offering the nearest spelling."""
    names = _recipe_names(recipes)
    if name in FLOAT_NAMES:
        raise UsageError(f"{name} quantizes nothing", remedy="choose one that `trtpipe quants` lists")
    if name not in names:
        able = [known for known, recipe in names.items() if recipe.quant_algo is not None]
        raise UsageError(f"unknown quantization '{name}' in --quant", remedy=suggestion(name, able))
    return names[name]


def _recipe_names(recipes: Mapping[str, QuantRecipe]) -> dict[str, QuantRecipe]:
    return {alias: recipe for recipe in recipes.values() for alias in (recipe.name, *recipe.aliases)}


def with_kv_cache(recipe: QuantRecipe, kv_cache: str | None) -> QuantRecipe:
    """Return `recipe` with a KV cache of type fp8, int8, nvfp4 or none, or None for its own. Raises UsageError."""
    if kv_cache is None:
        return recipe
    choices = {"none": None, **{algo.value.lower(): algo for algo in KvCacheQuantAlgo}}
    if kv_cache not in choices:
        known = f"known: {', '.join(choices)}; none leaves it unquantized"
        raise UsageError(f"unknown KV cache type '{kv_cache}'", remedy=known)
    return replace(recipe, kv_cache_quant_algo=choices[kv_cache])


def _sms(known: Iterable[int]) -> str:
    return ", ".join(f"SM{sm}" for sm in known)


def with_group_size(recipe: QuantRecipe, group_size: int | None) -> QuantRecipe:
    """Return `recipe` with the requested group size. Raises UsageError."""
    if group_size is None:
        return recipe
    known = recipe.quant_algo.row.group_sizes if recipe.quant_algo is not None else ()
    if not known:
        raise UsageError(f"{recipe.name} has no groups to choose the size of", remedy="leave the group size out")
    if group_size not in known:
        raise UsageError(
            f"{recipe.name} does not run with groups of {group_size}",
            why=f"its kernel knows {' and '.join(map(str, known))} alone",
        )
    return replace(recipe, group_size=group_size)


def check_sm(
    recipe: QuantRecipe,
    gpu: GpuSpec,
    recipes: Mapping[str, QuantRecipe],
    runtime: str | None = None,
    *,
    experts: bool = False,
    toolchain: Toolchain | None = None,
) -> None:
    """Raises UsageError for a recipe or KV cache that `gpu` cannot run, naming those that it can, with `runtime` and in
    the release `toolchain` where they are known."""
    if gpu.sm is None:
        return  # on a CPU the reference runtime executes all recipes
    known = kernel_sms(recipe, runtime)
    if gpu.sm not in known:
        raise UsageError(
            f"{recipe.name} does not run on {gpu.describe()}",
            why=f"it is known to run on {_sms(known)}",
            remedy=f"use --dtype {_able(gpu, recipes, runtime, experts=experts, toolchain=toolchain)} here",
        )
    cache, allowed = recipe.kv_cache_quant_algo, cache_sms(recipe)
    if cache is not None and gpu.sm not in allowed:
        raise UsageError(
            f"a KV cache in {cache.value} does not run on {gpu.describe()}",
            why=f"it is known to run on {_sms(allowed)}",
            remedy="use --kv-cache none here",
        )


def _able(
    gpu: GpuSpec,
    recipes: Mapping[str, QuantRecipe],
    runtime: str | None,
    *,
    experts: bool,
    toolchain: Toolchain | None,
) -> str:
    """The values of --dtype that run on `gpu`, in words."""
    able = []
    for one in recipes.values():
        known = kernel_sms(one, runtime)
        if one.quant_algo is None or gpu.sm not in (one.quant_algo.row.native or known):
            continue
        if runtime is not None and not reads(runtime, one.quant_algo, experts=experts):
            continue
        if runtime is not None and toolchain is not None:
            target = Target(gpu=gpu, mapping=Ranks(), quantization=one.quantization, toolchain=toolchain)
            sms = load_backend(runtime).runs_on(target, known)
            if sms is not None and gpu.sm not in sms:
                continue
        able.append(one.name)
    return " or ".join([*([", ".join(sorted(able))] if able else []), "bf16"])


def kernel_sms(recipe: QuantRecipe, runtime: str | None) -> tuple[int, ...]:
    """The SMs that have kernels for a recipe's weights, in `runtime` if it is known."""
    algo = recipe.quant_algo
    more = load_backend(runtime).MORE_SMS.get(algo, ()) if runtime is not None and algo is not None else ()
    return tuple(sorted({*recipe.sms, *more}))


def engine_sms(recipe: QuantRecipe, gpu: GpuSpec, runtime: str | None) -> tuple[int, ...]:
    """The SMs that run a recipe and its KV cache: its own, or those of `runtime` for a GPU that has its kernels alone.

    Engines of other GPUs keep what their passports say.
    """
    known = recipe.sms if gpu.sm is None or gpu.sm in recipe.sms else kernel_sms(recipe, runtime)
    return tuple(sm for sm in known if recipe.kv_cache_quant_algo is None or sm in cache_sms(recipe))


def cache_sms(recipe: QuantRecipe) -> tuple[int, ...]:
    """The SMs that run a recipe's KV cache."""
    special = {KvCacheQuantAlgo.FP8: FP8_SMS, KvCacheQuantAlgo.INT8: INT8_KV_SMS, KvCacheQuantAlgo.NVFP4: NVFP4_KV_SMS}
    return recipe.sms if recipe.kv_cache_quant_algo is None else special[recipe.kv_cache_quant_algo]


def parse_float(name: str) -> DataType:
    """Find an unquantized type by its short or long name. Raises UsageError offering the nearest spelling."""
    if name not in FLOAT_NAMES:
        raise UsageError(f"unknown dtype '{name}'", remedy=suggestion(name, ["auto", *FLOAT_NAMES]))
    return FLOAT_NAMES[name]
