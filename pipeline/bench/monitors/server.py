"""Server monitor of a load point: the server's metrics, read once a second during the load, and its token count.

A thread fetches and stamps the pages; they are parsed after the run, like everything else.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from itertools import pairwise
from time import monotonic_ns
from typing import Any
from urllib.parse import urlsplit

from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.pipeline.bench.monitors import gpu as gpus
from trtpipe.pipeline.bench.monitors.gpu import GpuSampler
from trtpipe.pipeline.net.fetch import fetch
from trtpipe.pipeline.net.triton_metrics import MAX_PAGE, Change, Figures, Scrape, derive, parse

PERIOD_S = 1.0
TIMEOUT_S = 5.0
# Most bytes of all pages of a load point: an hour of a server with five models.
MAX_PAGES = 64 << 20
# Allowed relative difference between the server's token count and ours.
AGREEMENT = 0.01


# Definitions of `models` in `summarise`: each covers the load point and the requests that succeeded in it.
SERVER_METRICS = {
    name: {
        "unit": "ms",
        "formula": f"increase of {counter} / increase of nv_inference_request_success, a model",
        "undefined": "no request of the model succeeded within the load point, or the page has no such counter",
    }
    for name, counter in {
        "request_ms": "nv_inference_request_duration_us",
        "queue_ms": "nv_inference_queue_duration_us",
        "compute_ms": "nv_inference_compute_infer_duration_us",
    }.items()
}


def require_metrics(url: str) -> None:
    """Raises HostError where no known metrics can be read at `url`: the server's figures would be missing."""
    page, trouble = _read_page(url)
    if page is not None:
        found = _parse((0, page))
        if found is None or not found.samples:
            trouble = "its page has no Prometheus metrics"
        elif not found.is_known:
            trouble = "its page has none of the metrics of Triton, TensorRT-LLM's backend or vLLM, which are read"
    if trouble:
        raise HostError(
            f"no metrics could be read from {url}",
            why=trouble,
            remedy=(
                "give the server's metrics page, such as http://host:8002/metrics of Triton or "
                "http://host:8000/metrics of vLLM, or leave --metrics-url out"
            ),
        )


def _read_page(url: str) -> tuple[bytes | None, str]:
    """A Prometheus page; where there is none, None and why."""
    import http.client

    try:
        status, page = fetch(url if urlsplit(url).path else f"{url}/metrics", max_bytes=MAX_PAGE, within_s=TIMEOUT_S)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return None, getattr(error, "strerror", None) or str(error) or type(error).__name__
    return (page, "") if status == 200 else (None, f"status {status}")


