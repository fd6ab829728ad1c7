"""`trtpipe bench` beside other load testers, each against the same server of known timing, one after the other.

AIPerf and `vllm bench serve` (with its Rust client as well) are installed from PyPI, pinned, each into an environment
of its own, which is kept for the next time. The server keeps to one core and the load tester to another; one token a
response. Each figure is the median of several runs, in which the tools take turns:

    answered        requests that the tool reports as answered, of those it was to measure
    TTFT error      its time to first token less the server's own, of the same request (the server's: its first write of
                    a token less the arrival of the request); ms
    ITL mean error  mean of all gaps between responses as it reports them, less the mean of the true ones; ms
    ITL p99         99th percentile of these gaps, reported / true; ms
    load            tokens/s that the server wrote while the load was whole, by its own stamps, of what so many streams
                    would take without any delay; from when as many measured requests as there are streams had arrived,
                    until the last one did
    CPU s           of the tool with all its processes for 1,000 tokens, between its first request and its last token
    start           from the command's start to the arrival of its first request; s
    tail            from the last token to the command's end, results written; s

What a tool reports is read from the files that it writes, request by request. One that cannot be installed, or fails,
is a row with the last error that it gave.

    python -m tests.benchmarks.peers [--streams 64,256,1000] [--runs 3] [--write FILE.md]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trtpipe
from tests.benchmarks import beside
from trtpipe.engines.errors import TrtpipeError
from trtpipe.pipeline.bench.compare.importers import read_records, read_report
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.script import Truth
from trtpipe.pipeline.bench.results.report import host
from trtpipe.pipeline.bench.selftest import write_tokenizer

AIPERF, VLLM = "0.13.0", "0.32.0"
TTFT_S, TOKENS = 0.05, 64
# Between tokens; of many streams the longer one, as batches of a real engine have it.
ITL_S, ITL_OF_MANY_S, MANY = 0.01, 0.02, 1000
PROMPT_TOKENS = 32
LIMIT_S = 900.0
# Looking for new processes reads all of the machine's.
SAMPLE_S, SAMPLES_A_SEARCH = 0.1, 5
INVALID = 5  # the exit status of `trtpipe bench` when it was the limit itself
# What the commands of vllm need of what it declares, to be a client: the rest serves engines and GPUs.
VLLM_NEEDS = (
    "aiohttp", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "filelock", "huggingface-hub", "llguidance",
    "msgspec", "numpy", "openai", "oss-harmony", "partial-json-parser", "pillow", "prometheus-client", "psutil",
    "py-cpuinfo", "pybase64", "pydantic", "pyyaml", "pyzmq", "regex", "requests", "safetensors", "sentencepiece",
    "setuptools", "starlette", "tiktoken", "tokenizers", "torch", "tqdm", "transformers", "typing-extensions",
    "watchfiles", "xgrammar",
)  # fmt: skip
NO_HUB = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
BACKENDS = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}


class Failed(Exception):
    """A tool gave no figures; the words are its own."""


@dataclass(frozen=True)
class Load:
    """What one run asks of a tool. In `folder` lies the tokenizer, and there it writes; `http` is a URL."""

    protocol: str
    streams: int
    requests: int
    grpc: str
    http: str
    folder: Path


@dataclass(frozen=True)
class Tool:
    """A load tester.

    install   makes its environment where there is none, gives its command and says its version. Raises Failed
    words     its command line for a load, without the command itself
    result    the file that it writes in the load's folder, as our readers take it
    truth_id  how the server knows the request that the tool's results call so
    fine      exit statuses that leave results
    """

    name: str
    protocols: tuple[str, ...]
    install: Callable[[], tuple[list[str], str]]
    words: Callable[[Load], list[str]]
    result: str
    truth_id: Callable[[str], str] = str
    environment: Mapping[str, str] = field(default_factory=dict)
    fine: tuple[int, ...] = (0,)


def aiperf_words(load: Load) -> list[str]:
    # Neither the GPU nor the server has metrics here, so it is spared looking for them.
    return [
        "profile", "--model", "ensemble", "--url", load.http, "--endpoint-type", load.protocol, "--streaming",
        "--tokenizer", str(load.folder), "--isl", str(PROMPT_TOKENS), "--isl-stddev", "0",
        "--osl", str(TOKENS), "--osl-stddev", "0", "--concurrency", str(load.streams),
        "--warmup-request-count", str(load.streams), "--request-count", str(load.requests),
        "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--output-artifact-dir", str(load.folder),
    ]  # fmt: skip


def vllm_words(load: Load) -> list[str]:
    backend, path = BACKENDS[load.protocol]
    return [
        "bench", "serve", "--backend", backend, "--base-url", load.http, "--endpoint", path, "--model", "ensemble",
        "--tokenizer", str(load.folder), "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
        "--random-output-len", str(TOKENS), "--ignore-eos", "--max-concurrency", str(load.streams),
        "--num-warmups", str(load.streams), "--num-prompts", str(load.requests), "--request-id-prefix", "vllm-",
        "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", str(load.folder),
        "--result-filename", "vllm.json",
    ]  # fmt: skip


def vllm_id(name: str) -> str:
    """Its results know a request by its place, which its id ends with; ours call it LEVEL-PLACE."""
    return f"vllm-{name.rpartition('-')[2]}"


def our_words(load: Load) -> list[str]:
    report, tokenizer = load.folder / "report.json", load.folder / "tokenizer.json"
    words = beside.bench_words(load.protocol, load.grpc, load.http, tokenizer, report, TOKENS)
    loop = ["--concurrency", str(load.streams), "--requests", str(load.requests)]
    return [*words[len(beside.COMMAND) - 1 :], *loop]


def tools(chosen: argparse.Namespace) -> list[Tool]:
    def ours() -> tuple[list[str], str]:
        return beside.COMMAND[:1], f"trtpipe {trtpipe.__version__}"

    def aiperf() -> tuple[list[str], str]:
        folder = environment(chosen.venvs / f"aiperf-{chosen.aiperf}", lambda pip: pip(f"aiperf=={chosen.aiperf}"))
        return [str(folder / "bin" / "aiperf")], f"aiperf {installed(folder, 'aiperf')}"

    def vllm(command: str) -> Callable[[], tuple[list[str], str]]:
        def install() -> tuple[list[str], str]:
            folder = chosen.venvs / f"vllm-{chosen.vllm}"
            environment(folder, lambda pip: install_vllm(folder, pip, chosen.vllm, chosen.torch))
            versions = f"vllm {installed(folder, 'vllm')} on torch {installed(folder, 'torch')}"
            return [str(found(folder, command))], versions

        return install

    both = ("completions", "chat")
    return [
        Tool("trtpipe bench", ("grpc", *both), ours, our_words, "report.json", fine=(0, INVALID)),
        Tool("aiperf", both, aiperf, aiperf_words, "profile_export_aiperf.json"),
        Tool("vllm bench serve", both, vllm("bin/vllm"), vllm_words, "vllm.json", vllm_id, NO_HUB),
        # A program of its own in vllm's wheel, which VLLM_USE_RUST_BENCH=1 puts in the place of the other.
        Tool("vllm-rs bench serve", both, vllm("vllm-rs"), vllm_words, "vllm.json", vllm_id, NO_HUB),
    ]


def environment(folder: Path, install: Callable[[Callable[..., None]], None]) -> Path:
    """The environment in `folder`, made if it is not there whole. `install` is given what runs `pip install`."""
    ready = folder / ".ready"
    if not ready.exists():
        print(f"installing into {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        said([sys.executable, "-m", "venv", str(folder)])

        def pip(*words: str) -> None:
            said([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *words])

        install(pip)
        ready.touch()
    return folder


def install_vllm(folder: Path, pip: Callable[..., None], version: str, torch: str | None) -> None:
    """vllm without what it declares, then what its client needs of that, torch in the version given or declared."""
    pip("--no-deps", "--only-binary", "vllm", f"vllm=={version}")
    chosen = wanted(distribution(folder, "vllm").requires or [], VLLM_NEEDS)
    pip(*(torch if torch and Requirement(one).name == "torch" else one for one in chosen))


def wanted(requirements: Iterable[str], names: Iterable[str]) -> list[str]:
    """Those of `requirements` that name one of `names` and hold on this machine, without extras."""
    sought = {canonicalize_name(name) for name in names}
    out = []
    for line in requirements:
        one = Requirement(line)
        if canonicalize_name(one.name) in sought and (one.marker is None or one.marker.evaluate({"extra": ""})):
            one.marker = None
            out.append(str(one))
    return out


def distribution(folder: Path, name: str) -> importlib.metadata.Distribution:
    sites = [str(site) for site in folder.glob("lib/python*/site-packages")]
    return next(iter(importlib.metadata.distributions(name=name, path=sites)))


def installed(folder: Path, name: str) -> str:
    return distribution(folder, name).version


def found(folder: Path, command: str) -> Path:
    """A command of the environment, or a program in vllm's package."""
    for path in (folder / command, *folder.glob(f"lib/python*/site-packages/vllm/{command}")):
        if path.is_file():
            return path
    raise Failed(f"there is no {command} in {folder.name}")


