"""What one client's hostile requests cost the other clients of a gateway: latencies and memory, printed as a table.

A gateway with one worker stands in front of a mock Triton that answers each chat after 20 ms. One client asks in turn
for /health/live and for a streamed chat, first undisturbed, then while another client with a valid key sends requests
of one kind in a loop, or holds 10,000 connections. Every client runs in a process of its own.

    python -m tests.attacks.gateway_load [--seconds 5] [--connections 10000] [--only WORD,...] [--tokenizer FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.gateway import Triton, response
from tests.support.factories import write_tokenizer
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.supervisor import Gateway
from trtpipe.pipeline.net.h2 import frames

KEY = "the-key"
ENGINE_SECONDS = 0.02
BODY_BYTES = 4_000_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True})
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


# The mock server


class Engine(Triton):
    """One connection of the gateway to a Triton that answers each request a fixed time after it came."""

    async def run(self) -> None:
        """No clock ticks here."""

    def received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        super().received(kind, flags, number, payload)
        for live in self.live:
            asyncio.get_running_loop().call_later(ENGINE_SECONDS, self.answer, live)
        self.live.clear()

    def answer(self, number: int) -> None:
        self.transport.write(
            self.begin(number) + frames.frame(frames.DATA, 0, number, self.messages[0]) + self.end(number)
        )


def serve(pipe: Pipe) -> None:
    async def main() -> None:
        messages = [response([5], final=True)]
        server = await asyncio.get_running_loop().create_server(lambda: Engine(messages, 1.0), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


# The client that suffers


def measure(pipe: Pipe, port: int) -> None:
    """For each number of seconds received: ask for so long, and send back the two lists of latencies."""
    while seconds := pipe.recv():
        live, first = [], []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            live.append(_ask(port, "GET", "/health/live", b""))
            first.append(_ask(port, "POST", CHAT, HELLO.encode()))
            time.sleep(0.01)
        pipe.send((live, first))


def _ask(port: int, method: str, path: str, body: bytes) -> float:
    """Seconds to the first byte of the answer's body, on a connection of its own; infinite for no answer."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, _headers(KEY))
        answer = connection.getresponse()
        answer.read(1)
        if answer.status != 200:
            return float("inf")
        return time.monotonic() - start
    except OSError:
        return float("inf")
    finally:
        connection.close()


# The client that attacks