class Scraper:
    """Fetches `url`, a Prometheus page, from `start` to `stop`, including both ends.

    trouble  why the last missing page could not be fetched
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.pages: list[tuple[int, bytes]] = []
        self.trouble = ""
        self._size = 0  # bytes of all pages
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._fetch()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._fetch()

    def _follow(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._fetch()

    def _fetch(self) -> None:
        page, trouble = _read_page(self.url)
        if page is None:
            self.trouble = trouble
            return
        if self._size + len(page) > MAX_PAGES:  # the time series ends there; the last page still gives the totals
            self._size -= len(self.pages.pop()[1])
        self._size += len(page)
        self.pages.append((monotonic_ns(), page))


class ServerMonitor:
    """Monitors during a load point: server metrics where their URL is known, GPUs where the server runs here."""

    def __init__(self, url: str, metrics_url: str | None) -> None:
        self._scraper = None if metrics_url is None else Scraper(metrics_url)
        self._gpus = GpuSampler.find(url)
        self._readers = [reader for reader in (self._scraper, self._gpus) if reader is not None]

    def __enter__(self) -> None:
        for reader in self._readers:
            reader.start()

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.stop()

    @property
    def unread(self) -> str:
        """Why no metrics page could be read although there is a URL for it; empty if one was read, or without a URL."""
        if self._scraper is None or self._scraper.pages:
            return ""
        return self._scraper.trouble

    def said(self, tokens: int | None, start_ns: int) -> dict[str, Any] | None:
        """Result of `summarise`, with that of `gpu.summarise` as `nvml`; None without either."""
        told = None if self._scraper is None else summarise(self._scraper.pages, tokens, start_ns)
        if self._gpus is None:
            return told
        nvml = gpus.summarise(self._gpus.names, self._gpus.readings, tokens, start_ns)
        return {**(told or {}), "nvml": nvml}


def summarise(pages: list[tuple[int, bytes]], tokens: int | None, start_ns: int) -> dict[str, Any] | None:
    """Figures over the whole load point and their time series, for the report; None without two pages.

    tokens    tokens of all answers, where all of them are known; the server's count has to agree
    start_ns  zero of the times in the series, which are in seconds
    """
    scrapes = [scrape for scrape in map(_parse, pages) if scrape is not None]
    if len(scrapes) < 2:
        return None
    change = Change(scrapes[0], scrapes[-1])
    whole = derive(scrapes[0], scrapes[-1])
    counted = sum(
        (engine.output_tokens_per_s or 0.0) * (change.seconds or 0.0)
        for engine in whole.engines
        if engine.output_tokens_per_s is not None
    )
    energy = change.increase("nv_energy_consumption")
    return {
        "models": [asdict(model) for model in whole.models if model.succeeded_per_s or model.failed_per_s],
        "engines": [asdict(engine) for engine in whole.engines],
        "output_tokens": {
            "server": round(counted) if counted else None,
            "client": tokens,
            "agree": agree(counted, tokens),
        },
        "energy_j_per_token": energy / tokens if energy and tokens else None,
        "series": _series(scrapes, start_ns),
    }


def agree(server: float, client: int | None) -> bool | None:
    """Whether server and client counted the same tokens; None where one count is unknown."""
    return None if not server or not client else abs(client - server) <= AGREEMENT * server


def _parse(page: tuple[int, bytes]) -> Scrape | None:
    stamp, text = page
    try:
        return parse(text.decode(errors="replace"), stamp / 1e9)
    except InputDataError:
        return None


def _series(scrapes: list[Scrape], start_ns: int) -> dict[str, list[float | None]]:
    """Sums over all engines and GPUs, at each page but the first. The last page is read as soon as the load ends: it
    takes the place of one just before it, since a few tokens over a few milliseconds make any rate."""
    if len(scrapes) > 2 and scrapes[-1].at_s - scrapes[-2].at_s < PERIOD_S / 2:
        scrapes = [*scrapes[:-2], scrapes[-1]]
    out: dict[str, list[float | None]] = {"t_s": []}
    for before, after in pairwise(scrapes):
        figures = derive(before, after)
        out["t_s"].append(round(after.at_s - start_ns / 1e9, 3))
        for name, value in _moment(figures).items():
            out.setdefault(name, []).append(value)
    return out


def _moment(figures: Figures) -> dict[str, float | None]:
    def total(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    engines, gpus = figures.engines, figures.gpus
    used, most = total([engine.kv_used for engine in engines]), total([engine.kv_max for engine in engines])
    fullest = max((engine.kv_fraction for engine in engines if engine.kv_fraction is not None), default=None)
    return {
        "in_flight": total([engine.in_flight for engine in engines]),
        "waiting": total([engine.waiting for engine in engines]),
        "tokens_per_s": total([engine.output_tokens_per_s for engine in engines]),
        "kv_fraction": used / most if used is not None and most else fullest,  # vLLM tells no blocks
        "gpu_utilization": total([gpu.utilization for gpu in gpus]),
        "gpu_memory_bytes": total([gpu.memory_used_bytes for gpu in gpus]),
        "gpu_power_w": total([gpu.power_w for gpu in gpus]),
    }