def said(command: Sequence[str]) -> None:
    """Run a command that is to succeed. Raises Failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(last_error(done.stdout + done.stderr))


def last_error(text: str) -> str:
    """The last line that speaks of an error, else the last line; without colours and what would break a table."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"error|exception|failed", line, re.IGNORECASE)]
    return (told or lines or ["it said nothing"])[-1][:200].replace("|", "/")


class Cpu:
    """What a command and its processes have used so far, now and then; its thread keeps to the server's core, so that
    looking takes nothing from the command."""

    def __init__(self) -> None:
        self._used: dict[int, float] = {}
        self._series: list[tuple[int, float]] = []

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        try:
            parent = psutil.Process(process.pid)
            for sample in itertools.count():
                if process.poll() is not None:
                    return
                if sample % SAMPLES_A_SEARCH == 0:
                    family = [parent, *parent.children(recursive=True)]
                self._look(family)
                time.sleep(SAMPLE_S)
        except psutil.NoSuchProcess:
            return

    def _look(self, processes: Iterable[psutil.Process]) -> None:
        for one in processes:
            try:
                times = one.cpu_times()
            except psutil.Error:
                continue
            self._used[one.pid] = times.user + times.system
        # One that has ended keeps what it had used.
        self._series.append((time.monotonic_ns(), sum(self._used.values())))

    def between(self, begin_ns: int, end_ns: int) -> float:
        moments, used = zip(*self._series, strict=True)
        begin, end = np.interp([begin_ns, end_ns], moments, used)
        return float(end - begin)


