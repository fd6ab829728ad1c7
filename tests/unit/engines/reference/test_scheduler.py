"""In-flight batching, played out without a model: a drawn token is a number that depends on position alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.reference.cache import BlockPool
from trtpipe.engines.reference.scheduler import Chunk, Policy, Scheduler, Sequence


def make(
    blocks: int,
    *,
    size: int = 4,
    batch: int = 4,
    tokens: int = 16,
    policy: Policy = "guaranteed_no_evict",
    chunked: bool = False,
    reuse: bool = False,
) -> Scheduler:
    pool = BlockPool(blocks, size, enable_reuse=reuse)
    return Scheduler(pool, max_batch_size=batch, max_num_tokens=tokens, policy=policy, enable_chunked_context=chunked)


def add(scheduler: Scheduler, name: str, prompt: int, new: int, first: int = 0) -> Sequence:
    tokens = tuple(range(first, first + prompt))
    sequence = Sequence(Request(id=name, prompt=tokens, max_tokens=new))
    scheduler.submit(sequence)
    return sequence


def play(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step: (request, first position, tokens) of each chunk; sequences that drew their last token leave."""
    chunks = scheduler.schedule()
    seen = [(c.sequence.request.id, c.start, c.stop - c.start) for c in chunks]
    for chunk in chunks:
        draws = chunk.draws
        scheduler.computed(chunk.sequence, chunk.stop)
        if draws:
            chunk.sequence.tokens.append(1000 + len(chunk.sequence.tokens))
            if chunk.sequence.generated == chunk.sequence.request.max_tokens:
                scheduler.finish(chunk.sequence)
    return seen


def test_a_request_joins_while_another_decodes() -> None:
    scheduler = make(16)
    add(scheduler, "a", 3, 3)
    assert play(scheduler) == [("a", 0, 3)]
    add(scheduler, "b", 2, 1)
    assert play(scheduler) == [("a", 3, 1), ("b", 0, 2)]
    assert play(scheduler) == [("a", 4, 1)]
    assert not scheduler.has_work
    assert scheduler.pool.used == 0


def test_a_prompt_is_cut_to_what_decoding_leaves_of_the_step() -> None:
    scheduler = make(16, tokens=6, chunked=True)
    add(scheduler, "a", 2, 9)
    play(scheduler)
    add(scheduler, "b", 12, 1)
    assert play(scheduler) == [("a", 2, 1), ("b", 0, 5)]
    assert play(scheduler) == [("a", 3, 1), ("b", 5, 5)]
    assert play(scheduler) == [("a", 4, 1), ("b", 10, 2)]


def test_unchunked_prompts_wait_for_a_step_with_room_for_all_of_them() -> None:
    scheduler = make(16, tokens=6)
    add(scheduler, "a", 2, 3)
    play(scheduler)
    add(scheduler, "b", 6, 1)
    add(scheduler, "c", 1, 1)
    # "c" would fit, but does not overtake.
    assert play(scheduler) == [("a", 2, 1)]
    assert play(scheduler) == [("a", 3, 1)]
    assert play(scheduler) == [("b", 0, 6)]
    assert play(scheduler) == [("c", 0, 1)]


def test_no_more_than_the_batch_size_is_in_flight() -> None:
    scheduler = make(16, batch=2)
    for name in "abc":
        add(scheduler, name, 2, 2)
    assert [name for name, _, _ in play(scheduler)] == ["a", "b"]
    assert [name for name, _, _ in play(scheduler)] == ["a", "b"]
    assert [name for name, _, _ in play(scheduler)] == ["c"]


def test_no_evict_admits_only_what_the_worst_case_leaves_room_for() -> None:
    # "a" may come to 4 + 9 - 1 = 12 tokens, all 3 blocks, though it needs only one now.
    scheduler = make(3)
    add(scheduler, "a", 4, 9)
    add(scheduler, "b", 4, 1)
    for step in range(9):
        assert [name for name, _, _ in play(scheduler)] == ["a"], step
    assert play(scheduler) == [("b", 0, 4)]


