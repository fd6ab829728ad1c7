"""A gateway that is given other models: its workers are replaced, and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.certificates import with_openssl, write_certificate
from tests.support.gateways import CHAT, chat, events, mock_triton, run, saying, spoken, until, write_model
from tests.unit.gateway.conftest import options
from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.pipeline.gateway import process
from trtpipe.pipeline.gateway.options import ServedModel

pytestmark = [
    pytest.mark.real,
    pytest.mark.process,
    pytest.mark.loopback,
    # The gateway outlives the command that starts it.
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

LONG = "one two three four five six seven eight nine ten " * 6


@contextlib.asynccontextmanager
async def started(folder: Path, log: Path, pause: float = 0.05, **fields: Any) -> AsyncIterator[tuple[int, str]]:
    async with mock_triton(saying(folder, LONG, pause=pause)) as (address, _):
        pid, url = await asyncio.to_thread(process.start, options(folder, grpc_url=address, port=0, **fields), log)
        try:
            yield pid, url
        finally:
            await asyncio.to_thread(process.end, pid)


def workers(pid: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children() if "trtpipe.pipeline.gateway" in one.cmdline()]


def test_workers_with_other_models_take_over_while_a_stream_goes_on(folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}")

    async def whole() -> None:
        async with (
            started(folder, tmp_path / "log", workers=2) as (pid, url),
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        ):
            before = workers(pid)
            assert len(before) == 2
            (short,) = (await client.post(CHAT, json=chat(max_tokens=1))).json()["choices"]
            assert short["finish_reason"] == "length"
            stream = asyncio.create_task(events(client, CHAT, chat(max_tokens=400)))
            await asyncio.sleep(0.3)
            models = (ServedModel(name="new", tokenizer=other, max_seq_len=40),)
            reloading = asyncio.create_task(asyncio.to_thread(process.reload, pid, models, tmp_path / "log"))
            names = []
            while not reloading.done():  # each over a connection of its own
                async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as another:
                    names.append((await another.get("/v1/models")).json()["data"][0]["id"])
            await reloading
            assert set(names) <= {"llama", "new"}
            assert not stream.done()
            answer = await client.post(CHAT, json=chat(model="new"))
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["total_tokens"] == 40  # max_tokens by the new max_seq_len
            assert (await client.post(CHAT, json=chat())).status_code == 404
            assert spoken(await stream).startswith("one two three")
            await until(lambda: not any(one.is_running() for one in before))
            assert len(workers(pid)) == 2
            counted = (await client.get("/metrics")).text
            assert 'trtpipe_gateway_requests_total{endpoint="chat",status="200"} 3' in counted
            assert "trtpipe_gateway_running 0" in counted

    run(whole(), 120)


def test_a_reload_ends_when_no_old_worker_takes_requests_any_more(folder: Path, tmp_path: Path) -> None:
    async def whole() -> None:
        async with (
            started(folder, tmp_path / "log") as (pid, url),
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        ):
            (old,) = workers(pid)
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "llama"
            old.suspend()
            models = (ServedModel(name="new", tokenizer=folder),)
            reloading = asyncio.create_task(asyncio.to_thread(process.reload, pid, models, tmp_path / "log"))
            # The two workers share a socket, and only the new one can take the connection.
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as another:
                await until(lambda: len(workers(pid)) == 2)
                assert (await another.get("/v1/models")).json()["data"][0]["id"] == "new"
            await asyncio.sleep(0.5)
            assert not reloading.done()
            old.resume()
            await reloading
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "new"

    run(whole(), 120)


def test_a_request_that_is_arriving_at_a_reload_is_answered(folder: Path, tmp_path: Path) -> None:
    async def whole() -> bytes:
        async with started(folder, tmp_path / "log") as (pid, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET /v1/models HTTP/1.1\r\n")
            await asyncio.sleep(0.2)
            models = (ServedModel(name="new", tokenizer=folder),)
            await asyncio.to_thread(process.reload, pid, models, tmp_path / "log")
            writer.write(b"host: here\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    answer = run(whole(), 60)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in answer
    assert b'"id":"llama"' in answer


def test_answers_of_replaced_workers_that_a_stop_cuts_short_are_told_so(folder: Path, tmp_path: Path) -> None:
    async def whole() -> list[tuple[int, str]]:
        async with (
            started(folder, tmp_path / "log", pause=60.0, drain_s=1) as (pid, url),
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        ):
            asked = [
                asyncio.create_task(client.post(CHAT, json=chat(max_tokens=400, stream=stream)))
                for stream in (False, True)
            ]
            await asyncio.sleep(0.5)
            models = (ServedModel(name="new", tokenizer=folder),)
            await asyncio.to_thread(process.reload, pid, models, tmp_path / "log")
            await asyncio.to_thread(process.end, pid)
            return [(one.status_code, one.text) for one in [await one for one in asked]]

    (status, answer), (streamed, text) = run(whole(), 60)
    assert (status, streamed) == (503, 200)
    assert json.loads(answer)["error"]["code"] == "gateway_stopped"
    assert text.endswith('"code": "gateway_stopped"}}\n\ndata: [DONE]\n\n')


@with_openssl
def test_clients_that_stream_one_answer_after_the_other_notice_no_reload(folder: Path, tmp_path: Path) -> None:
    """Over TLS, where a client learns later that a connection has ended, and may have sent its next request by then."""
    cert, key = write_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=cert)

    async def whole() -> None:
        async with started(folder, tmp_path / "log", workers=2, tls_cert=cert, tls_key=key) as (pid, url):
            over = False

            async def user() -> int:
                answers = 0
                async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=trusting) as client:
                    while not over:
                        assert spoken(await events(client, CHAT, chat(max_tokens=30))).startswith("one two")
                        answers += 1
                return answers

            users = [asyncio.create_task(user()) for _ in range(4)]
            for _ in range(3):
                await asyncio.sleep(0.5)
                models = (ServedModel(name="llama", tokenizer=folder),)
                await asyncio.to_thread(process.reload, pid, models, tmp_path / "log")
            over = True
            assert min(await asyncio.gather(*users)) > 2

    run(whole(), 120)


def test_a_gateway_that_cannot_take_other_models_goes_on(folder: Path, tmp_path: Path) -> None:
    async def whole() -> None:
        async with (
            started(folder, tmp_path / "log") as (pid, url),
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        ):
            before = workers(pid)
            empty, broken = tmp_path / "empty", write_model(tmp_path / "broken", "{% if x %}")
            empty.mkdir()
            for other, refusal in ((empty, "no tokenizer that can be read"), (broken, "is not a Jinja template")):
                with pytest.raises(InputDataError, match=refusal):
                    await asyncio.to_thread(
                        process.reload, pid, (ServedModel(name="x", tokenizer=other),), tmp_path / "log"
                    )
            assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200
            assert workers(pid) == before
            assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "empty", "log"]

    run(whole(), 120)


def test_a_reload_after_an_interrupted_one_waits_for_its_own_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway still takes the models of the first one, and tells so, when the second one asks for the old ones."""

    async def whole() -> None:
        async with started(folder, tmp_path / "log") as (pid, url):
            asleep = time.sleep

            def interrupted(seconds: float) -> None:
                if len(workers(pid)) == 2:
                    raise KeyboardInterrupt
                asleep(seconds)

            with monkeypatch.context() as patch:
                patch.setattr(time, "sleep", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    process.reload(pid, (ServedModel(name="new", tokenizer=folder),), tmp_path / "log")
            before = (ServedModel(name="llama", tokenizer=folder),)
            await asyncio.to_thread(process.reload, pid, before, tmp_path / "log")
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                assert (await client.get("/v1/models")).json()["data"][0]["id"] == "llama"
            assert (tmp_path / "log").read_text().count("gateway reloaded\n") == 2
            assert [path.name for path in tmp_path.iterdir()] == ["log"]

    run(whole(), 120)


def test_a_reload_needs_no_log(folder: Path, tmp_path: Path) -> None:
    async def whole() -> None:
        async with (
            started(folder, tmp_path / "log") as (pid, url),
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        ):
            (tmp_path / "log").rename(tmp_path / "log.1")
            with pytest.raises(InputDataError, match="no tokenizer that can be read"):
                await asyncio.to_thread(
                    process.reload, pid, (ServedModel(name="x", tokenizer=tmp_path),), tmp_path / "log"
                )
            models = (ServedModel(name="new", tokenizer=folder),)
            await asyncio.to_thread(process.reload, pid, models, tmp_path / "log")
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "new"

    run(whole(), 120)


def test_a_gateway_that_the_system_gives_no_process_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Full:
        def serve_models(self, models: tuple[ServedModel, ...]) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    error = process._serve_models(Full(), [])  # type: ignore[arg-type]
    assert isinstance(error, HostError)
    assert str(error) == "Resource temporarily unavailable"
    assert capsys.readouterr().out == (
        'gateway failed: {"error": "HostError", "what": "Resource temporarily unavailable", "why": "", "remedy": ""}\n'
    )
