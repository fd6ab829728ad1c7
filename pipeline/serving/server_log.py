"""The log of a server: where its last start begins, how far it is, and why it ended."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trtpipe.engines.process import LOG_BYTES, tail

# Time between two looks into the log of a starting server.
LOOK_SECONDS = 0.5
# Line before a server's output, because a log holds every start.
STARTED = "--- server is started "
# "failed to load 'tensorrt_llm' version 1: Internal: <reason>", as Triton logs it, line ends written as \\n; the
# class of a Python exception stands before its message, its traceback after it.
LOAD_FAILURE = re.compile(
    r"failed to load '(?P<model>[^']+)' version \d+: [\w ]+: (?:TritonModelException: )?(?P<reason>.*?)(?:\\n|\"?$)",
    re.MULTILINE,
)
LOAD_END = re.compile(rf"{LOAD_FAILURE.pattern}|successfully loaded '(?P<loaded>[^']+)'", re.MULTILINE)
# Last line of a Python traceback, as vLLM and TensorRT-LLM write it: after the process and the place in the source.
RAISED = re.compile(
    r"^(?:\([^)\n]*\) )?(?:[A-Z]+ [\d:. -]+)?(?:\[[^]\n]*\] )*((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE
)

# Errors that do not say why a server ended: one of vLLM's points to another, and every server without a GPU begins with
# the other.
NO_REASON = ("See root cause above", "Failed to initialize NVML")


def last_start(log: Path) -> int:
    """The byte of a log at which the output of its last start begins; 0 for a log without a start."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
        file.seek(begin)
        written = file.read()
        start = written.rfind(STARTED.encode())
        if start >= 0:
            return begin + written.index(b"\n", start) + 1
    return 0


def size(log: Path) -> int:
    """Bytes of a log; 0 where there is none."""
    return log.stat().st_size if log.exists() else 0


def loads(log: Path, begin: int) -> dict[str, str]:
    """Models that the server has loaded or failed to load since byte `begin` of its log, in the order of their last
    outcome, each with the reason of a failure, or ""."""
    out: dict[str, str] = {}
    with contextlib.suppress(OSError):
        text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
        for found in LOAD_END.finditer(text):
            name = found["loaded"] or found["model"]
            out.pop(name, None)
            out[name] = (found["reason"] or "").strip()
    return out


class Loading:
    """Shows, each time it is called, how far a starting server is by its log."""

    def __init__(self, models: Sequence[str], log: Path, show: Callable[[str, str], None]) -> None:
        self._models = models
        self._log = log
        self._show = show
        self._next = 0.0

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[last_start(self._log) :].decode(errors="replace")
            left = [name for name in self._models if f"successfully loaded '{name}'" not in text]
            pulled = re.findall(r"^pulling .*: (\d+% of .*)$", text, re.MULTILINE)
            if pulled and len(left) == len(self._models) and "loading: " not in text:
                self._show("pulling the image", pulled[-1])
            else:
                done = len(self._models) - len(left)
                self._show("loading the models", f"{done} of {len(self._models)}, left: {', '.join(left)}")


def failure(log: Path) -> str:
    """Why the server that wrote last ended: the first model's reason, else its exception, else its first error, else
    its last lines."""
    begin = last_start(log)
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace") if log.exists() else ""
    found = LOAD_FAILURE.search(text)
    if found:
        return f"model {found['model']}: {found['reason'].strip()}"
    thrown = re.findall(r"^ *what\(\): *(.+)$", text, re.MULTILINE)
    if thrown:
        return f"it crashed: {thrown[-1].strip()}"
    raised = [reason for reason in RAISED.findall(text) if not any(one in reason for one in NO_REASON)]
    if raised:
        return str(raised[-1])
    errors = [line.split("] ", 1)[-1].strip().strip('"') for line in text.splitlines() if re.match(r"E\d{4} ", line)]
    # Every server without a GPU logs the first error, and continues.
    errors = [error for error in errors if "CudaDriverHelper" not in error]
    return errors[0] if errors else tail(log, begin=begin)
