"""Routes of the gateway besides completions: models and their names, adapters, tokens, pages of another origin."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import (
    CHAT,
    INPUTS,
    Triton,
    ask,
    chat,
    end_fork_servers,
    saying,
    tokens_of,
    write_model,
)
from trtpipe import __version__
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.gateway.model_names import require_free
from trtpipe.pipeline.gateway.options import ServedModel

# A gateway makes prompts in processes of its own.
pytestmark = pytest.mark.process


@pytest.mark.loopback
def test_other_routes(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["llama"]
        assert (await client.get("/v1/models/llama")).json()["object"] == "model"
        assert (await client.get("/v1/models/x/y")).json()["error"]["code"] == "model_not_found"
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/version")).json() == {"version": __version__}
        nothing = await client.get("/v2/none")
        assert (nothing.status_code, nothing.json()["error"]["message"]) == (404, "GET /v2/none: Not Found")
        for path in ("/chat/completions", "/completions"):
            without = await client.post(path, json=chat())
            told = f"POST {path}: Not Found; try /v1{path}, with /v1 at the end of the base URL"
            assert (without.status_code, without.json()["error"]["message"]) == (404, told)
        assert "; try /v1/models, " in (await client.get("/models")).json()["error"]["message"]
        wrong = await client.get(CHAT)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        counted = (await client.get("/metrics")).text
        # A wrong method is no fault of the server, whose share of 5xx the dashboard shows.
        assert 'requests_total{endpoint="chat",status="405"} 1' in counted
        assert 'requests_total{endpoint="chat",status="500"} 0' in counted
        assert (await client.get("/docs")).status_code == 404

    ask(saying(folder, "x"), folder, scenario)


@pytest.mark.loopback
def test_every_served_name_is_answered_under_the_first(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for name in ("llama", "gpt-4o", "other", "o2"):
            answer = (await client.post(CHAT, json={**chat(), "model": name})).json()
            assert answer["model"] == {"gpt-4o": "llama", "o2": "other"}.get(name, name)
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [
            "llama", "gpt-4o", "other", "o2",
        ]  # fmt: skip
        assert (await client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        told = (await client.post(CHAT, json={**chat(), "model": "gpt-5"})).json()["error"]["message"]
        assert told.endswith("served: llama, gpt-4o, other, o2")

    more = (ServedModel(name="other", tokenizer=folder, aliases=("o2",)),)
    ask(saying(folder, "x"), folder, scenario, model={"aliases": ("gpt-4o",)}, more=more)


@pytest.mark.loopback
def test_adapters_are_models_of_their_own_which_come_and_go(folder: Path, tmp_path: Path) -> None:
    """A request's adapter reaches Triton by its number; the worker and its prompt process look into the same folder."""
    adapters = tmp_path / "lora"

    def add(number: int, name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.json").write_text(json.dumps({"name": name, "rank": 8}))
        (tmp_path / name).rename(adapters / str(number))

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        triton.inputs = [*INPUTS, "lora_task_id"]

        async def listed() -> list[tuple[str, str | None]]:
            models = (await client.get("/v1/models")).json()["data"]
            return [(model["id"], model.get("parent")) for model in models]

        async def asked(model: str) -> tuple[str, bytes | None]:
            answer = (await client.post(CHAT, json={**chat(), "model": model})).json()
            return answer["model"], triton.asked[-1].raw.get("lora_task_id")

        assert await listed() == [("llama", None), ("gpt-4o", None)]
        add(7, "fr")
        add(2**31 - 1, "de.2-x")
        assert await listed() == [
            ("llama", None), ("llama:de.2-x", "llama"), ("llama:fr", "llama"),
            ("gpt-4o", None), ("gpt-4o:de.2-x", "gpt-4o"), ("gpt-4o:fr", "gpt-4o"),
        ]  # fmt: skip
        assert await asked("llama:fr") == ("llama:fr", struct.pack("<Q", 7))
        assert await asked("gpt-4o:de.2-x") == ("llama:de.2-x", struct.pack("<Q", 2**31 - 1))
        assert await asked("llama") == ("llama", None)
        assert (await client.get("/v1/models/llama:fr")).json()["parent"] == "llama"
        (adapters / "7").rename(tmp_path / "gone")
        count = len(triton.asked)
        for name in ("llama:fr", "llama:", ":fr", "llama:fr:fr", "fr"):
            answer = await client.post(CHAT, json={**chat(), "model": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert len(triton.asked) == count
        triton.inputs = INPUTS

    adapters.mkdir()
    script = saying(folder, "x")
    ask(script, folder, scenario, model={"aliases": ("gpt-4o",), "adapters": adapters})


def test_an_adapter_may_not_have_the_name_of_a_model() -> None:
    names = ("llama", "llama:fr")
    require_free(names, ("llama",), "de")
    with pytest.raises(UsageError, match="the name llama:fr is that of a model, and of llama with the adapter fr"):
        require_free(names, ("llama",), "fr")


@pytest.mark.loopback
def test_tokens_of_a_text_or_of_messages_and_the_way_back(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async def tokenize(**body: Any) -> Any:
            return (await client.post("/tokenize", json=body)).json()

        ids = tokens_of(folder, "ab é")
        told = await tokenize(model="llama", prompt="ab é")
        assert told == {"count": len(ids), "max_model_len": 100, "tokens": ids}
        assert (await tokenize(prompt="ab", return_token_strs=True))["token_strs"] == ["a", "b"]
        assert (await tokenize(prompt=""))["tokens"] == []
        messages = chat("Hi")["messages"]
        whole = await tokenize(messages=messages)
        assert whole["tokens"] == tokens_of(folder, "<s>[user]Hi")
        usage = (await client.post(CHAT, json=chat("Hi"))).json()["usage"]
        assert usage["prompt_tokens"] == whole["count"]
        back = await client.post("/detokenize", json={"model": "llama", "tokens": [0, *ids]})
        assert back.json() == {"prompt": "<s>ab é"}
        for path, body, field in (
            ("/tokenize", {"prompt": "x", "messages": messages}, "prompt"),
            ("/tokenize", {"model": "llama"}, "prompt"),
            ("/tokenize", {"prompt": "x", "add_special": True}, "add_special"),
            ("/tokenize", {"prompt": "x", "model": "nix"}, "model"),
            ("/tokenize", {"prompt": "x" * 1000}, "prompt"),
            ("/detokenize", {"tokens": [1, 300]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ):
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (404 if field == "model" else 400, field)
        many = await client.post("/detokenize", json={"tokens": tokens_of(folder, "a") * 10_000})
        assert many.json() == {"prompt": "a" * 10_000}

    ask(saying(folder, "x"), folder, scenario, model={"max_seq_len": 100})


@pytest.mark.loopback
def test_a_text_that_begins_with_the_first_token_is_counted_as_it_is_taken(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    folder = write_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    a, b = tokenizer.encode("ab", add_special_tokens=False).ids

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for fields, tokens in (
            ({"prompt": "ab"}, [0, a, b]),
            ({"prompt": "<s>ab"}, [0, a, b]),
            ({"prompt": "<s>ab", "add_special_tokens": True}, [0, 0, a, b]),
            ({"prompt": "<s>ab", "add_special_tokens": False}, [0, a, b]),
            ({"prompt": "ab", "add_special_tokens": False}, [a, b]),
        ):
            assert (await client.post("/tokenize", json=fields)).json()["tokens"] == tokens, fields
        for prompt in ("ab", "<s>ab"):
            answer = (await client.post("/v1/completions", json={"model": "llama", "prompt": prompt})).json()
            assert answer["usage"]["prompt_tokens"] == 3

    ask(saying(folder, "x"), folder, scenario)
    end_fork_servers()


@pytest.mark.loopback
def test_pages_of_an_origin_may_call_and_need_a_key_all_the_same(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = "access-control-allow-origin"

    def scenario(origin: str, answer: str | None) -> Any:
        async def asked(client: httpx.AsyncClient, triton: Triton) -> None:
            page = {"origin": origin}
            before = await client.options(CHAT, headers={**page, **preflight})
            assert (before.status_code, before.headers.get(allowed)) == (200 if answer else 400, answer)
            for key, body, status in (("key", chat(), 200), ("no", chat(), 401), ("key", {"model": 1}, 400)):
                headers = {**page, "authorization": f"Bearer {key}"}
                real = await client.post(CHAT, json=body, headers=headers)
                assert (real.status_code, real.headers.get(allowed)) == (status, answer)
                if answer:  # elsewhere a browser shows the page nothing
                    assert real.headers["access-control-expose-headers"] == "retry-after"
            assert allowed not in (await client.get("/health")).headers

        return asked

    own: dict[str, Any] = {"api_keys_file": tmp_path / "keys", "cors_origins": ("https://a.example",)}
    ask(saying(folder, "x"), folder, scenario("https://a.example", "https://a.example"), **own)
    ask(saying(folder, "x"), folder, scenario("https://b.example", None), **own)
    every = {**own, "cors_origins": ("*",)}
    ask(saying(folder, "x"), folder, scenario("https://b.example", "*"), **every)
