"""A target that is built anew while it is served, behind a real tritonserver."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Cli, Served, until
from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder
from trtpipe.pipeline.serving import servers
from trtpipe.pipeline.store.store import Store

pytestmark = pytest.mark.real

TARGET = "changing.cpu.fp32"


def test_the_gateway_takes_what_a_rebuild_changed(cli: Cli, serve: Callable[..., Served], tmp_path: Path) -> None:
    """Adapters, the chat template and the lengths; and adapters that were added to the server stay, where they can."""
    model = hf_folder(tmp_path / "changing", dtype="F32", max_position_embeddings=512)
    template = model / "chat_template.jinja"
    adapter = write_adapter(tmp_path / "first", model)

    def build(content: str, length: int, *more: str, batch: int = 4) -> None:
        template.write_text("{% for m in messages %}" + content + "{% endfor %}")
        settings = (f"max_batch_size={batch}", "max_input_len=32", "max_num_tokens=32", f"max_seq_len={length}")
        words = [word for setting in settings for word in ("--set", f"build.{setting}")]
        cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *words, *more)

    def answered(name: str) -> dict[str, Any]:
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
        answer = httpx.post(f"{served.openai}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def models() -> list[str]:
        return [one["id"] for one in httpx.get(f"{served.openai}/v1/models", timeout=60).json()["data"]]

    def prompt_tokens() -> int:
        answer = served.generate(text_input="Hello", max_tokens=1, return_num_input_tokens=True)
        return int(answer["num_input_tokens"])

    here = ("--server", TARGET)
    build("{{ m.content }}", 96)
    # As where the clock is set back while it is served.
    for path in (cli.folder / "runs" / TARGET / "repository").resolve().rglob("*"):
        os.utime(path, (time.time() + 3600,) * 2)
    served = serve(TARGET, "--restart", "1")
    try:
        before = answered(TARGET)
        assert before["total_tokens"] == 96
        build("{{ m.content }} {{ m.content }}", 64, "--lora", f"first={adapter}", "--set", "build.max_lora_rank=16")
        cli.ok("reload", *here)
        assert models() == [TARGET, f"{TARGET}:first"]
        for name in (TARGET, f"{TARGET}:first"):
            after = answered(name)
            assert after["total_tokens"] == 64
            assert after["prompt_tokens"] > before["prompt_tokens"]

        for name, rank in (("wide", 16), ("small", 2)):
            cli.ok("lora", "add", f"{name}={write_adapter(tmp_path / name, model, rank=rank)}", *here)
        # `small` is the new engine's own now.
        build("{{ m.content }}", 64, "--lora", f"small={adapter}", "--set", "build.max_lora_rank=8")
        refused = cli.run("reload", *here)
        assert refused.status != 0
        assert "adapter 'wide' has rank 16, and the new engine takes 8; run `trtpipe lora remove wide`" in refused.err
        assert answered(f"{TARGET}:wide") == after  # the server goes on as it was
        build("{{ m.content }}", 64)
        assert "the new engine was built without adapters, and '" in cli.run("reload", *here).err
        build("{{ m.content }}", 64, "--lora", f"small={adapter}")
        cli.ok("lora", "remove", "wide", *here)
        recorded, tokens = cli.ok("ps", "--json").out, prompt_tokens()
        for batch in (4, 2, 8):  # an ensemble's batches may not be larger than those of its models
            build("{{ m.content }}", 64, "--lora", f"small={adapter}", batch=batch)
            refused = cli.run("reload", str(with_an_engine_that_does_not_load(cli, tmp_path / str(batch))), *here)
            assert (refused.status, refused.err.split(": ")[1]) == (5, "tensorrt_llm does not load"), refused.err
            assert models() == [TARGET, f"{TARGET}:first", f"{TARGET}:small"]
            assert answered(f"{TARGET}:small") == answered(TARGET) == after
            assert (cli.ok("ps", "--json").out, prompt_tokens()) == (recorded, tokens)
        with servers.reloading(Store(cli.home), TARGET):
            refused = cli.run("reload", *here)
        assert (refused.status, "is being reloaded by another command" in refused.err) == (4, True), refused.err
        os.kill(served.pid, signal.SIGKILL)
        assert until(lambda: cli.ok("ps", "--json").out not in ("[]\n", recorded) and answers(served.http), 120)
        assert answered(f"{TARGET}:small") == after  # what was added to a server is there when it is started again
        cli.ok("reload", *here)
        assert httpx.get(f"{served.http}/v2/models/ensemble/config", timeout=60).json()["max_batch_size"] == 8
        assert models() == [TARGET, f"{TARGET}:small"]
        assert answered(f"{TARGET}:small") == before | {
            "total_tokens": 64,
            "completion_tokens": 64 - before["prompt_tokens"],
        }
    finally:
        cli.kill_server(TARGET)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v2/health/ready", timeout=60).status_code == 200
    return False


def with_an_engine_that_does_not_load(cli: Cli, folder: Path) -> Path:
    """A copy of the target's repository whose engine lacks layers, and whose tokenizer puts "xx" before a text."""
    out = folder / "broken"
    shutil.copytree(cli.folder / "runs" / TARGET / "repository", out)
    engine, tokenizer = out / "tensorrt_llm/1/config.json", out / "preprocessing/1/tokenizer/tokenizer.json"
    for path in (engine, tokenizer):
        path.chmod(0o644)
    config, settings = json.loads(engine.read_text()), json.loads(tokenizer.read_text())
    config["pretrained_config"]["num_hidden_layers"] += 1
    settings["normalizer"] = {"type": "Prepend", "prepend": "xx"}
    engine.write_text(json.dumps(config))
    tokenizer.write_text(json.dumps(settings))
    return out
