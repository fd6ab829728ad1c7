"""API key of an OpenAI-compatible server, as a client meets it."""

from __future__ import annotations

import os

from trtpipe.engines.errors import UsageError

VARIABLE = "TRTPIPE_API_KEY"


class KeyRefused(UsageError):
    """A server asks for a key, or for another one."""


def api_key() -> str | None:
    """The key that requests have, None for none. Raises UsageError, which quotes nothing of the key."""
    key = os.environ.get(VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"the key in {VARIABLE} has a control character or a letter outside ASCII",
            why="it is sent in an HTTP header",
            remedy="give the key alone",
        )
    return key or None


def key_refused(server: str, *, given: bool) -> KeyRefused:
    """The error for a server's answer 401, or a proxy's 403 to a key. `given`: whether the request had a key."""
    if given:
        return KeyRefused(f"{server} does not accept the key", remedy=f"give another in {VARIABLE}")
    return KeyRefused(f"{server} asks for a key", remedy=f"give it in {VARIABLE}")