def _repeated(start: str, piece: str, end: str) -> bytes:
    return (start + piece * ((BODY_BYTES - len(start) - len(end)) // len(piece)) + end).encode()


def _chat(start: str, piece: str, end: str) -> tuple[str, bytes]:
    return CHAT, _repeated('{"model": "m", "messages": ' + start, piece, end + "}")


BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "deep": lambda: (CHAT, b"[" * BODY_BYTES),
    "deep objects": lambda: (CHAT, _repeated("", '{"a":', "")),
    "escaped key": lambda: _chat('[], "\\u0041": [', "[],", "0]"),
    "empty arrays": lambda: _chat("[", "[],", "0]"),
    "numbers": lambda: (TEXT, _repeated('{"model": "m", "prompt": [', "5,", "5]}")),
    "prompts": lambda: (TEXT, _repeated('{"model": "m", "prompt": [', '"x",', '"x"]}')),
    "messages": lambda: _chat("[", '{"role":"user","content":"x"},', '{"role":"user","content":"x"}]'),
    "parts": lambda: _chat(
        '[{"role":"user","content":[', '{"type":"text","text":"x"},', '{"type":"text","text":"x"}]}]'
    ),
    "words": lambda: _chat('[{"role":"user","content":"', "The quick brown fox. ", '"}]'),
    "digits": lambda: _chat('[{"role":"user","content":"', "0", '"}]'),
    "escapes": lambda: _chat('[{"role":"user","content":"', "\\u4e2d", '"}]'),
    "stops": lambda: _chat('[{"role":"user","content":"x"}], "stop": [', '"x",', '"x"]'),
    "n": lambda: _chat('[{"role":"user","content":"', "x", '"}], "n": 2147483647'),
    "logit_bias": lambda: (
        CHAT,
        json.dumps({"model": "m", "logit_bias": {str(n): 1 for n in range(300_000)}}).encode(),
    ),
    "unknown fields": lambda: (CHAT, json.dumps({"model": "m", **{f"x{n}": 1 for n in range(300_000)}}).encode()),
}


def _one_body(port: int, path: str, body: bytes, key: str = KEY) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        try:
            connection.request("POST", path, body, _headers(key))
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()


def _raw(port: int, head: bytes, piece: bytes, most: int = BODY_BYTES) -> None:
    """Send `piece` after `head` again and again, up to `most` bytes a connection."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head)
            for _ in range(most // len(piece)):
                connection.sendall(piece)
            connection.recv(1 << 16)


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _head(lines: str = "", key: str = KEY) -> bytes:
    fixed = f"Host: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    return f"POST {CHAT} HTTP/1.1\r\n{fixed}{lines}".encode()


CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"


def attack(pipe: Pipe, name: str, port: int) -> None:
    """Send requests of one kind until killed."""
    if name == "wrong key":
        _one_body(port, *BODIES["messages"](), key="wrong")
    elif name == "endless header":
        _raw(port, _head("X: ", "wrong"), b"x" * 65536, 300 << 20)
    elif name == "headers":
        _raw(port, _head(key="wrong"), b"a:b\r\n" * 10_000)
    elif name == "small chunks":
        _raw(port, _head(CHUNKED), b"1\r\n \r\n" * 10_000)
    elif name == "endless chunks":
        _raw(port, _head(CHUNKED), b"10000\r\n" + b" " * 65536 + b"\r\n", 300 << 20)
    else:
        _one_body(port, *BODIES[name]())


ATTACKS = [*BODIES, "wrong key", "endless header", "headers", "small chunks", "endless chunks"]

HELD: dict[str, tuple[bytes, bytes]] = {
    "idle": (b"", b""),
    "head drips": (_head("X: "), b"x"),
    "headers drip": (_head(), b"a:b\r\n"),
    "body drips": (_head("Content-Length: 4000000\r\n\r\n"), b" "),
}


def hold(pipe: Pipe, name: str, port: int, count: int) -> None:
    """Hold `count` connections that send a piece a second each, made again when they are closed, until killed."""
    _raise_limit()
    begin, piece = HELD[name]
    connections: list[socket.socket | None] = [None] * count
    while True:
        start = time.monotonic()
        for place, connection in enumerate(connections):
            try:
                if connection is None:
                    connection = connections[place] = socket.create_connection(("127.0.0.1", port), timeout=5)
                    connection.sendall(begin)
                connection.sendall(piece)
            except OSError:
                if connection is not None:
                    connection.close()
                connections[place] = None
        pipe.send(None)
        time.sleep(max(0.0, start + 1 - time.monotonic()))


# Measuring


class Memory(threading.Thread):
    """The most memory of a gateway worker beyond what it took at first, and of the largest of its prompt processes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.worker = psutil.Process(pid)
        self.first = self.worker.memory_info().rss
        self.most_of_worker = self.most_of_child = 0
        self.stopping = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stopping.wait(0.05):
            with contextlib.suppress(psutil.Error):
                self.most_of_worker = max(self.most_of_worker, self.worker.memory_info().rss - self.first)
                for process in self.worker.children(recursive=True):
                    self.most_of_child = max(self.most_of_child, process.memory_info().rss)

    def __str__(self) -> str:
        return f"{self.most_of_worker / 1e6:.0f} | {self.most_of_child / 1e6:.0f}"


@contextlib.contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Pipe]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _p(latencies: list[float], share: float) -> float:
    """In milliseconds."""
    return sorted(latencies)[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3


def _figures(live: list[float], first: list[float]) -> str:
    lost = sum(one == float("inf") for one in live + first)
    figures = (statistics.median(live) * 1e3, _p(live, 0.99), statistics.median(first) * 1e3, _p(first, 0.99))
    return " | ".join(f"{figure:.1f}" for figure in figures) + f" | {lost} of {len(live + first)}"


def _raise_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(tokenizer: Path, keys: Path, names: list[str], seconds: float, connections: int) -> None:
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(child(serve))
        model = ServedModel(name="m", tokenizer=tokenizer)
        options = GatewayOptions(models=(model,), grpc_url=f"127.0.0.1:{engine.recv()}", port=0, api_keys_file=keys)
        gateway = Gateway.start(options)
        stack.callback(gateway.stop)
        port = gateway.options.port
        client = stack.enter_context(child(measure, port))

        def ask(length: float) -> tuple[list[float], list[float]]:
            client.send(length)
            answer: tuple[list[float], list[float]] = client.recv()
            return answer

        ask(1)
        print("latencies in ms | live p50 | live p99 | first token p50 | p99 | unanswered | worker MB | process MB")
        print("---|---|---|---|---|---|---|---")
        for name in names:
            print(f"undisturbed | {_figures(*ask(seconds))} | |", flush=True)
            memory = Memory(gateway.pids[0])
            held = name in HELD
            with child(*((hold, name, port, connections) if held else (attack, name, port))) as attacker:
                if held:
                    attacker.recv()
                else:
                    time.sleep(1)
                print(f"{name} | {_figures(*ask(seconds))} | {memory}", flush=True)
            memory.stopping.set()
            time.sleep(1)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--only", default=",".join([*ATTACKS, *HELD]))
    parser.add_argument("--tokenizer", type=Path)
    chosen = parser.parse_args(arguments)
    _raise_limit()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{KEY}\n")
        tokenizer = chosen.tokenizer
        if tokenizer is None:
            tokenizer = Path(folder)
            write_tokenizer(tokenizer)
            (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
        run(tokenizer, keys, chosen.only.split(","), chosen.seconds, chosen.connections)


if __name__ == "__main__":
    main(sys.argv[1:])
