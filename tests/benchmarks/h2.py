"""What one streamed response costs to receive: our HTTP/2 reader beside grpc.aio, in one run on one machine.

A server in a process of its own sends responses as a served model does (a token's worth of bytes for every stream at
each tick of a clock, made beforehand); the client's own CPU time is counted, from the first response to the last, the
socket's system calls included. "parsed" reads each response's outputs as well. "fed" is our path without a socket.

    python -m tests.benchmarks.h2 [--streams 64,256] [--tokens 200] [--tick 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import struct
import sys
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

from hpack import Encoder

from trtpipe.pipeline.bench.mock_server.frames import FrameServer
from trtpipe.pipeline.net.h2 import frames

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def response(token: int, *, final: bool) -> bytes:
    from tritonclient.grpc import service_pb2

    out = service_pb2.ModelStreamInferResponse()
    reply = out.infer_response
    reply.model_name, reply.model_version, reply.id = "tensorrt_llm", "1", "0123456789abcdef0123456789abcdef"
    reply.parameters["triton_final_response"].bool_param = final
    for name, shape in (("output_ids", [1, 1, 1]), ("sequence_length", [1, 1])):
        reply.outputs.add(name=name, datatype="INT32", shape=shape)
        reply.raw_output_contents.append(struct.pack("<i", token))
    return bytes(out.SerializeToString())


class Server(FrameServer):
    """As much of a gRPC server as the benchmark needs: bytes made beforehand, one write for all streams a tick."""

    def __init__(self, tokens: int, tick: float) -> None:
        super().__init__()
        self.tick = tick
        self.messages = [response(token, final=token + 1 == tokens) for token in range(tokens)]
        self.streams: list[int] = []

    def received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.DATA and flags & frames.END_STREAM:
            self.streams.append(number)
            if len(self.streams) == 1:
                self.answering = asyncio.ensure_future(self.answer())

    async def answer(self) -> None:
        head = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")])
        tail = Encoder().encode([("grpc-status", "0")])
        start = time.monotonic() + 1.0
        for index, message in enumerate(self.messages):
            await asyncio.sleep(max(0.0, start + index * self.tick - time.monotonic()))
            body = frames.PREFIX.pack(0, len(message)) + message
            out = []
            for number in self.streams:
                if index == 0:
                    out.append(frames.header_frames(number, head, 16384))
                out.append(frames.frame(frames.DATA, 0, number, body))
                if message is self.messages[-1]:
                    out.append(frames.header_frames(number, tail, 16384, end_stream=True))
            self.transport.write(b"".join(out))
        self.streams = []


def serve(pipe: Pipe, tokens: int, tick: float) -> None:
    """Serve until killed."""

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Server(tokens, tick), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def through_ours(port: int, streams: int, request: bytes, parsed: bool) -> tuple[int, float]:
    from trtpipe.pipeline.net.h2.connection import Connection
    from trtpipe.pipeline.net.h2.status import Status
    from trtpipe.pipeline.net.h2.triton import Reader

    connection = await Connection.open("127.0.0.1", port)
    kept: list[list[tuple[bytes, int]]] = []
    ends: list[Status] = []
    done = asyncio.Event()
    begun = [0.0]

    def ended(status: Status, stamp: int) -> None:
        ends.append(status)
        if len(ends) == streams:
            done.set()

    for _ in range(streams):
        mine: list[tuple[bytes, int]] = []
        reader = Reader()
        kept.append(mine)

        def keep(data: bytes, stamp: int, mine: list[tuple[bytes, int]] = mine) -> None:
            if not begun[0]:
                begun[0] = time.process_time()
            mine.append((data, stamp))

        def read(data: bytes, stamp: int, reader: Reader = reader, mine: list[Any] = mine) -> None:
            if not begun[0]:
                begun[0] = time.process_time()
            mine.append(reader.read(data).outputs["output_ids"])

        connection.start(METHOD, request, on_data=read if parsed else keep, on_end=ended)
    await done.wait()
    spent = time.process_time() - begun[0]
    connection.close()
    assert all(status.ok for status in ends), ends[0]
    return sum(map(len, kept)), spent


async def through_grpc(port: int, streams: int, request: bytes, parsed: bool) -> tuple[int, float]:
    import grpc
    from tritonclient.grpc import service_pb2

    begun = [0.0]
    decode = service_pb2.ModelStreamInferResponse.FromString
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        method = channel.stream_stream(METHOD, response_deserializer=decode if parsed else None)

        async def one() -> int:
            call = method()
            await call.write(request)
            await call.done_writing()
            count = 0
            async for message in call:
                if not begun[0]:
                    begun[0] = time.process_time()
                if parsed:
                    reply = message.infer_response
                    dict(zip((output.name for output in reply.outputs), reply.raw_output_contents, strict=True))
                count += 1
            return count

        counts = await asyncio.gather(*(one() for _ in range(streams)))
        return sum(counts), time.process_time() - begun[0]


def fed(streams: int, parsed: bool) -> float:
    """Microseconds a response from bytes in memory, a tick's worth a read."""
    from trtpipe.pipeline.net.h2.connection import Connection
    from trtpipe.pipeline.net.h2.triton import Reader

    loop = asyncio.new_event_loop()
    connection = Connection("benchmark", loop)
    connection.data_received(frames.settings_frame({}))
    head = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")])
    kept: list[Any] = []
    for _ in range(streams):
        reader = Reader()

        def keep(data: bytes, stamp: int) -> None:
            kept.append((data, stamp))

        def read(data: bytes, stamp: int, reader: Reader = reader) -> None:
            kept.append(reader.read(data).outputs["output_ids"])

        stream = connection.start(METHOD, b"", on_data=read if parsed else keep, on_end=lambda status, stamp: None)
        connection.data_received(frames.header_frames(stream.number, head, 16384))
    message = response(7, final=False)
    body = frames.PREFIX.pack(0, len(message)) + message
    tick = b"".join(frames.frame(frames.DATA, 0, 2 * index + 1, body) for index in range(streams))
    connection.data_received(tick)
    rounds = max(1, 50_000 // streams)
    begun = time.process_time()
    for _ in range(rounds):
        connection.data_received(tick)
        kept.clear()
    spent = time.process_time() - begun
    connection.close()
    loop.close()
    return spent / rounds / streams * 1e6


def measure(port: int, name: str, streams: int, parsed: bool, pipe: Pipe) -> None:
    """In a process of its own, so that neither client runs in what the other left behind."""
    from tritonclient.grpc import service_pb2  # noqa: F401  # its import is not a part of a response's cost

    run = through_grpc if name == "grpc.aio" else through_ours
    if name == "ours, uvloop":
        import uvloop

        uvloop.install()
    pipe.send(asyncio.run(run(port, streams, b"\x0a\x01m", parsed)))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", default="64,256")
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--tick", type=float, default=40.0, help="milliseconds between the tokens of a stream")
    chosen = options.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, chosen.tokens, chosen.tick / 1000), daemon=True)
    server.start()
    port = here.recv()
    try:
        for streams in map(int, chosen.streams.split(",")):
            for parsed in (False, True):
                cost = {}
                for name in ("grpc.aio", "ours", "ours, uvloop"):
                    result, child_end = context.Pipe()
                    child = context.Process(target=measure, args=(port, name, streams, parsed, child_end))
                    child.start()
                    count, spent = result.recv()
                    child.join()
                    assert count == streams * chosen.tokens, (name, count)
                    cost[name] = spent / count * 1e6
                line = {
                    "streams": streams,
                    "parsed": parsed,
                    "fed us": round(fed(streams, parsed), 2),
                    **{f"{name} us": round(value, 2) for name, value in cost.items()},
                    "ratio": round(cost["grpc.aio"] / cost["ours"], 1),
                    "ratio, uvloop": round(cost["grpc.aio"] / cost["ours, uvloop"], 1),
                }
                print(json.dumps(line))
    finally:
        server.terminate()
        server.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
