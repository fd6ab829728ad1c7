"""Queries to an HTTP server about itself, before anything is measured."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.bench.protocols.endpoint import CONNECT_TIMEOUT_S, MAX_BYTES
from trtpipe.pipeline.net.fetch import fetch


@dataclass(frozen=True)
class Site:
    """An HTTP server: its URL as given, the parts of the URL, and what asks it (as `net.fetch.fetch`)."""

    url: str
    host: str
    port: int
    path: str
    tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    fetch: Callable[..., tuple[int, bytes]] = fetch

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str] | None = None) -> Site:
        """Parse a URL. Raises UsageError."""
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            (host or "").encode("idna")
        except ValueError:
            parts, host, port = urllib.parse.urlsplit(""), None, 0
        if parts.scheme not in ("http", "https") or not host:
            raise UsageError(f"'{url}' is not an HTTP URL", remedy="give one such as http://localhost:8000")
        return cls(url, host, port, parts.path.rstrip("/"), parts.scheme == "https", headers or {})

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def ask(self, method: str, path: str, what: str) -> tuple[int, Any]:
        """Status and JSON (None if the answer has none) of a request. Raises HostError when nothing answers."""
        url = f"{self.origin}{self.path}{path}"
        try:
            status, body = self.fetch(
                url, method=method, headers=self.headers, max_bytes=MAX_BYTES, within_s=CONNECT_TIMEOUT_S
            )
        except ssl.SSLError as error:
            raise HostError(
                f"no TLS connection to {self.url}",
                why=getattr(error, "verify_message", "") or error.reason or str(error),
                remedy="is it https there? SSL_CERT_FILE names the certificates that are trusted",
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            why, remedy = _reason(error), "start one with `trtpipe serve`, or give the URL of one that runs"
            raise HostError(f"no {what} answers over HTTP at {self.url}", why=why, remedy=remedy) from None
        try:
            return status, parse_json(body)
        except ValueError:
            return status, None

    def post(self, path: str, identity: str, body: Mapping[str, Any]) -> bytes:
        """Bytes of a whole POST request with a JSON body."""
        data = json.dumps(body, ensure_ascii=False).encode()
        lines = [
            f"POST {self.path}{path} HTTP/1.1",
            f"Host: {self.origin.partition('//')[2]}",
            "Content-Type: application/json",
            "Accept-Encoding: identity",
            f"Content-Length: {len(data)}",
            f"X-Request-Id: {identity}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def _reason(error: Exception) -> str:
    told = str(error).strip()
    # Bytes that are no text are an illegal request line to h11, which httpx reads with.
    if isinstance(error, http.client.BadStatusLine) and (not told.isprintable() or told == "illegal request line"):
        return "what answers speaks no HTTP/1.1; is it a gRPC port?"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
