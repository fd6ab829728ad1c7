"""Requests to a server and back: a codec makes and reads their bytes, a sender moves them.

endpoint     what answers, and how a request is put to a model of that family
transport    what codecs and senders have to do
triton_grpc, triton_http, openai_http   the codecs; http_setup asks HTTP servers who they are
h2_sender    gRPC calls through our own HTTP/2 reader
http1, sse   HTTP/1.1 and its event streams, read by ourselves
stamped      TCP connections whose reads have the kernel's stamps
library      the same through grpc.aio and httpx, for TLS and proxies
connect      chooses
"""
