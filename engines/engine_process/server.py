"""The engine process: one Runtime, the reference or another, fed over a local socket by the stubs that serve it.

Run with `python -m`. It accepts any number of stubs, writes one message to each per step, and leaves when the last
of them has gone, so a killed server leaves no process behind. SIGTERM does not end it. A step that raises is reported
to every stub before the process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import itertools
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtpipe.engines.engine_process.protocol import TAKEN, VERSION, Connection, peer
from trtpipe.engines.engine_process.request import Output, Request, RequestRefused
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.sampling import Guide, SamplingParams

if TYPE_CHECKING:
    from trtpipe.engines.reference.runtime import Runtime

# How long a new process waits for its first stub, and how long a step may run after the last stub has left.
FIRST_STUB_SECONDS = 60.0
LAST_STEP_SECONDS = 5.0


class _Stub:
    """One connected stub and its requests, under the stub's names for them."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.running: dict[Any, list[str]] = {}  # the stub's number of a sequence -> its request's id and key


class _Peers:
    """Processes of the connected stubs. When tritonserver is gone, they and this process are killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._connected = 0
        self._end: threading.Timer | None = None

    def came(self, pid: int) -> None:
        # A pidfd, since the process id may belong to another process by the time of the kill.
        with contextlib.suppress(ProcessLookupError):
            self._descriptors.append(os.pidfd_open(pid))
        with self._lock:
            self._connected += 1
            if self._end is not None:
                self._end.cancel()

    def left(self) -> None:
        """Count a stub that left. After the last one, a timer ends this process and frees its GPU if a step hangs."""
        with self._lock:
            self._connected -= 1
            if self._connected == 0:
                self._end = threading.Timer(LAST_STEP_SECONDS, _end_at_once)
                self._end.daemon = True
                self._end.start()

    def follow(self, server: int) -> None:
        """Wait for the server's end, then kill its stubs: each hangs in a call to the server that never returns."""
        with contextlib.suppress(ProcessLookupError):  # gone already
            select.select([os.pidfd_open(server)], [], [])
        for descriptor in self._descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        _end_at_once()


