"""Random numbers that a seed fixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Seed = int | Sequence[int] | np.random.Generator


def generator(seed: Seed) -> np.random.Generator:
    """A generator as it is, or one from a seed. PCG64 by name: numpy may change what its default is."""
    return seed if isinstance(seed, np.random.Generator) else np.random.Generator(np.random.PCG64(seed))
