"""Preparation of prompts in prompt processes: the gateway worker's side.

Every model has one prompt process for small requests, and each large request gets a process of its own. So neither a
large request nor one whose template does not end delays the requests of another model, or small requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from array import array
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.json_input import parse_json
from trtpipe.engines.process import python_command
from trtpipe.engines.sampling import Guide
from trtpipe.pipeline.gateway.access import KEYS_VARIABLE
from trtpipe.pipeline.gateway.failure import Failure, wrong
from trtpipe.pipeline.gateway.guides import GuideRequest
from trtpipe.pipeline.gateway.options import GatewayOptions
from trtpipe.pipeline.gateway.preparation import KINDS
from trtpipe.pipeline.gateway.prompt_process import LARGE, LENGTHS, MEMORY_BYTES, SECONDS, SMALL
from trtpipe.pipeline.gateway.reasoning import Reasoning
from trtpipe.pipeline.gateway.requests import ChatOptions, CompletionOptions
from trtpipe.pipeline.gateway.tools.parser import ToolUse

# A text of this size is tokenised in some 10 ms, which is the cost of a process of its own.
SMALL_BYTES = 16 << 10
# Large requests of one model: how many are prepared together, and how many wait with their bodies in memory.
LARGE_TOGETHER, LARGE_WAITING = 2, 16
STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that can be answered, with at most `max_tokens` for each of `prompts`, which are token ids.

    adapter  name of the model's adapter; None for the model itself
    bias     token id -> number that is added to its logit
    echoes   texts of the prompts where answers begin with them (`echo`); else empty
    guide    form that the answers must have
    tools    how the answers may call tools; None where they may not
    reasoning  where the model's reasoning begins, which is apart from the text of an answer; None where it has none
    """

    options: ChatOptions | CompletionOptions
    prompts: list[array[int]]
    max_tokens: int
    adapter: str | None
    bias: dict[int, float]
    echoes: tuple[str, ...] = ()
    guide: GuideRequest | None = None
    tools: ToolUse | None = None
    reasoning: Reasoning | None = None


class ForkServer:
    """The process that loads the tokenizers once and forks prompt processes. Used by one event loop at a time."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded = False

    def start(self) -> None:
        """Start the process, unless it runs already."""
        if self.running:
            return
        self.stop()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *python_command("trtpipe.pipeline.gateway.prompt_process"),
                    self._options.to_json(),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Threads do not survive a fork.
                env={
                    **{name: value for name, value in os.environ.items() if name != KEYS_VARIABLE},
                    "TOKENIZERS_PARALLELISM": "false",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )

    async def ready(self) -> None:
        """Return when the process has loaded the tokenizers."""
        self.start()
        assert self._control is not None
        if not self._loaded and not await asyncio.get_running_loop().sock_recv(self._control, 1):
            raise RuntimeError("the process that makes prompts has ended; the log says why")
        self._loaded = True

    @property
    def running(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        assert self._control is not None
        try:
            # A process closes its sockets before it can be waited for.
            return self._control.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def fork(self, size: bytes) -> socket.socket:
        """The socket of a new prompt process, for SMALL or LARGE requests. Raises Failure 503."""
        try:
            self.start()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with contextlib.ExitStack() as unsent:
                unsent.callback(ours.close)
                with theirs:
                    socket.send_fds(self._control, [size], [theirs.fileno()])
                unsent.pop_all()
        except OSError as error:
            raise _unavailable(error.strerror or str(error)) from None
        return ours

    def stop(self) -> None:
        """End the process; prompt processes end when their sockets are closed."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
        self._loaded = False


