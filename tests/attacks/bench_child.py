"""A process that measures one server after the other, and says of each what came of it and how much memory it took.

Reads a JSON object a line: protocol, url, and optionally metrics_url, transport, timeout_s, token_timeout_s and
requests. Answers a JSON object a line: `kinds` (failed requests by class), `messages`, `good` (requests that did not
fail), `stopped`, or `error` where nothing was measured; `seconds`, and `peak_mb`, the most memory that the process has
had meanwhile beside what it had before.

    python -m tests.attacks.bench_child

`Child` starts it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from tests.attacks.hostile_servers import MODEL, TOKENS
from tests.support.paths import ROOT
from trtpipe.engines.errors import TrtpipeError
from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.monitors import server as server_side
from trtpipe.pipeline.bench.options import BenchOptions, Target
from trtpipe.pipeline.bench.protocols import h2_sender, http_setup
from trtpipe.pipeline.bench.protocols.connect import Wiring
from trtpipe.pipeline.bench.run import run
from trtpipe.pipeline.bench.selftest import write_tokenizer

# What the process may take for one attack beside what it has, and how long.
MOST_MB = 40.0
# gRPC's library reads a stream faster than Python takes it: it holds 20 to 100 MB of one without an end.
MOST_MB_OF_LIBRARY = 200.0
MOST_SECONDS = 60.0
# What it waits for a server that is to say who it is, and for a page of metrics: 5 s where nobody hurries.
PATIENCE_S = 1.0


class Child:
    """The process. `measure` has it measure one server."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.attacks.bench_child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def measure(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert found["peak_mb"] < (MOST_MB_OF_LIBRARY if "transport" in asked else MOST_MB), found
        assert found["seconds"] < MOST_SECONDS, found
        return found

    def close(self) -> None:
        with self._process:
            self._process.kill()


def measure(asked: dict[str, Any], tokenizer: Path) -> dict[str, Any]:
    options = BenchOptions(
        targets=(
            Target(protocol=asked["protocol"], url=asked["url"], model=MODEL, metrics_url=asked.get("metrics_url")),
        ),
        tokenizer=tokenizer,
        loads=(Closed(concurrency=2, requests=asked.get("requests", 4)),),
        work=Work(input_tokens=4, output_tokens=TOKENS, ignore_eos=False),
        wiring=Wiring(transport=asked.get("transport", "own")),
        timeout_s=asked.get("timeout_s", 30),
        token_timeout_s=asked.get("token_timeout_s", 30),
    )
    try:
        report = run(options, None, None)
    except TrtpipeError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    failures = [failure for records in report.records for failure in records.failures]
    return {
        "kinds": dict(Counter(failure.kind for failure in failures if failure is not None)),
        "messages": sorted({failure.message for failure in failures if failure is not None}),
        "good": sum(failure is None for failure in failures),
        "stopped": report.results[0].stopped if report.results else None,
        "unread": report.unread_metrics,
    }


def _memory(name: str) -> float:
    """MB: VmRSS now, or VmHWM, the most since `_forget`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def main() -> None:
    with (
        mock.patch.object(http_setup, "CONNECT_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(h2_sender, "CONNECT_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(server_side, "TIMEOUT_S", PATIENCE_S),
        tempfile.TemporaryDirectory() as folder,
    ):
        tokenizer = write_tokenizer(Path(folder))
        for line in sys.stdin:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            before, began = _memory("VmRSS"), time.monotonic()
            found = measure(json.loads(line), tokenizer)
            found |= {"seconds": time.monotonic() - began, "peak_mb": _memory("VmHWM") - before}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
