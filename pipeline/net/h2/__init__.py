"""A gRPC client over HTTP/2 of our own, for token streams: the receive path that the load tester and gateway share.

A library client spends more on a response than a served token takes elsewhere. Here one read of the socket is
stamped once, cut into messages without an object a frame, and handed to a callback as raw bytes, to be parsed at
once or later. Plaintext TCP only; TLS is the business of the library clients.

headers     header blocks, encoded and decoded
peer        a peer that speaks something else, a peer that is gone
frames      constants and frame bytes
status      how a call or a connection ends
connection  one connection and its streams
pool        several connections to one server
triton      Triton's messages: requests built, responses read
"""
