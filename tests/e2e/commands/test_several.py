"""Two targets in one real tritonserver, with one gateway in front of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import SIZES, TEXTS, Cli
from trtpipe.triton_repo.check import check_repository

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.real

TOKENS = 16
FRONTS = ("ensemble", "tensorrt_llm_bls")


@dataclass(frozen=True)
class Both:
    """The running server, and the names of its two targets."""

    cli: Cli
    record: dict[str, Any]
    first: str
    second: str

    def text(self, model: str) -> str:
        ask = {"text_input": TEXTS[0], "max_tokens": TOKENS}
        url = f"{self.record['http']}/v2/models/{model}/generate"
        return str(httpx.post(url, json=ask, timeout=120).json()["text_output"])

    def openai(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.record['openai']}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def both(cli: Cli, four_layers: Path, quantized_build: list[str]) -> Iterator[Both]:
    """The first four layers of SmolLM2 in float32, and in FP8 with the ensemble as a script."""
    plain = ["build", "--model", str(four_layers), "--gpu", "cpu", "--dtype", "fp32"]
    settings = (word for size in (*SIZES, "serving.bls_instance_count=1") for word in ("--set", size))
    first, second = (
        cli.ok(*words).out.rstrip().rpartition("next: trtpipe serve ")[2]
        for words in ([*plain, *settings], quantized_build)
    )
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--openai-port", "0"]
    record = json.loads(cli.ok("serve", first, second, "--detach", "--json", *ports).out)
    yield Both(cli, record, first, second)
    cli.kill_server(record["server"])


def test_each_answers_under_its_own_names(both: Both) -> None:
    for name in (both.first, both.second):
        (text,) = {both.text(f"{name}.{front}") for front in FRONTS}
        assert text
    # Which engine answered: each has a cache of its own.
    page = httpx.get(both.record["metrics"]).text
    for name in (both.first, both.second):
        assert f'nv_inference_request_success{{model="{name}.tensorrt_llm",version="1"}} ' in page


def test_the_gateway_offers_both(both: Both) -> None:
    with both.openai() as client:
        assert [model.id for model in client.models.list()] == [both.first, both.second]
        for name in (both.first, both.second):
            asked = client.completions.create(model=name, prompt=TEXTS[0], max_tokens=TOKENS, temperature=0)
            assert asked.choices[0].text == both.text(f"{name}.ensemble")


def test_commands_ask_which_is_meant(both: Both, tmp_path: Path) -> None:
    unnamed = both.cli.run("generate", "Hello", "--server", both.record["server"])
    assert (unnamed.status, unnamed.err.count("\n")) == (2, 1)
    assert f"serves several models; name one, by --target: {both.first}, {both.second}" in unnamed.err
    where = ["--server", both.record["server"], "--target", both.second]
    assert both.cli.ok("generate", "What is the capital of France?", *where, "--max-tokens", "8").out
    report = tmp_path / "report.json"
    load = ["--concurrency", "2", "--requests", "4", "--input-tokens", "16", "--output-tokens", "4"]
    both.cli.run("bench", *where, *load, "--report", str(report))
    asked = json.loads(report.read_text())
    assert {endpoint["model"] for endpoint in asked["endpoints"]} == {f"{both.second}.ensemble"}
    assert [level["requests"]["succeeded"] for level in asked["levels"]] == [4, 4]


def test_one_is_loaded_anew_while_the_other_serves(both: Both, tmp_path: Path) -> None:
    elsewhere = replace(both.cli, folder=tmp_path)  # the target is found in the folder in which it was served
    done = elsewhere.ok("reload", both.second, "--server", both.record["server"])
    assert done.out.count("\n") == 2
    assert done.out.endswith(f"--target {both.second}\n")
    log = Path(both.record["log"])
    engine = f"{both.second}.tensorrt_llm"
    deadline = time.monotonic() + 60
    while f"successfully unloaded '{engine}'" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert both.text(f"{both.first}.ensemble")
    assert both.text(f"{both.second}.ensemble")
    # The old version's metrics have the names and labels of the new one's: tritonserver 2.51 writes to freed memory
    # when the old version deletes them.
    assert "Signal" not in log.read_text()
    page = httpx.get(both.record["metrics"]).text
    assert f'nv_trt_llm_request_metrics{{model="{engine}",request_type="max",version="1"}} 32' in page


def test_what_is_served_is_a_sound_repository(both: Both) -> None:
    faults = check_repository(both.cli.home / "servers" / both.record["server"] / "models")
    # Two engines would share a GPU, if this were one: the one thing to say.
    assert [fault.rule for fault in faults] == ["shared-gpu"]


def test_a_target_named_twice_is_refused(both: Both) -> None:
    done = both.cli.run("serve", both.first, both.first)
    assert (done.status, done.err.strip().splitlines()[-1]) == (2, "error: a target is named twice; name each once")
