"""A served model under mixed load with clients that go away and requests that fail: does anything grow?

A tiny model is built and served through the command line. Requests arrive at a bounded rate over HTTP and gRPC, through
all three entry points, and through the gateway, streamed and whole; a share is left in mid-stream and a share is
impossible. Every ten seconds 48 streams begin at once through the script, which would lock up a Python model that
follows streams in several threads. Each second the proportional memory (without pages of files), file descriptors and
threads of the server, its stubs, the engine and the gateway are read, with the KV blocks in use and the shared memory
regions. Descriptors are counted without connections whose other end is there: they are as many as requests are in
flight.

Over HTTP and of the gateway a client leaves by closing; over gRPC by a `stop` request, which the engine model alone
takes. A reset of a stream that is being written to ends tritonserver up to 25.03 itself (grpc-cancellation-race in
configs/failures), on busy processors about twice an hour, and nothing would be learnt of leaks.

The rule: the first third is warm-up. Of the rest, each series is halved; it leaks when the median of the second half
exceeds that of the first by more than 2% plus a floor (1 MiB of memory for each minute measured, 2 descriptors, 2
threads, 0 regions). When the load has ended and the clients are gone, no request may be active and no KV block used
within five seconds, and no request may have been answered wrongly or have hung.

    python -m tests.benchmarks.soak [--minutes 5] [--rate 8] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tritonclient.grpc import aio as grpc

from tests.benchmarks.client import pss_of
from tests.support.factories import hf_folder
from tests.support.kserve import infer_inputs

TRTPIPE = Path(sys.executable).with_name("trtpipe")
MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")
SIZES = ("max_batch_size=16", "max_input_len=256", "max_seq_len=1024", "max_num_tokens=256")
LONGEST_SECONDS = 60.0
BURST, BURST_SECONDS = 48, 10.0
# Growth allowed of each series' median beside 2%: (a fixed amount, for each minute measured).
FLOORS = {"PSS MiB": (2.0, 1.0), "descriptors": (2.0, 0.0), "threads": (2.0, 0.0), "regions": (0.0, 0.0)}


@dataclass
class Counts:
    """How the requests ended, and what was wrong."""

    ended: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


class Server:
    """A served tiny model, and what is read of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TRTPIPE_HOME": str(folder / "home")}

    def start(self) -> None:
        model = hf_folder(self.folder / "tiny", dtype="F32", max_position_embeddings=1024)
        sizes = [word for size in SIZES for word in ("--set", f"build.{size}")]
        self.cli("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *sizes)
        target = "tiny.cpu.fp32"
        ports = [word for kind in ("http", "grpc", "metrics", "openai") for word in (f"--{kind}-port", "0")]
        self.cli("serve", target, "--detach", *ports)
        (entry,) = json.loads(self.cli("ps", "--json"))
        self.attach(entry, target)

    def attach(self, entry: dict[str, Any], target: str) -> None:
        """Take a server that is there, from its row of `ps`."""
        self.http, self.grpc, self.metrics = entry["http"], entry["grpc"], entry["metrics"]
        self.openai, self.model = entry["openai"], target
        self.process = psutil.Process(entry["pid"])

    def cli(self, *words: str) -> str:
        done = subprocess.run(
            [TRTPIPE, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    def parts(self) -> dict[str, psutil.Process]:
        """The server, each stub by its model, and the engine."""
        out = {"server": self.process}
        for child in self.process.children(recursive=True):
            words = child.cmdline()
            if "trtpipe.engines.engine_process.server" in words:
                out["engine"] = child
            elif words and words[0].endswith("triton_python_backend_stub"):
                (instance,) = [word for word in words if re.fullmatch(r"\w+_0_\d+", word)]
                out[instance.removesuffix("_0_0")] = child
        (record,) = (self.folder / "home" / "servers").glob("*.json")
        gateway = psutil.Process(json.loads(record.read_text(encoding="utf-8"))["gateway_pid"])
        workers = {f"gateway worker {n}": worker for n, worker in enumerate(gateway.children(recursive=True))}
        return {**out, "gateway": gateway, **workers}

    def last_words(self) -> str:
        """The end of its log."""
        (log,) = (self.folder / "home" / "logs").glob("serve-*.log")
        return log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def sample(self, parts: dict[str, psutil.Process]) -> dict[str, float]:
        out: dict[str, float] = {"regions": len(self.regions())}
        for name, process in parts.items():
            out[f"{name} PSS MiB"] = pss_of(process.pid, files=False)
            out[f"{name} descriptors"] = process.num_fds() - _connected(process)
            out[f"{name} threads"] = process.num_threads()
        return out

    def regions(self) -> set[str]:
        """Shared memory that the server and its stubs exchange tensors through."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8")
        return set(re.findall(r"/dev/shm/\S+", maps))

    def gauges(self) -> tuple[int, int]:
        """(requests active or waiting, KV blocks used)."""
        text = httpx.get(self.metrics, timeout=10).text
        values = {kind: int(float(number)) for kind, number in re.findall(r'_type="(\w+)"[^}]*\} (\S+)', text)}
        return values["active"] + values["waiting"], values["used"]


def _connected(process: psutil.Process) -> int:
    """Connections of it whose other end is there: not one that its client has closed and it has not."""
    return sum(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))


def ask(rng: random.Random, model: str, whole: bool) -> tuple[dict[str, Any], bool]:
    """(a request's inputs, whether it is possible)."""
    tokens = rng.randint(2, 60)
    prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 120)))
    possible = rng.random() >= 0.1
    if not possible:
        tokens = rng.choice((0, -1, 5000))
    if model == "tensorrt_llm":
        ids = [byte % 250 + 2 for byte in prompt.encode()]
        body: dict[str, Any] = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": tokens}
        return {**body, "streaming": not whole, "end_id": -1}, possible
    return {"text_input": prompt, "max_tokens": tokens, "stream": not whole, "end_id": -1}, possible


def completion(model: str, body: dict[str, Any]) -> dict[str, Any]:
    """The gateway's form of a request that `ask` has made for one of the models behind it."""
    prompt = body.get("text_input", body.get("input_ids"))
    tokens = body.get("max_tokens", body.get("request_output_len"))
    stream = body.get("stream", body.get("streaming"))
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": stream, "ignore_eos": True}


async def over_http(client: httpx.AsyncClient, url: str, body: dict[str, Any], leave_after: int) -> str:
    kind = "generate_stream" if body.get("stream", body.get("streaming")) else "generate"
    seen = 0
    last: dict[str, Any] = {}
    async with client.stream("POST", f"{url}/{kind}", json=body) as response:
        if kind == "generate":
            last = json.loads(await response.aread())
        else:
            async for line in response.aiter_lines():
                if not line:
                    continue
                last, seen = json.loads(line.removeprefix("data: ")), seen + 1
                if seen == leave_after and "error" not in last:
                    return "left"
    return "refused" if "error" in last else "answered" if last else "empty"


async def over_gateway(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], leave_after: int, first: Callable[[], None] | None = None
) -> str:
    """How the request ended; `first` is called when its first line comes."""
    seen, last = 0, ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            last, seen = line or last, seen + bool(line)
            if seen == 1 and line and first is not None:
                first()
            if seen == leave_after and response.is_success:
                return "left"
        if not response.is_success:
            return "refused" if response.status_code == 400 else f"status {response.status_code}"
    return "answered" if last == "data: [DONE]" or not body["stream"] else "cut short"


