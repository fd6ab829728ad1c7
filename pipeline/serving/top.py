"""Live figures of a served repository: /metrics is scraped every few seconds, and each answer is a Snapshot.

A server that does not answer also gives a Snapshot, so that the viewer sees it go and come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from trtpipe.engines.errors import HostError, InputDataError, UsageError
from trtpipe.pipeline.net.fetch import fetch
from trtpipe.pipeline.net.triton_metrics import KNOWN, MAX_PAGE, Figures, Scrape, derive, parse

# Triton answers in a few milliseconds; in a live view a server that needs longer counts as gone.
TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A server at one moment. `figures` is None, and `why` says why, while it does not answer."""

    server: str
    url: str
    time: str
    up: bool
    why: str = ""
    figures: Figures | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def metrics_url(url: str) -> str:
    """The URL to scrape: HTTP and /metrics unless another scheme or path is given. Raises UsageError."""
    import httpx

    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"'{url}' is not an HTTP URL", remedy="give one such as http://localhost:8002/metrics")
    return str(parsed if parsed.path not in ("", "/") else parsed.copy_with(path="/metrics"))


def watch(
    url: str,
    name: str,
    *,
    interval: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Snapshot, None, None]:
    """A Snapshot now and one every `interval` seconds, without end; the first has no rates.

    After an outage rates cover all the time since the last answer: `seconds` of the figures is that time.
    """
    before: Scrape | None = None
    due = clock()
    while True:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            scrape = scrape_once(url, clock)
        except HostError as error:
            yield Snapshot(server=name, url=url, time=now, up=False, why=error.why)
        else:
            yield Snapshot(server=name, url=url, time=now, up=True, figures=derive(before, scrape))
            before = scrape
        # Scrapes that were missed because of a slow reader or a timeout are skipped.
        due = max(due + interval, clock())
        sleep(max(0.0, due - clock()))


def scrape_once(url: str, clock: Callable[[], float] = time.monotonic) -> Scrape:
    """The samples that a server publishes now. Raises HostError."""
    import http.client

    try:
        status, page = fetch(url, max_bytes=MAX_PAGE, within_s=TIMEOUT_S)
        stamp = clock()
        if status != 200:
            raise HostError("no metrics", why=f"HTTP status {status}")
        scrape = parse(page.decode(errors="replace"), stamp)
    except InputDataError as error:
        raise HostError("no metrics", why=f"{error.what}: {error.why}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise HostError("no metrics", why=str(error) or type(error).__name__) from None
    if not any(sample.family in KNOWN for sample in scrape.samples):
        raise HostError("no metrics", why="none of the families is one of Triton's")
    return scrape
