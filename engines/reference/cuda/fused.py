"""The small steps between matrix products, written as PyTorch has them.

In a step that is recorded as a CUDA graph each is one kernel, where there is a compiler: many small ones take as long
as the products of few requests do. Every line rounds to the type it says, compiled or not.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import functional

# A function is compiled for each kind of layer and of size; beyond so many of them it would run as it is.
_KINDS = 64
# A linear's `encode`.
Encode = Callable[[torch.Tensor], Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_recorded = ContextVar("recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """What runs in this block is recorded, or goes ahead of a recording to set up what is."""
    token = _recorded.set(can_compile())
    try:
        yield
    finally:
        _recorded.reset(token)


def compiling() -> bool:
    """Whether what is called now is compiled."""
    return _recorded.get()


def one_kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, compiled while a step is recorded. Elsewhere a call of compiled code costs more than its kernels.

    The first dimension of its first tensor is the rows, and so is that of any other with as many and a second one.
    """
    compiled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal compiled
        if not _recorded.get():
            return function(*args, **kwargs)
        if compiled is None:
            # Rounding between two operations as they do one by one. How a sum is split must not be what was fastest
            # when it was compiled: two ranks, or one server and the next, would differ in last bits.
            compiled = torch.compile(function, options={"emulate_precision_casts": True, "deterministic": True})
        # For any number of rows, all else as it is: numbers that are not known cost a division for each element.
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1]
        for tensor in tensors:
            if len(tensor) == len(tensors[0]) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=_KINDS):
            return compiled(*args, **kwargs)

    return call


@functools.cache
def can_compile() -> bool:
    """Whether kernels can be made here: what starts them is C."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        return False
    import torch._dynamo
    import torch._inductor.config

    # They are few and small: a pool of processes to make them would cost more than it saves.
    torch._inductor.config.compile_threads = 1
    return True


@one_kernel
def encoded(x: torch.Tensor, encode: Encode) -> Any:
    """What a linear multiplies."""
    return encode(x)


@one_kernel
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Over the last dimension. The kernel computes in float32 whatever the type of x."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


@one_kernel
def add_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float, encoders: Sequence[Encode]
) -> tuple[torch.Tensor, list[Any]]:
    """The residual stream with an update, and its norm as each of those who take it encodes it."""
    total = hidden if update is None else hidden + update
    normed = functional.rms_norm(total, weight.shape, weight, epsilon)
    return total, [encode(normed) for encode in encoders]


@one_kernel
def swiglu(activated: torch.Tensor, gate: torch.Tensor, encode: Encode) -> Any:
    """As the linear after it encodes it."""
    return encode(functional.silu(activated).mul_(gate))


def rotated(x: torch.Tensor, turned: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first `turned` of [..., heads, head_size], queries and keys, turned by their angles [..., 1, head_size]."""
    x, values = x[..., :turned, :], x[..., turned:, :]
    return torch.cat((torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin), values), dim=-2)


@one_kernel
def rotate_and_keep(
    x: torch.Tensor, turned: int, cos: torch.Tensor, sin: torch.Tensor, encode: Encode | None, slots: torch.Tensor,
    pool: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`rotated`, and its keys and values put at their slots [T, 1] of a pool [slots, heads of both, head_size]."""
    x = rotated(x, turned, cos, sin)
    new = x[:, -pool.shape[1] :]
    pool[slots[:, 0]] = new if encode is None else encode(new)
    return x
