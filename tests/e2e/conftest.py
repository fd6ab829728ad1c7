"""The real model and real servers, each made once a session through the command line a user types."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import forked
from tests.support.factories import hf_folder
from tests.support.paths import GOLDEN, ROOT
from trtpipe.engines.hf.safetensors_file import header_bytes, read_header
from trtpipe.pipeline.serving.serve import stop
from trtpipe.pipeline.serving.servers import recorded
from trtpipe.pipeline.store.store import Store

CAPITALS = ROOT / "tests" / "data" / "tasks" / "capitals.yaml"
TRTPIPE = Path(sys.executable).with_name("trtpipe")
SIZES = ["build.max_batch_size=32", "build.max_input_len=512", "build.max_seq_len=1024", "build.max_num_tokens=256"]

# FP8 weights and KV cache, with what calibration takes cut to what the tests need.
FP8 = [
    "--gpu", "cpu", "--dtype", "fp8", "--kv-cache", "fp8", "--set", "calibration.data=demo",
    "--set", "calibration.samples=16", "--set", "calibration.seq_len=128",
]  # fmt: skip

# Gauges of TensorRT-LLM.
ACTIVE, USED = "nv_trt_llm_request_metrics{active}", "nv_trt_llm_kv_cache_block_metrics{used}"

# Words of the four-layer model: a comparison of models mostly computes their likelihoods.
WORDS = 8192

# How long a server may take to start here.
START_SECONDS = 150.0
NEW_TOKENS = 16
END = 2
GREEDY = "smollm2_greedy.json"
TEXTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "To bake bread you need flour, water,",
    "Photosynthesis is the process by which",
    "In 1969, the first human",
    "SELECT name FROM users WHERE",
    "The recipe for a good life is simple:",
    "Mount Everest is",
    "An algorithm is a finite sequence of instructions. It differs from a heuristic in that",
    "She opened the door and saw, to her great surprise, that the room which had been full of furniture "
    "only an hour ago was now completely empty, save for a small wooden box in the middle of the floor.",
)


def until(check: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.1)
    return False


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Cli:
    """The trtpipe command in a folder and a home of the session's own."""

    folder: Path
    home: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, "TRTPIPE_HOME": str(self.home)}

    def run(self, *arguments: str, text: str = "", timeout: float = 1500) -> Finished:
        """Run the command with `text` as its input."""
        if arguments[0] != "serve":  # the process of a server is known by its words
            ended = forked.run(arguments, self.folder, self.environment(), text, seconds=timeout)
            return Finished(ended.status, ended.out, ended.err)
        done = subprocess.run(
            [TRTPIPE, *arguments], cwd=self.folder, env=self.environment(), capture_output=True, text=True,
            timeout=timeout, check=False, input=text,
        )  # fmt: skip
        return Finished(done.returncode, done.stdout, done.stderr)

    def ok(self, *arguments: str) -> Finished:
        done = self.run(*arguments)
        assert done.status == 0, done.err
        return done

    def kill_server(self, name: str) -> None:
        """End a server at once; `trtpipe stop` waits for requests that a killed Python process has left open."""
        store = Store(self.home)
        for server in recorded(store):
            if server.name == name:
                if server.died is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(server.pid, signal.SIGKILL)
                stop(store, name)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [TRTPIPE, *arguments], cwd=self.folder, env=self.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @contextlib.contextmanager
    def serving(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """`serve` in the foreground, once it says how to end it; a test that fails leaves none."""
        process = self.start("serve", *arguments)
        assert process.stdout is not None
        assert process.stderr is not None
        late = threading.Timer(START_SECONDS, process.send_signal, (signal.SIGINT,))
        late.start()
        try:
            if not any("Ctrl-C" in line for line in process.stdout):
                logs = [log.read_text(errors="replace")[-4000:] for log in self.home.glob("logs/serve-*.log")]
                raise AssertionError("\n".join([process.stderr.read(), *logs]))
            late.cancel()
            yield process
        finally:
            late.cancel()
            with process:
                process.send_signal(signal.SIGINT)


@dataclass(frozen=True)
class Served:
    """A running server and how to talk to it.

    `verify=False`: before a request httpx reads all certificate authorities, which takes 30 ms.
    """

    cli: Cli
    name: str
    pid: int
    http: str
    grpc: str
    metrics: str
    openai: str

    def generate(self, model: str = "ensemble", **body: Any) -> dict[str, Any]:
        """One answer over HTTP /generate: the reply's JSON, with `error` in it when it failed."""
        reply: dict[str, Any] = httpx.post(
            f"{self.http}/v2/models/{model}/generate", json=body, timeout=120, verify=False
        ).json()
        return reply

    def stream(self, model: str = "ensemble", **body: Any) -> Iterator[dict[str, Any]]:
        """Each server-sent event of /generate_stream."""
        url = f"{self.http}/v2/models/{model}/generate_stream"
        with httpx.stream("POST", url, json={"stream": True, **body}, timeout=120, verify=False) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[len("data: ") :])

    def gauges(self) -> dict[str, float]:
        """TensorRT-LLM's gauges, each as `family{its own label}`."""
        out = {}
        for family, labels, number in re.findall(
            r"^(nv_trt_llm\w+)\{(.*)\} (\S+)$", httpx.get(self.metrics, timeout=10, verify=False).text, re.MULTILINE
        ):
            own = [value for name, value in re.findall(r'(\w+)="([^"]*)"', labels) if name not in ("model", "version")]
            out[f"{family}{{{own[0]}}}"] = float(number)
        return out


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """In a folder and a home of this process; artefacts are made once for all processes of the session."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    home = tmp_path_factory.mktemp("home")
    for name in ("artefacts", "locks"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(shared / name)
    return Cli(tmp_path_factory.mktemp("work"), home)


@pytest.fixture(scope="session")
def target(cli: Cli) -> str:
    """SmolLM2 in float32, built whole; the target's name."""
    options = [option for size in SIZES for option in ("--set", size)]
    cli.ok("build", "--model", "smollm2-135m", "--gpu", "cpu", "--dtype", "fp32", *options)
    return "smollm2-135m.cpu.fp32"


