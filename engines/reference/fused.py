"""The small steps between matrix products, written as PyTorch has them.

Where there is a GPU and a compiler, `one_kernel` makes one kernel of each: their launches and the traffic between them
cost a step of few requests as much as its products do. Every line rounds to the type it says, compiled or not.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.nn import functional

_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` of tensors, the first of which tells the device; as few kernels as can be on a GPU."""
    compiled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal compiled
        first = args[0]
        if not (isinstance(first, torch.Tensor) and first.is_cuda and _can_compile()):
            return function(*args, **kwargs)
        if compiled is None:
            # For any number of rows, and rounding between two operations as they do one by one.
            compiled = torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})
        return compiled(*args, **kwargs)

    return call


@functools.cache
def _can_compile() -> bool:
    """Whether kernels can be made here: what starts them is C."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        return False
    import torch._inductor.config

    # They are few and small: a pool of processes to make them would cost more than it saves.
    torch._inductor.config.compile_threads = 1
    return True


@one_kernel
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Over the last dimension. The kernel computes in float32 whatever the type of x."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


@one_kernel
def add_norm(
    hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream with an update, and its norm."""
    total = hidden + update
    return total, functional.rms_norm(total, weight.shape, weight, epsilon)


@one_kernel
def swiglu(activated: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return functional.silu(activated).mul_(gate)


@one_kernel
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn queries and keys [..., heads, head_size] by their angles [..., 1, head_size], in place."""
    x.copy_(torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin))
