"""Mock server: it computes nothing, sends each token when it is due, and records when it really did.

What a load tester reports can be compared with that record, stamp by stamp: `time.monotonic_ns` is one clock for all
processes of a machine. Linux only.

server   the process: gRPC on one port, HTTP on another
clock    when tokens are due, and the one alarm that wakes for them
script   what a request is answered with, faults on request included, and the record of it
link     one connection: what is written together, and the stamp of the write
frames   HTTP/2 frames of one connection, cut and acknowledged
grpc     Triton's gRPC endpoint, flow control included
triton   Triton's messages and the models that it describes
http     Triton's and OpenAI's HTTP endpoints; events, their server-sent events
child    the server started as a child process
"""
