"""A real tritonserver that is killed, that does not start, and whose name or port is taken."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Cli, Served, until
from trtpipe.pipeline.serving.servers import starting
from trtpipe.pipeline.store.store import Store

ANYWHERE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--no-openai"]

pytestmark = pytest.mark.real


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def using(folder: Path) -> list[psutil.Process]:
    """Processes that name the folder on their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def _link_tree(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, place)


def test_serve_refuses_a_taken_port_and_a_second_server_of_one_name(
    tiny: Served, tiny_repository: Path, tmp_path: Path
) -> None:
    port = str(httpx.URL(tiny.http).port)
    copy = tmp_path / "other"
    _link_tree(tiny_repository, copy)
    taken = tiny.cli.run("serve", str(copy), "--http-port", port)
    assert taken.status == 4
    last = taken.err.splitlines()[-1]
    assert last.startswith(f"error: port {port} on 127.0.0.1 cannot be taken: Address already in use")
    namesake = tmp_path / tiny.name
    _link_tree(tiny_repository, namesake)
    again = tiny.cli.run("serve", str(namesake))
    assert again.status == 2
    assert "already served" in again.err
    with starting(Store(tiny.cli.home), "other"):
        meanwhile = tiny.cli.run("serve", str(copy))
    assert meanwhile.status == 4
    assert "error: other is being started by another command, " in meanwhile.err


def test_a_server_killed_in_mid_stream_is_one_line_and_leaves_no_process(tiny: Served) -> None:
    asking = tiny.cli.start("generate", "Count.", "--raw", "--server", tiny.name, "--max-tokens", "8000")
    assert asking.stdout is not None
    assert asking.stdout.read(4)
    server = psutil.Process(tiny.pid)
    family = [server, *server.children(recursive=True)]
    regions = f"trtpipe{httpx.URL(tiny.http).port}_*"
    assert list(Path("/dev/shm").glob(regions))
    server.kill()
    _, err = asking.communicate(timeout=60)
    assert asking.returncode == 4
    assert re.fullmatch(r"error: the server at \S+ .*`trtpipe serve`\n", err)
    # A Python process may hang when its server is gone: the next command ends it. For a moment `serve` still watches.
    assert until(lambda: tiny.cli.run("generate", "Hello", "--raw", "--server", tiny.name).status == 2)
    assert until(lambda: not any(alive(process) for process in family))
    assert not list(Path("/dev/shm").glob(regions))
    assert f"{tiny.name} died: tritonserver ended by itself (status -9)" in tiny.cli.ok("ps").out


def test_a_model_that_does_not_load_shows_its_own_reason(cli: Cli, tiny_repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "broken"
    _link_tree(tiny_repository, copy)
    weights = copy / "tensorrt_llm" / "1" / "rank0.safetensors"
    weights.unlink()
    weights.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    done = cli.run("serve", str(copy), *ANYWHERE)
    assert done.status == 5
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("error: tritonserver does not start: model tensorrt_llm: ")
    assert "rank0.safetensors" in last
    assert not using(copy)


def test_an_answer_ends_whole_where_every_process_is_told_to_end(
    cli: Cli, tiny_repository: Path, tmp_path: Path
) -> None:
    """As by `systemctl stop` of a unit with systemd's own KillMode."""
    copy = tmp_path / "unit"
    _link_tree(tiny_repository, copy)
    with cli.serving(str(copy), *ANYWHERE) as serving:
        server = next(one for one in json.loads(cli.ok("ps", "--json").out) if one["server"] == "unit")
        url = f"{server['http']}/v2/models/ensemble/generate_stream"
        body = {"text_input": "Hello", "max_tokens": 200, "stream": True, "exclude_input_in_output": True}

        def answer() -> Iterator[str]:
            with httpx.stream("POST", url, json=body, timeout=60) as reply:
                yield from (line for line in reply.iter_lines() if line)

        whole = list(answer())
        family = psutil.Process(serving.pid).children(recursive=True)
        lines = answer()
        begun = [next(lines)]
        for pid in (*(one.pid for one in family), serving.pid):
            os.kill(pid, signal.SIGTERM)
        assert [*begun, *lines] == whole
        serving.communicate(timeout=60)
    assert serving.returncode == 0
    _, left = psutil.wait_procs(family, timeout=30)
    assert not any(alive(process) for process in left)
    assert not using(copy)


@pytest.mark.slow
def test_a_dead_stub_is_reported_and_its_model_loaded_again(cli: Cli, tiny_repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "watched"
    _link_tree(tiny_repository, copy)
    with cli.serving(str(copy), *ANYWHERE) as serving:
        assert serving.stderr is not None
        server = next(one for one in json.loads(cli.ok("ps", "--json").out) if one["server"] == "watched")

        def answer() -> dict[str, Any]:
            ask = {"text_input": "Hello", "max_tokens": 1}
            return dict(httpx.post(f"{server['http']}/v2/models/ensemble/generate", json=ask, timeout=60).json())

        assert until(lambda: "text_output" in answer())
        family = psutil.Process(server["pid"]).children()
        next(process for process in family if "preprocessing_0_0" in _words(process)).kill()
        # A start that takes long has lines in between, which say for how long now.
        lines = (line for line in serving.stderr if not line.endswith(" now\n"))
        for told in (
            "starting tritonserver with watched", "checking the repository", "loading the models",
            "asking watched for an answer", "a Python process of preprocessing has died; loading it again",
            "preprocessing is loaded again",
        ):  # fmt: skip
            assert told in next(lines)
        assert until(lambda: "text_output" in answer())
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=60)
    assert serving.returncode == 0
    assert not using(copy)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # or nobody has collected it
        return []
