"""A draft model behind a real tritonserver: the same text, and its figures in metrics and in `top`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Cli, Served
from tests.support.factories import hf_folder

pytestmark = pytest.mark.real

TARGET = "guessed.cpu.fp32"
SIZES = ("max_batch_size=4", "max_input_len=64", "max_seq_len=128", "max_num_tokens=64")
NEW = 25


@pytest.fixture(scope="module")
def served(cli: Cli, tmp_path_factory: pytest.TempPathFactory, serve: Callable[[str], Served]) -> Iterator[Served]:
    model = hf_folder(tmp_path_factory.mktemp("models") / "guessed", dtype="F32", seed=3)
    asked = (*SIZES, "speculative_decoding_mode=draft_model", "max_draft_len=3", f"speculative_model={model}")
    words = [word for one in asked for word in ("--set", f"build.{one}")]
    cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *words)
    server = serve(TARGET)
    yield server
    cli.kill_server(server.name)


def test_drafts_of_the_model_itself_are_all_accepted(cli: Cli, served: Served) -> None:
    from trtpipe.engines.engine_process.request import Request
    from trtpipe.engines.reference.runtime import Runtime

    (server,) = (one for one in json.loads(cli.ok("ps", "--json").out) if one["server"] == served.name)
    prompt = list(range(40, 60))
    body = {"model": TARGET, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server['openai']}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    # What the engine says by itself, without Triton and, by its config, without drafts.
    engine = (cli.folder / "runs" / TARGET / "engine").resolve()
    plain = without_drafts(engine, cli.folder / "plain")
    runtime = Runtime(plain, device="cpu")
    runtime.submit(Request(id=0, prompt=tuple(prompt), max_tokens=NEW))
    tokens: list[int] = []
    while runtime.has_work:
        tokens += [token for output in runtime.step() for token in output.tokens]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(cli.folder / "runs" / TARGET / "tokenizer" / "tokenizer.json"))
    assert answer.json()["choices"][0]["text"] == tokenizer.decode(tokens)
    figures = json.loads(cli.ok("top", "--server", TARGET, "--once", "--interval", "0.5", "--json").out)["figures"]
    (engine_figures,) = figures["engines"]
    assert engine_figures["model"] == "tensorrt_llm"
    page = httpx.get(served.metrics, timeout=60).text
    counts = {
        line.split('speculation_type="')[1].split('"')[0]: float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("trtpipe_speculation{")
    }
    # A first token, and six steps of three drafts and one more.
    assert counts == {"decode_steps": 6, "draft_tokens": 18, "accepted_draft_tokens": 18}


def without_drafts(engine: Path, out: Path) -> Path:
    """The engine with a config that makes no drafts."""
    out.mkdir()
    for path in engine.iterdir():
        if path.is_file():
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    for name in ("speculative_decoding_mode", "max_draft_len", "speculative_model"):
        del config["build_config"][name]
    (out / "config.json").write_text(json.dumps(config))
    return out
