"""OpenAI-compatible gateway for a served repository: chat and text completions over Triton's gRPC stream.

The gateway sends tokens to the engine model `tensorrt_llm` and receives tokens; it converts text itself, for two
reasons. Cancelling: when a client leaves, its stream ends, and the engine drops the request within a step; Triton
does not pass this on through an ensemble. Cost: a response that goes through `tensorrt_llm_bls` is sent twice by
Python stubs, at about 100 microseconds of a core each; making text of a token here takes two.

options         the gateway's options; plain data, light to import
access          API keys and the certificate, read from files; light to import
supervisor      the worker processes: started, watched, ended
server          the HTTP server of a worker
connections     limits on what clients send, how long it takes, and how many there are
app             the routes, with vLLM's /tokenize and /detokenize
prompts         preparation of prompts in processes of their own: the worker's side
prompt_process  those processes, with limits of time and memory
preparation     their work: a request is checked, put through the chat template and tokenised
requests        OpenAI's request bodies, with every field checked
text            prompts to tokens and tokens to text, stop strings
upstream        requests to the engine, and its answers
answers         OpenAI's answers, whole or as server-sent events
shared_counters counters that all workers share
failure         errors as the client sees them
traces          spans of requests for an OpenTelemetry collector; light to import
"""
