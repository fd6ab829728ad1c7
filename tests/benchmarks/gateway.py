"""What a streamed token costs in the gateway: CPU seconds of one worker per 1,000 tokens, by streams and endpoint.

Behind it a Triton of bytes made beforehand, which answers every stream at each tick of a clock; before it readers
that take what comes and count. Both run in a process of their own; the worker's CPU time is read from the system,
from the first token of all streams to the last, and over whole requests as well (parsing, tokenising, template).

    python -m tests.benchmarks.gateway [--streams 64,256] [--tokens 128] [--tick 20] [--endpoint completions]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from hpack import Decoder, Encoder

from trtpipe.pipeline.bench.mock_server.frames import FrameServer
from trtpipe.pipeline.net.h2 import frames

WORDS = "The quick brown fox jumps over the lazy dog and goes home to sleep until the sun is up again. "


def response(tokens: list[int], *, final: bool) -> bytes:
    from tritonclient.grpc import service_pb2

    out = service_pb2.ModelStreamInferResponse()
    reply = out.infer_response
    reply.model_name, reply.model_version = "tensorrt_llm", "1"
    reply.parameters["triton_final_response"].bool_param = final
    for name, shape, data in (
        ("output_ids", [1, 1, len(tokens)], struct.pack(f"<{len(tokens)}i", *tokens)),
        ("sequence_length", [1, 1], struct.pack("<i", len(tokens))),
    ):
        reply.outputs.add(name=name, datatype="INT32", shape=shape)
        reply.raw_output_contents.append(data)
    return bytes(out.SerializeToString())


def _config() -> bytes:
    from tritonclient.grpc import model_config_pb2, service_pb2

    config = model_config_pb2.ModelConfig(name="tensorrt_llm")
    config.model_transaction_policy.decoupled = True
    for name in ("input_ids", "seed", "min_tokens", "exclude_input_in_output", "return_log_probs"):
        config.input.add(name=name)
    return bytes(service_pb2.ModelConfigResponse(config=config).SerializeToString())


class Triton(FrameServer):
    """One connection of a worker. A stream begins at the first tick after its request."""

    clock: dict[str, Any]

    def __init__(self, messages: list[bytes], tick: float) -> None:
        super().__init__()
        self.messages = [frames.PREFIX.pack(0, len(message)) + message for message in messages]
        self.tick = tick
        self.live: dict[int, int] = {}
        self.paths: dict[int, str] = {}
        self.decoder = Decoder()
        self.head = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")])
        self.tail = Encoder().encode([("grpc-status", "0")])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.running = asyncio.ensure_future(self.run())

    def connection_lost(self, exc: Exception | None) -> None:
        self.running.cancel()

    def received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self.paths[number] = next(
                bytes(value).decode() for name, value in self.decoder.decode(payload, raw=True) if name == b":path"
            )
        elif kind == frames.RST_STREAM:
            self.live.pop(number, None)
        elif kind == frames.DATA and flags & frames.END_STREAM:
            if self.paths.pop(number).endswith("ModelConfig"):
                answer = _config()
                body = frames.frame(frames.DATA, 0, number, frames.PREFIX.pack(0, len(answer)) + answer)
                self.transport.write(self.begin(number) + body + self.end(number))
            else:
                self.live[number] = 0

    def begin(self, number: int) -> bytes:
        return frames.header_frames(number, self.head, 16384)

    def end(self, number: int) -> bytes:
        return frames.header_frames(number, self.tail, 16384, end_stream=True)

    async def run(self) -> None:
        start = time.monotonic()
        ticks = 0
        while True:
            ticks += 1
            await asyncio.sleep(max(0.0, start + ticks * self.tick - time.monotonic()))
            out = []
            for number, place in list(self.live.items()):
                if place == 0:
                    out.append(self.begin(number))
                out.append(frames.frame(frames.DATA, 0, number, self.messages[place]))
                self.live[number] = place + 1
                if place + 1 == len(self.messages):
                    out.append(self.end(number))
                    del self.live[number]
            if out:
                self.transport.write(b"".join(out))


def serve(pipe: Pipe, tokenizer: str, tokens: int, tick: float) -> None:
    """Serve until killed."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode(WORDS * (tokens // 10 + 1)).ids[:tokens]
    messages = [response([token], final=place + 1 == tokens) for place, token in enumerate(ids)]

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Triton(messages, tick), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


