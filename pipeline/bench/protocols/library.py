"""Senders through well-known libraries (grpc.aio, as in tritonclient; httpx), which support TLS and proxies.

The libraries wake Python once for each message: simultaneous messages of several streams are read one after the other,
late, and the client fills its core at a fraction of the load that our own reader takes. The report says so.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trtpipe.engines.errors import HostError
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.options import is_local
from trtpipe.pipeline.bench.protocols.endpoint import CONNECT_TIMEOUT_S
from trtpipe.pipeline.bench.protocols.h2_sender import parse_address
from trtpipe.pipeline.bench.protocols.http1 import SSE_DATA, error_text
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.protocols.triton_grpc import CallRefused
from trtpipe.pipeline.net.h2.triton import STREAM_INFER

if TYPE_CHECKING:
    import httpx

KNOWN_ERROR = (
    "streams that tick together are read late, one after the other; `trtpipe bench selftest --transport tritonclient` "
    "says by how much here"
)
# Connections that are opened before a load point. httpx looks through all idle ones for each request, once for each of
# them: with 64 a request leaves 5 ms later.
OPENED = 16
# Most bytes of the page that is read to free such a connection; with more to come it is closed.
_PAGE = 1 << 20


def fetch(
    url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, max_bytes: int, within_s: float
) -> tuple[int, bytes]:
    """As `net.fetch.fetch`, by the way that the requests take: through a proxy of the environment.

    within_s  seconds to connect, and seconds of each wait for bytes
    """
    import httpx

    body = bytearray()
    try:
        with (
            httpx.Client(mounts=_unproxied(url), timeout=within_s) as client,
            client.stream(method, url, headers=headers) as response,
        ):
            for piece in response.iter_bytes():
                body += piece
                if len(body) > max_bytes:
                    raise ValueError(f"the answer has more than {max_bytes:,} bytes")
    except httpx.RemoteProtocolError as error:
        raise http.client.BadStatusLine(str(error)) from None
    except httpx.HTTPError as error:
        cause = error.__cause__ and error.__cause__.__cause__  # httpcore's error lies between
        raise (cause if isinstance(cause, OSError) else OSError(str(error) or type(error).__name__)) from None
    return response.status_code, bytes(body)


def _unproxied(url: str) -> dict[str, None]:
    """httpx's rule that sends requests to this machine past a proxy of the environment, which does not reach it."""
    if not is_local(url):
        return {}
    host = urlsplit(url).hostname or ""
    # Without the port: httpx drops a scheme's own port from the URL, and a rule that names it fits no more.
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None}