@pytest.fixture(scope="session")
def tiny_repository(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a model of random weights, to be copied and served by tests of starts and ends.

    One process of the script: at its end tritonserver takes a second for each.
    """
    model = hf_folder(tmp_path_factory.mktemp("models") / "tiny", dtype="F32", max_position_embeddings=8192)
    settings = (
        "build.max_batch_size=2", "build.max_input_len=64", "build.max_seq_len=8192", "build.max_num_tokens=64",
        "serving.bls_instance_count=1",
    )  # fmt: skip
    options = [option for setting in settings for option in ("--set", setting)]
    cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *options)
    return (cli.folder / "runs" / "tiny.cpu.fp32" / "repository").resolve()


@pytest.fixture(scope="session")
def smollm2_hf(cli: Cli, target: str) -> Path:
    return (cli.folder / "runs" / target / "model").resolve()


@pytest.fixture(scope="session")
def four_layers(smollm2_hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four layers and words of SmolLM2 as a model: real weights, a tenth of the time."""
    out = tmp_path_factory.mktemp("models") / "smollm2-4"
    out.mkdir()
    for path in smollm2_hf.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "vocab_size": WORDS}))
    # A word's number is its place among the merges, so that the first words are those of the first merges.
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {word: number for word, number in model["vocab"].items() if number < WORDS}
    model["merges"] = [(left, right) for left, right in model["merges"] if left + right in model["vocab"]]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    (weights,) = smollm2_hf.glob("*.safetensors")
    layers = {f"model.layers.{number}" for number in range(4)}
    kept = [
        tensor for name, tensor in read_header(weights).tensors.items()
        if not name.startswith("model.layers.") or ".".join(name.split(".")[:3]) in layers
    ]  # fmt: skip
    shapes = [(WORDS, *one.shape[1:]) if one.shape[0] == config["vocab_size"] else one.shape for one in kept]
    header, _ = header_bytes((one.name, one.dtype, shape) for one, shape in zip(kept, shapes, strict=True))
    with weights.open("rb") as source, (out / "model.safetensors").open("wb") as file:
        file.write(header)
        for tensor, shape in zip(kept, shapes, strict=True):
            source.seek(tensor.offset)
            file.write(source.read(tensor.nbytes * shape[0] // tensor.shape[0]))
    return out


@pytest.fixture(scope="session")
def quantized_build(four_layers: Path) -> list[str]:
    """`trtpipe build` of the four layers in FP8, as its words."""
    settings = (*SIZES, "serving.ensemble=script", "serving.bls_instance_count=2")
    words = (word for one in settings for word in ("--set", one))
    return ["build", "--model", str(four_layers), *FP8, *words, "--tasks", str(CAPITALS)]


@pytest.fixture(scope="session")
def smollm2_engine_fp32(cli: Cli, target: str) -> Path:
    return (cli.folder / "runs" / target / "engine").resolve()


@pytest.fixture(scope="session")
def serve(cli: Cli) -> Callable[..., Served]:
    """Serve a target on free ports, with further words of `trtpipe serve`."""
    free = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]

    def start(target: str, *words: str) -> Served:
        told = json.loads(cli.ok("serve", target, "--detach", "--json", *free, *words).out)
        addresses = (told[name] for name in ("http", "grpc", "metrics", "openai"))
        return Served(cli, told["server"], told["pid"], *addresses)

    return start


@pytest.fixture(scope="session")
def greedy_texts() -> tuple[str, ...]:
    return TEXTS


@pytest.fixture(scope="session")
def prompts(smollm2_hf: Path, greedy_texts: tuple[str, ...]) -> list[tuple[int, ...]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_hf / "tokenizer.json"))
    out = [tuple(tokenizer.encode(text).ids) for text in greedy_texts]
    assert max(len(prompt) for prompt in out) <= 64
    return out


@pytest.fixture(scope="session")
def expected() -> list[list[int]]:
    """transformers' own greedy continuation of each prompt in float32, without the end token."""
    tokens: list[list[int]] = json.loads((GOLDEN / GREEDY).read_text())
    return tokens
