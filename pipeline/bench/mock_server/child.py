"""Mock server as a process of its own, so that it shares neither thread nor core with its client."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from trtpipe.engines.errors import HostError
from trtpipe.engines.process import python_command
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.script import Truth

MODULE = "trtpipe.pipeline.bench.mock_server.server"


class MockServerProcess:
    """A running mock server. Made by `start`."""

    def __init__(self, process: subprocess.Popen[str], truth: Path, ports: dict[str, int]) -> None:
        self.grpc_port = ports["grpc_port"]
        self.http_port = ports["http_port"]
        self._process = process
        self._truth = truth

    @classmethod
    def start(cls, timing: Timing, truth: Path, *, cpu: int | None = None) -> MockServerProcess:
        """Start on free ports of 127.0.0.1 and wait until it listens; it writes `truth` on exit. Raises HostError."""
        command = [*python_command(MODULE), "--truth", str(truth)]
        command += ["--ttft-ms", repr(timing.ttft_s * 1e3), "--itl-ms", repr(timing.itl_s * 1e3)]
        command += ["--tokens-per-response", str(timing.tokens_per_response)]
        command += ["--prefill-ms", repr(timing.prefill_s * 1e3)]
        command += [] if cpu is None else ["--cpu", str(cpu)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
        except BaseException:  # a signal
            process.kill()
            process.wait()
            raise
        if not line:
            raise _failure("does not start", process)
        return cls(process, truth, json.loads(line))

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> list[Truth]:
        """Stop it; return what happened to each request, in the order of arrival. Raises HostError."""
        self._process.terminate()
        if self._process.wait():
            raise _failure("has failed", self._process)
        self._process.communicate()
        return [Truth.from_json(json.loads(line)) for line in self._truth.read_text(encoding="utf-8").splitlines()]


def _failure(how: str, process: subprocess.Popen[str]) -> HostError:
    _, words = process.communicate()
    last = words.strip().rpartition("\n")[2]
    return HostError(f"the server of known timing {how}", why=last, remedy=f"run it: python -m {MODULE}")
