"""Chat templates that came with a hostile model: each stops its own request, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.gateways import CHAT, Triton, ask, chat, end_fork_servers, saying, write_model

pytestmark = [pytest.mark.loopback, pytest.mark.process]

COSTLY = "the prompt of this request takes more than 1 s of processor time or 256 MB of memory to make"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (LOOPS, COSTLY),
    "endless output": (LOOPS.replace("{% endfor %}", "xxxxxxxxxxxxxxxxxxxx{% endfor %}", 1), COSTLY),
    "text": ("{{ 'x' * 10**10 }}", COSTLY),
    "number": ("{{ 10 ** (10**10) }}", COSTLY),
    "join": ("{{ range(99999) | join('x' * 99999) }}", COSTLY),
    "doubling": ("{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", COSTLY),
    "width": ("{{ '%09999999999d' % 1 }}", COSTLY),
    "filter": ("{{ 'x' | center(9999999999) }}", COSTLY),
    "global": ("{{ lipsum(n=99999999) }}", COSTLY),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
    "long error": ("{{ raise_exception('x' * 10**6) }}", "x" * 200 + "..."),
}
# Hostile to one message, good to others.
SOMETIMES = "{% if messages[0].content == 'evil' %}" + LOOPS + "{% endif %}[{{ messages[0].content }}]"


@pytest.fixture(scope="module", autouse=True)
def _fork_servers() -> Iterator[None]:
    yield
    end_fork_servers()


def test_every_hostile_template_stops_its_own_requests_only(tmp_path: Path) -> None:
    good = write_model(tmp_path / "good")
    others = {name: write_model(tmp_path / name.replace(" ", "-"), template) for name, (template, _) in HOSTILE.items()}

    async def refused(client: httpx.AsyncClient, name: str) -> None:
        error = (await client.post(CHAT, json=chat() | {"model": name})).json()["error"]
        assert HOSTILE[name][1] in error["message"], (name, error)
        assert len(error["message"]) < 500
        assert error["type"] == "invalid_request_error"

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        attacks = asyncio.gather(*(refused(client, name) for name in HOSTILE))
        answered = 0
        while not attacks.done():
            for request in (client.post(CHAT, json=chat()), client.get("/health/live")):
                assert (await request).status_code == 200
            answered += 1
        await attacks
        assert answered >= 1

    ask(saying(good, "x"), good, scenario, others=others)


@pytest.mark.parametrize(
    ("size", "evils"),
    [(1, 3), pytest.param(20_000, 1, marks=pytest.mark.slow)],
    ids=["small requests", "large requests"],
)
def test_a_template_that_is_hostile_to_one_message_answers_the_others(tmp_path: Path, size: int, evils: int) -> None:
    folder = write_model(tmp_path / "model", SOMETIMES)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        good = chat("x" * size, max_tokens=5)
        assert (await client.post(CHAT, json=good)).status_code == 200
        evil = [client.post(CHAT, json=chat("evil", user="x" * size)) for _ in range(evils)]
        *refused, answer = await asyncio.gather(*evil, client.post(CHAT, json=good))
        assert answer.status_code == 200
        for one in refused:
            assert one.json()["error"]["code"] == "prompt_too_costly"
        await asyncio.sleep(0.1)
        working = [one for one in psutil.Process().children(recursive=True) if one.cpu_percent(0.2) > 50]
        assert working == []

    ask(saying(folder, "x"), folder, scenario)


def test_a_request_cannot_be_prepared_in_another_model_s_name(tmp_path: Path) -> None:
    """A hostile client and a hostile template together would keep another model's prompt process busy."""
    good, evil = write_model(tmp_path / "good"), write_model(tmp_path / "evil", LOOPS)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        attack = asyncio.ensure_future(client.post(CHAT, json=chat(metadata={"x": "llama"}) | {"model": "evil"}))
        await asyncio.sleep(0.2)
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert not attack.done()
        assert (await attack).json()["error"]["code"] == "prompt_too_costly"

    ask(saying(good, "x"), good, scenario, others={"evil": evil})
