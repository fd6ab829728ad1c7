"""An OpenAI-compatible front for a served repository: chat and text completions over Triton's gRPC stream.

It speaks to the engine model `tensorrt_llm` itself, tokens in and tokens out, and does the text here, for two
reasons. Cancelling: a client that leaves ends its stream, and the engine drops the request within a step; through
an ensemble Triton does not pass this on. Cost: a response that goes through `tensorrt_llm_bls` is sent twice by
Python stubs, at about 100 microseconds of a core each, where making text of a token here takes two.

options         what a gateway is told; plain data, light to import
access          API keys and the certificate, read from files; light to import
supervisor      the worker processes: started, watched, ended
server          the HTTP server of a worker
connections     limits on what clients send, how long it takes, and how many there are
app             the routes
prompts         requests made into prompts, in processes of their own: the worker's side
prompt_process  those processes, with limits of time and memory
preparation     what they do: a request checked, put through the chat template and tokenised
requests        OpenAI's bodies, checked to the last field
text            prompts to tokens and tokens to text, stop strings
upstream        requests to the engine and its answers
answers         OpenAI's answers, whole or as server-sent events
board           counters that all workers share
failure         an error as the client sees it
"""
