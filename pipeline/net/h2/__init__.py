"""gRPC client over our own HTTP/2 for token streams: the receive path that the load generator and the gateway share.

A library client spends more time on a response than a served token takes elsewhere. Here one read of the socket is
stamped once, cut into messages without an object per frame, and passed to a callback as raw bytes, to be parsed at
once or later. Plaintext TCP only; the library clients serve TLS.

headers     header blocks, encoded and decoded
peer        detects a peer that speaks another protocol or is gone
frames      constants and frame bytes
status      how a call or a connection ends
connection  one connection and its streams
pool        several connections to one server
triton      Triton's messages: requests built, responses read
"""
