"""Messages of a chat, including tool calls and their results, in the form that chat templates take."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.gateway.failure import wrong
from trtpipe.pipeline.gateway.strict import Strict


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str
    # What OpenAI's clients have read of `arguments`; they send it back.
    parsed_arguments: Any = None


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    # In the pieces of a stream; clients that join these pieces send it back.
    index: int | None = None

    def plain(self, place: str) -> dict[str, Any]:
        """The call as chat templates take it. Raises Failure, which names its path `place`, for arguments that are no
        JSON object."""
        try:
            arguments = parse_json(self.function.arguments)
        except ValueError as error:
            raise wrong(f"'{place}.function.arguments' is not JSON: {error}", f"{place}.function.arguments") from None
        if not isinstance(arguments, dict):
            raise wrong(f"'{place}.function.arguments' is not a JSON object", f"{place}.function.arguments")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What the assistant thought, under both names that servers give it. Chat templates read the second.
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Fields that OpenAI's clients copy from an answer; this server leaves them empty.
    annotations: list[str] | None = Field(None, max_length=0)
    audio: None = None
    # What these clients have read of `content`.
    parsed: Any = None
    function_call: None = None
    refusal: None = None

    def plain(self, place: str) -> dict[str, Any]:
        """The message as chat templates take it. Raises Failure, which names its path `place`, as `ToolCall.plain`."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        out: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if reasoning := self.reasoning_content or self.reasoning:
            out["reasoning_content"] = reasoning
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            out["tool_calls"] = [call.plain(f"{place}.tool_calls.{number}") for number, call in calls]
        if self.role == "tool":
            out["tool_call_id"] = self.tool_call_id
            out |= {"name": self.name} if self.name is not None else {}
        return out


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages in the form that chat templates take. Raises Failure where a message contradicts its role."""
    known: set[str] = set()
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if message.content is None and not message.tool_calls:
            raise wrong(f"'{place}.content' is missing", f"{place}.content", "missing_parameter")
        if message.tool_calls and message.role != "assistant":
            raise wrong(f"'{place}.tool_calls': only the assistant calls tools", f"{place}.tool_calls")
        if message.role == "tool" and message.tool_call_id is None:
            raise wrong(f"'{place}.tool_call_id' is missing", f"{place}.tool_call_id", "missing_parameter")
        if message.tool_call_id is not None and (message.role != "tool" or message.tool_call_id not in known):
            no_call = (
                "no call with that id comes before it"
                if message.role == "tool"
                else "only a message of the role 'tool' has it"
            )
            raise wrong(f"'{place}.tool_call_id': {no_call}", f"{place}.tool_call_id")
        known.update(call.id for call in message.tool_calls or ())
    return [message.plain(f"messages.{number}") for number, message in enumerate(messages)]


def without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without their tool calls: a chat template that renders both alike ignores tool calls."""
    return [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
