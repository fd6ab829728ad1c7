"""Process that makes requests into prompts: parses and checks them, applies the chat template, tokenises.

`python -m pipeline.gateway.prompt_process OPTIONS DESCRIPTOR` loads the tokenizer of every model, and forks a prompt
process for each socket that it is sent over DESCRIPTOR. A prompt process does the jobs that come over its socket, one
after another, until the socket is closed.

A chat template is a program that came with the model. Jinja's sandbox keeps it from the machine, but bounds neither
its time nor its memory; nor can a thread that parses or tokenises be stopped. The kernel can end a process.

A job and its reply are two lengths, a JSON object and bytes:
  job    {"endpoint", "model", "large"}, the body of the request
  reply  {"options", "max_tokens", "lengths"}, the token ids of the prompts as INT32
         {"failure": {"status", "message", "param", "code"}}
         {"model"}, where the request is for another model than the job says
         {"fault": true}, of which the log says more
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

from engines.json_input import parse_json
from pipeline.gateway.failure import Failure
from pipeline.gateway.options import GatewayOptions
from pipeline.gateway.preparation import Preparation
from pipeline.gateway.text import Text

LENGTHS = struct.Struct("<II")
# Processor time of a job with a small body and with a large one.
SMALL_SECONDS, LARGE_SECONDS = 1.0, 10.0
# Beyond what the tokenizers take. A text of 4 MB takes half of it, or all where each of its characters is a token.
MEMORY_BYTES = 1 << 30


def main(options: GatewayOptions, control: socket.socket) -> None:
    """Fork a prompt process for every socket that comes over `control`, until the gateway has ended."""
    texts = {model.name: Text(model.tokenizer) for model in options.models}
    preparation = Preparation(options, texts)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these children
    control.sendall(b"\0")  # ready
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        jobs = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            # The gateway closes its end, or has ended.
            with contextlib.suppress(ConnectionError):
                _work(jobs, preparation)
            os._exit(0)
        jobs.close()


def _work(jobs: socket.socket, preparation: Preparation) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while True:
        sizes = LENGTHS.unpack(_receive(jobs, LENGTHS.size))
        job, body = parse_json(_receive(jobs, sizes[0])), _receive(jobs, sizes[1])
        if job["large"]:
            os.nice(10)  # small requests, and answers, come first
        signal.setitimer(signal.ITIMER_PROF, LARGE_SECONDS if job["large"] else SMALL_SECONDS)
        told, ids = _reply(job, body, preparation)
        signal.setitimer(signal.ITIMER_PROF, 0)
        head = json.dumps(told).encode()
        jobs.sendall(LENGTHS.pack(len(head), len(ids)) + head + ids)


def _receive(jobs: socket.socket, size: int) -> bytes:
    """Raises ConnectionError when the other end is closed."""
    data = bytearray()
    while len(data) < size:
        piece = jobs.recv(size - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return bytes(data)


def _reply(job: dict[str, Any], body: bytes, preparation: Preparation) -> tuple[dict[str, Any], bytes]:
    try:
        prepared = preparation.prepare(job["endpoint"], body, expected=job["model"])
    except Failure as failure:
        return {"failure": {name: getattr(failure, name) for name in ("status", "message", "param", "code")}}, b""
    except MemoryError:
        os._exit(1)  # the tokenizer ends the process as well when there is no more memory
    except Exception:
        traceback.print_exc()
        return {"fault": True}, b""
    return prepared


if __name__ == "__main__":
    main(GatewayOptions.from_json(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
