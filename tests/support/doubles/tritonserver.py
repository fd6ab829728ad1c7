"""A double of tritonserver and mpirun for tests of how a container is started; it serves nothing.

As `mpirun` it starts every rank's words; as `tritonserver` it says what it was told, and answers health, a
generation and a load the way Triton does. A rank that loads the engine's model alone never listens, as upstream's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def mpirun(words: list[str]) -> int:
    ranks: list[list[str]] = [[]]
    words = words[words.index("-n") :]
    for word in words:
        if word == ":":
            ranks.append([])
        else:
            ranks[-1].append(word)
    for rank in ranks:
        assert rank[:3] == ["-n", "1", "tritonserver"], rank
    children = [subprocess.Popen(rank[2:]) for rank in ranks]

    def pass_on(got: int, frame: object) -> None:
        for child in children:
            child.send_signal(got)

    # Ctrl-C and the like go to mpirun, which passes them on.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return max(child.wait() for child in children)


def tritonserver(words: list[str]) -> int:
    options: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.partition("=")
        options.setdefault(name, []).append(value)
    print(json.dumps({"uid": os.getuid(), "words": words}), flush=True)
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    models = options["--load-model"]
    repository = Path(options["--model-repository"][0])
    missing = [name for name in models if not (repository / name / "config.pbtxt").is_file()]
    if missing:
        print(f"E1121 failed to load '{missing[0]}' version 1: Internal: no config.pbtxt", flush=True)
        return 1
    if models == ["tensorrt_llm"]:
        while True:
            time.sleep(60)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            if self.path.endswith("/load"):
                print(f"loaded {self.path.split('/')[-2]}", flush=True)
            self._answer({"text_output": "a"})

        def _answer(self, value: dict[str, str]) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None: ...

    address = (options["--http-address"][0], int(options["--http-port"][0]))
    ThreadingHTTPServer(address, Handler).serve_forever()
    return 0


if __name__ == "__main__":
    called = Path(sys.argv[0]).name
    sys.exit(mpirun(sys.argv[1:]) if called == "mpirun" else tritonserver(sys.argv[1:]))
