"""Experts that a step reads and computes on the GPU that has most of them to do.

A router picks k of E experts for each token, here at random, each token by itself. Of T tokens

    q = (1 - k / E)^T                              is the probability that none picks an expert,
    r = ((E - k) (E - k - 1) / (E (E - 1)))^T      that none picks either of two
    n (1 - q)                                      experts a GPU with n = E / ep of them reads, on average
    T k / ep                                       rows it computes, on average

A step waits for the GPU with the most of either. The counts of the ep groups have the same distribution and a negative
covariance, since their sum is given: the largest is expected z sqrt(variance - covariance) above the mean, where z is
the expected largest of ep independent standard normal numbers. That is z sqrt(n (q - r)) experts; for one token of
Mixtral on four GPUs 1.17 are read, where counting gives 8/7. Rows also differ because a router prefers some experts:
with SKEW, the standard deviation of their shares of the tokens over the mean,

    z sqrt(n (T k (E - k) / (E (E - 1)) + (T SKEW k / E)^2 E / (E - 1)))    rows more than the mean

An expert's rows are computed in blocks of 64, of which the last is half full on average. How often the weights are
read for them depends on the kernel: see `again` in `efficiency`.

Source: the largest of equally correlated normal numbers, H. A. David and H. N. Nagaraja, Order Statistics.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtpipe.engines.base import Mapping
from trtpipe.engines.model_config import ModelConfig

# Standard deviation over mean of an expert's share of the tokens: assumed. Routers are trained to be even, and are not
# quite on the texts of one subject.
SKEW = 0.3
# Rows of a block.
BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Experts of a layer and how the GPUs divide them. Without experts the MLP is one, which each token picks.

    missed      probability that a token does not pick an expert; an array where several engines are evaluated together
    missed_two  that it picks neither of two
    held        experts of a GPU, or parts of as many
    groups      groups of GPUs that divide the experts: ep
    rows        variance of a GPU's rows less their covariance, for each token; `preferred` for the square of tokens
    most        expected largest of `groups` standard normal numbers
    picked      experts of a token
    """

    missed: Any = 0.0
    missed_two: float = 0.0
    held: int = 1
    groups: int = 1
    rows: float = 0.0
    preferred: float = 0.0
    most: float = 0.0
    picked: int = 1

    @classmethod
    def of(cls, model: ModelConfig, mapping: Mapping) -> Routing:
        if model.experts is None:
            return cls()
        number, picked, groups = model.experts.count, model.experts.top_k, mapping.moe_ep_size
        held, pairs = number // groups, number * max(number - 1, 1)
        return cls(
            missed=1 - picked / number, missed_two=(number - picked) * (number - picked - 1) / pairs, held=held,
            groups=groups, rows=held * picked * (number - picked) / pairs,
            preferred=held * (SKEW * picked) ** 2 / pairs, most=largest(groups), picked=picked,
        )  # fmt: skip

    def read(self, tokens: Any) -> Any:
        """Share of its experts that the GPU with the most of them reads in a step of `tokens`."""
        missed = self.missed**tokens
        if self.groups == 1:
            return 1 - missed
        return np.minimum(1.0, 1 - missed + self.most * np.sqrt((missed - self.missed_two**tokens) / self.held))

    def computed(self, tokens: Any) -> Any:
        """Tokens whose even part is as much as the GPU with the most rows computes."""
        if self.groups == 1:
            return tokens
        even, most = tokens * self.picked / self.groups, tokens * min(self.picked, self.held)
        spread = np.sqrt(self.rows * tokens + self.preferred * tokens**2)
        return np.minimum(most, even + self.most * spread) * self.groups / self.picked

    def blocks(self, tokens: Any) -> Any:
        """Blocks of rows of an expert that some token picks."""
        return np.maximum(1.0, tokens * (1 - self.missed) / BLOCK + 0.5)


@functools.cache
def largest(number: int) -> float:
    """Expected largest of so many independent standard normal numbers."""
    below = np.linspace(-8, 8, 4001)
    share = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in below]) ** number
    # The mean of a number x is the integral of P(x > t) over t above 0, less that of P(x <= t) below 0.
    return float((np.heaviside(below, 0.5) - share).sum() * (below[1] - below[0]))
