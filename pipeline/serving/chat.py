"""A conversation with a served model, over the OpenAI API of its server."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from trtpipe.engines.sampling import recommended
from trtpipe.pipeline.serving.openai_client import events


def usual_temperature(tokenizer: Path) -> float | None:
    """None where the model in this folder recommends a temperature, which its gateway then takes; else 0: at 1, which
    is the API's, a small model talks nonsense. Raises InputDataError."""
    return None if "temperature" in recommended(tokenizer) else 0.0


class Conversation:
    """Messages so far, and the next answer.

    options   fields of the requests, such as temperature
    thinking  called once as an answer begins with reasoning, which is not part of its text
    """

    def __init__(
        self, url: str, model: str, *, key: str | None, system: str | None, options: dict[str, Any],
        thinking: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._url = url
        self._thinking = thinking
        self._fields = {"model": model, **options}
        self._key = key
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
        thought = False
        try:
            body = {**self._fields, "messages": asked}
            for event in events(self._url, "/v1/chat/completions", body, self._key):
                for choice in event["choices"]:
                    delta = choice["delta"]
                    # vLLM calls the field `reasoning`, older releases of it and TensorRT-LLM `reasoning_content`.
                    if not thought and (delta.get("reasoning") or delta.get("reasoning_content")):
                        thought = True
                        self._thinking()
                    piece = delta.get("content") or ""
                    said.append(piece)
                    yield piece
        finally:
            if said:
                self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
