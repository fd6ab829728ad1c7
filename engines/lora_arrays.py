"""Writer of LoRA adapters as TensorRT-LLM's C++ backend loads them: an array of weights and one of their rows' places.

model.lora_weights.npy is [1, rows, width] float16: a row is A [rank, in] and then scale * B [out, rank] of one linear,
each in C order, padded with zeros. model.lora_config.npy is [1, rows, 3] int32: module, layer, rank. Sources:
hf_lora_convert.py, runtime/loraModule.h and runtime/utils/numpyUtils.cpp of TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.engines.base import DataType
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf.adapter import Adapter, located_pairs
from trtpipe.engines.hf.adapter_check import read_matrix, scaled
from trtpipe.engines.model_config import Geometry

if TYPE_CHECKING:
    import numpy as np

ARRAY_WEIGHTS, ARRAY_CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
# Last part of a linear's name -> TensorRT-LLM's name of the module. Its gate is up_proj.
MODULES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h", "down_proj": "mlp_4h_to_h", "up_proj": "mlp_gate",
}  # fmt: skip
_ROLES = {"q": 1, "k": 2, "v": 3, "o": 4, "gate": 5, "down": 6, "up": 7}
# Groups of modules: an engine takes adapters for all modules of a group or for none.
_TOGETHER = (("attn_q", "attn_k", "attn_v"), ("mlp_h_to_4h", "mlp_gate"))


def whole_groups(modules: Iterable[str]) -> tuple[str, ...]:
    """`modules` with the rest of each group that they begin, sorted. TensorRT-LLM's engine takes adapters of q, k and v
    together, and of both inputs of the MLP; a single adapter may lack some of them."""
    out = set(modules)
    for group in _TOGETHER:
        if out.intersection(group):
            out.update(group)
    return tuple(sorted(out))


def require_type(dtype: DataType) -> None:
    """Raises UsageError for a model's type in which the C++ backend loads no adapters from a folder."""
    if dtype is not DataType.FLOAT16:
        raise UsageError(
            f"TensorRT-LLM's C++ backend does not serve adapters of a {dtype.value} engine by name",
            why="it loads them from NumPy files, which lack that type, and an adapter must have the engine's type",
            remedy="use --dtype fp16, or --runtime trtllm_pytorch or vllm",
        )


def write_arrays(adapter: Adapter, model: Geometry, out: Path) -> int:
    """Write both files of an adapter, as `checked_adapter` gives it for float16, into `out`; return the bytes of
    weights."""
    import numpy as np

    rows: list[np.ndarray[Any, Any]] = []
    facts: list[tuple[int, int, int]] = []
    for (layer, role), pair in sorted(located_pairs(adapter, model).items()):
        a, b = read_matrix(pair.a), scaled(pair.b, adapter)
        rows.append(np.concatenate([a.ravel(), b.ravel()]).astype(np.float16))
        facts.append((_ROLES[role], layer, adapter.rank))
    weights = np.zeros((1, len(rows), max(map(len, rows))), np.float16)
    for index, row in enumerate(rows):
        weights[0, index, : len(row)] = row
    np.save(out / ARRAY_WEIGHTS, weights)
    np.save(out / ARRAY_CONFIG, np.array([facts], np.int32))
    return weights.nbytes
