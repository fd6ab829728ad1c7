"""Codec of Triton's HTTP protocol: POST /v2/models/<model>/generate_stream, answered by server-sent events.

Triton sends one `data: {json}` event for each response, no [DONE] and no final flag: the end of the chunked body
is the end of the answer. The status is fixed by the first response, so a later failure is an `error` object
inside a 200 stream.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from trtpipe.engines.errors import HostError, kind_of
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.endpoint import Endpoint, model_error
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.protocols.sse import events
from trtpipe.pipeline.bench.protocols.transport import MOST_TOKENS, Answer, BadAnswer, Messages, ReadIds

# A quote inside a JSON string is preceded by a backslash, so these bytes are always the key.
_ERROR = b'"error":'


class TritonHttp:
    """Codec of one model. Made by `find`."""

    protocol = "http"

    def __init__(self, site: Site, endpoint: Endpoint, tokenize: Callable[[str], list[int]]) -> None:
        self._site = site
        self._endpoint = endpoint
        self._tokenize = tokenize
        self._path = f"/v2/models/{urllib.parse.quote(endpoint.model, safe='')}/generate_stream"
        family = endpoint.family()
        self._output = family.output
        self._count = family.count if family.count in endpoint.outputs else None
        self._counted = None if self._count is None else re.compile(rb'"%b":\[?(\d+)' % self._count.encode())

    @classmethod
    def find(cls, site: Site, model: str, tokenize: Callable[[str], list[int]]) -> TritonHttp:
        """Ask a server for its model. Raises HostError, UsageError, StageFailed."""
        return cls(site, _endpoint(site, model), tokenize)

    def described(self) -> dict[str, Any]:
        return self._endpoint.described()

    def encode(
        self, identity: str, prompt: str, max_tokens: int, options: Mapping[str, Any], messages: Messages | None = None
    ) -> bytes:
        values = self._endpoint.values(prompt, max_tokens, options, self._tokenize)
        return self._site.post(self._path, identity, {"id": identity, **values})

    def decode(self, request: InFlightRequest) -> Answer:
        stamps: list[int] = []
        tokens: list[int] = []
        texts: list[str] = []
        counted = None if self._counted is None or _ERROR in request.body else self._counted
        usual, number = b"", 0
        for event, stamp in events(request):
            # Events of an answer often differ in their text only, and the token count precedes the text.
            if not usual or not event.startswith(usual):
                found = None if counted is None else counted.search(event)
                if found is None:
                    usual, number = b"", self._read(event, texts)
                else:
                    usual, number = event[: found.end() + 1], _count(found[1])
            if number:
                stamps.append(stamp)
                tokens.append(number)
        return Answer(stamps, tokens) if not texts else Answer(stamps, None, "".join(texts))

    def content(self, request: InFlightRequest) -> str:
        return self.text(request)

    def text(self, request: InFlightRequest, read_ids: ReadIds | None = None) -> str:
        texts: list[str] = []
        ids: list[Any] = []
        try:
            for event, _ in events(request):
                self._read(event, texts, ids)
        except BadAnswer:
            return ""
        return "".join(texts) if read_ids is None or not ids else read_ids([one for one in ids if type(one) is int])

    def _read(self, event: bytes, texts: list[str], ids: list[Any] | None = None) -> int:
        """Tokens of an event without a token count: the number of ids, or 1 for a text. They are added to `ids`, where
        that is given, and `texts`."""
        try:
            value = parse_json(event)
            if "error" in value:
                raise BadAnswer("ServerError", str(value["error"]))
            out = value[self._output]  # Triton unwraps arrays of one element
            if self._output == "output_ids":
                found = out if isinstance(out, list) else [out]
                if ids is not None:
                    ids += found
                return len(found)
            if not isinstance(out, str):
                raise TypeError(f"{self._output} is {kind_of(out)}")
        except (ValueError, KeyError, TypeError) as error:
            raise BadAnswer("MalformedResponse", f"{error!r} in {event[:200]!r}") from None
        texts.append(out)
        return bool(out)


def _count(digits: bytes) -> int:
    """Parse a token count. Raises BadAnswer for an impossible one."""
    if len(digits) > 10 or int(digits) > MOST_TOKENS:
        raise BadAnswer("MalformedResponse", f"a response of {digits[:20].decode()} tokens")
    return int(digits)


def _endpoint(site: Site, model: str) -> Endpoint:
    _, server = site.ask("GET", "/v2", "Triton")
    if not isinstance(server, dict) or not isinstance(server.get("version"), str):
        raise _no_triton(site, "GET /v2 gives no server metadata")
    path = f"/v2/models/{urllib.parse.quote(model, safe='')}"
    status, metadata = site.ask("GET", path, "Triton")
    if status != 200 or not isinstance(metadata, dict):
        _, index = site.ask("POST", "/v2/repository/index", "Triton")
        listed = [entry for entry in index if isinstance(entry, dict)] if isinstance(index, list) else []
        states = [[str(entry.get(key, "")) for key in ("name", "state", "reason")] for entry in listed]
        raise model_error(model, site.url, [(name, state, reason) for name, state, reason in states])
    try:
        return Endpoint(
            protocol="http",
            url=site.url,
            server_name=str(server.get("name", "")),
            server_version=server["version"],
            model=model,
            model_versions=tuple(map(str, metadata.get("versions", ()))),
            inputs={
                str(tensor["name"]): (str(tensor["datatype"]), len(tensor["shape"])) for tensor in metadata["inputs"]
            },
            outputs=frozenset(str(tensor["name"]) for tensor in metadata["outputs"]),
        )
    except (KeyError, TypeError):
        raise _no_triton(site, f"GET {path} gives no metadata of a model") from None


def _no_triton(site: Site, why: str) -> HostError:
    return HostError(
        f"what answers at {site.url} is not Triton's HTTP endpoint",
        why=why,
        remedy="give the URL of Triton's HTTP port (8000 by default)",
    )
