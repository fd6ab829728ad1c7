"""Protocols: a codec makes the bytes of requests and reads those of answers; a sender moves them.

transport    interfaces of codecs and senders
endpoint     models of a server, and the inputs of a request to one
triton_grpc, triton_http, openai_http   the codecs; http_setup queries HTTP servers about themselves
h2_sender    gRPC calls through our own HTTP/2 reader
http1, sse   HTTP/1.1 and server-sent events, by readers of our own
library      the same requests through grpc.aio and httpx, for TLS and proxies
connect      chooses a codec and a sender
"""
