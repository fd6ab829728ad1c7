"""Requests that the gateway refuses, what the engine refuses, and keys."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateways import CHAT, TEXT, Asked, Triton, ask, chat, fork_server, response, saying
from tests.unit.gateway.conftest import options
from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.gateway.app import build
from trtpipe.pipeline.gateway.shared_counters import SharedCounters

JSON = {"content-type": "application/json"}

# A gateway makes prompts in processes of its own.
pytestmark = [pytest.mark.process, pytest.mark.loopback]


@pytest.mark.parametrize(
    ("body", "status", "param", "telling"),
    [
        (b"{", 400, None, "not JSON"),
        (b"[]", 400, None, "not a JSON object"),
        (b"[" * 200_000, 400, None, "not JSON"),
        (b"\xff\xfe", 400, None, "not JSON"),
        (chat(temprature=1), 400, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        (chat(max_token=1), 400, "max_token", "did you mean 'max_tokens'?"),
        (chat(zzz=1), 400, "zzz", "unknown field 'zzz'"),
        (chat(functions=[{"name": "f"}]), 400, "functions", "'functions' is not supported"),
        (chat(temperature="hot"), 400, "temperature", "'temperature': "),
        (chat(temperature=3), 400, "temperature", "less than or equal to 2"),
        (chat(temperature=float("nan")), 400, "temperature", "finite"),
        (chat(n=True), 400, "n", "valid integer"),
        (chat(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
        (chat(max_tokens=2**31), 400, "max_tokens", "less than 2147483648"),
        (chat(repetition_penalty=1e300), 400, "repetition_penalty", "less than or equal to 100"),
        (chat(repetition_penalty=1e-300), 400, "repetition_penalty", "greater than or equal to 0.01"),
        (chat(top_k=2**31), 400, "top_k", "less than 2147483648"),
        (chat(seed=2**64), 400, "seed", "less than 18446744073709551616"),
        (chat(seed=10**70), 400, None, "more than 64 digits"),
        (chat(n=2**31), 400, "n", "at most 32 answers a request, not 2147483648; send them in several requests"),
        (chat(max_tokens=5, min_tokens=6), 400, "min_tokens", "'min_tokens': 6 is more than the 5 tokens of"),
        (chat(max_completion_tokens=5, min_tokens=6), 400, "min_tokens", "than the 5 tokens"),
        (chat(min_tokens=94), 400, "min_tokens", "'min_tokens': 94 is more than the 88 tokens of the answer"),
        (chat(stop=["x" * 257]), 400, "stop", "up to 256 characters"),
        (chat(stop=["x"] * 5000), 400, "stop", "'stop' holds more than 4096 elements"),
        (chat() | {f"x{n}": 1 for n in range(50_000)}, 400, None, "the body holds more than 50000 elements"),
        (chat() | {"x" * 5000: 1}, 400, "x" * 200 + "...", "unknown field 'xxx"),
        (chat(model="x" * 5000), 404, "model", "xxx...' does not exist"),
        (chat(stop=["x"] * 17), 400, "stop", "up to 16"),
        (chat(stream_options={"include_usage": True}), 400, "stream_options", "needs 'stream': true"),
        ({"model": "llama"}, 400, "messages", "'messages' is missing"),
        (chat() | {"messages": []}, 400, "messages", "at least 1"),
        (chat() | {"messages": [{"role": "user"}]}, 400, "messages.0.content", "missing"),
        (chat() | {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "'system'"),
        (
            chat() | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages.0.content.0.type",
            "images are not supported",
        ),
        (
            chat() | {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            400,
            "messages.0.content.0.text",
            "'messages.0.content.0.text': Input should be a valid string",
        ),
        (
            chat() | {"messages": [{"role": "user", "content": 5}]},
            400,
            "messages.0.content",
            "'messages.0.content': Input should be a valid string or a valid list",
        ),
        (
            chat() | {"messages": [{"role": "user", "content": {}}]},
            400,
            "messages.0.content",
            "'messages.0.content': Input should be a valid string or a valid list",
        ),
        (chat(stop=5), 400, "stop", "'stop': Input should be a valid string or a valid list"),
        (chat(stream_options=5), 400, "stream_options", "'stream_options': Input should be an object"),
        (chat(stop=["x", 5]), 400, "stop.1", "'stop.1': Input should be a valid string"),
        (chat("\ud800"), 400, None, "half of a surrogate pair"),
        (chat() | {"\ud800": 1}, 400, None, "half of a surrogate pair"),
        (b'{"model": "llama", "messages": "\xed\xa0\x80"}', 400, None, "not JSON"),
        (chat(model="gpt-4"), 404, "model", "model 'gpt-4' does not exist; served: llama"),
        (chat("x" * 60), 400, "messages", "the prompt has 67 tokens; this model takes 50"),
        (chat("x" * 40, max_tokens=60), 400, "messages", "has 47 tokens and max_tokens is 60; this model takes 100"),
        (chat("x" * 2_000_000), 413, None, "larger than 1000000 bytes"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_by_name(
    folder: Path, body: Any, status: int, param: str | None, telling: str
) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post(CHAT, content=content, headers=JSON)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert telling in error["message"]
        if param is not None:
            assert error["param"] == param
        assert triton.asked == []
        assert f'{{endpoint="chat",status="{status}"}} 1' in (await client.get("/metrics")).text

    limits = {"max_input_len": 50, "max_seq_len": 100}
    ask(saying(folder, "x"), folder, scenario, model=limits, max_body_bytes=1_000_000)


def test_completions_refuse_what_they_cannot_do(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": 5}, "prompt"),
            ({"prompt": {}}, "prompt"),
            ({"prompt": ["x", 5]}, "prompt.1"),
            ({"prompt": [[5], "x"]}, "prompt.1"),
            ({"prompt": [5, True]}, "prompt.0"),
            ({"prompt": ["x"] * 33}, "prompt"),
            ({"prompt": ["x"] * 11, "n": 3}, "n"),
            ({"prompt": [5, 9999]}, "prompt"),
            ({"prompt": [-5]}, "prompt"),
            ({"prompt": "x", "suffix": "y"}, "suffix"),
            ({"prompt": "x", "echo": True, "logprobs": 1, "temperature": 0}, "echo"),
            ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
            ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias.x"),
            ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias.-1"),
            ({"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias.9999"),
            ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias.5"),
            ({"prompt": "x", "logit_bias": {"5": 1}, "logprobs": 1, "temperature": 0}, "logprobs"),
            ({"prompt": "x", "best_of": 2}, "best_of"),
            ({"prompt": "x", "logprobs": 2}, "logprobs"),
            ({"prompt": "x", "messages": []}, "messages"),
        ]
        for fields, param in cases:
            answer = await client.post(TEXT, json={"model": "llama", **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
        neutral: dict[str, Any] = {"suffix": None, "echo": False, "best_of": 1, "logit_bias": {}, "user": "me", "n": 1}
        assert (await client.post(TEXT, json={"model": "llama", "prompt": "x", **neutral})).status_code == 200
        pair = {"model": "llama", "prompt": "\U0001f600", "stop": "\U0001f600"}  # escaped, it is two surrogates
        assert (await client.post(TEXT, content=json.dumps(pair), headers=JSON)).status_code == 200

    ask(saying(folder, "x"), folder, scenario)


@pytest.mark.parametrize(
    ("headers", "telling"),
    [
        ({}, "send the header 'Content-Type: application/json'"),
        ({"content-type": "text/plain"}, "send the header 'Content-Type: application/json'"),
        ({"content-type": "application/json; charset=utf-8", "content-encoding": "gzip"}, "the body is compressed"),
    ],
)
def test_a_body_that_is_not_said_to_be_json_is_refused(folder: Path, headers: dict[str, str], telling: str) -> None:
    """A browser sends text from any page to any address, without asking first."""

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, content=json.dumps(chat()), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert telling in answer.json()["error"]["message"]
        said = {"content-type": "application/JSON ; charset=utf-8", "content-encoding": "identity"}
        assert (await client.post(CHAT, content=json.dumps(chat()), headers=said)).status_code == 200
        counted = (await client.get("/metrics")).text
        assert 'requests_total{endpoint="chat",status="415"} 1' in counted
        assert 'requests_total{endpoint="chat",status="500"} 0' in counted

    ask(saying(folder, "x"), folder, scenario)


def test_api_keys(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\n\n  second-key\n")
    monkeypatch.setenv("TRTPIPE_API_KEYS", "third,fourth")

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for header, status in [
            (None, 401),
            ("Bearer wrong", 401),
            ("Bearer # ours", 401),
            ("Basic first-key", 401),
            ("Bearer first-key", 200),
            ("bearer second-key", 200),
            ("Bearer third", 200),
            ("Bearer fourth", 200),
        ]:
            headers = {"authorization": header} if header else {}
            for answer in (
                await client.get("/v1/models", headers=headers),
                await client.get("/metrics", headers=headers),
                await client.post(CHAT, json=chat(), headers=headers),
            ):
                assert answer.status_code == status, header
                if status == 401:
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.post(CHAT, content=b"{")).status_code == 401, "nothing is read of a stranger's body"
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/version")).status_code == 401
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401

    async def first_key(client: httpx.AsyncClient, triton: Triton) -> None:
        assert (await client.get("/v1/models", headers={"authorization": "Bearer first-key"})).status_code == 200

    ask(saying(folder, "x"), folder, scenario, api_keys_file=keys)
    # As Windows' editor writes it.
    keys.write_bytes("\ufefffirst-key\r\n# für uns\r\n".encode())
    ask(saying(folder, "x"), folder, first_key, api_keys_file=keys)
    keys.write_text("first-key\nschlüssel\n")
    keyed = options(folder, api_keys_file=keys)
    with pytest.raises(InputDataError, match="has a letter outside ASCII") as refused:
        build(keyed, SharedCounters(), fork_server(keyed), most_connections=10)
    assert "schl" not in str(refused.value)
    monkeypatch.setenv("TRTPIPE_API_KEYS", "third,schlüssel")
    with pytest.raises(InputDataError, match="an API key in TRTPIPE_API_KEYS has a letter outside ASCII"):
        build(options(folder), SharedCounters(), fork_server(keyed), most_connections=10)
    monkeypatch.delenv("TRTPIPE_API_KEYS")
    (tmp_path / "none").write_text("# nothing\n")
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "none", tmp_path / "absent", tmp_path / "pipe"):
        keyed = options(folder, api_keys_file=file)
        with pytest.raises(InputDataError):
            build(keyed, SharedCounters(), fork_server(keyed), most_connections=10)


@pytest.mark.parametrize(
    ("code", "words", "status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Maximum queue size of 2 has been reached", 429, "rate_limit_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too much", 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, "the engine process ended (signal 9)", 503, "server_error"),
        (grpc.StatusCode.INVALID_ARGUMENT, "max_input_len", 400, "invalid_request_error"),
        (grpc.StatusCode.INTERNAL, "it broke", 500, "server_error"),
        (grpc.StatusCode.INTERNAL, "Prompt length (9) exceeds maximum input length (5)", 400, "invalid_request_error"),
        (None, "takes 512 (max_input_len)", 400, "invalid_request_error"),
        (None, "vLLM refuses it: temperature must be non-negative", 400, "invalid_request_error"),
        (None, "Exceeds maximum queue size", 429, "rate_limit_error"),
        (None, "it broke", 500, "server_error"),
    ],
)
@pytest.mark.parametrize("when", ["before the first token", "after it"])
def test_what_the_engine_refuses_is_told_as_it_is(
    folder: Path, code: grpc.StatusCode | None, words: str, status: int, kind: str, when: str
) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        if when == "after it":
            yield response([72])
        if code is None:
            yield service_pb2.ModelStreamInferResponse(error_message=words)
        else:
            await context.abort(code, words)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            text = (await answer.aread()).decode()
        if when == "after it":
            assert answer.status_code == 200
            last, done, _ = text.split("\n\n")[-3:]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert done == "data: [DONE]"
        else:
            error = json.loads(text)["error"]
            assert answer.status_code == status
            assert ("retry-after" in answer.headers) == (status in (429, 503))
        assert error["type"] == kind
        assert words in error["message"]
        whole = await client.post(CHAT, json=chat())
        assert whole.status_code == status

    ask(script, folder, scenario)
