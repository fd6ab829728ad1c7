"""Mock server: it computes nothing, sends each token when it is due, and records when it actually sent it.

The report of a load generator can be compared with that record, stamp by stamp: `time.monotonic_ns` is one clock for
all processes of a machine. Linux only.

server   the process: gRPC on one port, HTTP on another
clock    schedule of token times, and the alarm that wakes the server for them
script   scripted answers to requests, faults included, and the record of each request
link     one connection: bytes written together, and the stamp of the write
frames   server side of HTTP/2 framing
grpc     Triton's gRPC endpoint, flow control included
triton   Triton's messages and the models that it describes
http     Triton's and OpenAI's HTTP endpoints; events, their server-sent events
child    the server started as a child process
"""
