"""A conversation over the gateway, which asks a Triton of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import Triton, ask, end_fork_servers, saying, tokens_of, until, write_model
from trtpipe.engines.errors import HostError, TrtpipeError, UsageError
from trtpipe.pipeline.net.api_key import KeyRefused
from trtpipe.pipeline.serving.chat import Conversation, usual_temperature
from trtpipe.pipeline.serving.openai_client import ContextFull

# A gateway makes prompts in processes of its own.
pytestmark = [pytest.mark.process, pytest.mark.loopback]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_model(tmp_path_factory.mktemp("tokenizer"))
    end_fork_servers()


def conversation(client: httpx.AsyncClient, *, key: str | None = None, **options: Any) -> Conversation:
    url = str(client.base_url).rstrip("/")
    return Conversation(url, "llama", key=key, system="be brief", options={"max_tokens": 50, **options})


@pytest.mark.parametrize(
    ("config", "usual"),
    [
        (None, 0.0),
        ('{"eos_token_id": 2}', 0.0),
        ('{"temperature": 0.6}', None),
        ('{"do_sample": true, "temperature": 0.6}', None),
        ('{"do_sample": false, "temperature": 0.6}', 0.0),
        ('{"temperature": null}', 0.0),
    ],
)
def test_answers_are_greedy_unless_the_model_recommends_a_temperature(
    tmp_path: Path, config: str | None, usual: float | None
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(config)
    assert usual_temperature(tmp_path) == usual


def test_what_was_said_goes_into_the_next_prompt_until_it_is_cleared(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        talk = conversation(client)
        for question in ("one?", "two?"):
            assert "".join(await asyncio.to_thread(list, talk.ask(question))) == "aé 😀"
        assert triton.asked[1].prompt == tokens_of(folder, "<s>[system]be brief[user]one?[assistant]aé 😀[user]two?")
        talk.clear()
        await asyncio.to_thread(list, talk.ask("three?"))
        assert triton.asked[2].prompt == tokens_of(folder, "<s>[system]be brief[user]three?")

    ask(saying(folder, "aé 😀"), folder, scenario)


def test_a_line_ends_where_an_event_stream_ends_it_and_not_within_a_text(folder: Path) -> None:
    said = "a\u2028b\u2029c\x85d\x0be"

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        assert "".join(await asyncio.to_thread(list, conversation(client).ask("one?"))) == said

    ask(saying(folder, said), folder, scenario)


def test_reasoning_is_told_once_and_is_no_part_of_the_answer(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    folder = write_model(tmp_path / "tokenizer", template)
    heard: list[str] = []

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        url = str(client.base_url).rstrip("/")
        talk = Conversation(
            url, "llama", key=None, system=None, options={"max_tokens": 50}, thinking=lambda: heard.append("thinks")
        )
        for question in ("one?", "two?"):
            heard.extend(filter(None, await asyncio.to_thread(list, talk.ask(question))))
        assert triton.asked[1].prompt == tokens_of(folder, "[user]one?[assistant]yes[user]two?")

    ask(saying(folder, "<think>\na city\n</think>\n\nyes"), folder, scenario)
    end_fork_servers()
    assert "".join(heard) == "thinksyesthinksyes"


def test_an_answer_that_is_stopped_ends_its_request_and_is_kept_as_far_as_it_came(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        talk = conversation(client)

        def stopped() -> str:
            pieces = talk.ask("count")
            first = next(piece for piece in pieces if piece)
            pieces.close()
            return first

        first = await asyncio.to_thread(stopped)
        await until(lambda: triton.running == 0)
        assert "abcdefghijkl".startswith(first)
        assert len(first) < 12
        await asyncio.to_thread(lambda: next(talk.ask("more")))
        assert triton.asked[1].prompt == tokens_of(
            folder, f"<s>[system]be brief[user]count[assistant]{first}[user]more"
        )

    ask(saying(folder, "abcdefghijkl", pause=0.2), folder, scenario)


def test_what_the_gateway_refuses_is_told_and_forgotten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async def refusal(talk: Conversation, kind: type[TrtpipeError]) -> str:
            with pytest.raises(kind) as caught:
                await asyncio.to_thread(list, talk.ask("x" * 40))
            return str(caught.value)

        assert "TRTPIPE_API_KEY" in await refusal(conversation(client), KeyRefused)
        assert "temperature" in await refusal(conversation(client, key="key", temperature=9), UsageError)
        assert "this model takes 60" in await refusal(conversation(client, key="key"), ContextFull)
        talk = conversation(client, key="key", max_tokens=1)
        assert "this model takes 60" in await refusal(talk, ContextFull)
        await asyncio.to_thread(list, talk.ask("y"))
        assert triton.asked[0].prompt == tokens_of(folder, "<s>[system]be brief[user]y")

    ask(saying(folder, "x"), folder, scenario, api_keys_file=tmp_path / "keys", model={"max_seq_len": 60})


def test_a_gateway_that_is_gone_is_told() -> None:
    talk = Conversation("http://127.0.0.1:1", "llama", key=None, system=None, options={})
    with pytest.raises(HostError, match="trtpipe ps"):
        list(talk.ask("Hello"))
    with pytest.raises(UnicodeEncodeError):  # which the command tells as an input that is not text
        list(talk.ask("\udcff"))