async def over_grpc(client: Any, model: str, body: dict[str, Any], leave_after: int, name: str) -> str:
    enough = asyncio.Event()

    async def requests() -> Any:
        ask = {"model_name": model, "request_id": name, "enable_empty_final_response": True}
        yield {**ask, "inputs": infer_inputs(body)}
        if leave_after:
            await enough.wait()
            yield {**ask, "inputs": infer_inputs({**body, "stop": True})}

    seen = 0
    failed = None
    # Read to the stream's own end: one that is dropped between its last response and that is a reset one.
    async for result, error in client.stream_infer(requests()):
        seen += 1
        failed = failed or error
        over = result is None or result.get_response().parameters["triton_final_response"].bool_param
        if seen == leave_after or over:
            enough.set()
    if failed is not None:
        return "refused"
    return "left" if 0 < leave_after <= seen else "answered" if seen else "empty"


async def load(server: Server, seconds: float, rate: float, counts: Counts) -> list[dict[str, float]]:
    """Requests at `rate` a second, and a sample each second."""
    rng = random.Random(7)
    parts = server.parts()
    samples: list[dict[str, float]] = []
    running: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(timeout=LONGEST_SECONDS) as http, grpc.InferenceServerClient(server.grpc) as client:

        async def one(number: int, burst: bool = False) -> None:
            how = rng.choice(("http", "grpc") if burst else ("http", "grpc", "gateway"))
            model = "tensorrt_llm_bls" if burst else rng.choice(MODELS)
            whole = not burst and rng.random() < 0.3
            body, possible = ask(rng, model, whole)
            leave_after = rng.randint(1, 10) if rng.random() < 0.25 and not whole else 0
            try:
                if how == "http":
                    ended = await over_http(http, f"{server.http}/v2/models/{model}", body, leave_after)
                elif how == "gateway":
                    ended = await over_gateway(http, server.openai, completion(server.model, body), leave_after)
                else:
                    stoppable = leave_after if model == "tensorrt_llm" else 0
                    work = over_grpc(client, model, body, stoppable, f"soak-{number}")
                    ended = await asyncio.wait_for(work, LONGEST_SECONDS)
            except (httpx.HTTPError, asyncio.TimeoutError) as error:
                counts.wrong.append(f"{how} {model}: {type(error).__name__}")
                return
            if (ended == "refused") == possible or ended not in ("answered", "left", "refused"):
                counts.wrong.append(f"{how} {model}: {ended} {body}")
            counts.ended[ended] += 1

        def begin(burst: bool = False) -> None:
            task = asyncio.create_task(one(next(numbers), burst))
            running.add(task)
            task.add_done_callback(running.discard)

        start = time.monotonic()
        next_sample, next_burst, numbers = start, start, itertools.count()
        for due in itertools.count(1):
            now = time.monotonic()
            if now - start >= seconds:
                break
            if now >= next_sample:
                samples.append(server.sample(parts))
                next_sample += 1.0
            if now >= next_burst:
                for _ in range(BURST):
                    begin(burst=True)
                next_burst += BURST_SECONDS
            begin()
            await asyncio.sleep(max(0.0, start + due / rate - time.monotonic()))
        if running:
            await asyncio.wait(running)
    return samples


