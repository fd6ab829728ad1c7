"""The client of image registries (oras'), mended: whom it tells who we are, when, and how often it asks."""

from __future__ import annotations

from typing import Any

import oras.provider
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

# Of what may be asked twice, when a line breaks or a registry is busy; seconds apart: 0.5, 1, 2.
RETRY = Retry(total=3, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
DENIED = (401, 403)


class Client(oras.provider.Registry):  # type: ignore[misc]
    """oras waits for two minutes where it is refused, and keeps a token that is of no use: one given for reading when
    it is to write, or one that has grown old."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=RETRY))

    def do_request(self, url: str, method: str = "GET", **rest: Any) -> Any:
        """Raises ValueError where it is asked who it is, and has nothing to say; requests' exceptions."""
        once = oras.provider.Registry.do_request.__wrapped__
        answer = once(self, url, method, **rest)
        if answer.status_code in DENIED and getattr(self.auth, "token", None):
            self.auth.token = None
            answer = once(self, url, method, **rest)
        return answer
