"""HTTP client of huggingface_hub with limits, which checks values of a Hub before they become file names.

huggingface_hub makes file names of its cache from a Hub's responses (ETag, commit, digests), follows page links to
any host with the user's token, and waits as long as a Hub requests.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import httpx
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils import _xet

from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.net.http_limits import MAX_ANSWER_BYTES, AnswerRefused, LimitedClient

# Matches Git's object names, SHA-256, and the ETags of S3.
SAFE_NAME = r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}"
NAME_HEADERS = ("x-repo-commit", "x-xet-hash")
ETAGS = ("etag", "x-linked-etag")
NAME_FIELDS = ("sha", "oid", "sha256", "xetHash", "blobId")
# Most seconds to wait before the next attempt, as a Hub may request; there are at most 6 attempts.
MAX_WAIT_SECONDS = 60
# Limits of one list: its pages, and the bytes of all pages.
MAX_PAGES = 1000
MAX_LIST_BYTES = 32 << 20


@functools.cache
def limit_hub() -> None:
    """Make huggingface_hub use this client from now on, in this process."""
    logging.getLogger("huggingface_hub").setLevel(
        logging.ERROR
    )  # its words about each attempt are many lines; what fails in the end is told in one
    hooks = get_session().event_hooks["request"]
    set_client_factory(lambda: HubClient(hooks))


def end_requests() -> None:
    """End what huggingface_hub transfers in other threads now, over HTTP and with hf_xet."""
    client = get_session()
    if isinstance(client, HubClient):
        client.end()
    getattr(_xet, "abort_xet_session", lambda: None)()  # older clients have none


class HubClient(LimitedClient):
    """Client for huggingface_hub. `hooks` are those of its own client, called for each request."""

    def __init__(self, hooks: list[Callable[..., Any]]) -> None:
        super().__init__(https=constants.ENDPOINT.startswith("https://"))
        self.event_hooks["request"] += hooks
        self._place = httpx.URL(constants.ENDPOINT).netloc
        self._pages: set[str] = set()
        self._listed = 0

    def send(self, request: httpx.Request, *, stream: bool = False, **named: Any) -> httpx.Response:
        response = super().send(request, stream=stream, **named)
        if not stream:
            if "/api/" in request.url.path and response.is_success and response.content:
                self._check_answer(response)
            self._check_pages(response)
        return response

    def check_request(self, request: httpx.Request) -> None:
        super().check_request(request)
        if request.url.netloc != self._place:
            request.headers.pop("authorization", None)

    def check_response(self, response: httpx.Response) -> None:
        super().check_response(response)
        # Names of files come from answers to HEAD alone, of any host that huggingface_hub follows a redirect to. ETags
        # of other answers and of refusals are of the Hub's web server, in base64 with `/` and `+`, and name nothing.
        head = response.request.method == "HEAD"
        names = NAME_HEADERS if head or response.request.url.netloc == self._place else ()
        for name in (*names, *ETAGS) if head and response.status_code < 400 else names:
            value = response.headers.get(name)
            if value is not None and not re.fullmatch(SAFE_NAME, value.removeprefix("W/").strip('"')):
                raise AnswerRefused(f"its {name} is not a digest: {value[:80]}")
        wait = response.headers.get("retry-after")
        if wait is not None and not (re.fullmatch("[0-9]{1,2}", wait) and int(wait) <= MAX_WAIT_SECONDS):
            response.headers["retry-after"] = str(MAX_WAIT_SECONDS)
        response.headers.pop("ratelimit", None)  # another header for the waiting time, without a bound

    def _check_answer(self, response: httpx.Response) -> None:
        """Check a response of the Hub's API, which is JSON."""
        try:
            value = parse_json(response.content, max_bytes=MAX_ANSWER_BYTES)
        except ValueError as error:
            raise AnswerRefused(f"its answer is not JSON: {error}") from None
        level = [value]
        while level:
            inner: list[Any] = []
            for one in level:
                if isinstance(one, dict):
                    for name in NAME_FIELDS:
                        said = one.get(name)
                        if said is not None and not (isinstance(said, str) and re.fullmatch(SAFE_NAME, said)):
                            raise AnswerRefused(f"its `{name}` is not a digest: {str(said)[:80]}")
                    inner += one.values()
                elif isinstance(one, list):
                    inner += one
            level = inner

    def _check_pages(self, response: httpx.Response) -> None:
        """Check page links: huggingface_hub follows links to further pages without a limit."""
        link = response.links.get("next", {}).get("url")
        if link is None:
            self._pages.clear()
            self._listed = 0
            return
        self._listed += len(response.content)
        try:
            url = response.url.join(link)
        except httpx.InvalidURL:
            raise AnswerRefused(f"its list goes on at what is not a URL: {link[:200]}") from None
        if url.netloc != response.url.netloc:
            raise AnswerRefused(f"its list goes on at another host: {str(url)[:200]}")
        place = str(url)
        if place in self._pages or len(self._pages) == MAX_PAGES or self._listed > MAX_LIST_BYTES:
            raise AnswerRefused(f"its list has no end after {len(self._pages) + 1:,} pages")
        self._pages.add(place)
