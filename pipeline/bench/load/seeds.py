"""Random number generators made from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Seed = int | Sequence[int] | np.random.Generator


def generator(seed: Seed) -> np.random.Generator:
    """Return a generator unchanged, or make one from a seed. PCG64 by name, since numpy may change its default."""
    return seed if isinstance(seed, np.random.Generator) else np.random.Generator(np.random.PCG64(seed))
