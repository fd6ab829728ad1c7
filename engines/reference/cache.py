"""The block pool of the paged KV cache: who holds which block, and which freed blocks still hold a known prefix.

Pure bookkeeping over block numbers; the tensors belong to the model. A block is written by one request only.
Once full it may be published under a digest of its tokens and of all tokens before it, and then shared
read-only by any request that starts with the same tokens. A freed block keeps its content until it is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

# Digest of the empty prefix.
ROOT = b""


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block: SHA-256 over its parent's key and its tokens, so that equal keys mean equal prefixes."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """`num_blocks` blocks of `tokens_per_block` tokens. Every block is either free or held at least once."""

    def __init__(self, num_blocks: int, tokens_per_block: int, *, enable_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_reuse = enable_reuse
        self._holders = [0] * num_blocks
        # Free blocks, the next one to give out first: unpublished ones, then published ones by age.
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
        """How many requests hold `block`."""
        return self._holders[block]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.tokens_per_block)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix of the chain `digests`. Takes none of them."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold published blocks once more."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def allocate(self) -> int:
        """Take a block to write to; what a prefix had left in it is forgotten. There must be a free one."""
        block, _ = self._free.popitem(last=False)
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        self._holders[block] = 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find the full block `block`. A second block of equal content stays private."""
        if self.enable_reuse and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block of a request, given in the order of its tokens."""
        # From the end, so that a prefix outlives its continuations: those are unreachable without it.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)
