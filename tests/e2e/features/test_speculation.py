"""A draft model behind a real tritonserver: the same text, and its figures in metrics and in `top`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import until
from tests.e2e.features.conftest import TARGET, Front
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.reference.runtime import Runtime

pytestmark = pytest.mark.real

NEW = 25


def counts(front: Front) -> dict[str, int]:
    """Steps and drafts since the server's start."""
    page = httpx.get(front.served.metrics, timeout=60).text
    found = re.findall(r'^trtpipe_speculation\{.*speculation_type="(\w+)".*\} (\S+)$', page, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


def test_drafts_of_the_model_itself_are_all_accepted(front: Front, tmp_path: Path) -> None:
    figures = json.loads(front.served.cli.ok("top", "--server", TARGET, "--once", "--interval", "0.5", "--json").out)[
        "figures"
    ]
    (engine_figures,) = figures["engines"]
    assert engine_figures["model"] == "tensorrt_llm"
    before = counts(front)
    prompt = list(range(40, 60))
    body = {"model": TARGET, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{front.served.openai}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    # What the engine says by itself, without Triton and, by its config, without drafts.
    runtime = Runtime(without_drafts(front.engine, tmp_path / "plain"), device="cpu")
    runtime.submit(Request(id=0, prompt=tuple(prompt), max_tokens=NEW))
    tokens: list[int] = []
    while runtime.has_work:
        tokens += [token for output in runtime.step() for token in output.tokens]
    tokenizer = Tokenizer.from_file(str(front.run / "tokenizer" / "tokenizer.json"))
    assert answer.json()["choices"][0]["text"] == tokenizer.decode(tokens)
    # A first token, and six steps of three drafts and one more.
    grown = {"decode_steps": 6, "draft_tokens": 18, "accepted_draft_tokens": 18}
    assert until(lambda: counts(front) == {name: before[name] + more for name, more in grown.items()}), counts(front)


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
