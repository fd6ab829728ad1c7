"""Error messages name the proxy variable that a request obeys."""

from __future__ import annotations

import pytest

from trtpipe.pipeline.net.proxies import with_proxy


@pytest.mark.parametrize(
    ("variables", "url", "named"),
    [
        ({}, "https://hub.example", ""),
        ({"HTTPS_PROXY": "http://a:b@proxy:3128"}, "https://hub.example/x", ", and the proxy of HTTPS_PROXY"),
        ({"https_proxy": "http://proxy:1"}, "https://hub.example", ", and the proxy of https_proxy"),
        ({"ALL_PROXY": "http://proxy:1"}, "http://hub.example", ", and the proxy of ALL_PROXY"),
        ({"HTTPS_PROXY": "http://proxy:1"}, "http://hub.example", ""),
        ({"HTTPS_PROXY": "http://proxy:1", "NO_PROXY": "hub.example"}, "https://hub.example:443", ""),
    ],
)
def test_the_proxy_of_a_request_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, named: str
) -> None:
    for scheme in ("HTTP", "HTTPS", "ALL", "NO"):
        for name in (f"{scheme}_PROXY", f"{scheme}_PROXY".lower()):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert with_proxy("check its address", url) == f"check its address{named}"
