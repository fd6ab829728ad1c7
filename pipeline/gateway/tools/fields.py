"""Fields of a request that offer tools to the model: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from trtpipe.engines.sampling import Guide
from trtpipe.pipeline.gateway.failure import wrong
from trtpipe.pipeline.gateway.guides import GuideRequest
from trtpipe.pipeline.gateway.strict import Strict
from trtpipe.pipeline.gateway.tools import required
from trtpipe.pipeline.gateway.tools.call_format import CallFormat
from trtpipe.pipeline.gateway.tools.formats import FORMATS, recognise
from trtpipe.pipeline.gateway.tools.parser import ToolUse

# OpenAI's limit.
MAX_TOOLS = 128
# Schema that chat templates get for a function without parameters.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# Schema for the arguments of functions that are not `strict`.
ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


class FunctionField(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionField

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or NO_PARAMETERS
        return {"type": "function", "function": function}


class FunctionName(Strict):
    name: str


class ToolName(Strict):
    type: Literal["function"]
    function: FunctionName


class ToolFields(Strict):
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = None

    def offered(self) -> list[Tool]:
        """The tools that the model may call: none where `tool_choice` is "none". Raises Failure for two tools with one
        name, parameters that are no object, and a choice that is not among the tools."""
        tools = self.tools or []
        names: set[str] = set()
        for number, tool in enumerate(tools):
            if tool.function.name in names:
                place = f"tools.{number}.function.name"
                raise wrong(f"'{place}': another tool has the name '{tool.function.name}'", place)
            names.add(tool.function.name)
            if (tool.function.parameters or NO_PARAMETERS).get("type", "object") != "object":
                place = f"tools.{number}.function.parameters"
                raise wrong(f"'{place}': the schema's type is not that of an object", place)
        if isinstance(self.tool_choice, ToolName):
            if self.tool_choice.function.name not in names:
                raise wrong("'tool_choice' names a function that is not in 'tools'", "tool_choice")
        elif self.tool_choice == "required" and not tools:
            raise wrong("'tool_choice' is \"required\", and there are no 'tools'", "tool_choice")
        return [] if self.tool_choice == "none" else tools

    def use(self, form: CallFormat) -> tuple[ToolUse, GuideRequest | None]:
        """How the answer may call the offered tools, and the guide for an answer that must call one, or whose calls of
        a function must match its schema (`strict`).

        Raises Failure where guided decoding cannot enforce the schema of a tool's parameters.
        """
        named = self.tool_choice.function.name if isinstance(self.tool_choice, ToolName) else None
        chosen = [
            (f"tools.{number}.function.parameters", tool.function)
            for number, tool in enumerate(self.offered())
            if named in (None, tool.function.name)
        ]
        # A choice of one function is a choice of one call.
        parallel = self.parallel_tool_calls is not False and named is None
        must = named is not None or self.tool_choice == "required"
        names = tuple(function.name for _, function in chosen)
        use = ToolUse(format=form.name, names=names, required=must, parallel=parallel)
        schemas = {
            function.name: required.arguments(function.parameters, place) if must or function.strict else ANY_ARGUMENTS
            for place, function in chosen
        }
        if must:
            return use, GuideRequest(required.guide(schemas, parallel=parallel), "tools")
        if not any(function.strict for _, function in chosen):
            return use, None
        tag = form.structural_tag(schemas)
        if tag is None:
            why = f"it needs a call that is required, since this model writes calls in the format {form.name}"
            raise wrong(f"'strict' of a function in 'tools': {why}", "tools", "unsupported_parameter")
        return use, GuideRequest(Guide("structural_tag", json.dumps(tag, ensure_ascii=False)), "tools")


def find_format(name: str | None, template: str | None) -> CallFormat:
    """The format called `name`; for None the one that the chat template asks for. Raises Failure if it is unknown."""
    found = FORMATS[name] if name is not None else recognise(template or "")
    if found is None:
        known = ", ".join(FORMATS)
        raise wrong(
            "'tools': the format of this model's tool calls is not known; the server's operator can give it with "
            f"--tool-format, one of {known}",
            "tools",
            "unsupported_parameter",
        )
    return found
