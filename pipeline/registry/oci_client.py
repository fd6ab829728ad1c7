"""HTTP client of one registry of container images, with authentication, retries and limits.

Credentials go to the registry itself, or to the token server that it names if that is of the same site. The limits
of time, size and redirects are those of `trtpipe.pipeline.net.http_limits`.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Iterable
from urllib.parse import urljoin

import httpx

from trtpipe.engines.errors import HostError
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.bench.options import is_local
from trtpipe.pipeline.net.http_limits import LimitedClient
from trtpipe.pipeline.registry.docker_config import DOCKER_HUB_HOST, Credentials, credentials
from trtpipe.pipeline.registry.sites import AUTH_HOSTS, may_have_credentials
from trtpipe.pipeline.registry.streams import WAITS

# Methods that may be repeated where a connection breaks.
REPEATABLE = ("GET", "HEAD", "PUT")
# Statuses after which a request is repeated: any failure of those methods; of others, what was not begun.
BUSY = {"POST": (429, 503), "PATCH": (429,)} | dict.fromkeys(REPEATABLE, (429, 500, 502, 503, 504))
# Most seconds that a busy registry may ask to wait before a request is repeated.
MAX_RETRY_AFTER = 60.0
DENIED = (401, 403)
# Characters and length of a token in a header: Azure's have some 5 KB.
TOKEN = r"[\x21-\x7e]{1,32768}"
MAX_CHALLENGE = 8192


def joined(place: str, link: str) -> str:
    """The URL of a link in the answer of `place`. Raises HostError for an invalid URL."""
    try:
        return urljoin(place, link)
    except ValueError:
        raise HostError(f"{place} leads to what is not a URL", why=link[:200]) from None


class OciClient:
    """Requests to the registry at `host`, which may have a port. `url` is its name in messages."""

    def __init__(self, host: str, url: str) -> None:
        self.url = url
        self.host = host
        # Docker Hub's registry has a host of its own; docker.io leads to a web page.
        self.base = f"{'http' if is_local(host) else 'https'}://{DOCKER_HUB_HOST if host == 'docker.io' else host}"
        # Why a credential helper gave no credentials for it, once they were asked for.
        self.failure = ""
        self._own = httpx.URL(self.base)
        self._http = LimitedClient(https=self._own.scheme == "https")
        weakref.finalize(self, self._http.close)
        self._authorization: str | None = None

    def probe(self) -> httpx.Response:
        """The answer, without credentials, to the check that this is a registry."""
        return self._http.get(f"{self.base}/v2/")

    def request(
        self, method: str, url: str, *, headers: dict[str, str] | None = None, content: bytes | Iterable[bytes] = b"",
        stream: bool = False,
    ) -> httpx.Response:  # fmt: skip
        """The answer, of any status: whole, or to be streamed and closed.

        content  bytes, or an object that can be iterated again for another attempt

        Raises httpx's exceptions, and HostError for a URL of another host or where no credentials help.
        """
        self.require_own(url)
        waits = iter(WAITS)
        while True:
            wait = next(waits, None)
            try:
                response = self._authorized(method, url, headers or {}, content, stream)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if wait is None or method not in REPEATABLE:
                    raise
            else:
                if response.status_code not in BUSY.get(method, ()) or wait is None:
                    return response
                response.close()
                wait = max(wait, _retry_after(response))
            time.sleep(wait)

    def require_own(self, url: str) -> None:
        """Raise HostError for a URL that is not of this registry: a link, or the address where an upload continues."""
        if not self._is_own(httpx.URL(url)):
            raise HostError(
                f"{self.url} leads to another host", why=f"{url[:200]} is not at {self.base}",
                remedy="check the registry's own address in its configuration",
            )  # fmt: skip

    def _is_own(self, url: httpx.URL) -> bool:
        return (url.scheme, url.host, url.port) == (self._own.scheme, self._own.host, self._own.port)

    def _authorized(
        self, method: str, url: str, headers: dict[str, str], content: bytes | Iterable[bytes], stream: bool
    ) -> httpx.Response:
        answered = False
        while True:
            sent = headers if self._authorization is None else {**headers, "Authorization": self._authorization}
            response = self._http.send(
                self._http.build_request(method, url, headers=sent, content=content),
                stream=stream,
                follow_redirects=method in ("GET", "HEAD"),
            )
            if response.status_code not in DENIED or answered or not self._is_own(response.url):
                return response
            challenge = response.headers.get("www-authenticate")
            if challenge is None and self._authorization is None:
                return response
            response.close()
            # An expired token, or one for reading only, may be denied without a challenge.
            answered = challenge is not None
            self._authorization = None if challenge is None else self._answer(challenge)

    def _answer(self, challenge: str) -> str:
        """The Authorization header that answers a registry's challenge. Raises HostError."""
        kind, _, rest = challenge[:MAX_CHALLENGE].partition(" ")
        told = {key.lower(): value for key, value in re.findall(r'([A-Za-z]+)="([^"]*)"', rest)}
        known = credentials(self.host)
        self.failure = "" if known is None else known.failure
        if self.failure:
            known = None  # the registry may give what is public
        if kind.lower() == "basic" and known is not None and known.basic:
            return f"Basic {known.basic}"
        if kind.lower() == "bearer" and told.get("realm"):
            return f"Bearer {self._token(told, known)}"
        why, remedy = "it asks who you are", self._login()
        if kind.lower() == "basic" and known is not None:
            why, remedy = "it asks for a password, and Docker keeps an identity token", f"{remedy} with a password"
        raise HostError(f"{self.url} does not let you", why=self.with_failure(why), remedy=remedy)

    def _token(self, told: dict[str, str], known: Credentials | None) -> str:
        """A token from the server that the registry names, requested with the registry's credentials, if any."""
        realm = httpx.URL(told["realm"])
        if realm.scheme != "https" and not (self._own.scheme == "http" and is_local(str(realm))):
            raise HostError(f"{self.url} has its tokens from {str(realm)[:200]}", why="that is not https")
        if known is not None and not may_have_credentials(realm.host, self._own.host):
            raise HostError(
                f"{self.url} asks for your credentials on behalf of {realm.host[:200]}",
                why="that is another site, and they were not sent",
                remedy=f"set {AUTH_HOSTS}={realm.host[:200]} if they are for it, too",
            )
        asked: dict[str, str] = {key: told[key] for key in ("service", "scope") if key in told}
        if known is not None and known.identity:
            # OAuth 2, as CNCF Distribution's token servers have it.
            form = {"grant_type": "refresh_token", "refresh_token": known.identity, "client_id": "trtpipe", **asked}
            response = self._http.post(realm, data=form, follow_redirects=False)
        else:
            response = self._http.get(
                realm.copy_merge_params(asked),
                headers={} if known is None else {"Authorization": f"Basic {known.basic}"},
                follow_redirects=False,
            )
        try:
            answer = parse_json(response.content) if response.status_code == 200 else {}
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not isinstance(token, str) or not re.fullmatch(TOKEN, token):
            raise HostError(
                f"{self.url} does not let you",
                why=self.with_failure(f"{realm.host[:200]} gives no token ({response.status_code})"),
                remedy=self._login(),
            )
        return token

    def with_failure(self, why: str) -> str:
        """`why`, and why a credential helper gave no credentials, if it failed."""
        return "; ".join(filter(None, (why, self.failure)))

    def _login(self) -> str:
        return f"run `docker login {self.host}`"


def _retry_after(response: httpx.Response) -> float:
    """Seconds that a busy registry asks to wait, within the limit; 0 where it does not say."""
    told = response.headers.get("retry-after", "")
    return min(float(told), MAX_RETRY_AFTER) if re.fullmatch("[0-9]{1,18}", told) else 0.0
