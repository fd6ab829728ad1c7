"""Choosing tokens: greedy, top-k, top-p, penalties and bans, each on logits small enough to work out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.reference.sampling import Sampler, choose, log_probs
from trtpipe.engines.sampling import SamplingParams


def sampler(
    prompt: tuple[int, ...] = (0,), max_tokens: int = 100, rest: dict[str, Any] | None = None, **params: Any
) -> Sampler:
    request = Request(id=0, prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(**params), **(rest or {}))
    return Sampler(request)


def draws(logits: list[float], count: int, make: Any) -> list[int]:
    """`count` independent first tokens, with the seeds 0, 1, 2, ..."""
    rows = torch.tensor([logits]).repeat(count, 1)
    return choose(rows, [make(seed) for seed in range(count)])


def shares(tokens: list[int], vocab: int) -> list[float]:
    return [tokens.count(token) / len(tokens) for token in range(vocab)]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 0, "top_p": 0.0},
        {"top_k": 1, "temperature": 5.0},
        {"temperature": 0.0, "top_p": 0.9},
        {"temperature": 0.0, "top_k": 50},
        {"temperature": 0.7},
        {"top_p": 1e-6},
    ],
)
def test_settings_that_are_greedy(params: dict[str, Any]) -> None:
    assert draws([1.0, 3.0, 2.9, -1.0], 50, lambda seed: sampler(seed=seed, **params)) == [1] * 50


def test_of_equal_logits_the_first_is_taken() -> None:
    row = torch.full((3, 5000), -1.0)
    row[:, [70, 71, 4000]] = 2.0
    assert choose(row, [sampler()] * 3) == [70] * 3
    assert choose(row.bfloat16(), [sampler()] * 3) == [70] * 3


# Probabilities of 0.4, 0.3, 0.2 and 0.1.
LOGITS = [math.log(p) for p in (0.2, 0.4, 0.1, 0.3)]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 2, "top_p": 1.0}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 2, "top_p": 0.0}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 1.0}, [0.2, 0.4, 0.1, 0.3]),
        ({"top_p": 2.0}, [0.2, 0.4, 0.1, 0.3]),
        # The tail is cut at the mass itself, so the last candidate keeps only its part below it.
        ({"top_p": 0.5}, [0, 0.8, 0, 0.2]),
        # Half of the mass of the best three: 0.45 of 0.9.
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 4.5, 0, 0.5 / 4.5]),
        # Squared probabilities: 4, 16, 1 and 9 of 30.
        ({"top_p": 1.0, "temperature": 0.5}, [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        ({"top_k": 1000}, [0.2, 0.4, 0.1, 0.3]),
    ],
)
def test_shares_of_the_tokens(params: dict[str, Any], expected: list[float]) -> None:
    found = shares(draws(LOGITS, 4000, lambda seed: sampler(seed=seed, **params)), 4)
    # Four standard deviations of a share near one half.
    assert found == pytest.approx(expected, abs=0.032)
    assert [p == 0 for p in found] == [p == 0 for p in expected]


def test_draws_beyond_the_likeliest_thousand() -> None:
    # A flat distribution over 4000 tokens: three quarters of the draws lie beyond the first 1024.
    tokens = draws([0.0] * 4000, 2000, lambda seed: sampler(seed=seed, top_p=1.0))
    # 4000 * (1 - exp(-2000 / 4000)) different ones are to be expected, a quarter of them in each quarter.
    assert len(set(tokens)) == pytest.approx(1574, abs=80)
    for start in range(0, 4000, 1000):
        assert sum(start <= token < start + 1000 for token in tokens) / 2000 == pytest.approx(0.25, abs=0.04)


def test_equal_seeds_draw_equally_and_no_seed_is_seed_zero() -> None:
    logits = torch.zeros(4, 1000)
    a, b, c, d = choose(logits, [sampler(seed=seed, top_p=1.0) for seed in (7, 7, None, 0)])
    assert a == b
    assert c == d
    assert a != c


def test_every_step_draws_anew() -> None:
    one = sampler(seed=1, top_p=1.0)
    tokens = []
    for _ in range(50):
        tokens += choose(torch.zeros(1, 1000), [one])
        one.accept(tokens[-1])
    assert len(set(tokens)) > 40


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "seed": st.integers(0, 2**64 - 1),
                "top_k": st.sampled_from([None, 0, 1, 3, 200]),
                "top_p": st.sampled_from([None, 0.0, 0.3, 0.9, 1.0]),
                "temperature": st.sampled_from([None, 0.0, 0.5, 2.0]),
                "repetition_penalty": st.sampled_from([None, 1.3]),
                "frequency_penalty": st.sampled_from([None, 0.5]),
            }
        ),
        min_size=1,
        max_size=6,
    )
)
def test_neighbours_in_the_batch_change_nothing(settings_of: list[dict[str, Any]]) -> None:
    logits = torch.randn(len(settings_of), 1500, generator=torch.Generator().manual_seed(1)) * 3
    # Rounding makes ties, whose order is where a batch could leak in.
    logits = logits.bfloat16()
    alone = [choose(logits[i : i + 1], [sampler(**params)])[0] for i, params in enumerate(settings_of)]
    assert choose(logits, [sampler(**params) for params in settings_of]) == alone


def test_repetition_penalty_over_prompt_and_output() -> None:
    one = sampler(prompt=(1,), repetition_penalty=2.0)
    # 3.0 of the prompt's token counts as 1.5; a negative logit gets further away.
    assert choose(torch.tensor([[1.0, 3.0, 1.6]]), [one]) == [2]
    one.accept(2)
    assert choose(torch.tensor([[0.9, 1.7, 1.6]]), [one]) == [0]
    assert choose(torch.tensor([[-1.9, -1.0, -5.0]]), [one]) == [0]


def test_presence_and_frequency_penalties_over_the_output_alone() -> None:
    presence, frequency = sampler(prompt=(1,), presence_penalty=1.0), sampler(prompt=(1,), frequency_penalty=1.0)
    row = torch.tensor([[0.0, 2.5, 1.0]])
    assert choose(row.repeat(2, 1), [presence, frequency]) == [1, 1]
    for one in (presence, frequency):
        one.accept(1)
        one.accept(1)
    # Once for being there, 1.5; twice for having come twice, 0.5.
    assert choose(row.repeat(2, 1), [presence, frequency]) == [1, 2]


def test_temperature_comes_before_the_penalties() -> None:
    one = sampler(prompt=(1,), temperature=0.5, top_k=1, presence_penalty=1.0)
    one.accept(1)
    # 2 * 2.0 - 1 = 3 against 2 * 1.4 = 2.8; the other way round 2 * (2.0 - 1) = 2 would lose.
    assert choose(torch.tensor([[1.4, 2.0]]), [one]) == [1]


def test_the_end_is_banned_before_min_tokens() -> None:
    one = sampler(min_tokens=2, rest={"end_id": 3})
    row = torch.tensor([[0.0, 1.0, 0.0, 9.0]])
    for _ in range(2):
        assert choose(row, [one]) == [1]
        assert one.accept(1) is None
    assert choose(row, [one]) == [3]
    assert one.accept(3) == "end_id"
    assert one.generated == [1, 1]


@pytest.mark.parametrize("end_id", [None, 3])
def test_stop_words_of_one_token_are_banned_before_min_tokens(end_id: int | None) -> None:
    one = sampler(min_tokens=3, rest={"end_id": end_id, "stop_words": ((4,), (1, 1))})
    row = torch.tensor([[0.0, 1.0, 0.0, -1.0, 9.0]])
    # A longer word is not banned, and ends nothing before.
    for _ in range(2):
        assert choose(row, [one]) == [1]
        assert one.accept(1) is None
    assert choose(row, [one]) == [1]
    assert one.accept(2) is None
    assert choose(row, [one]) == [4]
    assert one.accept(4) == "stop_words"
    assert one.generated == [1, 1, 2, 4]


@pytest.mark.parametrize("end_id", [None, -1])
def test_without_an_end_id_nothing_is_an_end(end_id: int | None) -> None:
    one = sampler(max_tokens=2, min_tokens=1, rest={"end_id": end_id})
    assert choose(torch.tensor([[0.0, 9.0]]), [one]) == [1]
    assert [one.accept(1), one.accept(1)] == [None, "length"]


def test_stop_words_end_where_the_output_ends_in_one() -> None:
    one = sampler(prompt=(4, 5), rest={"stop_words": ((5, 6), (7, 8, 9))})
    # The prompt's 5 does not count.
    assert [one.accept(token) for token in (6, 7, 8, 5, 9, 7, 8, 9)] == [None] * 7 + ["stop_words"]
    assert one.generated == [6, 7, 8, 5, 9, 7, 8, 9]


def test_stop_words_do_not_end_before_min_tokens() -> None:
    one = sampler(min_tokens=3, rest={"stop_words": ((5,),)})
    assert [one.accept(5), one.accept(5), one.accept(5)] == [None, None, "stop_words"]


def test_bad_words_are_not_completed() -> None:
    one = sampler(prompt=(1, 2), rest={"bad_words": ((3,), (2, 4), (5, 6))})
    row = torch.tensor([[0.0, 0.0, 0.0, 9.0, 8.0, 7.0, 7.5]])
    # 3 never, 4 not behind the prompt's 2, 6 not behind 5.
    assert choose(row, [one]) == [6]
    one.accept(5)
    assert choose(row, [one]) == [4]
    one.accept(0)
    row[0, 4] = 0.0
    assert choose(row, [one]) == [6]


def test_banning_everything_still_gives_a_token() -> None:
    bad = {"bad_words": ((0,), (1,))}
    assert choose(torch.zeros(2, 2), [sampler(rest=bad), sampler(rest=bad, top_p=0.5)]) == [0, 0]


def test_the_bias_is_added_and_may_be_read_only() -> None:
    bias = np.frombuffer(np.array([0, -np.inf, 5], dtype=np.float32).tobytes(), dtype=np.float32)
    one = sampler(rest={"embedding_bias": bias})
    assert choose(torch.tensor([[4.0, 10.0, 0.0]]), [one]) == [2]


def test_logits_are_left_as_they_are() -> None:
    row = torch.tensor([[1.0, 2.0]])
    choose(row, [sampler(temperature=0.1, top_p=0.5, repetition_penalty=2.0, rest={"bad_words": ((1,),)})])
    assert row.tolist() == [[1.0, 2.0]]


def test_log_probs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    assert log_probs(logits, [1, 2]) == pytest.approx([math.log(0.4), math.log(0.1)])
