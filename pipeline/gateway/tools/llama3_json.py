"""Tool calls of Llama 3.1 to 3.3: JSON objects with `;` between them, sometimes after <|python_tag|>."""

from trtpipe.pipeline.gateway.tools.json_calls import JsonCalls

LLAMA3_JSON = JsonCalls(
    name="llama3_json",
    mark="<|python_tag|>",
    bare="{",
    separator=";",
    arguments="parameters",
    sign='{"name": function name, "parameters":',
)
