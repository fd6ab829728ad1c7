"""Tool calls of Hermes, Qwen 2.5 and Qwen 3: each is a JSON object between <tool_call> and </tool_call>."""

from trtpipe.pipeline.gateway.tools.json_calls import JsonCalls

HERMES = JsonCalls(name="hermes", mark="<tool_call>", close="</tool_call>", margin="\n", sign="<tool_call>")
