"""Calls of a tool by clients that other projects make: `python tool_clients.py URL`, in an environment that has them.

Prints one JSON object: what each client understood. It imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel

QUESTION = "Weather?"
RESULT = "sunny"


class Weather(BaseModel):
    """The weather of a city."""

    city: str


def get_weather(city: str) -> str:
    """The weather of a city."""
    return RESULT


def langchain(url: str) -> dict[str, Any]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model="llama", max_retries=0)
    bound = model.bind_tools([tool(get_weather)])
    first = bound.invoke(QUESTION)
    (call,) = first.tool_calls
    last = bound.invoke([HumanMessage(QUESTION), first, ToolMessage(RESULT, tool_call_id=call["id"])])
    streamed: Any = None
    for chunk in bound.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    any_tool = model.bind_tools([tool(get_weather)], tool_choice="any").invoke(QUESTION)
    structured = model.with_structured_output(Weather, method="function_calling").invoke(QUESTION)
    return {
        "call": [call["name"], call["args"]],
        "answer": last.content,
        "streamed": [[one["name"], one["args"]] for one in streamed.tool_calls],
        "required": [[one["name"], one["args"]] for one in any_tool.tool_calls],
        "structured": structured.model_dump(),
    }


def llama_index(url: str) -> dict[str, Any]:
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="llama", api_base=url, api_key="none", max_retries=0, is_chat_model=True, is_function_calling_model=True
    )
    tools = [FunctionTool.from_defaults(fn=get_weather)]

    def called(**fields: Any) -> list[Any]:
        answer = model.chat_with_tools(tools, user_msg=QUESTION, **fields)
        return [[one.tool_name, one.tool_kwargs] for one in model.get_tool_calls_from_response(answer)]

    *_, streamed = model.stream_chat_with_tools(tools, user_msg=QUESTION)
    return {
        "call": called()[0],
        "streamed": [[one.tool_name, one.tool_kwargs] for one in model.get_tool_calls_from_response(streamed)],
        "required": called(tool_required=True),
        "result": str(model.predict_and_call(tools, user_msg=QUESTION).response),
    }


def litellm(url: str) -> dict[str, Any]:
    import litellm

    tool = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: dict[str, Any] = {"model": "openai/llama", "api_base": url, "api_key": "none", "tools": [tool]}

    def told(message: Any) -> list[Any]:
        return [[one.function.name, json.loads(one.function.arguments)] for one in message.tool_calls or []]

    first = litellm.completion(messages=messages, **fields).choices[0].message
    chunks = list(litellm.completion(messages=messages, stream=True, **fields))
    streamed = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    required = litellm.completion(messages=messages, tool_choice="required", **fields).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": RESULT}
    last = litellm.completion(messages=[*messages, first.model_dump(), result], **fields).choices[0].message
    return {
        "call": told(first)[0],
        "answer": last.content,
        "streamed": told(streamed),
        "required": told(required),
    }


if __name__ == "__main__":
    address = sys.argv[1]
    print(json.dumps({one.__name__: one(address) for one in (langchain, llama_index, litellm)}))
