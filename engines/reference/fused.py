"""Operations between matrix products, written in PyTorch and compiled to one kernel each.

They are compiled for steps that are recorded as CUDA graphs, if there is a compiler: many small kernels would take as
long as the products of few requests. Compiled or not, every line rounds to the type that it states.
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
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn import functional

# Limit of compilations of a function, one for each kind of layer and size; beyond it the function runs uncompiled.
_KINDS = 64
# The `encode` method of a linear.
Encode = Callable[[torch.Tensor], Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_recorded = ContextVar("recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """Context in which operations are compiled: the recording of a CUDA graph, or the warm-up before it."""
    token = _recorded.set(can_compile())
    try:
        yield
    finally:
        _recorded.reset(token)


def compiling() -> bool:
    """Whether functions of `one_kernel` run compiled now."""
    return _recorded.get()


def one_kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile `function` for calls within `recorded`. Elsewhere a compiled call costs more than it saves in kernels.

    The first dimension of the first tensor is the number of rows; tensors of two or more dimensions with the same
    first size have rows too.
    """
    compiled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal compiled
        if not _recorded.get():
            return function(*args, **kwargs)
        if compiled is None:
            # Intermediate results are rounded as in uncompiled code. The split of a sum must not depend on timings at
            # compilation: two ranks, or two servers, would differ in the last bits.
            compiled = torch.compile(function, options={"emulate_precision_casts": True, "deterministic": True})
        # Only the number of rows is dynamic: each other dynamic size would cost a division per element.
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1]
        for tensor in tensors:
            if len(tensor) == len(tensors[0]) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=_KINDS):
            return compiled(*args, **kwargs)

    return call


@functools.cache
def can_compile() -> bool:
    """Whether kernels can be compiled here: their launchers are C code, which needs a compiler and Python.h."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        return False
    import torch._dynamo
    import torch._inductor.config

    # The kernels are few and small: a pool of compiler processes would cost more than it saves.
    torch._inductor.config.compile_threads = 1
    return True


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """An `encode` for what takes its input as it is."""
    return x


@one_kernel
def encoded(x: torch.Tensor, encode: Encode) -> Any:
    """Apply a linear's `encode` to `x`."""
    return encode(x)


@one_kernel
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last dimension. The kernel computes in float32 for any type of `x`."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


@one_kernel
def add_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float, encoders: Sequence[Encode]
) -> tuple[torch.Tensor, list[Any]]:
    """Add an update to the residual stream; return the stream, and its norm encoded by each of `encoders`."""
    total = hidden if update is None else hidden + update
    normed = functional.rms_norm(total, weight.shape, weight, epsilon)
    return total, [encode(normed) for encode in encoders]


@one_kernel
def swiglu(activated: torch.Tensor, gate: torch.Tensor, encode: Encode) -> Any:
    """SwiGLU of `activated` and `gate`, encoded for the linear after it."""
    return encode(functional.silu(activated).mul_(gate))


class HeadNorms(NamedTuple):
    """RMSNorm of each head's queries and keys: weights [1, heads of queries and keys, head_size], and epsilon."""

    weight: torch.Tensor
    epsilon: float


def rotated(
    x: torch.Tensor, turned: int, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotate the first `turned` heads of [..., heads, head_size], queries and keys, by angles [..., 1, head_size],
    after their norms."""
    x, values = x[..., :turned, :], x[..., turned:, :]
    if norms is not None:
        # As in transformers the normed values are rounded before they are multiplied by the weight.
        x = functional.rms_norm(x, x.shape[-1:], eps=norms.epsilon) * norms.weight
    return torch.cat((torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin), values), dim=-2)


@one_kernel
def rotate_and_keep(
    x: torch.Tensor, turned: int, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor,
    encode: Encode | None, slots: torch.Tensor, pool: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Apply `rotated`, and write keys and values to slots [T, 1] of a pool [slots, key and value heads, head_size]."""
    x = rotated(x, turned, norms, cos, sin)
    new = x[:, -pool.shape[1] :]
    pool[slots[:, 0]] = new if encode is None else encode(new)
    return x
