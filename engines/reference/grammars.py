"""Grammars of guided decoding: compiled by another process, cached, and advanced token by token for each request."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import socket
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trtpipe.engines.engine_process.request import DEAD_END, Request, RequestRefused
from trtpipe.engines.process import python_command
from trtpipe.engines.sampling import Guide

if TYPE_CHECKING:
    import xgrammar

# Most bytes of a guide's text.
TEXT_BYTES = 64 << 10
# Most bytes of all cached grammars, and the least that each counts as.
KEPT_BYTES, LEAST_BYTES = 256 << 20, 64 << 10
# Most grammars that are compiled at a time (others wait), and most processor seconds of each.
TOGETHER, SECONDS = 4, 10
# Most processor seconds that following a request's grammar may take: in one step, and in all, to which each token adds
# TOKEN_SECONDS. A grammar of a few characters can take longer for each further token, without bound.
STEP_SECONDS, ALL_SECONDS, TOKEN_SECONDS = 0.1, 1.0, 0.001


TOO_SLOW = "guided_decoding_guide: its grammar takes too long to follow; make it less ambiguous"
NOT_COMPILED = "guided_decoding_guide: its grammar was not compiled; the server's log says why"


def guide_refusal(guide: Guide) -> str:
    """Why the guide is refused before it is compiled; "" where it is not."""
    if guide.kind not in _NAMES:
        known = ", ".join(_NAMES)
        return f"guided_decoding_guide: no type of a guide is called '{guide.kind[:40]}'; known are {known}"
    size = len(guide.text.encode(errors="replace"))
    if size > TEXT_BYTES:
        return f"guided_decoding_guide: it has {size} bytes, at most {TEXT_BYTES} are taken"
    if find_spec("xgrammar") is None:
        return "guided_decoding_guide: xgrammar is not installed; `trtpipe doctor` prints the command that installs it"
    return ""


class Grammars:
    """Compiles guides for the tokenizer in the file `info` and a model with `vocab_size` logits."""

    def __init__(self, info: Path, vocab_size: int) -> None:
        self._info = info
        self._vocab_size = vocab_size
        self._kept: OrderedDict[Guide, tuple[xgrammar.CompiledGrammar | RequestRefused, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._threads = ThreadPoolExecutor(TOGETHER, thread_name_prefix="grammar")

    def compile(self, guide: Guide) -> Future[xgrammar.CompiledGrammar]:
        """Compile a guide in the background. The future raises RequestRefused for a guide that cannot be compiled."""
        return self._threads.submit(self._compile, guide)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stop()

    def _compile(self, guide: Guide) -> xgrammar.CompiledGrammar:
        with self._lock:
            kept = self._kept.get(guide)
            if kept is not None:
                self._kept.move_to_end(guide)
        found, size = kept or self._made(guide)
        if kept is None:
            with self._lock:
                self._kept[guide] = found, size
                while sum(size for _, size in self._kept.values()) > KEPT_BYTES and len(self._kept) > 1:
                    self._kept.popitem(last=False)
        if isinstance(found, RequestRefused):
            raise found
        return found

    def _made(self, guide: Guide) -> tuple[xgrammar.CompiledGrammar | RequestRefused, int]:
        """The compiled grammar, or the refusal of the guide; and the bytes that it counts as in the cache.

        Raises RequestRefused for a guide whose compilation was ended.
        """
        from trtpipe.engines.reference.grammar_process import COMPILED, MEMORY_BYTES

        reply = self._ask(guide)
        if reply.startswith(COMPILED):
            import xgrammar

            text = reply[len(COMPILED) :].decode()
            grammar = xgrammar.CompiledGrammar.deserialize_json(text, self._tokenizer)
            return grammar, max(grammar.memory_size_bytes, LEAST_BYTES)
        refusal = f"guided_decoding_guide: this {_NAMES[guide.kind]} cannot be used: "
        reason = " ".join(reply[1:].decode().split())
        if not reason:
            # Not cached: where the machine lacked memory, or the process was killed, another attempt may succeed.
            limits = f"more than {SECONDS} s of processor time or {MEMORY_BYTES >> 20} MB of memory"
            raise RequestRefused(f"{refusal}it takes {limits} to compile")
        return RequestRefused(refusal + reason), LEAST_BYTES

    def _ask(self, guide: Guide) -> bytes:
        """The reply of the process that compiles the guide; empty when it was ended, as the kernel does at a limit."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                try:
                    self._hand_over(theirs)
                except ConnectionError:  # the process has been killed a moment ago
                    self._start()
                    self._hand_over(theirs)
            with contextlib.suppress(ConnectionError):
                ours.sendall(json.dumps(dataclasses.asdict(guide)).encode())
                ours.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: ours.recv(1 << 20), b""))
        return b""

    def _hand_over(self, theirs: socket.socket) -> None:
        """Send the process its end of a socket. Raises ConnectionError where the process is gone."""
        assert self._control is not None
        socket.send_fds(self._control, [b"g"], [theirs.fileno()])

    def _start(self) -> None:
        self._stop()
        self._control, theirs = socket.socketpair()
        with theirs:
            command = python_command("trtpipe.engines.reference.grammar_process")
            self._process = subprocess.Popen(
                [*command, str(self._info), str(self._vocab_size), str(SECONDS), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @functools.cached_property
    def _tokenizer(self) -> xgrammar.TokenizerInfo:
        from trtpipe.engines.reference.grammar_process import tokenizer_info

        return tokenizer_info(self._info, self._vocab_size)


_NAMES = {
    "json": "form",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural tag",
}


class Follower:
    """Position of one request's output in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, request: Request) -> None:
        import xgrammar

        # As stop tokens of the grammar, these are masked until the output is complete.
        ends = [word[0] for word in request.stop_words if len(word) == 1]
        if request.end_id is not None and request.end_id >= 0:
            ends.append(request.end_id)
        self.matcher = xgrammar.GrammarMatcher(
            grammar, override_stop_tokens=ends or None, terminate_without_stop_token=not ends
        )
        # Why the request must end; "" while its grammar can be followed.
        self.refusal = ""
        self._left = ALL_SECONDS

    @property
    def complete(self) -> bool:
        """Whether the output is complete and no token may follow."""
        return bool(self.matcher.is_terminated())

    def accept(self, token: int) -> None:
        """Advance by a token. Sets `refusal` where a time limit is passed, and where the grammar does not allow the
        token, since the mask then allowed none."""
        started = time.thread_time()
        accepted = self.matcher.accept_token(token)
        self.spend(time.thread_time() - started)
        if not accepted:
            self.refusal = DEAD_END

    def spend(self, seconds: float) -> None:
        self._left += TOKEN_SECONDS - seconds
        if seconds > STEP_SECONDS or self._left < 0:
            self.refusal = TOO_SLOW


def mask(logits: torch.Tensor, followers: Sequence[tuple[int, Follower]]) -> None:
    """Set logits [rows, vocab_size], float32, to -inf in place for the tokens that the grammar of a row does not allow.

    followers  (row, its follower) of the rows that have a grammar
    """
    import xgrammar

    bitmask = xgrammar.allocate_token_bitmask(len(logits), logits.shape[1])
    started = time.perf_counter()
    _batch().batch_fill_next_token_bitmask(
        [follower.matcher for _, follower in followers], bitmask, [row for row, _ in followers]
    )
    if time.perf_counter() - started > STEP_SECONDS:
        # This is rare. The masks are made again one by one to find the slow grammar.
        for row, follower in followers:
            began = time.thread_time()
            follower.matcher.fill_next_token_bitmask(bitmask, row)
            follower.spend(time.thread_time() - began)
    xgrammar.apply_token_bitmask_inplace(logits, bitmask.to(logits.device), indices=[row for row, _ in followers])


@functools.cache
def _batch() -> xgrammar.BatchGrammarMatcher:
    import xgrammar

    return xgrammar.BatchGrammarMatcher()
