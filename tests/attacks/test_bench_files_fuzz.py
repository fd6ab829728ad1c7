"""Damaged files and answers, read by the load tester's own functions: never anything but a TrtpipeError, a hang, or
memory beyond what a file is worth.

TRTPIPE_FUZZ=0.1 python -m pytest -m slow tests/attacks/test_bench_files_fuzz.py -k report      a tenth of the runs
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attacks import hostile_servers as hostile
from tests.attacks.fuzzing import _cause
from tests.attacks.mutations import PLACES, mutate, mutate_bytes, mutate_yaml, replace
from tests.attacks.running import LIMIT_BYTES, LIMIT_S, Outcome, read_here
from tests.support import bench_reports
from tests.support.h2 import Bench
from tests.support.paths import DATA
from tests.support.wires import Wire
from trtpipe.pipeline.bench.compare.comparison import compare
from trtpipe.pipeline.bench.load.arrivals import schedule
from trtpipe.pipeline.bench.load.files import find_load
from trtpipe.pipeline.bench.load.lengths import parse
from trtpipe.pipeline.bench.load.loads import Closed, Open, Replay
from trtpipe.pipeline.bench.load.prompt_files import read_conversations, read_prompts
from trtpipe.pipeline.bench.load.trace import read_trace
from trtpipe.pipeline.bench.load.work import Sessions, SharedPrefix, Work
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.monitors.server import summarise
from trtpipe.pipeline.bench.options import BenchOptions, Target
from trtpipe.pipeline.bench.protocols.http1 import HttpConnection, HttpSender
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.protocols.openai_http import OpenAiHttp
from trtpipe.pipeline.bench.protocols.triton_grpc import TritonGrpc
from trtpipe.pipeline.bench.protocols.triton_http import TritonHttp
from trtpipe.pipeline.bench.results.digest import digest
from trtpipe.pipeline.bench.results.files import read_again
from trtpipe.pipeline.bench.results.records import settle
from trtpipe.pipeline.bench.results.slo import parse_objective
from trtpipe.pipeline.cli.bench import _price_of
from trtpipe.pipeline.net.h2 import frames

QUICK = 5
SLOW = 20_000
BENCH = DATA / "bench"


def folder_of_files(folder: Path) -> None:
    """A file of each kind that the load tester reads."""
    bench_reports.saved(folder / "a", bench_reports.lines(6, seed=1), bench_reports.lines(6, seed=2))
    bench_reports.saved(folder / "b", bench_reports.lines(6, seed=3), bench_reports.lines(6, seed=4))
    for source in ("aiperf/profile_export_aiperf.json", "aiperf/profile_export.jsonl",
                   "vllm/chat.json", "vllm/completions.json", "vllm/rate.json"):  # fmt: skip
        (folder / source).parent.mkdir(exist_ok=True)
        shutil.copy(BENCH / source, folder / source)
    (folder / "tokenizer.json").write_text("{}")
    options = BenchOptions(
        targets=(Target(protocol="grpc", url="127.0.0.1:8001", model="ensemble"),),
        tokenizer=folder / "tokenizer.json",
        loads=(Closed(concurrency=2), Open(rate=5.0, requests=20)),
        objectives=(parse_objective("ttft:p99<200ms"),),
        work=Work(
            input_tokens="uniform:5,9",
            shared_prefix=SharedPrefix(share=0.5, tokens=4),
            sessions=Sessions(turns="uniform:1,3", think_s=0.5),
            options={"temperature": 0.5},
        ),
    )
    sha256 = digest(folder / "tokenizer.json")
    again = bench_reports.report([], options=options.to_json(), tokenizer_sha256=sha256, work_sha256={})
    (folder / "again.json").write_text(json.dumps(again))
    texts = {
        "prompts.txt": "Hello\nGood morning\n",
        "prompts.jsonl": '{"prompt": "a", "max_tokens": 5, "temperature": 0.5, "stop": ["x"]}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}\n',
        "sharegpt.json": '[{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}]',
        "sharegpt.jsonl": '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}\n',
        "trace.jsonl": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 500.5, "input_length": 20, "output_length": 9, "hash_ids": [1]}\n',
        "lengths.txt": "100 10\n200 20\n",
        "lengths.jsonl": '{"input_length": 100, "output_length": 10}\n',
        "closed.yaml": "load: {concurrency: [1, 4], requests: 20, ramp_s: 0.5}\nwork: {input_tokens: 'normal:9,2'}\n",
        "open.yaml": "load: {rate: 5.0, duration_s: 3, arrivals: gamma, burstiness: 2}\nwork: {prompts: prompts.txt}\n",
        "staged.yaml": "load: {stages: [{duration_s: 5, rate: 1}, {duration_s: 5, from: 1, to: 2}]}\n",
        "replay.yaml": "load: {trace: trace.jsonl, speedup: [1, 2.5]}\n",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "answer.http").write_bytes(hostile.chat())
    (folder / "generate.http").write_bytes(generated_http())
    (folder / "answer.grpc").write_bytes(hostile.generated(1))
    (folder / "metrics.txt").write_text(bench_metrics())


def generated_http() -> bytes:
    events = [hostile.event({"model_name": "m", "num_output_tokens": 1, "text_output": f" w{n}"}) for n in range(8)]
    return hostile.CHUNKED + b"".join(map(hostile.chunk, events)) + b"0\r\n\r\n"


def bench_metrics() -> str:
    counters = ("nv_inference_request_success", "nv_inference_request_duration_us", "nv_energy_consumption")
    lines = [f'# HELP {name} x\n# TYPE {name} counter\n{name}{{model="m",version="1"}} 5\n' for name in counters]
    return "".join(lines) + '# TYPE nv_llm_output_token_len histogram\nnv_llm_output_token_len_sum{model="m"} 7\n'


# Readers


def compared(*names: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        found = compare([folder / name for name in names], own_price=_price_of)
        list(found.tables())
        found.summary()
        json.dumps(found.to_json())

    return read


def loaded(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        for load_point in find_load(str(folder / name)).load_points:
            if isinstance(load_point, Replay):
                schedule(load_point, 0)

    return read


def traced(read: Callable[[Path], object]) -> Callable[[Path], None]:
    """As `read`, which reads its trace anew: a process keeps those that it has read."""

    def anew(folder: Path) -> None:
        read_trace.cache_clear()
        read(folder)

    return anew


def lengths(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        drawn = parse(f"empirical:{folder / name}", "x").tokens(np.random.default_rng(0), 100)
        assert drawn.min() > 0

    return read


def described(folder: Path) -> None:
    text = (folder / "description").read_text(errors="replace")
    drawn = parse(text, "x").tokens(np.random.default_rng(0), 100)
    assert drawn.min() > 0


def answered_http(name: str, codec: Any) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        sender = HttpSender(Site.of("http://127.0.0.1:1"))
        connection = HttpConnection(sender)
        connection.connection_made(Wire())
        sender.release(connection)
        asked = InFlightRequest("r", b"POST / HTTP/1.1\r\n\r\n", input_tokens=1, max_tokens=8)
        sender.start([asked])
        data = (folder / name).read_bytes()
        for start in range(0, len(data), 4096):
            connection.feed(data[start : start + 4096], start)
        connection.connection_lost(None)
        settle([asked], codec.decode, len)
        codec.text(asked)

    return read


def answered_grpc(folder: Path) -> None:
    bench = Bench()
    asked = InFlightRequest("r", b"ask", input_tokens=1, max_tokens=8)
    try:
        bench.connection.start(
            "/m", b"", on_data=asked.receive, max_bytes=asked.limit, max_message=asked.response_limit,
            on_end=lambda status, stamp: asked.end(stamp) if status.ok else asked.fail("grpc", status.message),
        )  # fmt: skip
        bench.feed((folder / "answer.grpc").read_bytes())
        bench.connection.abort()
        settle([asked], GRPC.decode, len)
        assert bench.problems == []
    finally:
        bench.loop.close()


def scraped(folder: Path) -> None:
    pages = [(0, bench_metrics().encode()), (10**9, (folder / "metrics.txt").read_bytes())]
    json.dumps(summarise(pages, 5, 0))


SITE = Site.of("http://127.0.0.1:1")
INPUTS = {"text_input": ("BYTES", 2), "max_tokens": ("INT32", 2), "stream": ("BOOL", 2)}


def endpoint(*outputs: str) -> Any:
    from trtpipe.pipeline.bench.protocols.endpoint import Endpoint

    return Endpoint(
        protocol="http", url="u", server_name="t", server_version="1", model="m", model_versions=(), inputs=INPUTS,
        outputs=frozenset(outputs),
    )  # fmt: skip


GRPC = TritonGrpc(endpoint("text_output", "num_output_tokens"), lambda text: [])


@dataclass(frozen=True)
class Reader:
    """`read` is given the folder; one of `files` is damaged before."""

    read: Callable[[Path], object]
    files: tuple[str, ...]
    share: int = 1


REPORT = ("a/report.json", "a/report.requests.jsonl")
READERS = {
    "report": Reader(compared("a/report.json", "b/report.json"), REPORT, share=3),
    "report as the second": Reader(compared("b/report.json", "a/report.json"), REPORT),
    "aiperf": Reader(
        compared("aiperf/profile_export_aiperf.json", "b/report.json"),
        ("aiperf/profile_export_aiperf.json", "aiperf/profile_export.jsonl"),
        share=2,
    ),
    "vllm": Reader(compared("vllm/completions.json", "vllm/rate.json"), ("vllm/completions.json",), share=2),
    "vllm chat": Reader(compared("vllm/rate.json", "vllm/chat.json"), ("vllm/chat.json",)),
    "again": Reader(lambda folder: read_again(folder / "again.json"), ("again.json",), share=2),
    "prompts": Reader(lambda folder: read_prompts(folder / "prompts.txt"), ("prompts.txt",)),
    "prompts a line": Reader(lambda folder: read_prompts(folder / "prompts.jsonl"), ("prompts.jsonl",)),
    "sharegpt": Reader(lambda folder: read_conversations(folder / "sharegpt.json"), ("sharegpt.json",)),
    "sharegpt a line": Reader(lambda folder: read_conversations(folder / "sharegpt.jsonl"), ("sharegpt.jsonl",)),
    "trace": Reader(traced(lambda folder: read_trace(folder / "trace.jsonl")), ("trace.jsonl",)),
    "lengths": Reader(lengths("lengths.txt"), ("lengths.txt",)),
    "lengths a line": Reader(lengths("lengths.jsonl"), ("lengths.jsonl",)),
    "a description of lengths": Reader(described, ("description",)),
    "closed load": Reader(loaded("closed.yaml"), ("closed.yaml",)),
    "open load": Reader(loaded("open.yaml"), ("open.yaml",)),
    "staged load": Reader(loaded("staged.yaml"), ("staged.yaml",)),
    "replay": Reader(traced(loaded("replay.yaml")), ("replay.yaml", "trace.jsonl")),
    "an answer of chat": Reader(answered_http("answer.http", OpenAiHttp(SITE, "m", chat=True)), ("answer.http",), 3),
    "an answer of Triton over HTTP": Reader(
        answered_http("generate.http", TritonHttp(SITE, endpoint("text_output", "num_output_tokens"), lambda text: [])),
        ("generate.http",),
        share=2,
    ),
    "an answer of Triton that does not count": Reader(
        answered_http("generate.http", TritonHttp(SITE, endpoint("text_output"), lambda text: [])), ("generate.http",)
    ),
    "an answer of Triton over gRPC": Reader(answered_grpc, ("answer.grpc",), share=3),
    "a page of metrics": Reader(scraped, ("metrics.txt",), share=2),
}
SHARES = sum(reader.share for reader in READERS.values())
DESCRIPTIONS = ("128", "normal:128,32", "lognormal:128,0.5", "uniform:64,256", "mix:0.7*128+0.3*normal:1024,64")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    folder_of_files(folder)
    for name, reader in READERS.items():  # undamaged, all of them can be read
        (folder / "description").write_text(DESCRIPTIONS[-1])
        outcome = read_here(partial(reader.read, folder))
        assert outcome.code == 0, (name, outcome)
    return folder


def damaged(rng: random.Random, path: Path, data: bytes) -> bytes | str:
    """Other content for a file, or the name of what stands in its place."""
    if rng.random() < 0.1 and path.suffix not in (".http", ".grpc", ".txt", ""):
        return rng.choice(list(PLACES))
    if path.name == "description":
        return mutate_yaml(rng, rng.choice(DESCRIPTIONS).encode()).replace(b"\0", b"")
    if path.suffix == ".grpc" and rng.random() < 0.7:
        return mutated_frames(rng, data)
    if path.suffix == ".http" and rng.random() < 0.7:
        return mutated_events(rng, data)
    return mutate(rng, path.name, data)


def mutated_frames(rng: random.Random, data: bytes) -> bytes:
    """One frame's content changed, and its length with it."""
    out = []
    at = 0
    while at < len(data):
        high, low, kind, flags, number = frames.HEADER.unpack_from(data, at)
        end = at + 9 + (high << 16 | low)
        out.append((kind, flags, number, data[at + 9 : end]))
        at = end
    place = rng.randrange(len(out))
    kind, flags, number, payload = out[place]
    if kind == frames.DATA and rng.random() < 0.5:
        message = mutate_bytes(rng, payload[5:])
        payload = struct.pack(">BL", 0, len(message)) + message
    else:
        payload = mutate_bytes(rng, payload)
    flags ^= rng.choice((0, 0, 0, 1, 4, 8, 32))
    out[place] = (kind, flags, number, payload[: 1 << 16])
    return b"".join(frames.frame(*one) for one in out)