def _end_at_once() -> None:
    """Kill this process, and its whole process group if it leads one, as it does when a stub starts it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


Event = tuple[_Stub, dict[str, Any] | None, bytes]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trtpipe.engines.engine_process.server", description=__doc__)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--address", required=True, help="name of the socket, in the kernel's own name space")
    parser.add_argument("--options", type=json.loads, default={}, help="Runtime options as JSON")
    parser.add_argument(
        "--runtime", default="trtpipe.engines.reference.runtime", help="module whose Runtime executes engines"
    )
    parser.add_argument("--protocol", type=int, default=1, help="version of the stubs' protocol, 1 had no option")
    parser.add_argument("--server", type=int, help="end this process and its stubs with this one")
    args = parser.parse_args()
    # systemd sends it to every process of a service at once, while the requests in flight still have their time.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    peers = _Peers()
    if args.server is not None:
        threading.Thread(target=peers.follow, args=(args.server,), daemon=True).start()
    stats_period = float(args.options.pop("stats_check_period_ms", 100)) / 1000
    most = args.options.pop("max_requests", None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind("\0" + args.address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return TAKEN
        listener.listen()
        if args.protocol != VERSION:
            reason = "this server was started by another version of trtpipe: stop it and serve it again"
            _refuse(listener, reason, args.protocol)
            return 1
        try:
            # Imported here, so that the waiting stub, and not only the log, gets the error of a missing torch.
            runtime = importlib.import_module(args.runtime).Runtime(args.engine, **args.options)
        except (TrtpipeError, ImportError, OSError, MemoryError) as error:
            _refuse(listener, str(error) or type(error).__name__)
            return 1
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        threading.Thread(target=_accept, args=(listener, events, peers), daemon=True).start()
        return _serve(runtime, events, stats_period, most)


def _refuse(listener: socket.socket, reason: str, protocol: int = VERSION) -> None:
    """Send the waiting stubs the reason why the engine did not start, in their version of the protocol."""
    listener.settimeout(FIRST_STUB_SECONDS)
    with contextlib.suppress(TimeoutError, BlockingIOError):
        while True:
            sock, _ = listener.accept()
            sock.setblocking(True)
            with contextlib.suppress(OSError):  # the stub did not wait
                Connection(sock, protocol).send({"type": "failed", "error": reason})
            listener.settimeout(0)  # then only stubs that are connected already


def _accept(listener: socket.socket, events: queue.SimpleQueue[Event], peers: _Peers) -> None:
    for number in itertools.count():
        sock, _ = listener.accept()
        pid, user = peer(sock)
        if user != os.geteuid():  # every user of this machine can connect to the address
            sock.close()
            continue
        peers.came(pid)
        stub = _Stub(Connection(sock), number)
        threading.Thread(target=_listen, args=(stub, events, peers), daemon=True).start()


def _listen(stub: _Stub, events: queue.SimpleQueue[Event], peers: _Peers) -> None:
    events.put((stub, {"type": "hello"}, b""))
    while (received := stub.connection.receive()) is not None:
        events.put((stub, *received))
    events.put((stub, None, b""))
    peers.left()


def _serve(runtime: Runtime, events: queue.SimpleQueue[Event], stats_period: float, most: int | None) -> int:
    """Main loop: receive messages, run a step, send its outputs."""
    stubs: dict[int, _Stub] = {}
    next_stats = 0.0
    while True:
        try:
            # Nothing to compute: wait for a message, but exit when no stub ever connects.
            timeout = None if stubs else FIRST_STUB_SECONDS
            batch = [] if runtime.has_work else [events.get(timeout=timeout)]
        except queue.Empty:
            return 0
        while not events.empty():
            batch.append(events.get())
        for stub, message, blob in batch:
            if message is None:
                _forget(runtime, stubs, stub)
            else:
                _handle(runtime, stubs, stub, message, blob, most)
        if not stubs:
            return 0
        try:
            outputs = runtime.step() if runtime.has_work else []
        except Exception as error:
            for stub in stubs.values():
                _send(stub, {"type": "failed", "error": f"the engine failed in a step: {error}"})
            raise
        now = time.monotonic()
        stats = None
        if now >= next_stats or not runtime.has_work:
            stats, next_stats = runtime.stats(), now + stats_period
        _publish(stubs, outputs, stats)


def _handle(
    runtime: Runtime, stubs: dict[int, _Stub], stub: _Stub, message: dict[str, Any], blob: bytes, most: int | None
) -> None:
    kind = message["type"]
    if kind == "hello":
        stubs[stub.number] = stub
        _send(stub, {"type": "ready"})
    elif kind == "cancel":
        runtime.cancel((stub.number, message["id"]))
    elif kind == "stop":
        for owner in stubs.values():
            for number, names in owner.running.items():
                if message["name"] in names:
                    runtime.cancel((owner.number, number))
    elif most is not None and sum(len(owner.running) for owner in stubs.values()) >= most:
        _send(stub, {"type": "refused", "id": message["id"], "full": True})
    else:
        try:
            runtime.submit(_request(stub, message, blob))
            stub.running[message["id"]] = message["names"]
        except RequestRefused as error:
            _log(str(error), error.__cause__)
            _send(stub, {"type": "refused", "id": message["id"], "full": False, "error": str(error)})
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            # A malformed request must not end the requests of other stubs.
            reason = f"the request is malformed: {type(error).__name__}: {error}"
            _send(stub, {"type": "refused", "id": message["id"], "full": False, "error": reason})


def _log(refusal: str, cause: BaseException | None) -> None:
    """Log the cause of a refusal, which the client does not get."""
    if cause is not None:
        with contextlib.suppress(OSError):  # a full disk costs lines of the log, not the engine
            print(f"{refusal}: {cause}", file=sys.stderr, flush=True)


def _forget(runtime: Runtime, stubs: dict[int, _Stub], stub: _Stub) -> None:
    """Remove a stub that has disconnected, and cancel its requests."""
    stubs.pop(stub.number, None)
    for name in stub.running:
        runtime.cancel((stub.number, name))


def _request(stub: _Stub, message: dict[str, Any], blob: bytes) -> Request:
    return Request(
        id=(stub.number, message["id"]),
        prompt=tuple(message["prompt"]),
        max_tokens=message["max_tokens"],
        sampling=SamplingParams(**message["sampling"]),
        end_id=message["end_id"],
        stop_words=tuple(tuple(word) for word in message["stop_words"]),
        bad_words=tuple(tuple(word) for word in message["bad_words"]),
        embedding_bias=np.frombuffer(blob, dtype=np.float32) if blob else None,
        adapter=message["adapter"],
        return_log_probs=message["return_log_probs"],
        return_context_logits=message["return_context_logits"],
        return_generation_logits=message["return_generation_logits"],
        return_prompt_log_probs=message["return_prompt_log_probs"],
        guide=Guide(**message["guide"]) if message["guide"] else None,
    )


def _publish(stubs: dict[int, _Stub], outputs: list[Output], stats: dict[str, Any] | None) -> None:
    """Send one message to each stub; the first stub also gets the statistics and sets the gauges for all."""
    first = min(stubs)
    # With hundreds of requests this loop is the main cost beside the engine, so outputs with only tokens are packed.
    plain: dict[int, list[Any]] = {number: [] for number in stubs}
    others: dict[int, list[Output]] = {}
    for output in outputs:
        number, name = output.id
        if number not in plain:
            continue
        if output.finish is None and output.only_tokens:
            plain[number].append((name, output.tokens, output.reused_blocks, output.allocated_blocks))
        else:
            others.setdefault(number, []).append(output)
    for number, stub in stubs.items():
        told = stats if number == first else None
        mine = others.get(number, [])
        if not plain[number] and not mine and told is None:
            continue
        for output in mine:
            if output.finish:
                stub.running.pop(output.id[1], None)
            if output.finish == "refused":
                _log(output.refusal, output.cause)
                fault = {"error": output.refusal, "failed": output.failed}
                _send(stub, {"type": "refused", "id": output.id[1], "full": False, **fault})
        mine = [output for output in mine if output.finish != "refused"]
        blob = bytearray()
        message: dict[str, Any] = {
            "type": "step", "tokens": plain[number], "outputs": [_entry(output, blob) for output in mine],
        }  # fmt: skip
        if told is not None:
            message["stats"] = told
        _send(stub, message, bytes(blob))


def _entry(output: Output, blob: bytearray) -> dict[str, Any]:
    """One output as JSON; arrays are appended to the block of bytes: logits as [rows, vocabulary] float32."""
    entry: dict[str, Any] = {
        "id": output.id[1],
        "tokens": output.tokens,
        "finish": output.finish,
        "reused_blocks": output.reused_blocks,
        "allocated_blocks": output.allocated_blocks,
        "scheduled_ns": output.scheduled_ns,
    }
    if output.log_probs:
        entry["log_probs"] = output.log_probs
        entry["cum_log_prob"] = output.cum_log_prob
    for name, logits in (("context_logits", output.context_logits), ("generation_logits", output.generation_logits)):
        if logits is not None:
            entry[name] = [len(blob), *logits.shape]
            blob += np.ascontiguousarray(logits, dtype=np.float32).tobytes()
    if output.prompt_log_probs is not None and output.prompt_likeliest is not None:
        entry["prompt_log_probs"] = [len(blob), *output.prompt_log_probs.shape]
        blob += output.prompt_log_probs.tobytes() + output.prompt_likeliest.tobytes()
    return entry


def _send(stub: _Stub, message: dict[str, Any], blob: bytes = b"") -> None:
    with contextlib.suppress(OSError):  # its listener reports the end of the connection
        stub.connection.send(message, blob)


if __name__ == "__main__":
    sys.exit(main())