def gap_s(streams: int) -> float:
    return ITL_S if streams < MANY else ITL_OF_MANY_S


def written(truth: Sequence[Truth], measured: Sequence[Truth], streams: int) -> float:
    """Tokens/s of all requests between the arrival of the measured one that makes the load whole and the last one's.

    As many measured requests are a multiple of `streams`, these are whole rounds even when all streams keep step.
    """
    arrivals = sorted(known.arrival_ns for known in measured)
    if len(arrivals) <= streams:
        raise Failed(f"{len(arrivals)} measured requests came: too few for {streams} streams")
    begin, end = arrivals[streams - 1], arrivals[-1]
    count = sum(int(np.searchsorted(known.stamps_ns, end) - np.searchsorted(known.stamps_ns, begin)) for known in truth)
    return count * 1e9 / (end - begin)


def measure(tool: Tool, command: list[str], protocol: str, streams: int, requests: int) -> dict[str, float]:
    """The figures of one run. Raises Failed."""
    cpu = Cpu()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer(folder)
        # transformers asks for it, ours does not.
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

        def words(server: MockServerProcess) -> list[str]:
            grpc, http = f"127.0.0.1:{server.grpc_port}", f"http://127.0.0.1:{server.http_port}"
            return [*command, *tool.words(Load(protocol, streams, requests, grpc, http, folder))]

        timing = Timing(ttft_s=TTFT_S, itl_s=gap_s(streams))
        run = beside.run(timing, words, folder, watch=cpu.watch, environment=tool.environment, limit_s=LIMIT_S)
        if run.status is None:
            raise Failed(f"it had not ended after {LIMIT_S:g} s")
        if run.status not in tool.fine:
            raise Failed(f"exit status {run.status}: {last_error(run.words)}")
        try:
            records = list(read_records(folder / tool.result, read_report(folder / tool.result)) or [])
        except (TrtpipeError, OSError) as error:
            raise Failed(f"{last_error(str(error))}; it said: {last_error(run.words)}") from None
    return figures(tool, run, cpu, records or [], streams) | {"invalid": float(run.status == INVALID)}


