"""Precision of a model on a GPU, as a build takes it."""

from __future__ import annotations

from trtpipe.configs import facts
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import checkpoint_form
from trtpipe.engines.checkpoint.split import check_expert_format
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.stored import Stored
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.precision import Precision, resolve_precision
from trtpipe.engines.stored_precision import require_readable, stored_precision
from trtpipe.engines.toolchain import Toolchain
from trtpipe.pipeline.planner.predict import quantization


def planned_precision(
    model: str, shape: ModelConfig, stored: Stored | None, gpu: GpuSpec, runtime: str, dtype: str,
    kv_cache: str | None = None, group_size: int | None = None, toolchain: Toolchain | None = None,
) -> Precision:  # fmt: skip
    """stored: quantization that the model's files have already. Raises UsageError for a precision that the model, the
    GPU or the runtime cannot have."""
    recipes = facts.load_quant_recipes()
    if stored is not None:
        found = stored_precision(model, stored, dtype, gpu, recipes, kv_cache, group_size, runtime)
        require_readable(model, stored, runtime, experts=shape.experts is not None)
        check_expert_format(shape, stored.quantization, load_backend(runtime).FORM, stored.method, on_cpu=gpu.is_cpu)
        return found
    experts = shape.experts is not None
    found = resolve_precision(dtype, gpu, recipes, kv_cache, group_size, runtime, experts=experts, toolchain=toolchain)
    coded = quantization(found)
    check_expert_format(shape, coded, checkpoint_form(runtime, coded.quant_algo))
    return found
