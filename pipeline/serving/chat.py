"""A conversation with a served model, over the OpenAI API of its gateway."""

from __future__ import annotations

import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.engines.json_input import parse_json, read_json
from trtpipe.pipeline.serving.generate import SILENCE_SECONDS


def usual_temperature(tokenizer: Path) -> float | None:
    """None where the model in this folder recommends a temperature, which its gateway then takes; else 0: at 1, which
    is the API's, a small model talks nonsense. Raises InputDataError."""
    path = tokenizer / "generation_config.json"
    return None if path.is_file() and "temperature" in read_json(path, "generation config") else 0.0


class Conversation:
    """Messages so far, and the next answer. `options` are fields of the requests, such as temperature."""

    def __init__(self, url: str, model: str, *, key: str | None, system: str | None, options: dict[str, Any]) -> None:
        self._url = url
        self._fields = {"model": model, "stream": True, **options}
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._first = [{"role": "system", "content": system}] if system is not None else []
        self.clear()

    def clear(self) -> None:
        """Forget what was said."""
        self._messages = list(self._first)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer as it arrives. Closing the iterator stops it; what was said of it until then is kept.

        Raises HostError when the gateway cannot be reached or goes away, UsageError or StageFailed for what it refuses.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            for piece in self._stream(asked):
                said.append(piece)
                yield piece
        finally:
            if said:
                self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        import httpx

        try:
            with (
                # A proxy of the environment is not for a server of this machine.
                httpx.Client(timeout=SILENCE_SECONDS, trust_env=False, verify=ssl.create_default_context()) as client,
                client.stream(
                    "POST", f"{self._url}/v1/chat/completions", json={**self._fields, "messages": messages},
                    headers=self._headers,
                ) as reply,
            ):  # fmt: skip
                if reply.status_code == 401:
                    raise UsageError("the gateway asks for a key", remedy="give it in TRTPIPE_API_KEY")
                if reply.status_code != 200:
                    raise _refused(parse_json(reply.read()))
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        event = parse_json(line.removeprefix("data: "))
                        if "error" in event:
                            raise _refused(event)
                        for choice in event["choices"]:
                            yield choice["delta"].get("content") or ""
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise HostError(f"the gateway at {self._url} does not answer", why=why, remedy="see `trtpipe ps`") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StageFailed(f"an answer of the gateway at {self._url} cannot be read", why=str(error)) from None


def _refused(body: dict[str, Any]) -> StageFailed:
    return StageFailed("the gateway refused the request", why=str(body["error"]["message"]))
