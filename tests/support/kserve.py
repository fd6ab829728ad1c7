"""Requests to Triton over gRPC, written as one writes them over HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc import InferInput

_KINDS = {int: (np.int32, "INT32"), bool: (np.bool_, "BOOL"), str: (np.object_, "BYTES")}


def infer_inputs(body: dict[str, Any]) -> list[Any]:
    """An input of shape [1, n] for each entry of `body`, a value or a list of them."""
    inputs = []
    for name, value in body.items():
        values = value if isinstance(value, list) else [value]
        dtype, kind = _KINDS[type(values[0])]
        array = np.array([values], dtype=dtype)
        inputs.append(InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs
