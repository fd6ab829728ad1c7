"""Check of a LoRA adapter before it is served: it is of the model, and its numbers are finite in the model's type."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.engines.base import DataType
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.adapter import Adapter, located_pairs, read_adapter, require_rank
from trtpipe.engines.hf.folder import LocatedTensor
from trtpipe.engines.model_config import Geometry

if TYPE_CHECKING:
    import numpy as np


def checked_adapter(folder: Path, model: Geometry, most: int, dtype: DataType) -> Adapter:
    """The adapter in `folder`, for an engine of `model` that takes ranks up to `most` and computes in `dtype`.

    Raises UsageError for a rank above that, InputDataError for files that are not an adapter of this model.
    """
    adapter = read_adapter(folder)
    located_pairs(adapter, model)
    require_rank(adapter, most)
    check_range(adapter, dtype)
    return adapter


def check_range(adapter: Adapter, dtype: DataType) -> None:
    """Raises InputDataError for an adapter with an infinity or a NaN in `dtype`: times the zeros of a batch's padding
    it would spoil other requests."""
    import numpy as np

    for name, pair in adapter.linears.items():
        a, b = read_matrix(pair.a), scaled(pair.b, adapter)
        if not all(np.isfinite(one).all() for one in (a, b)):
            raise InputDataError(f"{adapter.folder}: a matrix of '{name}' holds numbers that are not finite")
        if max(np.abs(one).max(initial=0) for one in (a, b)) > dtype.largest:
            raise InputDataError(
                f"{adapter.folder}: a matrix of '{name}' has numbers beyond the range of {dtype.value}"
            )


def scaled(b: LocatedTensor, adapter: Adapter) -> np.ndarray[Any, Any]:
    """The matrix B in float32, times the adapter's scale."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        return read_matrix(b) * np.float32(adapter.scale)


def read_matrix(tensor: LocatedTensor) -> np.ndarray[Any, Any]:
    """The matrix in float32."""
    import numpy as np

    entry = tensor.entry
    with tensor.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        stored = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[entry.dtype]
        flat = np.frombuffer(data[entry.offset : entry.offset + entry.nbytes], stored)
    if entry.dtype == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32).reshape(entry.shape)
