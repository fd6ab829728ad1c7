"""Block pool of the paged KV cache: reference counts of blocks, and an index of blocks with known prefixes.

The pool manages block numbers only; the tensors belong to the model. Only one request writes a block.
A full block may be published under a digest of its tokens and of all tokens before it, and is then shared
read-only by any request that starts with the same tokens. A freed block keeps its content until it is reused.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root(adapter: int) -> bytes:
    """Digest of the empty prefix of requests with an adapter, whose keys and values differ from those of another."""
    return adapter.to_bytes(8, "big") if adapter else b""


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block: SHA-256 over its parent's key and its tokens, so that equal keys mean equal prefixes."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """Pool of `num_blocks` blocks of `tokens_per_block` tokens. Each block is either free or held at least once."""

    def __init__(self, num_blocks: int, tokens_per_block: int, *, enable_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_reuse = enable_reuse
        self._holders = [0] * num_blocks
        # Free blocks in order of allocation: unpublished blocks, then published blocks by age.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def holders(self, block: int) -> int:
        """Number of requests that hold `block`."""
        return self._holders[block]

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for `tokens` tokens, the last one perhaps filled in part."""
        return -(-tokens // self.tokens_per_block)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Find the blocks of the longest known prefix of the chain `digests`, without holding them."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a hold to each of these published blocks."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def allocate(self) -> int:
        """Take a block to write to, and unpublish it. There must be a free block."""
        block, _ = self._free.popitem(last=False)
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        self._holders[block] = 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Let other requests find the full block `block`. A second block of equal content stays private."""
        if self.enable_reuse and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one hold from each block of a request; `blocks` are in the order of its tokens."""
        # From the end, so that a prefix is reused after its continuations, which cannot be found without it.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)