class Prompts:
    """Prepares requests for the models of `options`."""

    def __init__(self, options: GatewayOptions, forks: ForkServer) -> None:
        self._lanes = {model.name: _Lane(forks) for model in options.models}
        self._marks = {model.name: [json.dumps(name).encode() for name in model.names] for model in options.models}

    async def prepare(self, endpoint: str, body: bytearray) -> Prepared:
        """The prepared request. Raises Failure for a request that cannot be answered."""
        head, ids = await self.ask(endpoint, body)
        prompts, start = [], 0
        for length in head["lengths"]:
            prompts.append(array("i", ids[start : start + 4 * length]))
            start += 4 * length
        _, kept = KINDS[endpoint]
        guide = head["guide"]
        return Prepared(
            options=kept.model_validate(head["options"]),
            prompts=prompts,
            max_tokens=head["max_tokens"],
            adapter=head["adapter"],
            bias=dict(head["bias"]),
            echoes=tuple(head.get("echoes", ())),
            guide=guide and GuideRequest(Guide(guide["kind"], guide["text"]), guide["param"]),
            tools=ToolUse(**head["tools"]) if head["tools"] else None,
            reasoning=head["reasoning"],
        )

    async def ask(self, endpoint: str, body: bytearray) -> tuple[dict[str, Any], bytes]:
        """Reply of a prompt process, see there. Raises Failure."""
        model = self._guess(body)
        head, ids = await self._lanes[model].ask({"endpoint": endpoint, "model": model}, body)
        if "model" in head:  # the guess was wrong
            model = head["model"]
            head, ids = await self._lanes[model].ask({"endpoint": endpoint, "model": model}, body)
        return head, ids

    def _guess(self, body: bytearray) -> str:
        """The most likely model of a request; only the prompt process of that model reads the body."""
        *others, last = self._lanes
        return next((name for name in others if any(mark in body for mark in self._marks[name])), last)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    """The prompt processes of one model."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks = forks
        self._small: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._large = asyncio.Semaphore(LARGE_TOGETHER)
        self._waiting = 0

    async def ask(self, job: dict[str, Any], body: bytearray) -> tuple[dict[str, Any], bytes]:
        """The reply to a job. Raises Failure."""
        if len(body) <= SMALL_BYTES:
            async with self._turn:
                reply, ids = await self._ask_small(job, body)
        else:
            reply, ids = await self._ask_large(job, body)
        if "failure" in reply:
            raise Failure(**reply["failure"])
        if "fault" in reply:
            raise RuntimeError("a prompt process failed; the log says why")
        return reply, ids

    async def _ask_large(self, job: dict[str, Any], body: bytearray) -> tuple[dict[str, Any], bytes]:
        if self._waiting >= LARGE_WAITING:
            raise Failure(429, "too many large requests are waiting", code="overloaded", retry_after=1)
        self._waiting += 1
        try:
            async with self._large:
                with self._forks.fork(LARGE) as process:
                    return await _exchange(process, job, body)
        except (OSError, EOFError):
            raise self._ended(LARGE) from None
        finally:
            self._waiting -= 1

    async def _ask_small(self, job: dict[str, Any], body: bytearray) -> tuple[dict[str, Any], bytes]:
        used = self._small is not None
        if self._small is None:
            self._small = self._forks.fork(SMALL)
        try:
            return await _exchange(self._small, job, body)
        except (OSError, EOFError):
            self.close()
            if used:  # it may have ended before this job: try a new one
                return await self._ask_small(job, body)
            raise self._ended(SMALL) from None
        except BaseException:
            self.close()  # the rest of this reply would be taken for the next one
            raise

    def close(self) -> None:
        if self._small is not None:
            self._small.close()
            self._small = None

    def _ended(self, size: bytes) -> Failure:
        """The Failure for a prompt process that has ended during a job."""
        if not self._forks.running:
            return _unavailable("it has ended, and is started again")
        limits = f"{SECONDS[size]:g} s of processor time or {MEMORY_BYTES[size] >> 20} MB of memory"
        return wrong(f"the prompt of this request takes more than {limits} to make", code="prompt_too_costly")


def _unavailable(why: str) -> Failure:
    return Failure(503, f"the process that makes prompts is not available: {why}", code="overloaded", retry_after=1)


async def _exchange(process: socket.socket, job: dict[str, Any], body: bytearray) -> tuple[dict[str, Any], bytes]:
    """Send a job and return its reply. Raises OSError or EOFError when the process has ended."""
    head = json.dumps(job).encode()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(process, LENGTHS.pack(len(head), len(body)) + head)
    await loop.sock_sendall(process, body)
    sizes = LENGTHS.unpack(await _receive(process, LENGTHS.size))
    reply = parse_json(await _receive(process, sizes[0]))
    return reply, await _receive(process, sizes[1])


async def _receive(process: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await asyncio.get_running_loop().sock_recv(process, min(size - len(data), 1 << 18))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
