"""In-flight batching: by hand, by what must always hold, and against the same rules taken one step at a time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.pipeline.planner.cost import Step
from trtpipe.pipeline.planner.scheduler import Asked, Places, Timeline, simulate

WIDE = Places(batch=100, tokens=1000, kv_blocks=1000, tokens_per_block=10)


def second(step: Step) -> float:
    return 1.0


def test_one_request_by_hand() -> None:
    found = simulate([Asked(5.0, 30, 4)], WIDE, second)
    # A step for the prompt and its first token, three for the others.
    assert (found.first, found.end) == ([6.0], [9.0])
    assert (found.steps, found.busy, found.most) == (4, 4.0, 1)
    assert found.ran == [(1, 1.0, Step(30, 0, 0, 450.0, 1)), (3, 1.0, Step(0, 1, 32.0, 0.0, 1))]


def test_a_prompt_in_chunks_delays_its_first_token_and_nobody_else() -> None:
    places = Places(batch=10, tokens=11, kv_blocks=100, tokens_per_block=10)
    found = simulate([Asked(0.0, 5, 5), Asked(0.0, 30, 2)], places, second)
    # The first takes 5 of 11 tokens; the second has 6, then 10 beside one that decodes, 10, and 4.
    assert found.first == [1.0, 4.0]
    assert found.end == [5.0, 5.0]


def test_a_prompt_in_one_piece_waits_for_room() -> None:
    places = Places(batch=10, tokens=10, kv_blocks=100, tokens_per_block=10, chunked=False)
    found = simulate([Asked(0.0, 5, 3), Asked(0.0, 10, 2), Asked(0.0, 11, 2)], places, second)
    assert found.first == [1.0, 4.0, None]  # eleven tokens never fit a step of ten
    assert found.end == [3.0, 5.0, None]


def test_the_cache_is_kept_for_all_that_a_request_may_need() -> None:
    places = Places(batch=10, tokens=100, kv_blocks=4, tokens_per_block=10)
    found = simulate([Asked(0.0, 15, 5), Asked(0.0, 15, 6), Asked(0.0, 35, 6)], places, second)
    # Two blocks, three blocks, five: the second waits for the first, the third does not fit at all.
    assert found.first == [1.0, 6.0, None]
    assert found.end == [5.0, 11.0, None]
    assert found.most == 1


def test_a_window_bounds_what_a_sequence_holds() -> None:
    places = Places(batch=10, tokens=100, kv_blocks=4, tokens_per_block=10, window=20)
    found = simulate([Asked(0.0, 35, 6), Asked(0.0, 35, 6)], places, second)
    assert found.first == [1.0, 1.0]  # two blocks each, where four and more would not have fitted together


def test_what_is_found_in_the_cache_is_not_computed() -> None:
    steps = [step for _, _, step in simulate([Asked(0.0, 100, 2, reused=60)], WIDE, second).ran]
    assert steps[0] == Step(context=40, decoding=0, cached=0, work=40 * 80, logits=1)
    assert steps[1] == Step(context=0, decoding=1, cached=101, work=0, logits=1)


def test_a_request_that_comes_in_a_step_misses_the_next_too_where_that_is_put_together_ahead() -> None:
    asked = [Asked(0.0, 10, 9), Asked(2.5, 10, 2), Asked(20.0, 10, 2)]
    assert simulate(asked, WIDE, second).first == [1.0, 4.0, 21.0]
    found = simulate(asked, dataclasses.replace(WIDE, ahead=True), second)
    assert found.first == [1.0, 5.0, 21.0]  # an idle engine waits for nothing


def test_a_client_asks_again_when_its_answer_has_ended() -> None:
    more = iter([Asked(3.0, 10, 1), None])
    found = simulate([Asked(0.0, 10, 2)], WIDE, second, follow=lambda index, now: next(more))
    assert found.first == [1.0, 4.0]
    assert found.end == [2.0, 4.0]


requests = st.lists(
    st.builds(
        Asked,
        reused=st.just(0),
        arrival=st.integers(0, 800).map(lambda value: value / 16),
        input=st.integers(1, 60),
        output=st.integers(1, 30),
    ),
    min_size=1,
    max_size=30,
)
kinds = st.builds(
    Places,
    batch=st.integers(1, 8),
    tokens=st.integers(8, 40),
    kv_blocks=st.integers(1, 30),
    tokens_per_block=st.just(10),
    chunked=st.booleans(),
)


def linear(step: Step) -> float:
    """Sums of these are exact, so that what comes at the end of a step does so by both clocks."""
    return float(8 + step.context + 2 * step.decoding) / 1024


@given(requests, kinds)
def test_nothing_is_exceeded_and_nothing_is_lost(asked: list[Asked], places: Places) -> None:
    found = simulate(asked, places, linear)
    seen = [(repeat, step) for repeat, _, step in found.ran]
    served = [one for one, end in zip(asked, found.end, strict=True) if end is not None]
    assert all(step.context + step.decoding <= max(places.tokens, places.batch) for _, step in seen)
    assert found.most <= places.batch
    assert sum(repeat * step.context for repeat, step in seen) == sum(one.input for one in served)
    assert sum(repeat * step.decoding for repeat, step in seen) == sum(one.output - 1 for one in served)
    for one, first, end in zip(asked, found.first, found.end, strict=True):
        fits = places.blocks(one) <= places.kv_blocks and (places.chunked or one.input <= places.tokens)
        assert (end is not None) == fits
        if first is not None and end is not None:
            assert one.arrival < first <= end


@given(requests, kinds)
def test_steps_taken_together_are_steps(asked: list[Asked], places: Places) -> None:
    together = simulate(asked, places, linear)
    alone = stepwise(asked, places)
    assert together.first == pytest.approx(alone.first)
    assert together.end == pytest.approx(alone.end)


def stepwise(asked: list[Asked], places: Places) -> Timeline:
    """The rules again, one step at a time, with nothing clever."""
    out = Timeline(asked=asked, first=[None] * len(asked), end=[None] * len(asked))
    able = [
        index
        for index, one in enumerate(asked)
        if places.blocks(one) <= places.kv_blocks and (places.chunked or one.input <= places.tokens)
    ]
    coming = sorted(able, key=lambda index: (asked[index].arrival, index))
    waiting: list[int] = []
    prompts: list[list[int]] = []  # index, tokens read
    decoding: dict[int, int] = {}  # index -> tokens to come
    now = 0.0

    def active() -> list[int]:
        return [index for index, _ in prompts] + list(decoding)

    while coming or waiting or prompts or decoding:
        while coming and asked[coming[0]].arrival <= now:
            waiting.append(coming.pop(0))
        while waiting and len(active()) < places.batch:
            held = sum(places.blocks(asked[index]) for index in active())
            if held + places.blocks(asked[waiting[0]]) > places.kv_blocks:
                break
            prompts.append([waiting.pop(0), 0])
        if not prompts and not decoding:
            now = asked[coming[0]].arrival
            continue
        room, context, begun = places.tokens - len(decoding), 0, []
        while prompts and room > 0:
            index, read = prompts[0]
            left = asked[index].input - read
            if left > room and not places.chunked:
                break
            take = min(left, room)
            context, room = context + take, room - take
            prompts[0][1] += take
            if take == left:
                begun.append(prompts.pop(0)[0])
        now += linear(Step(context, len(decoding), 0, 0, 0))
        for index in list(decoding):
            decoding[index] -= 1
            if not decoding[index]:
                del decoding[index]
                out.end[index] = now
        for index in begun:
            out.first[index] = now
            if asked[index].output > 1:
                decoding[index] = asked[index].output - 1
            else:
                out.end[index] = now
    return out
