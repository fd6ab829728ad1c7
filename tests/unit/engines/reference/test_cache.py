"""The block pool: who holds what, what is found again, and what never happens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.reference.cache import BlockPool, chain_digest, root


def chain(tokens: list[int], size: int) -> list[bytes]:
    out: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        out.append(chain_digest(out[-1] if out else root(0), tokens[end - size : end]))
    return out


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a request that has computed `tokens`, its full ones published."""
    blocks = [pool.allocate() for _ in range(pool.blocks_for(len(tokens)))]
    for block, digest in zip(blocks, chain(tokens, pool.tokens_per_block), strict=False):
        pool.publish(block, digest)
    return blocks


def test_counts_of_free_and_used() -> None:
    pool = BlockPool(4, 2)
    blocks = fill(pool, [1, 2, 3])
    assert (pool.free, pool.used, len(blocks)) == (2, 2, 2)
    pool.release(blocks)
    assert (pool.free, pool.used) == (4, 0)


def test_the_longest_known_prefix_is_found() -> None:
    pool = BlockPool(8, 2)
    blocks = fill(pool, [1, 2, 3, 4, 5])
    assert pool.match(chain([1, 2, 3, 4, 5, 6], 2)) == blocks[:2]
    assert pool.match(chain([1, 2, 9, 9], 2)) == blocks[:1]
    assert pool.match(chain([3, 4], 2)) == []


def test_equal_tokens_behind_different_ones_are_not_equal() -> None:
    pool = BlockPool(8, 2)
    fill(pool, [1, 2, 3, 4])
    assert pool.match(chain([7, 7, 3, 4], 2)) == []


def test_a_freed_prefix_is_found_until_its_blocks_are_needed() -> None:
    pool = BlockPool(3, 2)
    blocks = fill(pool, [1, 2, 3, 4])
    pool.release(blocks)
    assert pool.match(chain([1, 2, 3, 4], 2)) == blocks
    # The one block without content goes first, then the end of the prefix, its start last.
    pool.allocate()
    assert pool.match(chain([1, 2, 3, 4], 2)) == blocks
    assert pool.allocate() == blocks[1]
    assert pool.match(chain([1, 2, 3, 4], 2)) == blocks[:1]
    assert pool.allocate() == blocks[0]
    assert pool.match(chain([1, 2, 3, 4], 2)) == []


def test_the_prefix_used_longest_ago_is_forgotten_first() -> None:
    pool = BlockPool(3, 1)
    old, kept, recent = fill(pool, [1]), fill(pool, [2]), fill(pool, [3])
    for blocks in (kept, old, recent):
        pool.release(blocks)
    pool.share(kept)
    pool.release(kept)
    assert pool.allocate() == old[0]
    assert pool.match(chain([2], 1)) == kept


def test_a_shared_block_stays_until_the_last_holder_goes() -> None:
    pool = BlockPool(2, 2)
    blocks = fill(pool, [1, 2])
    pool.share(blocks)
    assert pool.holders(blocks[0]) == 2
    pool.release(blocks)
    assert (pool.used, pool.holders(blocks[0])) == (1, 1)
    pool.release(blocks)
    assert pool.used == 0


def test_a_second_block_of_equal_content_stays_private() -> None:
    pool = BlockPool(2, 2)
    first, second = fill(pool, [1, 2]), fill(pool, [1, 2])
    assert pool.match(chain([1, 2], 2)) == first
    pool.release(second)
    assert pool.allocate() == second[0]


def test_without_reuse_nothing_is_found() -> None:
    pool = BlockPool(2, 2, enable_reuse=False)
    fill(pool, [1, 2])
    assert pool.match(chain([1, 2], 2)) == []


# Few tokens and short prompts over a small pool, so that prefixes meet and blocks run out.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.lists(st.integers(0, 1), min_size=1, max_size=7)),
        st.tuples(st.just("stop"), st.integers(0, 99)),
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_no_block_is_written_by_one_while_held_by_another(steps: list[tuple[str, object]], reuse: bool) -> None:
    pool = BlockPool(6, 2, enable_reuse=reuse)
    running: list[tuple[list[int], list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}
    for kind, value in steps:
        if kind == "stop":
            if running:
                pool.release(running.pop(int(str(value)) % len(running))[0])
        else:
            tokens = [int(str(token)) for token in value]  # type: ignore[attr-defined]
            shared = pool.match(chain(tokens, 2))
            # What is found is the very same prefix, all of it.
            for index, block in enumerate(shared):
                assert content[block] == tuple(tokens[: 2 * index + 2])
            wanted = pool.blocks_for(len(tokens)) - len(shared)
            if wanted > pool.free - sum(pool.holders(block) == 0 for block in shared):
                continue
            pool.share(shared)
            blocks = list(shared)
            for _ in range(wanted):
                block = pool.allocate()
                assert all(block not in others for others, _ in running)
                blocks.append(block)
            for index, digest in enumerate(chain(tokens, 2)):
                if index >= len(shared):
                    content[blocks[index]] = tuple(tokens[: 2 * index + 2])
                    pool.publish(blocks[index], digest)
            running.append((blocks, tokens))
        held = [block for blocks, _ in running for block in blocks]
        assert pool.free + pool.used == 6
        assert pool.used == len(set(held))
        assert all(pool.holders(block) == held.count(block) for block in range(6))
        # Shared means full: a request's last, partial block is its own.
        for blocks, tokens in running:
            if len(tokens) % 2:
                assert held.count(blocks[-1]) == 1
    for blocks, _ in running:
        pool.release(blocks)
    assert pool.free == 6
    assert all(pool.holders(block) == 0 for block in range(6))
