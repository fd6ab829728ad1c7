"""HTTP session of the S3 client (aiobotocore), with limits of time and size, and without redirects."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession

from trtpipe.pipeline.net.http_limits import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    EXTRA_SECONDS,
    MAX_ANSWER_BYTES,
    SLOWEST,
    STALL_SECONDS,
)


class AnswerTooLarge(Exception): ...


class LimitedSession(AIOHTTPSession):  # type: ignore[misc]
    """Answers, except objects, are whole within ANSWER_SECONDS plus the time that SLOWEST takes for the request."""

    async def send(self, request: Any) -> Any:
        streamed = request.stream_output
        request.stream_output = True  # otherwise the whole answer is read, however large it is
        limit = ANSWER_SECONDS + EXTRA_SECONDS.get() + _size(request) / SLOWEST
        answer = await asyncio.wait_for(self._whole(request, streamed), limit)
        request.stream_output = streamed
        return answer

    async def _whole(self, request: Any, streamed: bool) -> Any:
        answer = await super().send(request)
        limited = _LimitedResponse(answer.url, answer.status_code, answer.headers, answer.raw)
        if not streamed or answer.status_code >= 300:
            await limited.content
        return limited

    async def _get_session(self, proxy_url: str | None) -> Any:
        # aiohttp would follow redirects to any host, with X-Amz-Security-Token; botocore follows those of S3 itself.
        session = await super()._get_session(proxy_url)
        return SimpleNamespace(request=functools.partial(session.request, allow_redirects=False))


class _LimitedResponse(AioAWSResponse):  # type: ignore[misc]
    _content: bytes | None

    async def _content_prop(self) -> bytes:
        if self._content is None:
            data = bytearray()
            try:
                while piece := await self.raw.content.read(1 << 16):
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        raise AnswerTooLarge(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes")
            except BaseException:
                self.raw.close()
                raise
            self._content = bytes(data)
        return self._content


def settings(attempts: int) -> dict[str, Any]:
    """Options of botocore's configuration."""
    return {
        "http_session_cls": LimitedSession, "connect_timeout": CONNECT_SECONDS, "read_timeout": STALL_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": attempts},
    }  # fmt: skip


def _size(request: Any) -> int:
    """Bytes that a request sends."""
    names = ("Content-Length", "X-Amz-Decoded-Content-Length")
    return max(int(request.headers.get(name, 0)) for name in names)
