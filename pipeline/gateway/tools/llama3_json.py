"""Calls of Llama 3.1 to 3.3: the whole answer is a JSON object, at times behind <|python_tag|>; `;` between several."""

from trtpipe.pipeline.gateway.tools.json_calls import JsonCalls

LLAMA3_JSON = JsonCalls(
    name="llama3_json",
    mark="<|python_tag|>",
    bare="{",
    separator=";",
    sign='{"name": function name, "parameters":',
)
