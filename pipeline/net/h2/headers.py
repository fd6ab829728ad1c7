"""Header blocks of one connection (HPACK, RFC 7541), arranged so that equal blocks are equal bytes both ways.

Request blocks use no dynamic table, so a repeated call needs no encoding. The peer is asked to use no dynamic table
either; once it complies, a block seen before needs no decoding.
"""

from __future__ import annotations

from typing import cast

from hpack import Decoder, Encoder, NeverIndexedHeaderTuple

from trtpipe.pipeline.net.h2.frames import ErrorCode
from trtpipe.pipeline.net.h2.status import ProtocolViolation

MAX_BLOCK = 64 << 10
# Number and length of blocks that are remembered: peers send few different ones, unless they write times into them.
_KEPT = 256
_KEPT_BYTES = 1024

Metadata = tuple[tuple[str, str], ...]


class HeaderBlocks:
    """Encodes the requests and decodes the answers of one connection."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._requests: dict[tuple[str, Metadata], bytes] = {}
        # The first block sets the table size to 0: later blocks can be the same bytes every time.
        self._first = b"\x20"
        self._decoder = Decoder(max_header_list_size=MAX_BLOCK)
        self.known: dict[bytes, dict[bytes, bytes]] = {}

    def request(self, method: str, metadata: Metadata) -> bytes:
        """The block that begins a call of `method`."""
        block = self._requests.get((method, metadata)) or self._encode(method, metadata)
        first, self._first = self._first, b""
        return first + block

    def decode(self, block: bytes) -> dict[bytes, bytes]:
        """Decode a block; every received block must be passed, in order. Raises ProtocolViolation."""
        known = self.known.get(block)
        if known is not None:
            return known
        stateless = self._decoder.header_table_size == 0
        try:
            headers = dict(cast("list[tuple[bytes, bytes]]", self._decoder.decode(block, raw=True)))
        except Exception as error:  # hpack's own errors, and IndexError and such from truncated blocks
            raise ProtocolViolation(ErrorCode.COMPRESSION_ERROR, f"headers that cannot be decoded: {error}") from None
        if self._decoder.header_table_size != 0:
            self.known.clear()
        elif stateless and len(self.known) < _KEPT and len(block) <= _KEPT_BYTES:
            self.known[block] = headers
        return headers

    def _encode(self, method: str, metadata: Metadata) -> bytes:
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "trtpipe"),
            *metadata,
        ]
        block = Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in headers])
        if len(self._requests) < _KEPT:  # bounded, since metadata may differ with every call
            self._requests[method, metadata] = block
        return block