class _TaskSender:
    """Sender with an asyncio task for each request."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def described(self) -> dict[str, Any]:
        return {"transport": "tritonclient", "stamps": "library", "known_error": KNOWN_ERROR}

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        for in_flight in batch:
            task = in_flight.call = asyncio.ensure_future(self._send(in_flight))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self, in_flight: InFlightRequest) -> None:
        if in_flight.call is not None:
            in_flight.call.cancel()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, in_flight: InFlightRequest) -> None:
        raise NotImplementedError


class GrpcAioSender(_TaskSender):
    """Sender over a channel of grpc.aio; `grpcs://` is TLS with the system's certificates."""

    def __init__(self, url: str) -> None:
        import grpc  # grpc publishes no types

        super().__init__()
        self._url = url
        self._secure = secure = url.startswith("grpcs://")
        host, port = parse_address(url.removeprefix("grpcs://"))
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = [("grpc.enable_http_proxy", 0)] if is_local(url) else None
        self._channel = (
            grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options)
            if secure
            else grpc.aio.insecure_channel(target, options)
        )
        self._method = self._channel.stream_stream(STREAM_INFER)  # bytes in, bytes out

    async def ask(self, method: str, message: bytes) -> bytes:
        """Make a unary call; see `H2Sender.ask`."""
        import grpc

        try:
            answer: bytes = await self._channel.unary_unary(method)(message, timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                remedy = (
                    "is it TLS there? GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names the certificates that are trusted"
                    if self._secure
                    else "start one with `trtpipe serve`, or give the URL of one that runs"
                )
                why = error.details() or error.code().name
                raise HostError(f"no Triton answers over gRPC at {self._url}", why=why, remedy=remedy) from None
            raise CallRefused(f"{error.code().name}: {error.details()}") from None
        return answer

    async def warm(self, calls: int) -> None:
        """Does nothing: the one connection of the channel was opened by `ask`."""

    async def close(self) -> None:
        await super().close()
        await self._channel.close()

    async def _send(self, in_flight: InFlightRequest) -> None:
        import grpc

        in_flight.sent_ns = monotonic_ns()
        call = self._method()
        try:
            try:
                await call.write(in_flight.message)
                await call.done_writing()
            except asyncio.InvalidStateError:
                pass  # the call has already ended; reading it shows the status
            left = in_flight.limit
            while (message := await call.read()) is not grpc.aio.EOF:
                in_flight.receive(message, monotonic_ns())
                left -= len(message) + 5
                if left < 0:
                    in_flight.fail_oversized()
                    return
        except grpc.aio.AioRpcError as error:
            in_flight.fail(f"grpc {error.code().name}", f"{error.details()} (after {len(in_flight.stamps)} responses)")
        else:
            in_flight.end(monotonic_ns())
        finally:
            call.cancel()  # has no effect on a call that has ended


async def _free(answer: httpx.Response) -> None:
    """Read an answer to its end, after which its connection can take a request. Close the connection where the end does
    not come: a page may be huge, or a stream of events."""

    async def read() -> None:
        left = _PAGE
        async for piece in answer.aiter_raw():
            left -= len(piece)
            if left < 0:
                return

    try:
        await asyncio.wait_for(read(), CONNECT_TIMEOUT_S)
    finally:
        await answer.aclose()


class HttpxSender(_TaskSender):
    """Sender over httpx; https is TLS with the system's certificates."""

    def __init__(self, site: Site) -> None:
        import httpx

        super().__init__()
        self._site = site
        self._client = httpx.AsyncClient(
            base_url=site.origin,
            mounts=_unproxied(site.origin),
            # By default httpx stops at 100 connections, and its own queue would be measured.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None),
            timeout=None,  # the driver enforces the time limits
        )

    async def warm(self, calls: int) -> None:
        """Ask for a page on each of so many connections at once, OPENED at most: httpx opens none without a request. It
        does not matter what the page is, nor whether a server or proxy refuses it."""
        import httpx

        pages = [
            self._client.build_request(
                "GET", self._site.path or "/", headers=dict(self._site.headers), timeout=CONNECT_TIMEOUT_S
            )
            for _ in range(min(calls, OPENED))
        ]
        # An answer that nobody has read yet keeps its connection busy, so that the next request opens another.
        answers = await asyncio.gather(
            *(self._client.send(page, stream=True) for page in pages), return_exceptions=True
        )
        held = [one for one in answers if isinstance(one, httpx.Response)]
        await asyncio.gather(*(_free(one) for one in held), return_exceptions=True)
        for error in answers:
            if isinstance(error, httpx.ConnectError):
                raise HostError(f"{self._site.url} takes no connections any more", why=str(error)) from None
            if isinstance(error, BaseException) and not isinstance(error, httpx.TransportError):
                raise error

    async def close(self) -> None:
        await super().close()
        await self._client.aclose()

    async def _send(self, in_flight: InFlightRequest) -> None:
        import httpx

        head, _, body = in_flight.message.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        del headers["Host"], headers["Content-Length"]  # httpx writes its own headers

        async def trace(event: str, details: object) -> None:
            # Connecting, TLS and a proxy's CONNECT come before: the last headers to be sent are the request's own.
            if event == "http11.send_request_headers.started":
                in_flight.sent_ns = monotonic_ns()

        request = self._client.build_request(
            "POST", first.split(" ")[1], content=body, headers=headers, extensions={"trace": trace}
        )
        in_flight.mark = SSE_DATA
        try:
            response = await self._client.send(request, stream=True)
            try:
                refused = response.status_code != 200
                left = in_flight.limit
                async for piece in response.aiter_raw():
                    in_flight.receive(piece, monotonic_ns())
                    left -= len(piece)
                    if left < 0 and not refused:
                        in_flight.fail_oversized()
                        return
                    if left < 0:
                        break
                if refused:
                    in_flight.fail(f"http {response.status_code}", error_text(in_flight.body))
                    return
            finally:
                await response.aclose()
        except httpx.ConnectError as error:
            in_flight.fail("ConnectFailed", str(error))
        except httpx.TransportError as error:
            in_flight.fail("ConnectionLost", f"{error or type(error).__name__} (after {len(in_flight.stamps)} reads)")
        else:
            in_flight.end(monotonic_ns())