def judge(samples: list[dict[str, float]], minutes: float) -> tuple[list[tuple[str, float, float, float]], list[str]]:
    """(series, median of the first half, of the second, growth allowed) after warm-up, and those that leak."""
    rest = samples[len(samples) // 3 :]
    middle = len(rest) // 2
    rows, leaks = [], []
    for name in sorted(rest[0]):
        first = statistics.median(sample[name] for sample in rest[:middle])
        second = statistics.median(sample[name] for sample in rest[middle:])
        fixed, each = next(floor for kind, floor in FLOORS.items() if name.endswith(kind))
        allowed = 0.02 * first + fixed + each * minutes * 2 / 3 if fixed or each else 0.0
        rows.append((name, first, second, allowed))
        if second - first > allowed:
            leaks.append(f"{name} grew from {first:.1f} to {second:.1f}, allowed are {allowed:.1f}")
    return rows, leaks


def report(rows: Iterable[tuple[str, float, float, float]], counts: Counts, faults: list[str], title: str) -> str:
    ended = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.ended.items()))
    lines = [f"# {title}", "", f"Requests: {ended}.", ""]
    lines += ["| series | median, first half | second half | growth | allowed |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {a:.1f} | {b:.1f} | {b - a:+.1f} | {most:.1f} |" for name, a, b, most in rows]
    lines += ["", *(f"- {fault}" for fault in faults or ["Nothing leaks."])]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            samples = asyncio.run(load(server, args.minutes * 60, args.rate, counts))
            deadline = time.monotonic() + 5
            while (state := server.gauges()) != (0, 0) and time.monotonic() < deadline:
                time.sleep(0.1)
            mapped = server.regions()
        except BaseException:
            print(server.last_words(), file=sys.stderr)
            raise
        finally:
            server.cli("stop")
        left = sum(Path(region).exists() for region in mapped)
    rows, faults = judge(samples, args.minutes)
    faults += [f"{state[0]} requests and {state[1]} KV blocks are left after the load"] if state != (0, 0) else []
    faults += [f"{left} shared memory regions are left after the server"] if left else []
    faults += [f"{len(counts.wrong)} requests went wrong, such as {counts.wrong[0]}"] if counts.wrong else []
    text = report(rows, counts, faults, f"{args.minutes:g} minutes at {args.rate:g} requests a second")
    print(text, end="")
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
