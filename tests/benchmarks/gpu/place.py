"""Where `make gpu-e2e` works: the command as a user types it, in a scratch folder, and the engine's environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.loop import OUTPUT_TOKENS, PROMPT_TOKENS
from tests.support.paths import ROOT

# Of every engine measured; calibration by the text that is shipped, for nothing can be downloaded.
SIZES = ("build.max_batch_size=512", "build.max_input_len=512", "build.max_seq_len=1024")
CALIBRATION = ("calibration.data=demo", "calibration.samples=64", "calibration.seq_len=256")
INPUT, OUTPUT = str(PROMPT_TOKENS), str(OUTPUT_TOKENS)
CONNECTIONS, WORKERS = "8", "6"
PORTS = tuple(word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0"))
PROGRAM = "from trtpipe.pipeline.cli.app import main\nraise SystemExit(main())"
# Folder of the model of Llama 3 8B's shapes, in the scratch folder.
MODEL = "llama3-8b-shaped"
# The engine process loads `measured` instead of its runtime.
MEASURED = """
from trtpipe.engines.backends import reference, vllm
reference.PROCESS = vllm.PROCESS = "tests.benchmarks.gpu.measured"
"""


class Failed(RuntimeError):
    """A command that did not succeed, with its message."""


@dataclass
class Place:
    """A scratch folder, the Python that torch and vLLM are installed in, and the GPU's name among ours.

    said  the commands that were run, as they go into the report
    """

    scratch: Path
    engine_python: str
    gpu: str
    said: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ, "TRTPIPE_HOME": str(self.scratch / "home"), "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }  # fmt: skip

    def trtpipe(self, *words: str, through: str = "", **environment: str) -> float:
        """Run the command, after the Python `through`; seconds. Raises Failed."""
        said = " ".join(["trtpipe", *words]).replace(str(self.scratch), "SCRATCH")
        self.said.append(said.replace(self.engine_python, "ENGINE_PYTHON"))
        print("+", self.said[-1], flush=True)
        began = time.perf_counter()
        # A file, since a server that goes on may keep it open.
        log = self.scratch / "logs" / f"{time.time_ns()}-{words[0]}.log"
        with log.open("wb") as out:
            code = subprocess.run(
                [sys.executable, "-c", f"{through}\n{PROGRAM}", *words],
                cwd=self.scratch,
                env={**self.environment, **environment},
                stderr=out,
                check=False,
            ).returncode
        told = log.read_text(encoding="utf-8", errors="replace")
        print(told, end="", flush=True)
        if code:
            *_, last = re.findall(r"^error: (.*)", told, re.MULTILINE) or [f"exit code {code}"]
            raise Failed(f"trtpipe {words[0]}: {last}")
        return time.perf_counter() - began

    def inside(
        self,
        what: str,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        limit: float | None = None,
        **arguments: Any,
    ) -> Any:
        """Run a function of `inside` in the engine's environment, or in that of `python`; what it returns.

        With `limit`, which is in seconds, failing is a result too: {"reason": why there is none}.
        """
        # Two may be started at a time on a host of several GPUs.
        name = f"{time.time_ns()}-{what.replace(':', '.')}"
        log, result = (self.scratch / "logs" / f"{name}{suffix}" for suffix in (".log", ".json"))
        print("+ inside", what, flush=True)
        began = time.perf_counter()
        command = [python or self.engine_python, "-m", "tests.benchmarks.gpu.inside", what, str(result)]
        reason = ""
        with log.open("wb") as out:
            try:
                code = subprocess.run(
                    [*command, json.dumps(arguments)],
                    cwd=ROOT,
                    env={**self.environment, **(environment or {})},
                    stdout=out,
                    stderr=out,
                    timeout=limit,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code, reason = 1, f"not within {limit:.0f} s"
        print(f"  {time.perf_counter() - began:.1f} s", flush=True)
        if code:
            told = log.read_text(encoding="utf-8", errors="replace")
            print(told[-6000:], flush=True)
            if limit is None:
                raise SystemExit(f"{what} failed")
            return {"reason": reason or told.strip().rpartition("\n")[2][:200]}
        return json.loads(result.read_text(encoding="utf-8"))

    def build(self, model: Path, dtype: str, runtime: str, *settings: str, words: Sequence[str] = ()) -> Path:
        """Build a target with the settings, each in place of one of that name in SIZES, and with further words of the
        command; its run folder."""
        chosen = {one.partition("=")[0]: one for one in (*SIZES, *CALIBRATION, *settings)}
        sets = [word for setting in chosen.values() for word in ("--set", setting)]
        self.trtpipe(
            "build", "--model", str(model), "--gpu", self.gpu, "--dtype", dtype, "--runtime", runtime,
            "--accept-accuracy", *sets, *words,
        )  # fmt: skip
        return max((self.scratch / "runs").iterdir(), key=lambda run: run.stat().st_mtime)

    def forget(self) -> None:
        """Remove all that was built: engines of 16 GB each do not fit a disk side by side."""
        shutil.rmtree(self.scratch / "home", ignore_errors=True)
        shutil.rmtree(self.scratch / "runs", ignore_errors=True)

    @contextmanager
    def _serving(self, *words: str, through: str = "", **environment: str) -> Iterator[None]:
        """What `serve` starts with these words, for the block."""
        python = ["--engine-python", self.engine_python]
        try:
            self.trtpipe("serve", *words, "--detach", *python, through=through, **environment)
            yield
        finally:
            self.trtpipe("stop")

    @contextmanager
    def native(self, target: str) -> Iterator[None]:
        """The runtime's own server on the target's engine, for the block."""
        with self._serving(target, "--front", "native", "--openai-port", "0"):
            yield

    @contextmanager
    def front(self, target: str) -> Iterator[dict[str, Any]]:
        """A server of the target, for the block; its row of `ps`."""
        with self._serving(target, "--gateway-workers", WORKERS, *PORTS):
            listed = subprocess.run(
                [sys.executable, "-c", PROGRAM, "ps", "--json"],
                cwd=self.scratch, env=self.environment, check=True, stdout=subprocess.PIPE,
            )  # fmt: skip
            (entry,) = json.loads(listed.stdout)
            yield entry

    @contextmanager
    def served(self, target: str, levels: Sequence[int], seconds: float | None) -> Iterator[dict[str, Any]]:
        """A server of the target, for the block; what its engine gave in its own process before it served.

        seconds  of `loop.measure`
        """
        out = self.scratch / "logs" / f"{target}.measured.json"
        asked = json.dumps({"levels": list(levels), "seconds": seconds, "out": str(out)})
        with self._serving(
            target, "--gateway-workers", WORKERS, *PORTS, through=MEASURED, TRTPIPE_MEASURE=asked
        ):  # fmt: skip
            yield json.loads(out.read_text(encoding="utf-8"))

    def bench(self, concurrency: int, protocol: str, seconds: float) -> dict[str, Any]:
        """What the load tester says of the running server over so many seconds."""
        path = self.scratch / "reports" / f"{time.time_ns()}.json"
        # Of its own for each: an engine has the keys and values of prompts that it has seen before.
        seed = len(self.said)
        load = write_load(self.scratch, concurrency, seconds)
        words = ["bench", "--protocol", protocol, "--load", str(load), "--report", str(path), "--seed", str(seed)]
        if protocol != "completions":
            words += ["--model", "tensorrt_llm"]
        if protocol == "grpc":
            # Triton answers all streams of a connection from one thread.
            words += ["--connections", CONNECTIONS]
        try:
            self.trtpipe(*words)
        except Failed:
            if not path.exists():
                raise
        (row,) = served_rows(json.loads(path.read_text(encoding="utf-8")))
        return {**row, "pattern": "steady", "seed": seed}


def write_load(folder: Path, concurrency: int, seconds: float) -> Path:
    """The load file of `loop.steady`."""
    content = {
        "name": "steady",
        "description": f"{concurrency} in flight",
        "load": {"concurrency": concurrency, "duration_s": seconds},
        "work": {"input_tokens": INPUT, "output_tokens": OUTPUT},
    }
    path = folder / f"steady-{concurrency}.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML too
    return path


def served_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is kept of a report of the load tester, a row for each level."""
    rows = []
    for level in report["levels"]:
        metrics = level["metrics"]
        rows.append(
            {
                "protocol": level["protocol"],
                "concurrency": level["load"]["concurrency"],
                "tokens_per_s": metrics["output_token_throughput"]["value"],
                "ttft_p50_ms": metrics["time_to_first_token"]["p50"],
                "ttft_p99_ms": metrics["time_to_first_token"]["p99"],
                "itl_p50_ms": metrics["inter_token_latency"]["p50"],
                "itl_p99_ms": metrics["inter_token_latency"]["p99"],
                "failed": level["requests"]["failed"],
                "valid": level["verdict"]["valid"],
            }
        )
    return rows
