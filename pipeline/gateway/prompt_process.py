"""Process that makes requests into prompts: parses and checks them, applies the chat template, tokenises.

`python -m trtpipe.pipeline.gateway.prompt_process OPTIONS DESCRIPTOR` loads the tokenizer of every model, and forks a
prompt process for each socket that it is sent over DESCRIPTOR, with SMALL or LARGE. A prompt process does the jobs that
come over its socket, one after another, until the socket is closed.

A chat template is a program that came with the model. Jinja's sandbox keeps it from the machine, but bounds neither
its time nor its memory; nor can a thread that parses or tokenises be stopped. The kernel can end a process.

A job and its reply are two lengths, a JSON object and bytes:
  job    {"endpoint", "model"}, the body of the request
  reply  {"options", "adapter", "max_tokens", "lengths", "bias", "guide", "tools"}, the token ids of the prompts as
         INT32; with `echo` also {"echoes"}, the texts of the prompts
         {"count", "max_model_len"}, the token ids as INT32, to a request to tokenize; {"prompt"} to detokenize
         {"failure": {"status", "message", "param", "code"}}
         {"model"}, where the request is for another model than the job says
         {"fault": true}, with details in the log
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

import jinja2.sandbox  # noqa: F401  # loaded once here, and not in every forked process

from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.hf.chat_template import ChatTemplate
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.gateway.failure import Failure
from trtpipe.pipeline.gateway.options import GatewayOptions
from trtpipe.pipeline.gateway.preparation import Preparation
from trtpipe.pipeline.gateway.text import Text

LENGTHS = struct.Struct("<II")
SMALL, LARGE = b"\0", b"\1"
# Processor time of a job with a small body and with a large one, and its memory in addition to the tokenizers.
# A text of 4 MB takes half of the time, or all where each of its characters is a token.
SECONDS = {SMALL: 1.0, LARGE: 10.0}
MEMORY_BYTES = {SMALL: 256 << 20, LARGE: 1 << 30}


def main(options: GatewayOptions, control: socket.socket) -> None:
    """Fork a prompt process for every socket that comes over `control`, until the gateway has ended."""
    try:
        texts = {model.name: Text(model.tokenizer) for model in options.models}
    except TrtpipeError:
        sys.exit(1)  # the worker, which reads the same tokenizers, reports the error
    preparation = Preparation(options, texts)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for text in texts.values():
        for template in text.compiled.values():
            _compile(template)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these children
    control.sendall(b"\0")  # ready
    while True:
        size, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        jobs = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            if size == LARGE:
                os.nice(5)  # small requests, and answers, have priority
            # The gateway closes its end, or has ended.
            with contextlib.suppress(ConnectionError):
                _work(jobs, preparation, size)
            os._exit(0)
        jobs.close()


def _compile(template: ChatTemplate) -> None:
    """Compile the template once for all processes, unless that takes more than a small job may: templates can do so."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    _limit_memory(MEMORY_BYTES[SMALL])
    child = os.fork()
    if child == 0:
        _limit_time(SECONDS[SMALL])
        with contextlib.suppress(Exception):
            template.compile()
            os._exit(0)
        os._exit(1)
    if os.waitpid(child, 0)[1] == 0:
        template.compile()
    resource.setrlimit(resource.RLIMIT_AS, before)


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, most))


def _limit_time(seconds: float) -> None:
    """Have the kernel end this process after this much more processor time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _work(jobs: socket.socket, preparation: Preparation, size: bytes) -> None:
    _limit_memory(MEMORY_BYTES[size])
    while True:
        sizes = LENGTHS.unpack(_receive(jobs, LENGTHS.size))
        job, body = parse_json(_receive(jobs, sizes[0])), _receive(jobs, sizes[1])
        _limit_time(SECONDS[size])
        told, ids = _reply(job, body, preparation)
        _limit_time(0)
        head = json.dumps(told).encode()
        jobs.sendall(LENGTHS.pack(len(head), len(ids)) + head + ids)


def _receive(jobs: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises ConnectionError when the other end is closed."""
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
        os._exit(1)  # the tokenizer also ends the process when memory runs out
    except Exception:
        traceback.print_exc()
        return {"fault": True}, b""
    return prepared


if __name__ == "__main__":
    main(GatewayOptions.from_json(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
