"""Status of a call (gRPC's codes) and exceptions of a connection; nothing here waits or retries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import unquote

from trtpipe.pipeline.net.h2.frames import ErrorCode, error_name


class Code(IntEnum):
    """gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True)
class Status:
    """End of a call.

    retry  the server has not begun the call: it may be sent again, elsewhere, without being executed twice
    lost   the status is not from the server: the connection or the stream broke
    oversized  the status is not from the server: the response was larger than the caller accepts
    """

    code: Code
    message: str = ""
    retry: bool = False
    lost: bool = False
    oversized: bool = False

    @property
    def ok(self) -> bool:
        return self.code is Code.OK

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.message else self.code.name


OK = Status(Code.OK)

# gRPC's own tables: status of a call for an HTTP/2 reset, and for an HTTP status of a server that is not a gRPC server.
_OF_RESET = {
    ErrorCode.REFUSED_STREAM: Code.UNAVAILABLE,
    ErrorCode.CANCEL: Code.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: Code.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: Code.PERMISSION_DENIED,
}
_OF_HTTP = {
    "400": Code.INTERNAL,
    "401": Code.UNAUTHENTICATED,
    "403": Code.PERMISSION_DENIED,
    "404": Code.UNIMPLEMENTED,
    "429": Code.UNAVAILABLE,
    "502": Code.UNAVAILABLE,
    "503": Code.UNAVAILABLE,
    "504": Code.UNAVAILABLE,
}


def of_reset(code: int) -> Status:
    return Status(
        _OF_RESET.get(code, Code.INTERNAL),  # type: ignore[call-overload]
        f"the server reset the stream ({error_name(code)})",
        retry=code == ErrorCode.REFUSED_STREAM,
        lost=True,
    )


def of_http(status: str) -> Status:
    return Status(_OF_HTTP.get(status, Code.UNKNOWN), f"the server answered HTTP status {status}, not gRPC")


def of_trailers(headers: dict[bytes, bytes]) -> Status:
    """Status in the trailers; UNKNOWN, as in gRPC, when they have no readable one."""
    raw = headers.get(b"grpc-status")
    if raw == b"0":
        return OK
    if raw is None:
        return Status(Code.UNKNOWN, "the stream ended without a grpc-status")
    message = unquote(headers.get(b"grpc-message", b"").decode("utf-8", "replace"), errors="replace")
    try:
        return Status(Code(int(raw)), message)
    except ValueError:
        return Status(Code.UNKNOWN, f"grpc-status {raw[:20]!r}: {message}")


class H2Error(Exception):
    """A connection cannot be made or used. The message says why."""


class ConnectFailed(H2Error):
    """No TCP connection: refused, unreachable, or a name that does not resolve."""


class ConnectTimeout(ConnectFailed):
    """The peer took too long to accept or to send its HTTP/2 settings."""


class NotHttp2(ConnectFailed):
    """The peer speaks something else: HTTP/1.1, TLS, or garbage."""


class ConnectionLost(H2Error):
    """The connection has ended."""


class Draining(H2Error):
    """The peer said GOAWAY: running streams finish, and no new one may start."""


class TooManyStreams(H2Error):
    """The peer's limit of concurrent streams is reached."""


class ProtocolViolation(H2Error):
    """The peer violated HTTP/2; `code` is the error code sent to it."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        self.code = code
        super().__init__(f"{text} ({code.name})")


class CallFailed(H2Error):
    """A unary call ended with another status than OK."""

    def __init__(self, status: Status) -> None:
        self.status = status
        super().__init__(str(status))
