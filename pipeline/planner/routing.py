"""Experts that a step reads and computes on the GPU that has most of them to do.

A router picks k of E experts for each token: here at random, all alike, each token by itself. Trained routers are made
to come near that; one that prefers some experts makes a step slower than is said here. Of T tokens

    an expert is picked by none with probability q = (1 - k / E)^T, and two are with r = ((E - k) (E - k - 1) / E (E - 1))^T
    a GPU with n = E / ep whole experts (or parts of them) reads n (1 - q) of them on average, and computes T k / ep rows

A step waits for the GPU with the most of either. The counts of the ep groups are alike and hang together (their sums are
given), so that the largest is expected z sqrt(variance - covariance) above their mean, where z is the expected largest of
ep independent standard normal numbers: z sqrt(n (q - r)) experts, and z sqrt(n T k (E - k) / (E (E - 1))) rows. For one
token of Mixtral on four GPUs that is 1.17 experts, where counting gives 8/7.

Source: order statistics of equicorrelated normal numbers (David and Nagaraja, Order Statistics, 3rd ed., section 5.3).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtpipe.engines.base import Mapping
from trtpipe.engines.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Experts of a layer and how the GPUs divide them. Without experts the MLP is one, which each token picks.

    missed      probability that a token does not pick an expert; an array where several engines are evaluated together
    missed_two  that it picks neither of two
    held        experts of a GPU, or parts of as many
    groups      groups of GPUs that divide the experts: ep
    rows        variance of a GPU's rows less their covariance, for each token
    most        expected largest of `groups` standard normal numbers
    picked      experts of a token
    """

    missed: Any = 0.0
    missed_two: float = 0.0
    held: int = 1
    groups: int = 1
    rows: float = 0.0
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
            groups=groups, rows=held * picked * (number - picked) / pairs, most=largest(groups), picked=picked,
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
        return tokens * np.minimum(most, even + self.most * np.sqrt(self.rows * tokens)) / np.maximum(even, 1e-9)


@functools.cache
def largest(number: int) -> float:
    """Expected largest of so many independent standard normal numbers."""
    below = np.linspace(-8, 8, 4001)
    share = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in below]) ** number
    # The mean of a number x is the integral of P(x > t) over t above 0, less that of P(x <= t) below 0.
    return float(np.where(below > 0, 1 - share, -share).sum() * (below[1] - below[0]))
