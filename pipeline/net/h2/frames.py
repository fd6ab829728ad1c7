"""HTTP/2 frames as bytes (RFC 9113): the constants that gRPC needs, and builders for what a client sends."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

# Flags; the value 1 is END_STREAM on DATA and HEADERS, and ACK on SETTINGS and PING.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)

# Defaults of both sides until a SETTINGS frame changes them.
DEFAULT_WINDOW = 65_535
DEFAULT_MAX_FRAME = 16_384
LARGEST_WINDOW = 2**31 - 1
LARGEST_STREAM_ID = 2**31 - 1

HEADER = struct.Struct(">BHBBL")  # length in 8 + 16 bits, type, flags, stream
# A DATA frame's header and, right behind it, the prefix of a gRPC message: compressed flag and length.
DATA_AND_PREFIX = struct.Struct(">BHBBLBL")
PREFIX = struct.Struct(">BL")
NUMBER = struct.Struct(">L")
SETTING = struct.Struct(">HL")
LAST_AND_CODE = struct.Struct(">LL")


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def error_name(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"


def frame(kind: int, flags: int, stream: int, payload: bytes | bytearray | memoryview = b"") -> bytes:
    length = len(payload)
    return HEADER.pack(length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def settings_frame(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, NUMBER.pack(increment))


def reset(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, NUMBER.pack(code))


def goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, LAST_AND_CODE.pack(last_stream, code) + text.encode()[:256])


def header_frames(stream: int, block: bytes, max_frame: int, *, end_stream: bool = False) -> bytes:
    """A header block as a HEADERS frame, with CONTINUATION frames where it is longer than the peer accepts."""
    last = END_STREAM if end_stream else 0
    if len(block) <= max_frame:
        return frame(HEADERS, last | END_HEADERS, stream, block)
    pieces = [block[start : start + max_frame] for start in range(0, len(block), max_frame)]
    out = [frame(HEADERS, last, stream, pieces[0])]
    out += [frame(CONTINUATION, 0, stream, piece) for piece in pieces[1:-1]]
    out.append(frame(CONTINUATION, END_HEADERS, stream, pieces[-1]))
    return b"".join(out)
