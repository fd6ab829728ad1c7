"""A target that is built anew while it is served, behind a real tritonserver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Cli, Served
from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder

pytestmark = pytest.mark.real

TARGET = "changing.cpu.fp32"


def test_the_gateway_takes_what_a_rebuild_changed(cli: Cli, serve: Callable[..., Served], tmp_path: Path) -> None:
    """Adapters, the chat template and the lengths."""
    model = hf_folder(tmp_path / "changing", dtype="F32", max_position_embeddings=512)
    template = model / "chat_template.jinja"
    adapter = write_adapter(tmp_path / "first", model)

    def build(content: str, length: int, *more: str) -> None:
        template.write_text("{% for m in messages %}" + content + "{% endfor %}")
        settings = ("max_batch_size=4", "max_input_len=32", "max_num_tokens=32", f"max_seq_len={length}")
        words = [word for setting in settings for word in ("--set", f"build.{setting}")]
        cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *words, *more)

    def answered(name: str) -> dict[str, Any]:
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
        answer = httpx.post(f"{served.openai}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    build("{{ m.content }}", 96)
    served = serve(TARGET)
    try:
        before = answered(TARGET)
        assert before["total_tokens"] == 96
        build("{{ m.content }} {{ m.content }}", 64, "--lora", f"first={adapter}")
        cli.ok("reload", "--server", TARGET)
        listed = httpx.get(f"{served.openai}/v1/models", timeout=60).json()["data"]
        assert [one["id"] for one in listed] == [TARGET, f"{TARGET}:first"]
        for name in (TARGET, f"{TARGET}:first"):
            after = answered(name)
            assert after["total_tokens"] == 64
            assert after["prompt_tokens"] > before["prompt_tokens"]
    finally:
        cli.kill_server(TARGET)
