"""Triton over HTTP: POST /v2/models/<model>/generate_stream, answered by server-sent events.

Triton sends one `data: {json}` event for each response, no [DONE] and no final flag: the end of the chunked body
is the end of the answer. The status is fixed by the first response, so a later failure is an `error` object
inside a 200 stream.

Limit: httpx costs several asyncio steps a read; like grpc.aio it reads late when many streams tick together.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engines.errors import HostError, UsageError
from pipeline.bench.client import CONNECT_TIMEOUT_S, COUNT_OUTPUT, TEXT_OUTPUT, Endpoint, model_error
from pipeline.bench.record import RequestFailed, RequestRecord, Response

if TYPE_CHECKING:
    import httpx


class SseDecoder:
    """Splits a byte stream into the data of server-sent events, however the bytes were cut."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes; lines other than `data:` are skipped."""
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    @property
    def unfinished(self) -> bool:
        return bool(self._tail or self._data)


class TritonHttpStream:
    """Transport over HTTP. Made by `connect`."""

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, clock: Callable[[], int]) -> None:
        self.endpoint = endpoint
        self._client = client
        self._clock = clock
        self._path = f"/v2/models/{urllib.parse.quote(endpoint.model, safe='')}/generate_stream"

    @classmethod
    async def connect(cls, url: str, model: str, clock: Callable[[], int]) -> TritonHttpStream:
        import httpx

        base = url if "://" in url else f"http://{url}"
        try:
            valid = bool(httpx.URL(base).host) and httpx.URL(base).scheme in ("http", "https")
        except httpx.InvalidURL:
            valid = False
        if not valid:
            raise UsageError(f"'{url}' is not an HTTP URL", remedy="give one such as http://localhost:8000")
        client = httpx.AsyncClient(
            base_url=base,
            # httpx would otherwise stop at 100 connections and measure its own queue.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None),
            # The driver holds one deadline over the whole request; httpx's are for each read.
            timeout=None,
            headers={"accept-encoding": "identity"},
            # A proxy from the environment has no place between a load generator and its server.
            trust_env=False,
        )
        try:
            endpoint = await _endpoint(client, url, model)
            endpoint.check()
        except BaseException:
            await client.aclose()
            raise
        return cls(client, endpoint, clock)

    async def send(self, prompt: str, record: RequestRecord) -> None:
        import httpx

        body = {"id": record.request_id, **self.endpoint.inputs(prompt, record.max_tokens)}
        request = self._client.build_request("POST", self._path, json=body)
        decoder = SseDecoder()
        record.sent_ns = self._clock()
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise RequestFailed(f"http {response.status_code}", _error_text(await response.aread()))
                async for chunk in response.aiter_raw():
                    stamp = self._clock()
                    record.responses.extend(_response(event, stamp) for event in decoder.feed(chunk))
            finally:
                await response.aclose()
        except httpx.ConnectError as error:
            raise RequestFailed("ConnectFailed", str(error)) from None
        except httpx.TransportError as error:
            raise RequestFailed(
                "ConnectionLost", f"{error or type(error).__name__} (after {len(record.responses)} responses)"
            ) from None
        if decoder.unfinished:
            raise RequestFailed(
                "TruncatedStream", f"the body ended within an event, after {len(record.responses)} responses"
            )

    async def close(self) -> None:
        await self._client.aclose()


async def _endpoint(client: httpx.AsyncClient, url: str, model: str) -> Endpoint:
    import httpx

    async def ask(method: str, path: str) -> Any:
        try:
            response = await client.request(method, path, timeout=CONNECT_TIMEOUT_S)
        except httpx.TransportError as error:
            raise HostError(
                f"no Triton answers over HTTP at {url}",
                why=str(error) or type(error).__name__,
                remedy="start one with `trtpipe serve`, or give the URL of one that runs",
            ) from None
        try:
            return response.json() if response.status_code == 200 else None
        except ValueError:
            return None

    server = await ask("GET", "/v2")
    if not isinstance(server, dict) or "version" not in server:
        raise HostError(
            f"what answers at {url} is not Triton's HTTP endpoint",
            why="GET /v2 gives no server metadata",
            remedy="give the URL of Triton's HTTP port (8000 by default)",
        )
    metadata = await ask("GET", f"/v2/models/{urllib.parse.quote(model, safe='')}")
    if metadata is None:
        index = await ask("POST", "/v2/repository/index") or []
        entries = [(entry["name"], entry.get("state", ""), entry.get("reason", "")) for entry in index]
        raise model_error(model, url, entries)
    return Endpoint(
        protocol="http",
        url=url,
        server_name=server.get("name", ""),
        server_version=server["version"],
        model=model,
        model_versions=tuple(metadata.get("versions", ())),
        ranks={tensor["name"]: len(tensor["shape"]) for tensor in metadata["inputs"]},
        outputs=frozenset(tensor["name"] for tensor in metadata["outputs"]),
    )


def _response(event: bytes, stamp_ns: int) -> Response:
    try:
        value = json.loads(event)
        if "error" in value:
            raise RequestFailed("ServerError", str(value["error"]))
        # Triton unwraps arrays of one element.
        text = value[TEXT_OUTPUT]
        if not isinstance(text, str):
            raise TypeError(f"text_output is a {type(text).__name__}")
        tokens = int(value[COUNT_OUTPUT]) if COUNT_OUTPUT in value else None
    except (ValueError, KeyError, TypeError) as error:
        raise RequestFailed("MalformedResponse", f"{error!r} in {event[:200]!r}") from None
    return Response(stamp_ns, tokens, text)


def _error_text(body: bytes) -> str:
    """Triton's {"error": ...} of a failed request, else the start of the body."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