class Reader(asyncio.Protocol):
    """A client with one request; done when the stream is."""

    def __init__(self, request: bytes, first: list[float], done: asyncio.Future[None]) -> None:
        self.request = request
        self.first = first
        self.done = done
        self.events = 0
        self.last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: {")
        if self.events and len(self.first) == 0:
            self.first.append(time.monotonic())
        self.last = (self.last + data)[-64:]
        if b"[DONE]" in self.last and not self.done.done():
            self.done.set_result(None)


async def load(port: int, streams: int, body: bytes, path: str, cpu: Any) -> tuple[int, float, float, float]:
    """(events, CPU seconds from the first token, over everything, wall seconds from the first token)."""
    loop = asyncio.get_running_loop()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    first: list[float] = []
    futures = [loop.create_future() for _ in range(streams)]
    before = cpu()
    readers = []
    for future in futures:
        reader = Reader(head.encode() + body, first, future)
        readers.append(reader)
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)  # type: ignore[misc]
    while not first:
        await asyncio.sleep(0.001)
    middle = cpu()
    await asyncio.gather(*futures)
    after = cpu()
    for reader in readers:
        reader.transport.close()
    return sum(reader.events for reader in readers), after - middle, after - before, time.monotonic() - first[0]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", default="64,256")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--tick", type=float, default=40.0, help="milliseconds between the tokens of a stream")
    options.add_argument("--endpoint", default="completions", choices=("completions", "chat"))
    options.add_argument("--tokenizer", type=Path, help="folder of a real tokenizer; else a byte-level one is made")
    chosen = options.parse_args()
    import psutil

    from tests.support.factories import write_tokenizer
    from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
    from trtpipe.pipeline.gateway.supervisor import Gateway

    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = chosen.tokenizer or Path(scratch)
        if chosen.tokenizer is None:
            write_tokenizer(tokenizer)
            (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        triton = context.Process(
            target=serve, args=(there, str(tokenizer), chosen.tokens, chosen.tick / 1000), daemon=True
        )
        triton.start()
        served = ServedModel(name="m", tokenizer=tokenizer)
        gateway = Gateway.start(GatewayOptions(models=(served,), grpc_url=f"127.0.0.1:{here.recv()}", port=0))
        try:
            worker = psutil.Process(gateway.pids[0])

            def cpu() -> float:
                times = worker.cpu_times()
                return float(times.user + times.system)

            prompt: dict[str, Any] = (
                {"prompt": "Hello"}
                if chosen.endpoint == "completions"
                else {"messages": [{"role": "user", "content": "Hello"}]}
            )
            asked = {"model": "m", "max_tokens": chosen.tokens, "stream": True, "ignore_eos": True, **prompt}
            path = "/v1/completions" if chosen.endpoint == "completions" else "/v1/chat/completions"
            for streams in (1, *map(int, chosen.streams.split(","))):  # the first warms it up
                measured = asyncio.run(load(gateway.options.port, streams, json.dumps(asked).encode(), path, cpu))
                events, spent, whole, wall = measured
                tokens = streams * chosen.tokens
                line = {
                    "streams": streams,
                    "tokens": tokens,
                    "events": events,
                    "tokens/s": round(tokens / wall),
                    "offered": round(streams / chosen.tick * 1000),
                    "CPU s per 1,000 tokens": round(spent / tokens * 1000, 4),
                    "with the requests": round(whole / tokens * 1000, 4),
                }
                print(json.dumps(line), flush=True)
        finally:
            gateway.stop()
            triton.terminate()
            triton.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
