"""Process that compiles grammars: loads a tokenizer once, and forks a process with limits for each grammar.

`python -m trtpipe.engines.reference.grammar_process INFO VOCAB_SIZE SECONDS DESCRIPTOR` takes sockets over DESCRIPTOR
until it is closed. Over each socket comes one guide, as JSON, and goes one answer: COMPILED and the grammar in
XGrammar's own JSON, REFUSED and the reason, or nothing when the kernel has ended the process at a limit.

A schema of some lines can take hours or gigabytes to compile, and no thread can be stopped while it does.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path

from trtpipe.engines.json_input import load_json, parse_json
from trtpipe.engines.reference.xgrammar_alone import xgrammar
from trtpipe.engines.sampling import WHITE_SPACE, Guide

COMPILED, REFUSED = b"\1", b"\0"
# Memory of a grammar in addition to the tokenizer, and its size when compiled.
MEMORY_BYTES, COMPILED_BYTES = 1 << 30, 32 << 20


def main(info: Path, vocab_size: int, seconds: int, control: socket.socket) -> None:
    """Serve the sockets that come over `control`, with a process of at most so much processor time for each."""
    compiler = xgrammar.GrammarCompiler(tokenizer_info(info, vocab_size), max_threads=1, cache_enabled=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these children
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as job:
            if os.fork() == 0:
                control.close()
                with contextlib.suppress(ConnectionError):
                    job.sendall(_answer(compiler, job, seconds))
                os._exit(0)


def tokenizer_info(path: Path, vocab_size: int) -> xgrammar.TokenizerInfo:
    """The tokenizer of an information file as NVIDIA's C++ backend reads it."""
    raw = load_json(path)
    # The C++ backend finds the kind of the vocabulary in the same way.
    found = xgrammar.TokenizerInfo._detect_metadata_from_hf(raw["tokenizer_str"])
    return xgrammar.TokenizerInfo(
        raw["encoded_vocab"],
        vocab_type=found["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=raw["stop_token_ids"],
        add_prefix_space=found["add_prefix_space"],
    )


def compiled(compiler: xgrammar.GrammarCompiler, guide: Guide) -> xgrammar.CompiledGrammar:
    """Raises RuntimeError and others for a guide that is none."""
    match guide.kind:
        case "json":
            return compiler.compile_builtin_json_grammar()
        case "json_schema":
            return compiler.compile_json_schema(guide.text, max_whitespace_cnt=WHITE_SPACE)
        case "regex":
            return compiler.compile_regex(guide.text)
        case "ebnf_grammar":
            return compiler.compile_grammar(guide.text)
        case "structural_tag":
            return compiler.compile_structural_tag(guide.text)


def _answer(compiler: xgrammar.GrammarCompiler, job: socket.socket, seconds: int) -> bytes:
    os.nice(10)  # answers have priority
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    received = b"".join(iter(lambda: job.recv(1 << 16), b""))
    try:
        text = compiled(compiler, Guide(**parse_json(received))).serialize_json().encode()
    except MemoryError:
        os._exit(1)
    except Exception as error:  # XGrammar raises RuntimeError, TypeError, and errors of its own
        if "bad_alloc" in str(error):  # C++'s MemoryError
            os._exit(1)
        # Before the reason XGrammar names the time and a line of its own source.
        reason = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error))
        return REFUSED + (reason or type(error).__name__).encode(errors="replace")
    if len(text) > COMPILED_BYTES:
        return REFUSED + f"it has {len(text) >> 20} MB when compiled, at most {COMPILED_BYTES >> 20} are taken".encode()
    return COMPILED + text


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), socket.socket(fileno=int(sys.argv[4])))
