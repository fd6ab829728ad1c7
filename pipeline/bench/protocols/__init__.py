"""Protocols: a codec makes the bytes of requests and reads those of answers, a sender moves them.

transport    what codecs and senders must offer
endpoint     which models a server has, and what a request to one holds
triton_grpc, triton_http, openai_http   the codecs; http_setup asks HTTP servers what they are
h2_sender    gRPC calls through our own HTTP/2 reader
http1, sse   HTTP/1.1 and server-sent events, by readers of our own
library      the same through grpc.aio and httpx, for TLS and proxies
connect      chooses a codec and a sender
"""
