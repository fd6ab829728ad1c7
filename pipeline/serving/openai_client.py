"""Client of an OpenAI-compatible server: the events of a streamed answer, and a whole answer."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any

from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.net.api_key import key_refused

# Longest silence of a server between two pieces of text.
SILENCE_SECONDS = 120.0


class ContextFull(UsageError):
    """The prompt, with what may be answered, is longer than the model takes."""


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is not streamed. Raises as `events`."""
    import httpx

    try:
        with _client() as client:
            reply = client.post(f"{url}{path}", json=body)
        answer = parse_json(reply.content)
        if reply.status_code != 200:
            raise refused(url, str(answer["error"]["message"]), reply.status_code)
        return dict(answer)
    except httpx.HTTPError as error:
        raise _gone(url, error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageFailed(f"an answer of {url} cannot be read", why=str(error)) from None


def events(url: str, path: str, body: dict[str, Any], key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of an answer as they arrive. Closing the iterator ends the request.

    Raises HostError when the server cannot be reached or goes away, UsageError where it asks for a key and for a
    request that it refuses, StageFailed where it fails.
    """
    import httpx

    from trtpipe.pipeline.bench.protocols.sse import SseDecoder

    try:
        with (
            _client() as client,
            client.stream(
                "POST", f"{url}{path}", json={**body, "stream": True},
                headers={"authorization": f"Bearer {key}"} if key else {},
            ) as reply,
        ):  # fmt: skip
            if reply.status_code == 401:
                raise key_refused("the gateway", given=key is not None)
            if reply.status_code != 200:
                error = parse_json(reply.read())["error"]
                kind = ContextFull if error.get("code") == "context_length_exceeded" else None
                raise refused(url, str(error["message"]), reply.status_code, kind)
            decoder = SseDecoder()
            # Not httpx's `iter_lines`, which ends a line at U+2028 within a text too.
            for data in (data for piece in reply.iter_bytes() for data in decoder.feed(piece)):
                if data.startswith(b"{"):
                    event = parse_json(data)
                    if "error" in event:
                        wrong = event["error"].get("type") == "invalid_request_error"
                        raise refused(url, str(event["error"]["message"]), 400 if wrong else 500)
                    yield event
    except httpx.HTTPError as error:
        raise _gone(url, error) from None
    except UnicodeEncodeError:  # of the request: the input is not text
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageFailed(f"an answer of {url} cannot be read", why=str(error)) from None


def _client() -> Any:
    import httpx

    # A proxy of the environment is not for a server of this machine.
    return httpx.Client(timeout=SILENCE_SECONDS, trust_env=False, verify=ssl.create_default_context())


def _gone(url: str, error: Exception) -> HostError:
    why = str(error) or type(error).__name__
    remedy = "SSL_CERT_FILE names the certificates that are trusted" if "CERTIFICATE" in why else "see `trtpipe ps`"
    return HostError(f"{url} does not answer", why=why, remedy=remedy)


def refused(server: str, message: str, status: int, kind: type[UsageError] | None = None) -> TrtpipeError:
    """The error for an answer of this HTTP status: a request that is refused for what it asks was a wrong one, of a
    narrower `kind` if it is known."""
    wrong = 400 <= status < 500 and status != 429
    what = "refused the request" if status < 500 else "did not finish the answer"
    return ((kind or UsageError) if wrong else StageFailed)(f"{server} {what}", why=message)
