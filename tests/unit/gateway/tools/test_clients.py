"""Tools through clients of other projects, and the requests that Open WebUI makes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import (
    CHAT,
    END,
    Asked,
    Script,
    Triton,
    ask,
    chat,
    end_fork_servers,
    events,
    response,
    saying,
    spoken,
    tokens_of,
    until,
)
from tests.support.paths import ROOT
from tests.support.tool_models import WEATHER, call_text, write_tool_model

pytestmark = [pytest.mark.process, pytest.mark.loopback]

CLIENTS = ("langchain-openai==1.7.4", "llama-index-llms-openai-like==0.8.1", "litellm==1.110.2")
PARIS = ["get_weather", {"city": "Paris"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tool_model(tmp_path_factory.mktemp("model"), "hermes")
    end_fork_servers()


def calling(folder: Path) -> Script:
    """An engine that calls get_weather, or the function that it is held to, and answers once it has the result."""

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        guide = asked.raw.get("guided_decoding_guide")
        result = tokens_of(folder, "sunny")
        if guide:
            (name,) = json.loads(guide[4:])["$defs"]
            said = json.dumps([{"name": name, "arguments": {"city": "Paris"}}])
        elif any(asked.prompt[start : start + len(result)] == result for start in range(len(asked.prompt))):
            said = "It is sunny."
        else:
            said = call_text("hermes", "get_weather", city="Paris")
        for token in [*tokens_of(folder, said), END]:
            yield response([token], final=token == END)

    return script


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the clients, which bring a hundred packages (450 MB)."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", "--no-compile", *CLIENTS], check=True)
    return folder / "bin/python"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_clients_of_other_projects_call_a_tool(folder: Path, clients: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> dict[str, Any]:
        # -P: a module beside the script would hide one of theirs.
        command = (str(clients), "-P", str(ROOT / "tests/support/tool_clients.py"), f"{client.base_url}/v1")
        # litellm would fetch a list of prices.
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "true"}
        running = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
        out, _ = await running.communicate()
        assert running.returncode == 0
        told: dict[str, Any] = json.loads(out.splitlines()[-1])
        return told

    told = ask(calling(folder), folder, scenario, seconds=600)
    assert told["langchain"] == {
        "call": PARIS,
        "answer": "It is sunny.",
        "streamed": [PARIS],
        "required": [PARIS],
        "structured": {"city": "Paris"},
    }
    assert told["llama_index"] == {"call": PARIS, "streamed": [PARIS], "required": [PARIS], "result": "sunny"}
    assert told["litellm"] == {"call": PARIS, "answer": "It is sunny.", "streamed": [PARIS], "required": [PARIS]}


def test_what_open_webui_asks(folder: Path) -> None:
    """Its list of models, a chat with a tool whose pieces it puts together itself, and a title."""

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        models = (await client.get("/v1/models")).json()
        assert [one["id"] for one in models["data"]] == ["llama"]
        body = chat("Weather?", tools=[WEATHER], stream_options={"include_usage": True})
        chunks = await events(client, CHAT, body)
        pieces = [
            delta for one in chunks for choice in one["choices"] for delta in choice["delta"].get("tool_calls", ())
        ]
        call, *more = pieces
        for piece in more:
            assert piece["index"] == call["index"]
            call["function"]["arguments"] += piece["function"]["arguments"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == tuple(PARIS)
        # The call goes back with its index.
        answer = {"role": "assistant", "content": spoken(chunks), "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        again = await events(client, CHAT, {**body, "messages": [*body["messages"], answer, result]})
        assert spoken(again) == "It is sunny."
        title = chat("### Task: write a title for: sunny", stream=False, max_completion_tokens=1000)
        assert (await client.post(CHAT, json=title)).json()["choices"][0]["message"]["content"] == "It is sunny."

    ask(calling(folder), folder, scenario)


def test_a_client_that_stops_a_call_ends_it_in_the_engine(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with client.stream("POST", CHAT, json=chat(tools=[WEATHER], stream=True)) as answer:
            async for _ in answer.aiter_lines():
                break
        await until(lambda: triton.stopped != [] and triton.running == 0)

    said = call_text("hermes", "get_weather", city="x" * 5000)
    ask(saying(folder, said, pause=0.01), folder, scenario)
