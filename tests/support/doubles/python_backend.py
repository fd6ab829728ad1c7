"""A contract double of `triton_python_backend_utils`, as far as the scripts of a repository use it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from trtpipe.triton_repo.shared_text import shared

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
Logger = SimpleNamespace(log_warn=print, log_error=print)
# Name of a model -> its answer to a request of a script: the responses.
MODELS: dict[str, Callable[[InferenceRequest], list[InferenceResponse]]] = {}


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self.name, self._array = name, np.asarray(array)

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class TritonModelException(Exception):
    pass


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = range(4)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class InferenceResponse:
    def __init__(self, output_tensors: Iterable[Tensor] = (), error: TritonError | None = None) -> None:
        self.tensors = {tensor.name: tensor for tensor in output_tensors}
        self._error = error

    def error(self) -> TritonError | None:
        return self._error

    def has_error(self) -> bool:
        return self._error is not None


class InferenceRequest:
    """A request that a script makes of another model, or that a test makes of a script."""

    def __init__(
        self, inputs: Iterable[Tensor] = (), *, model_name: str = "", request_id: str = "",
        requested_output_names: Iterable[str] = (), parameters: dict[str, Any] | None = None, cancelled: bool = False,
    ) -> None:  # fmt: skip
        self.tensors = {tensor.name: tensor for tensor in inputs}
        self.sent: list[InferenceResponse] = []
        self.final = False
        self._model, self._id, self._outputs = model_name, request_id, list(requested_output_names)
        self._parameters, self._cancelled = parameters or {}, cancelled

    def request_id(self) -> str:
        return self._id

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        return self._cancelled

    def get_response_sender(self) -> InferenceRequest:
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.final
        self.sent += [response] if response is not None else []
        self.final = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def exec(self, decoupled: bool = False) -> Any:
        responses = MODELS[self._model](self)
        return iter(responses) if decoupled else responses[0]


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return request.tensors.get(name)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return response.tensors.get(name)


def load(script: Path, **modules: Any) -> Any:
    """Import a script of a repository, or of a backend, as Triton's stub does.

    modules  doubles of what else it imports
    """
    spec = importlib.util.spec_from_file_location(f"script_{script.parent.name}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = {"triton_python_backend_utils": sys.modules[__name__], "trtpipe_text": shared(), **modules}
    with patch.dict(sys.modules, known):
        spec.loader.exec_module(module)
    return module
