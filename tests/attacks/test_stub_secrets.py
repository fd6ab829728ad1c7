"""Another user of the machine looks for prompts, and code within the server for the secrets of who started it.

Before: the shared memory of Triton's Python processes had the mode 0644, and every one of them the gateway's keys.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.attacks.conftest import SECRETS
from tests.attacks.streams import KEY, Attacked

pytestmark = pytest.mark.real

SHARED_MEMORY = Path("/dev/shm")
NOBODY = 65534
PROMPT = "a prompt that is nobody else's business"


def regions(attacked: Attacked) -> list[Path]:
    port = httpx.URL(attacked.record["http"]).port
    return sorted(SHARED_MEMORY.glob(f"trtpipe{port}_*"))


@pytest.fixture
def readable() -> Iterator[Path]:
    """What anybody can read, beside the regions: a control."""
    path = SHARED_MEMORY / f"trtpipe-test-{os.getpid()}"
    path.write_text(PROMPT)
    path.chmod(0o644)
    yield path
    path.unlink()


def read_as_nobody(path: Path) -> subprocess.CompletedProcess[bytes]:
    # A program that anybody may run: this Python may lie where another user cannot go.
    return subprocess.run(
        ["cat", str(path)], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_reads_no_prompt(attacked: Attacked, readable: Path) -> None:
    body = {"text_input": PROMPT[:60], "max_tokens": 2}
    assert (
        httpx.post(f"{attacked.record['http']}/v2/models/ensemble/generate", json=body, timeout=60).status_code == 200
    )
    found = regions(attacked)
    assert found
    assert any(PROMPT[:60].encode() in region.read_bytes() for region in found), "the prompt did pass here"
    assert read_as_nobody(readable).stdout.decode() == PROMPT
    log = Path(attacked.record["log"])
    for path in (*found, log):
        done = read_as_nobody(path)
        assert (done.returncode, done.stdout) == (1, b""), path
        assert b"Permission denied" in done.stderr


def test_shared_memory_is_its_user_s_alone_from_the_beginning(attacked: Attacked) -> None:
    """Also of a model that is loaded while the server runs: who opens a file once keeps it open."""
    before = regions(attacked)
    url = f"{attacked.record['http']}/v2/repository/models/postprocessing/load"
    assert httpx.post(url, json={}, timeout=60).status_code == 200
    for process in attacked.processes()["postprocessing"]:
        process.kill()
    attacked.recover()
    after = regions(attacked)
    assert set(after) - set(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in after} == {0o600}


def test_no_process_of_the_server_has_the_secrets_of_who_started_it(attacked: Attacked) -> None:
    server = psutil.Process(attacked.pid)
    # A process that was killed has no environment any more, and stays in the list until tritonserver asks for it.
    family = [one for one in (server, *server.children(recursive=True)) if one.status() != psutil.STATUS_ZOMBIE]
    assert len(family) > 5
    assert any("trtpipe.engines.engine_process.server" in " ".join(process.cmdline()) for process in family)
    for process in family:
        environment = process.environ()
        assert environment["PATH"], "the rest is there"
        for name, value in SECRETS.items():
            assert name not in environment, process
            assert value not in "".join(environment.values()), process


def test_the_gateway_has_its_keys(attacked: Attacked) -> None:
    assert KEY in psutil.Process(attacked.state()["gateway_pid"]).environ()["TRTPIPE_API_KEYS"]
    body = {"model": attacked.name, "prompt": "Hello", "max_tokens": 1}
    assert httpx.post(f"{attacked.record['openai']}/v1/completions", json=body, timeout=60).status_code == 401
    assert attacked.completion(1).status_code == 200
