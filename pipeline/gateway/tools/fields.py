"""Fields of a request that let its answer call tools, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trtpipe.pipeline.gateway.failure import wrong
from trtpipe.pipeline.gateway.guides import Asked
from trtpipe.pipeline.gateway.strict import Strict
from trtpipe.pipeline.gateway.tools import required
from trtpipe.pipeline.gateway.tools.call_format import CallFormat
from trtpipe.pipeline.gateway.tools.formats import FORMATS, recognise
from trtpipe.pipeline.gateway.tools.parser import ToolUse

# OpenAI's limit.
MAX_TOOLS = 128
# Of a function without parameters, as chat templates take it.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


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
        """The tools that the answer may call: none where the choice is none. Raises Failure for tools and choices that
        contradict one another."""
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

    def use(self, form: CallFormat) -> tuple[ToolUse, Asked | None]:
        """How the answer may call the offered tools, and the form that it must have where it must call one.

        Raises Failure for parameters that no answer can be held to, where one must.
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
        if not must:
            return use, None
        schemas = {function.name: required.arguments(function.parameters, place) for place, function in chosen}
        return use, Asked(required.guide(schemas, parallel=parallel), "tools")


def find_format(name: str | None, template: str | None) -> CallFormat:
    """The format of a model by its name, else as its chat template says. Raises Failure for an unknown one."""
    found = FORMATS[name] if name is not None else recognise(template or "")
    if found is None:
        known = ", ".join(FORMATS)
        raise wrong(
            "'tools': it is not known how this model writes calls; whoever serves it can say so with --tool-format, "
            f"one of {known}",
            "tools",
            "unsupported_parameter",
        )
    return found
