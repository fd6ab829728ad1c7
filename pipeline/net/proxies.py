"""Proxies that the environment names, for messages: the libraries read the variables themselves."""

from __future__ import annotations

import os
from urllib.parse import urlsplit


def variables(*schemes: str) -> list[str]:
    """The variables that name a proxy for these schemes, such as HTTPS_PROXY for https."""
    known = (f"{scheme}_PROXY".upper() for scheme in (*schemes, "all"))
    return [name for one in known for name in (one, one.lower()) if os.environ.get(name)]


def with_proxy(remedy: str, url: str) -> str:
    """`remedy` for a server that is not reached, and the proxy through which requests to it go, if any."""
    from urllib.request import proxy_bypass  # here: it loads http.client and ssl

    parts = urlsplit(url)
    named = [] if proxy_bypass(parts.netloc) else variables(parts.scheme)
    return f"{remedy}, and the proxy of {' or '.join(named)}" if named else remedy
