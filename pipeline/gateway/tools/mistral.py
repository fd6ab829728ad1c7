"""Tool calls of Mistral's models with a version 3 tokenizer: a JSON array of objects after [TOOL_CALLS]."""

from trtpipe.pipeline.gateway.tools.json_calls import JsonCalls

MISTRAL = JsonCalls(
    name="mistral",
    mark="[TOOL_CALLS]",
    opening="[",
    separator=",",
    close="]",
    sign="[TOOL_CALLS]",
    prefix="[TOOL_CALLS]",
    short_ids=True,
)
