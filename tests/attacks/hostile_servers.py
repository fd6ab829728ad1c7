"""Servers that are asked for tokens and answer otherwise: raw sockets on loopback, a thread for each connection."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpack import Decoder, Encoder

from trtpipe.pipeline.bench.mock_server import triton
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.frames import frame
from trtpipe.pipeline.net.h2.triton import STREAM_INFER, messages, pack_strings

# Bytes of an answer on the wire, one piece after the other; without end, or until the connection is closed.
Pieces = Iterable[bytes]

MODEL = "ensemble"
# What the child asks for.
TOKENS = 8


class Server:
    """Listens on 127.0.0.1 until `close`; `talk` has a connection's socket for as long as it likes."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        self._talk = talk
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        # So little that a client soon notices who reads nothing.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._talk(sock)
        sock.close()
        self._open.discard(sock)


def after(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def drip(data: bytes, pause_s: float) -> Iterator[bytes]:
    """A byte at a time."""
    for place in range(len(data)):
        time.sleep(pause_s)
        yield data[place : place + 1]


def without_end(*pieces: bytes, pause_s: float = 0) -> Iterator[bytes]:
    while True:
        yield from pieces
        if pause_s:
            time.sleep(pause_s)


# HTTP/1.1


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(*lines: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *lines]) + b"\r\n\r\n"


CHUNKED = head(b"content-type: text/event-stream", b"transfer-encoding: chunked")


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str, **more: Any) -> bytes:
    """A chat's event with some text."""
    return event({"choices": [{"index": 0, "delta": {"content": text}}], **more})


def chat(*events: bytes, usage: Any = None) -> bytes:
    """A whole answer: TOKENS events with a word each, then `events`, the usage and the end."""
    told = usage or {"prompt_tokens": 4, "completion_tokens": TOKENS}
    closing = [*events, event({"choices": [], "usage": told}), b"data: [DONE]\n\n"]
    return CHUNKED + b"".join(map(chunk, [*[delta(" word")] * TOKENS, *closing])) + b"0\r\n\r\n"


def http_server(attack: Callable[[], Pieces], *, on: str = "POST", good: int = 1) -> Server:
    """An OpenAI-compatible server, whose answers to `on` (POST, or a path that is asked for with GET) are `attack`
    after `good` answers that are as they should be."""
    left = [good]

    def talk(sock: socket.socket) -> None:
        reader = sock.makefile("rb")
        while line := reader.readline():
            method, path, _ = line.decode("latin-1").split(" ", 2)
            length = 0
            while (header := reader.readline()) not in (b"\r\n", b""):
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            reader.read(length)
            if on in (method, path):
                left[0] -= 1
                if left[0] < 0:
                    for piece in attack():
                        sock.sendall(piece)
                    continue
            sock.sendall(chat() if method == "POST" else _described(path))

    return Server(talk)


def _described(path: str) -> bytes:
    values: dict[str, Any] = {
        "/v1/models": {"object": "list", "data": [{"id": MODEL}]},
        "/v2": {"name": "triton", "version": "2.51.0"},
        f"/v2/models/{MODEL}": triton.metadata(MODEL),
    }
    body = json.dumps(values.get(path, {})).encode()
    return head(b"content-length: %d" % len(body)) + body


# gRPC


@dataclass
class Call:
    """A call that has been asked."""

    number: int
    method: str


GRPC_HEAD = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")])
GRPC_TAIL = Encoder().encode([("grpc-status", "0")])


def headers(number: int, block: bytes = GRPC_HEAD, *, last: bool = False) -> bytes:
    return frames.header_frames(number, block, 16384, end_stream=last)


def data(number: int, message: bytes, *, length: int | None = None, compressed: int = 0) -> bytes:
    """A message in frames; `length` is what its prefix says."""
    body = struct.pack(">BL", compressed, len(message) if length is None else length) + message
    return b"".join(frame(frames.DATA, 0, number, body[at : at + 16384]) for at in range(0, len(body), 16384))


def tokens(count: int = 1, text: str = " word", *, final: bool = False) -> bytes:
    """A response of the text front."""
    out = messages().ModelStreamInferResponse()
    reply = out.infer_response
    reply.model_name, reply.model_version = MODEL, "1"
    reply.parameters["triton_final_response"].bool_param = final
    for name, kind in (("text_output", "BYTES"), ("num_output_tokens", "INT32")):
        reply.outputs.add(name=name, datatype=kind, shape=[1, 1])
    reply.raw_output_contents.extend([pack_strings([text]), struct.pack("<i", count)])
    return bytes(out.SerializeToString())


def generated(number: int, *responses: bytes) -> bytes:
    """A whole answer: TOKENS responses, the last of which is final, and `responses` before it."""
    all_of_them = [*[tokens()] * (TOKENS - 1), *responses, tokens(final=True)]
    return headers(number) + b"".join(data(number, one) for one in all_of_them) + headers(number, GRPC_TAIL, last=True)


def grpc_server(
    attack: Callable[[int], Pieces], *, on: str = STREAM_INFER, good: int = 1, reads_on: bool = True
) -> Server:
    """A Triton whose answers to the method `on` are `attack` (of a stream's number), after `good` answers that are as
    they should be. A server that does not read on takes nothing more from its client once it attacks."""
    left = [good]

    def talk(sock: socket.socket) -> None:
        reader = sock.makefile("rb")
        if reader.read(len(frames.PREFACE)) != frames.PREFACE:
            return
        sock.sendall(frames.settings_frame({frames.HEADER_TABLE_SIZE: 0}))
        writing = threading.Lock()
        ended: set[int] = set()

        def answer(pieces: Pieces, number: int = 0) -> None:
            with contextlib.suppress(OSError):
                for piece in pieces:
                    with writing:
                        sock.sendall(piece)
                    if number in ended:
                        return

        decoder = Decoder()
        methods: dict[int, str] = {}
        while True:
            high, low, kind, flags, number = frames.HEADER.unpack(_exactly(reader, 9))
            payload = _exactly(reader, high << 16 | low)
            if kind == frames.SETTINGS and not flags & frames.ACK:
                answer([frame(frames.SETTINGS, frames.ACK, 0)])
            elif kind == frames.PING and not flags & frames.ACK:
                answer([frame(frames.PING, frames.ACK, 0, payload)])
            elif kind == frames.RST_STREAM:
                ended.add(number)
            elif kind == frames.HEADERS:
                methods[number] = dict(decoder.decode(payload, raw=True))[b":path"].decode()
            elif kind == frames.DATA:
                method = methods.pop(number, "")  # a request is one frame here
                if not method:
                    continue
                answer([frames.window_update(0, len(payload)), frames.window_update(number, len(payload))])
                if method == on:
                    left[0] -= 1
                if method == on and left[0] < 0:
                    if not reads_on:
                        answer(attack(number))
                        return
                    threading.Thread(target=answer, args=(attack(number), number), daemon=True).start()
                elif method == STREAM_INFER:
                    answer([generated(number)])
                else:
                    answer([_unary(number, triton.describe(method.rpartition("/")[2], payload[5:]))])

    return Server(talk)


def _unary(number: int, message: bytes) -> bytes:
    return headers(number) + data(number, message) + headers(number, GRPC_TAIL, last=True)


def _exactly(reader: Any, count: int) -> bytes:
    found: bytes = reader.read(count)
    if len(found) < count:
        raise EOFError
    return found