def mutated_events(rng: random.Random, data: bytes) -> bytes:
    """The JSON of one event changed, and the length of its chunk with it."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = body.split(b"\r\n")
    places = [place for place, line in enumerate(lines) if line.startswith(b"data: {")]
    place = rng.choice(places)
    event = b"data: " + mutate(rng, "x.json", lines[place][6:].strip()).replace(b"\n", b"") + b"\n\n"
    lines[place - 1 : place + 1] = [b"%x" % len(event), event]
    return head + b"\r\n\r\n" + b"\r\n".join(lines)


def campaign(folder: Path, name: str, runs: range) -> dict[str, str]:
    """What must not have happened: an example by its cause."""
    reader, found = READERS[name], dict[str, str]()
    for index in runs:
        rng = random.Random(f"{name} {index}")
        file = rng.choice(reader.files)
        path = folder / file
        kept = path.read_bytes()
        change = damaged(rng, path, kept)
        if isinstance(change, str):
            replace(path, change)
        else:
            path.write_bytes(change)
        outcome = read_here(lambda: reader.read(folder))
        cause = fault(outcome)
        if cause is not None:
            how = change if isinstance(change, str) else change[:300]
            found.setdefault(cause, f"{name} {index} ({file} {how!r}): {outcome}")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(kept)
    return found


def fault(outcome: Outcome) -> str | None:
    if outcome.trace:
        return _cause(outcome.trace)
    if outcome.seconds > LIMIT_S:
        return "hang"
    return "memory" if outcome.peak > LIMIT_BYTES else None


@pytest.mark.parametrize("name", READERS)
def test_some_damage_is_named(files: Path, name: str) -> None:
    found = campaign(files, name, range(QUICK))
    assert not found, "\n".join(f"{cause}: {example}" for cause, example in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_much_damage_is_named(files: Path, name: str) -> None:
    runs = round(float(os.environ.get("TRTPIPE_FUZZ", "1")) * SLOW * READERS[name].share / SHARES)
    found = campaign(files, name, range(QUICK, QUICK + runs))
    assert not found, "\n".join(f"{cause}: {example}" for cause, example in found.items())
