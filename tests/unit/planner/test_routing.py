"""Experts that the GPU with most to do reads and computes: against counting, one routing after the other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from trtpipe.configs.facts import find_shape
from trtpipe.engines.base import Mapping
from trtpipe.pipeline.planner.routing import Routing, largest

MIXTRAL = find_shape("mixtral-8x7b")[1]


def counted(tokens: int, groups: int) -> tuple[float, float]:
    """Mean of the most experts, and of the most rows, of a GPU over all ways in which tokens pick two of eight."""
    held, ways = 8 // groups, list(itertools.product(itertools.combinations(range(8), 2), repeat=tokens))
    experts = rows = 0
    for way in ways:
        picks = [expert // held for pair in way for expert in pair]
        touched = [expert // held for expert in {expert for pair in way for expert in pair}]
        experts += max(map(touched.count, range(groups)))
        rows += max(map(picks.count, range(groups)))
    return experts / len(ways), rows / len(ways)


def test_the_largest_of_normal_numbers() -> None:
    assert [round(largest(number), 3) for number in (1, 2, 4, 8)] == [0, 0.564, 1.029, 1.424]


@pytest.mark.parametrize(("groups", "tokens"), [(2, 1), (2, 3), (4, 1), (4, 2), (4, 3), (8, 3)])
def test_a_step_waits_for_the_gpu_with_the_most_experts(groups: int, tokens: int) -> None:
    routing = replace(Routing.of(MIXTRAL, Mapping(tp_size=groups, moe_ep_size=groups)), preferred=0.0)
    experts, rows = counted(tokens, groups)
    assert routing.read(tokens) * routing.held == pytest.approx(experts, rel=0.08)
    # `computed` is in tokens whose rows are divided evenly.
    assert routing.computed(tokens) * 2 / groups == pytest.approx(rows, rel=0.08)


def test_many_tokens_need_all_experts_and_are_even_but_for_what_the_router_prefers() -> None:
    routing = Routing.of(MIXTRAL, Mapping(tp_size=4, moe_ep_size=4))
    assert routing.read(1000) == 1
    assert 1 < replace(routing, preferred=0.0).computed(10_000) / 10_000 < 1.02
    # Two experts whose shares deviate by 0.3: 1 + 1.03 x 0.3 x sqrt(8 / 7 / 2).
    assert routing.computed(1_000_000) / 1_000_000 == pytest.approx(1.233, abs=2e-3)
    assert [routing.blocks(tokens) for tokens in (16, 256, 8192)] == [1, 1.5, 32.5]
    # Divided among the ranks of a tp, every GPU has its part of every expert, and of every row.
    even = Routing.of(MIXTRAL, Mapping(tp_size=4))
    assert (even.read(1), even.computed(3)) == (2 / 8, 3)
    assert (Routing().read(1), Routing().computed(3)) == (1, 3)  # no experts: one MLP
