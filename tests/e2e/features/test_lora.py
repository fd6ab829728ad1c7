"""Adapters of a running server, by the command line and the gateway, behind a real tritonserver."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ACTIVE, Cli, until
from tests.e2e.features.conftest import TARGET, Front
from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder
from trtpipe.engines.adapters import FOLDER, INFO, AdapterFolder
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.hf.adapter import WEIGHTS
from trtpipe.engines.reference.runtime import Runtime

pytestmark = pytest.mark.real

# Other servers may run beside it.
HERE = ("--server", TARGET)
PROMPT = list(range(40, 60))
NEW = 16


def ask(front: Front, model: str, **body: Any) -> httpx.Response:
    whole = {"model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **body}
    return httpx.post(f"{front.served.openai}/v1/completions", json=whole, timeout=120)


def text(front: Front, model: str, **body: Any) -> str:
    answer = ask(front, model, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    said: str = answer.json()["choices"][0]["text"]
    return said


def models(front: Front) -> list[str]:
    return [one["id"] for one in httpx.get(f"{front.served.openai}/v1/models", timeout=60).json()["data"]]


def without_triton(front: Front, adapters: Path) -> dict[str, str]:
    """Text that the engine gives with each adapter, and by itself under ""."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(front.model / "tokenizer.json"))
    runtime = Runtime(front.engine, device="cpu", adapters=adapters)
    out = {}
    for name, number in {"": 0, **{one.name: one.number for one in AdapterFolder(adapters).all()}}.items():
        runtime.submit(Request(id=0, prompt=tuple(PROMPT), max_tokens=NEW, adapter=number))
        tokens: list[int] = []
        while runtime.has_work:
            tokens += [token for output in runtime.step() for token in output.tokens]
        out[name] = tokenizer.decode(tokens)
    return out


