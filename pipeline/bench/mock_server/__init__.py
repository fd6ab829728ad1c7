"""A server of known timing: it computes nothing, says each token when it is due, and remembers when it really did.

What a load tester reports can be held against it, stamp by stamp: `time.monotonic_ns` is one clock for all processes
of a machine. Linux only.

clock    when tokens are due, and the one alarm that wakes for them
script   what a request is answered with, faults on request included, and what is remembered of it
link     one connection: what is written together, and the stamp of the write
frames   the HTTP/2 frames of one connection, cut and acknowledged
grpc     Triton's gRPC endpoint, flow control included
triton   its messages and the models that it describes
http     Triton's and OpenAI's HTTP endpoints
events   their server-sent events
child    the server as a process of its own
"""