def figures(
    tool: Tool, run: beside.Run, cpu: Cpu, records: Sequence[Mapping[str, Any]], streams: int
) -> dict[str, float]:
    # Where a client gives its warm-up the id of its first request, that one came last.
    truth = {known.id: known for known in run.truth}
    good = [{**one, "id": tool.truth_id(one["id"])} for one in beside.good(records)]
    if not good:
        raise Failed(f"no request was answered; it said: {last_error(run.words)}")
    strange = [one["id"] for one in good if one["id"] not in truth]
    if strange:
        raise Failed(f"{len(strange)} of its requests never came, by their ids: {strange[0]}")
    first = min(known.arrival_ns for known in run.truth)
    last = max(known.stamps_ns[-1] for known in run.truth if known.stamps_ns)
    tokens = sum(len(known.stamps_ns) for known in run.truth)
    full = streams * TOKENS / (TTFT_S + (TOKENS - 1) * gap_s(streams))
    return {
        **beside.errors(good, truth),
        "answered": len(good),
        "load": written(run.truth, [truth[one["id"]] for one in good], streams) / full,
        "cpu": cpu.between(first, last) / tokens * 1000,
        "start": run.start_s,
        "tail": (run.ended_ns - last) / 1e9,
    }


HEADER = (
    "| tool | protocol | in flight | answered | TTFT error p50 / p99 ms | ITL mean error ms | ITL p99 said / true ms "
    "| load | CPU s / 1,000 tokens | start s | tail s |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def row(name: str, protocol: str, streams: int, requests: int, runs: Sequence[dict[str, float] | Failed]) -> str:
    """A line of the table: medians of the runs that gave figures, and what the others said."""
    done = [run for run in runs if not isinstance(run, Failed)]
    failures = [str(run) for run in runs if isinstance(run, Failed)]
    notes = [f"{len(failures)} of {len(runs)} runs failed: {failures[-1]}"] if failures else []
    invalid = sum(bool(run["invalid"]) for run in done)
    notes += [f"{invalid} of {len(runs)} runs INVALID by its own verdict"] if invalid else []
    if not done:
        return f"| {name} | {protocol} | {streams} | {notes[0]} | | | | | | | |"
    one = beside.median(done)
    answered = "; ".join([f"{one['answered']:g} of {requests}", *notes])
    return (
        f"| {name} | {protocol} | {streams} | {answered} | {one['ttft_p50']:.2f} / {one['ttft_p99']:.2f} "
        f"| {one['itl_mean']:.3f} | {one['itl_p99_said']:.2f} / {one['itl_p99_true']:.2f} | {one['load']:.1%} "
        f"| {one['cpu']:.4f} | {one['start']:.2f} | {one['tail']:.2f} |"
    )


def attempt(tool: Tool, command: list[str] | Failed, *load: Any) -> dict[str, float] | Failed:
    if isinstance(command, Failed):
        return command
    try:
        return measure(tool, command, *load)
    except Failed as failed:
        return failed


NOTES = """
Errors are of single requests: what a tool wrote down of one, against the server's stamps of the same one. A tool's own
summary may hide them, or be of something else:

- aiperf: the gaps here are its `inter_chunk_latency`. What it calls `inter_token_latency` is the mean gap of a request,
  (latency - TTFT) / (tokens - 1): one that stalled does not show in its percentiles.
- vllm, both clients: every chunk with `choices` ends a gap. The server ends a stream as OpenAI's does, with a chunk
  that has the reason of the end and no text, right after the last token; so each answer has one gap more, of about
  0 ms. That is nearly all of the mean's error.
- vllm over `chat`: the chunk with the role counts as the first token, and the server sends it as soon as the request
  has come. Its TTFT is then not one, and its first gap holds the whole wait for the first token.
- Each peer warms up with as many requests as there are streams and lets all of them end; the burst with which the
  measured ones begin is in its figures. `trtpipe bench` hands each place from warm-up to measurement, so that there is
  no such burst.
- vllm-rs is the Rust client in vllm's wheel, called directly, without Python's start.
- No peer speaks Triton's gRPC.
"""


def page(rows: Sequence[str], versions: Sequence[str], commands: Sequence[str], chosen: argparse.Namespace) -> str:
    machine = host()
    asked = ["--streams", chosen.streams, "--requests", str(chosen.requests), "--runs", str(chosen.runs)]
    asked += ["--protocols", chosen.protocols, *(["--tools", chosen.tools] if chosen.tools else [])]
    words = shlex.join(["python", "-m", "tests.benchmarks.peers", *asked])
    return "\n".join(
        [
            "# The load tester beside others",
            "",
            f"{datetime.now(timezone.utc):%Y-%m-%d}, {len(os.sched_getaffinity(0))} cores of {machine['cpu']}, "
            f"{platform.system()} {platform.release()}, Python {platform.python_version()};",
            f"{', '.join(versions)}.",
            f"First token after {TTFT_S * 1e3:g} ms, {TOKENS} tokens, {ITL_S * 1e3:g} ms between them "
            f"({ITL_OF_MANY_S * 1e3:g} ms from {MANY:,} streams on); medians of {chosen.runs} runs in turns.",
            f"Written by `{words}`, which says what the columns mean.",
            "",
            *HEADER,
            *rows,
            NOTES,
            "The commands, of which PORT and FOLDER (with a tokenizer) differ from run to run:",
            "",
            *(f"    {command}" for command in commands),
            "",
        ]
    )


def shown(tool: Tool, protocol: str, streams: int, requests: int) -> str:
    """Its command line as anybody could type it."""
    load = Load(protocol, streams, requests, "127.0.0.1:PORT", "http://127.0.0.1:PORT", Path("FOLDER"))
    return shlex.join([tool.name.split()[0], *tool.words(load)])


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtpipe" / "peers"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--requests", type=int, default=2048, help="at least; four a stream and whole rounds are made")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--protocols", default="grpc,completions", help="of grpc, completions and chat")
    parser.add_argument("--tools", help="only those whose names begin so, with commas between")
    parser.add_argument("--venvs", type=Path, default=cache(), help="where the peers are installed, and kept")
    parser.add_argument("--aiperf", default=AIPERF, help="its version")
    parser.add_argument("--vllm", default=VLLM, help="its version")
    parser.add_argument("--torch", help="what pip is asked for in place of the torch that vllm declares")
    parser.add_argument("--write", type=Path, help="the page")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    protocols = chosen.protocols.split(",")
    begins = tuple((chosen.tools or "").split(","))
    commands: dict[str, list[str] | Failed] = {}
    versions: list[str] = []
    mine = [tool for tool in tools(chosen) if tool.name.startswith(begins)]
    for tool in mine:
        try:
            commands[tool.name], version = tool.install()
            versions += [version] if version not in versions else []
        except Failed as failed:
            commands[tool.name] = Failed(f"not installed: {failed}")
    rows: list[str] = []
    examples: dict[str, str] = {}
    print("\n".join(HEADER), flush=True)
    for streams in map(int, chosen.streams.split(",")):
        # Whole rounds: see `written`.
        requests = -(-max(chosen.requests, 4 * streams) // streams) * streams
        for protocol in protocols:
            takers = [tool for tool in mine if protocol in tool.protocols]
            outcomes: dict[str, list[dict[str, float] | Failed]] = {tool.name: [] for tool in takers}
            for _ in range(chosen.runs):
                for tool in takers:
                    outcomes[tool.name].append(attempt(tool, commands[tool.name], protocol, streams, requests))
            for tool in takers:
                examples.setdefault(f"{tool.name} {protocol}", shown(tool, protocol, streams, requests))
                rows.append(row(tool.name, protocol, streams, requests, outcomes[tool.name]))
                print(rows[-1], flush=True)
    if chosen.write:
        chosen.write.write_text(page(rows, versions, list(examples.values()), chosen), encoding="utf-8")


if __name__ == "__main__":
    main()