def test_adapters_come_and_go_while_requests_run(front: Front, cli: Cli, tmp_path: Path) -> None:
    second = write_adapter(tmp_path / "second", front.model, rank=8, seed=1, size=3)
    assert models(front) == [TARGET, f"{TARGET}:first"]
    assert cli.ok("lora", "add", f"second={second}", *HERE).out == f"{TARGET} serves {TARGET}:second\n"
    assert models(front) == [TARGET, f"{TARGET}:first", f"{TARGET}:second"]
    listed = json.loads(cli.ok("lora", "list", "--json", *HERE).out)
    assert [(one["model"], one["rank"]) for one in listed] == [(f"{TARGET}:first", 4), (f"{TARGET}:second", 8)]
    expected = without_triton(front, cli.home / "servers" / TARGET / "models" / "tensorrt_llm" / "1" / FOLDER)
    assert len(set(expected.values())) == 3
    names = {name: f"{TARGET}:{name}" if name else TARGET for name in expected}
    with ThreadPoolExecutor(4) as pool:
        # Twice, so that the second time finds the blocks of the first.
        found = list(pool.map(lambda name: text(front, name), [*names.values()] * 2))
    assert found == [*expected.values()] * 2

    # The command names an adapter as a request does.
    said = cli.ok("generate", "once", "--raw", "--max-tokens", "16", "--adapter", "second", *HERE).out
    assert said == text(front, names["second"], prompt="once", max_tokens=16, ignore_eos=False) + "\n"

    # A long answer outlives its adapter, and is the one that it would have been.
    before = text(front, names["second"], max_tokens=200)
    running: list[str] = []
    thread = threading.Thread(target=lambda: running.append(text(front, names["second"], max_tokens=200)))
    thread.start()
    assert until(lambda: front.served.gauges()[ACTIVE] == 1)
    assert cli.ok("lora", "remove", "second", *HERE).out == f"{TARGET} no longer serves {TARGET}:second\n"
    refused = ask(front, names["second"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    thread.join()
    assert running == [before]
    assert models(front) == [TARGET, names["first"]]


@pytest.mark.slow
def test_a_client_of_the_base_model_is_not_touched(front: Front, cli: Cli, tmp_path: Path) -> None:
    """Two adds of one name, an adapter that is damaged on the disk, and a removal, while every place is taken."""
    folders = [write_adapter(tmp_path / str(seed), front.model, seed=seed, size=3) for seed in (7, 8)]
    placed = cli.home / "servers" / TARGET / "models" / "tensorrt_llm" / "1" / FOLDER
    before, over = text(front, TARGET), threading.Event()

    def keep_asking() -> list[str]:
        said = []
        while not over.is_set():
            said.append(text(front, TARGET))
        return said

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(keep_asking) for _ in range(4)]
        try:
            added = list(pool.map(lambda folder: cli.run("lora", "add", f"both={folder}", *HERE), folders))
            assert text(front, f"{TARGET}:both") != before
            shutil.copytree(next(one.path for one in AdapterFolder(placed).all() if one.name == "both"), placed / "77")
            (placed / "77" / INFO).write_text(json.dumps({"name": "damaged", "rank": 4}))
            weights = placed / "77" / WEIGHTS
            content = weights.read_bytes()[:-8]
            weights.unlink()
            weights.write_bytes(content)
            damaged = ask(front, f"{TARGET}:damaged")
            shutil.rmtree(placed / "77")
            cli.ok("lora", "remove", "both", *HERE)
        finally:
            over.set()
        answers = [said for client in clients for said in client.result()]
    first, second = sorted(added, key=lambda done: done.status)
    assert (first.status, second.status, "has an adapter 'both' already" in second.err) == (0, 2, True), second.err
    error = damaged.json()["error"]
    assert (damaged.status_code, error["type"]) == (500, "server_error"), damaged.text  # the file is the server's
    # The reason names a file of the server, so it is in the log alone.
    assert error["message"] == "the inference server failed: the adapter damaged does not load; see the server's log"
    assert f"{WEIGHTS} is damaged" in cli.ok("logs", "-n", "1000", *HERE).out
    assert len(answers) > 4
    assert set(answers) == {before}


def test_names_that_are_not_served(front: Front) -> None:
    for adapter in (":", ":../first", ":first/", ":first:first", ":FIRST", ":" + "a" * 70):
        answer = ask(front, TARGET + adapter)
        error = answer.json()["error"]
        found = answer.status_code, error["type"], error["code"], error["param"]
        assert found == (404, "invalid_request_error", "model_not_found", "model"), answer.text


@pytest.mark.slow
def test_reload_keeps_what_was_added(front: Front, cli: Cli, tmp_path: Path) -> None:
    cli.ok("lora", "add", f"kept={write_adapter(tmp_path / 'kept', front.model, seed=5, size=3)}", *HERE)
    before = text(front, f"{TARGET}:kept")
    replace(cli, folder=tmp_path).ok("reload", *HERE)  # also from a folder without runs
    assert models(front) == [TARGET, f"{TARGET}:first", f"{TARGET}:kept"]
    assert text(front, f"{TARGET}:kept") == before
    cli.ok("lora", "remove", "kept", *HERE)


def test_what_is_refused(front: Front, cli: Cli, tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", front.model, rank=16)
    other = write_adapter(tmp_path / "other", hf_folder(tmp_path / "model", hidden_size=64, tokenizer=False))
    pickled = write_adapter(tmp_path / "pickled", front.model)
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    large = write_adapter(tmp_path / "large", front.model, lora_alpha=1e41)
    for words, status, told in (
        (("add", f"x={pickled}"), 3, "has its weights only as a pickle (adapter_model.bin)"),
        (("add", f"x={large}"), 3, "holds numbers that are not finite"),
        (("add", f"../x={wide}"), 2, "cannot be the name of an adapter"),
        (("add", f"first={wide}"), 2, "has rank 16, the engine takes 8"),
        (("add", f"x={other}"), 3, "is of another model"),
        (("add", "x=nowhere"), 2, "there is no such folder"),
        (("add", "x"), 2, "x is not NAME=FOLDER"),
        (("add", f"a:b={wide}"), 2, "cannot be the name of an adapter"),
        (("add", f"first={front.model.parent / 'first'}"), 2, "has an adapter 'first' already"),
        (("remove", "firs"), 2, "has no adapter 'firs'; did you mean 'first'?"),
    ):
        done = cli.run("lora", *words, *HERE)
        assert (done.status, told in done.err, done.err.count("\n")) == (status, True, 1), done.err
    assert models(front) == [TARGET, f"{TARGET}:first"]
