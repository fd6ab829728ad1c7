"""Parser that divides an answer in pieces into the model's reasoning, between <think> and </think>, and the answer."""

from __future__ import annotations

from typing import Literal

from trtpipe.pipeline.gateway.stops import overlap

OPEN, CLOSE = "<think>", "</think>"
# Where an answer's reasoning begins: with <think> in the answer, if at all, or in the prompt.
Reasoning = Literal["answer", "prompt"]


def find_reasoning(template: str, prompt: str) -> Reasoning | None:
    """Where reasoning begins in the answer to a prompt that the chat template has made; None where none is expected.

    Only templates of models that reason contain the marks. A prompt that ends with </think> switches reasoning off.
    """
    if CLOSE not in template:
        return None
    end = prompt.rstrip()
    return None if end.endswith(CLOSE) else "prompt" if end.endswith(OPEN) else "answer"


class ReasoningParser:
    """Parser of one answer. Its results do not depend on how the answer is cut into pieces."""

    def __init__(self, begins: Reasoning) -> None:
        self._rest = ""  # text that may still become a mark, and white space that may precede one
        self._mark = OPEN if begins == "answer" else CLOSE  # the mark that may come next; "" in the answer's text
        # Whether a character other than white space has come, of the reasoning or of the text after it.
        self._begun = False

    def push(self, piece: str, *, final: bool = False) -> tuple[str, str]:
        """Take the next piece of the answer, `final` if it is the last; return new reasoning and new text.

        White space beside the marks is left out.
        """
        text = self._rest + piece
        self._rest = ""
        if self._mark == OPEN:
            start = text.lstrip()
            if len(start) < len(OPEN) and OPEN.startswith(start) and not final:
                self._rest = text
                return "", ""
            if not start.startswith(OPEN):
                self._mark, self._begun = "", True
                return "", text
            self._mark, text = CLOSE, start[len(OPEN) :]
        reasoning = ""
        if self._mark == CLOSE:
            reasoning, found, after = text.partition(CLOSE)
            if not found and not final:
                kept = len(text) - overlap(text, CLOSE)
                reasoning = text[:kept].rstrip()
                self._rest = text[len(reasoning) :]
            reasoning = self._stripped(reasoning.rstrip())
            if not found:
                return reasoning, ""
            self._mark, self._begun, text = "", False, after
        return reasoning, self._stripped(text)

    def _stripped(self, text: str) -> str:
        """The text without white space at its beginning, where nothing else has come since the last mark."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text