def test_max_utilization_admits_on_present_need_and_preempts_the_youngest() -> None:
    scheduler = make(3, policy="max_utilization")
    a, b = add(scheduler, "a", 4, 9), add(scheduler, "b", 4, 9)
    assert play(scheduler) == [("a", 0, 4), ("b", 0, 4)]
    # Both fill a block and want another; one is left, and it goes to the older.
    assert play(scheduler) == [("a", 4, 1)]
    assert (b.paused, b.tokens[4:], list(scheduler.waiting)) == (True, [1004], [b])
    while a in scheduler.running:
        play(scheduler)
    # Recomputed as one prompt of five, and on.
    assert play(scheduler) == [("b", 0, 5)]
    assert (b.paused, b.tokens[4:]) == (False, [1004, 1005])


def test_a_preempted_request_comes_before_those_that_never_ran() -> None:
    scheduler = make(3, policy="max_utilization")
    a, b, c = (add(scheduler, name, 4, 9) for name in "abc")
    assert play(scheduler) == [("a", 0, 4), ("b", 0, 4), ("c", 0, 4)]
    assert play(scheduler) == [("a", 4, 1)]
    assert list(scheduler.waiting) == [b, c]
    while a in scheduler.running:
        play(scheduler)
    assert play(scheduler) == [("b", 0, 5)]


def test_a_resumed_sequence_that_outgrew_a_step_is_recomputed_in_parts() -> None:
    scheduler = make(8, tokens=8, batch=2, policy="max_utilization")
    a, b = add(scheduler, "a", 4, 20), add(scheduler, "b", 4, 20)
    # Eight blocks of four are full when both have 16 tokens.
    for _ in range(14):
        play(scheduler)
    assert (b.paused, len(b.tokens)) == (True, 17)
    while a in scheduler.running:
        play(scheduler)
    assert play(scheduler) == [("b", 0, 8)]
    assert play(scheduler) == [("b", 8, 8)]
    assert play(scheduler) == [("b", 16, 1)]
    for _ in range(6):
        play(scheduler)
    assert (len(b.tokens), scheduler.has_work) == (24, False)


def test_a_known_prefix_is_not_computed_again() -> None:
    scheduler = make(8, reuse=True)
    add(scheduler, "a", 10, 1)
    play(scheduler)
    # Two full blocks of four are known, the third was never filled.
    b = add(scheduler, "b", 10, 1)
    assert play(scheduler) == [("b", 8, 2)]
    assert (b.reused, b.allocated) == (2, 1)


def test_the_last_prompt_token_is_always_computed() -> None:
    scheduler = make(8, reuse=True)
    add(scheduler, "a", 8, 1)
    play(scheduler)
    add(scheduler, "b", 8, 1)
    assert play(scheduler) == [("b", 4, 4)]


def test_what_a_request_generated_is_a_known_prefix_too() -> None:
    scheduler = make(8, reuse=True)
    a = add(scheduler, "a", 3, 7)
    while scheduler.has_work:
        play(scheduler)
    assert len(a.tokens) == 10
    b = Sequence(Request(id="b", prompt=tuple(a.tokens), max_tokens=1))
    scheduler.submit(b)
    assert play(scheduler) == [("b", 8, 2)]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancelling_frees_everything(steps: int) -> None:
    scheduler = make(8)
    add(scheduler, "a", 6, 5)
    for _ in range(steps):
        play(scheduler)
    assert scheduler.cancel("a") is not None
    assert scheduler.cancel("a") is None
    assert (scheduler.has_work, scheduler.pool.used) == (False, 0)


LOADS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=8
)


