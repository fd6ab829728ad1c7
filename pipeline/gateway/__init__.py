"""An OpenAI-compatible front for a served repository: chat and text completions over Triton's gRPC stream.

It speaks to the engine model `tensorrt_llm` itself, tokens in and tokens out, and does the text here, for two
reasons. Cancelling: a client that leaves ends its stream, and the engine drops the request within a step; through
an ensemble Triton does not pass this on. Cost: a response that goes through `tensorrt_llm_bls` is sent twice by
Python stubs, at about 100 microseconds of a core each, where making text of a token here takes two.

options     what a gateway is told; plain data, light to import
access      API keys and the certificate, read from files; light to import
supervisor  the worker processes: started, watched, ended
requests    OpenAI's bodies, checked to the last field
text        prompts to tokens and tokens to text, stop strings
upstream    requests to the engine and its answers
answers     OpenAI's answers, whole or as server-sent events
app         the routes
board       counters that all workers share
failure     an error as the client sees it
"""