@given(
    load=LOADS,
    blocks=st.integers(10, 14),
    batch=st.integers(1, 4),
    tokens=st.integers(4, 12),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    chunked=st.booleans(),
    reuse=st.booleans(),
)
def test_every_request_is_served_in_full_whatever_the_load(
    load: list[tuple[int, int, int, int]],
    blocks: int,
    batch: int,
    tokens: int,
    policy: Policy,
    chunked: bool,
    reuse: bool,
) -> None:
    """Requests are (prompt length, tokens to draw, first token, step in which it arrives)."""
    scheduler = make(blocks, size=2, batch=batch, tokens=tokens, policy=policy, chunked=chunked, reuse=reuse)
    pool = scheduler.pool
    arriving = []
    for index, (prompt, new, first, step) in enumerate(load):
        prompt = prompt if chunked else min(prompt, tokens)
        request = Request(id=index, prompt=tuple(range(first, first + prompt)), max_tokens=new)
        arriving.append((step, Sequence(request)))
    sequences = [sequence for _, sequence in arriving]
    started: list[Sequence] = []
    submitted: list[Sequence] = []
    for step in range(1000):
        for at, sequence in arriving:
            if at == step:
                scheduler.submit(sequence)
                submitted.append(sequence)
        if not scheduler.has_work:
            if step > 4:
                break
            continue
        decoding = [sequence for sequence in scheduler.running if sequence.remaining == 1]
        chunks = scheduler.schedule()
        check_step(scheduler, chunks, batch, tokens)
        left = [s for s in submitted if s.generated < s.request.max_tokens]
        # With reuse a prompt may wait for one that begins alike.
        assert sorted([*scheduler.running, *scheduler.waiting], key=submitted.index) == left
        assert reuse or [*scheduler.running, *scheduler.waiting] == left
        scheduled = [chunk.sequence for chunk in chunks]
        assert all(sequence in scheduled or sequence.paused for sequence in decoding)
        if policy == "guaranteed_no_evict":
            assert not any(sequence.paused for sequence in sequences)
        started += [sequence for sequence in scheduled if sequence not in started]
        for chunk in chunks:
            draws = chunk.draws
            scheduler.computed(chunk.sequence, chunk.stop)
            if draws:
                # The position of the new token: lost or repeated ones would show as a gap or a double.
                chunk.sequence.tokens.append(1000 + len(chunk.sequence.tokens))
                if chunk.sequence.generated == chunk.sequence.request.max_tokens:
                    scheduler.finish(chunk.sequence)
    assert not scheduler.has_work
    in_order = [sequence for _, sequence in sorted(arriving, key=lambda pair: pair[0])]
    assert sorted(started, key=in_order.index) == in_order
    assert reuse or started == in_order
    for sequence in sequences:
        prompt = len(sequence.request.prompt)
        assert sequence.tokens[prompt:] == [1000 + n for n in range(prompt, prompt + sequence.request.max_tokens)]
    assert (pool.used, pool.free) == (0, blocks)


def check_step(scheduler: Scheduler, chunks: list[Chunk], batch: int, tokens: int) -> None:
    size = scheduler.pool.tokens_per_block
    assert chunks
    assert len(scheduler.running) <= batch
    assert sum(chunk.stop - chunk.start for chunk in chunks) <= tokens
    assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
    assert all(chunk.sequence in scheduler.running for chunk in chunks)
    written: list[int] = []
    for chunk in chunks:
        blocks = chunk.sequence.blocks
        assert chunk.start == chunk.sequence.computed
        assert chunk.stop <= len(blocks) * size
        written += {blocks[position // size] for position in range(chunk.start, chunk.stop)}
    # Nobody writes where somebody else reads.
    held = [block for sequence in scheduler.running for block in sequence.blocks]
    assert all(held.count(block) == 1 for block in written)
    assert scheduler.pool.used == len(set(held))


def test_a_prompt_that_another_is_computing_waits_for_it_and_is_computed_once() -> None:
    scheduler = make(16, tokens=32, reuse=True)
    add(scheduler, "a", 10, 2)
    add(scheduler, "same", 10, 2)
    add(scheduler, "other", 6, 1, first=50)
    assert play(scheduler) == [("a", 0, 10), ("other", 0, 6)]
    # Two blocks of four are shared; only the rest is computed.
    assert play(scheduler) == [("a", 10, 1), ("same", 8, 2)]
    assert play(scheduler) == [("same", 10, 1)]
    assert not scheduler.has_work


def test_a_prompt_in_parts_keeps_its_like_waiting_until_it_is_whole_or_gone() -> None:
    scheduler = make(16, tokens=4, reuse=True, chunked=True)
    add(scheduler, "a", 9, 1)
    add(scheduler, "same", 9, 1)
    assert play(scheduler) == [("a", 0, 4)]
    assert play(scheduler) == [("a", 4, 4)]
    scheduler.cancel("a")
    assert play(scheduler) == [("same", 8, 1)]
