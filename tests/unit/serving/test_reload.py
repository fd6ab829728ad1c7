"""What `reload` refuses before it changes anything, and what it says of a model that does not load."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.factories import write_passport
from tests.unit.engines.test_passport import passport
from trtpipe.engines.errors import ArtefactRefused, HostError, StageFailed, UsageError
from trtpipe.pipeline.serving import adapters, model_control, model_links, reload
from trtpipe.pipeline.serving.gpu_memory import require_room
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.servers import Served, Server
from trtpipe.pipeline.store.store import Store


def write_repository(folder: Path, **parameters: str) -> Path:
    """A repository with an engine model of these parameters alone."""
    (folder / "tensorrt_llm" / "1").mkdir(parents=True)
    lines = (f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items())
    text = "\n".join(['name: "tensorrt_llm"', 'backend: "tensorrtllm"', *lines])
    (folder / "tensorrt_llm" / "config.pbtxt").write_text(text)
    return folder


def write_llm_api(folder: Path, **cache: Any) -> Path:
    """A repository of the LLM API with this kv_cache_config."""
    (folder / "tensorrt_llm" / "1").mkdir(parents=True)
    (folder / "tensorrt_llm" / "config.pbtxt").write_text('name: "tensorrt_llm"\nbackend: "python"')
    (folder / "tensorrt_llm" / "1" / "model.yaml").write_text(yaml.safe_dump({"kv_cache_config": cache}))
    return folder


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"runtime": "trtllm_pytorch", "image": "triton:2"}, "trtllm_pytorch triton:2 with 1 rank(s)"),
        ({"runtime": "trtllm_pytorch", "image": "triton:1", "tp_size": 2}, "trtllm_pytorch triton:1 with 2 rank(s)"),
        ({}, "reference with 1 rank(s)"),
    ],
)
def test_a_server_takes_engines_of_its_own_release_alone(tmp_path: Path, changes: dict[str, Any], kind: str) -> None:
    before, after = write_repository(tmp_path / "a"), write_repository(tmp_path / "b")
    write_passport(before / "tensorrt_llm" / "1", runtime="trtllm_pytorch", image="triton:1")
    write_passport(after / "tensorrt_llm" / "1", **changes)
    with pytest.raises(ArtefactRefused) as refused:
        reload._require_same_kind(Served(name="a", repository=before), after)
    assert str(refused.value) == (
        f"the server of a runs trtllm_pytorch triton:1 with 1 rank(s): the new engine is for {kind}; "
        "stop the server and serve the new one"
    )
    again = write_passport(after / "tensorrt_llm" / "1", runtime="trtllm_pytorch", image="triton:1")
    assert reload._require_same_kind(Served(name="a", repository=before), after) == again


FULL = "0.9 of its free memory is taken, and the new engine takes 0.9"
SHARE, TOKENS = "kv_cache_free_gpu_mem_fraction", "max_tokens_in_paged_kv_cache"


@pytest.mark.parametrize(
    ("runtime", "old", "new", "why"),
    [
        ("tensorrt_llm", {}, {}, FULL),
        ("tensorrt_llm", {}, {SHARE: "0.2"}, "0.9 of its free memory is taken, and the new engine takes 0.2"),
        ("tensorrt_llm", {SHARE: "0.5"}, {SHARE: "0.5"}, None),
        ("tensorrt_llm", {TOKENS: "4096"}, {}, None),
        ("tensorrt_llm", {}, {TOKENS: "4096"}, None),
        ("tensorrt_llm", {"gpu_device_ids": "0"}, {"gpu_device_ids": "1"}, None),
        ("tensorrt_llm", {"gpu_device_ids": "0,1"}, {"gpu_device_ids": "1,2"}, FULL),
        ("vllm", {}, {}, "0.9 of its memory is taken, and the new engine takes 0.9"),
        ("vllm", {SHARE: "0.45"}, {SHARE: "0.45"}, None),
        ("vllm", {}, {TOKENS: "4096"}, "0.9 of its memory is taken, and the new engine takes 0.9"),
        ("reference", {}, {}, None),
    ],
)
def test_a_gpu_has_to_hold_the_new_engine_beside_the_old_one(
    tmp_path: Path, runtime: str, old: dict[str, str], new: dict[str, str], why: str | None
) -> None:
    """A KV cache of a number of tokens may take less than its share; vLLM asks for the whole share all the same."""
    before, after = write_repository(tmp_path / "a", **old), write_repository(tmp_path / "b", **new)
    built = passport(runtime=runtime, sms=None if runtime == "reference" else (90,))
    line = None
    try:
        require_room("a", [before], after, built)
    except HostError as error:
        line = str(error)
    told = (
        f"the GPU has no room for the new engine of a beside the old one, which serves while it loads: {why}; "
        "stop the server and serve the new one, or build both with a lower serving.kv_cache_free_gpu_mem_fraction, "
        "together at most 1"
    )
    assert line == (None if why is None else told)


@pytest.mark.parametrize(
    ("old", "new", "fits"),
    [
        ({}, {}, False),
        ({"free_gpu_memory_fraction": 0.9}, {"free_gpu_memory_fraction": 0.3}, False),
        ({"free_gpu_memory_fraction": 0.4}, {"free_gpu_memory_fraction": 0.6}, True),
        ({"max_tokens": 4096}, {}, True),
    ],
)
def test_the_llm_api_has_its_share_in_its_settings(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], *, fits: bool
) -> None:
    before, after = write_llm_api(tmp_path / "a", **old), write_llm_api(tmp_path / "b", **new)
    refusal = contextlib.nullcontext() if fits else pytest.raises(HostError, match="no room for the new engine of a")
    with refusal:
        require_room("a", [before], after, passport(runtime="trtllm_pytorch"))


def test_the_other_targets_of_a_server_count(tmp_path: Path) -> None:
    served = [write_repository(tmp_path / name, **{SHARE: "0.4"}) for name in ("a", "b")]
    new = write_repository(tmp_path / "new", **{SHARE: "0.4"})
    require_room("a", served[:1], new, passport())
    with pytest.raises(HostError, match=r"0\.8 of its free memory is taken, and the new engine takes 0\.4"):
        require_room("a", served, new, passport())


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        ["/opt/bin/tritonserver", "-c", "read line"], executable="/bin/sh", stdin=subprocess.PIPE
    ) as one:
        yield one
        one.kill()


@pytest.mark.process
def test_why_a_model_does_not_load_is_explained_as_at_a_start(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, log = Store(tmp_path / "home"), tmp_path / "log"
    old, new = write_repository(tmp_path / "old"), write_repository(tmp_path / "new")
    folder = store.home / "servers" / "a"
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    server = Server(
        name="a", pid=process.pid, log=log, endpoints=points, served=(Served(name="a", repository=old),)
    )  # fmt: skip
    model_links.lay_out(server.served, folder)
    before = (folder / "models" / "tensorrt_llm").readlink()
    log.write_text("CUDA runtime error in ::cudaMalloc(ptr, n): out of memory\n")  # of an earlier start

    def fail(*asked: object, seconds: int) -> None:
        with log.open("a") as file:
            file.write("E1127 model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' version 1: Internal: no room\"\n")
            file.write("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
        raise StageFailed("tensorrt_llm does not load", why="no room")

    monkeypatch.setattr(model_control, "load_models", fail)
    monkeypatch.setattr(model_control, "ready", lambda endpoints, name: True)
    monkeypatch.setattr(model_control, "answers", lambda endpoints: True)
    monkeypatch.setattr(reload, "_gateway_models", lambda server, folder: ())
    served = (Served(name="a", repository=new),)
    with pytest.raises(StageFailed) as failed:
        reload._load_instead(store, server, served, served, folder)
    assert failed.value.what == "tensorrt_llm does not load"
    assert failed.value.why == (
        "the weights, the activations and the KV cache do not fit the GPU memory that is free "
        "(RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB)"
    )
    assert failed.value.remedy.endswith(f"; the log is {log}")
    assert (folder / "models" / "tensorrt_llm").readlink() == before
    assert list((folder / "linked").iterdir()) == [before.parent]


def test_a_server_of_an_earlier_version_is_not_sent_the_signal_that_would_end_its_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of 0.1 do not say where a target came from."""
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    served = (Served(name="a", repository=write_repository(tmp_path / "old")),)
    server = Server(name="a", pid=1, log=tmp_path / "log", endpoints=points, served=served)
    with pytest.raises(
        UsageError, match="an earlier version of trtpipe started the server of a; stop it, and serve it"
    ):
        reload._reload(Store(tmp_path / "home"), server, None, allow_model_code=False)


def test_models_are_newer_than_what_they_replace_also_where_the_clock_was_set_back(tmp_path: Path) -> None:
    """Triton loads only what is newer than what it has, by the latest date in a model's folder."""
    repository, folder = write_repository(tmp_path / "old"), tmp_path / "server"
    (repository / "tensorrt_llm" / "1" / "model.py").touch()
    (repository / "tensorrt_llm" / "1" / "weights").touch()
    served = (Served(name="a", repository=repository),)
    model_links.lay_out(served, folder)
    before = (folder / "models" / "tensorrt_llm").readlink()
    later = time.time_ns() + 3600 * 10**9
    os.utime(before / "1", ns=(later, later))
    renewed = model_links.folders(served, folder)["tensorrt_llm"]
    assert {path.stat().st_mtime_ns for path in (renewed / "1", renewed / "1" / "model.py")} == {later + 10**9}
    assert (repository / "tensorrt_llm" / "1" / "weights").stat().st_mtime_ns < later
    (renewed / "1" / "__pycache__").mkdir()  # as Python does once it is loaded
    model_links.renew(before, renewed)
    assert (before / "1").stat().st_mtime_ns == later + 2 * 10**9
    model_links.renew(before, tmp_path / "nothing")
    assert (before / "1").stat().st_mtime_ns < later


def test_nothing_is_left_of_models_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise ArtefactRefused("the new engine was built without adapters")

    served = (Served(name="a", repository=write_repository(tmp_path / "old")),)
    model_links.lay_out(served, tmp_path / "server")
    linked = list((tmp_path / "server" / "linked").iterdir())
    monkeypatch.setattr(adapters, "keep_added", refuse)
    with pytest.raises(ArtefactRefused):
        model_links.folders(served, tmp_path / "server")
    assert list((tmp_path / "server" / "linked").iterdir()) == linked


def test_what_cannot_be_removed_of_earlier_models_is_no_obstacle(tmp_path: Path) -> None:
    served = (Served(name="a", repository=write_repository(tmp_path / "old")),)
    linked = tmp_path / "server" / "linked"
    linked.mkdir(parents=True)
    (linked / "no-folder").touch()
    models = model_links.lay_out(served, tmp_path / "server")
    assert [link.name for link in models.iterdir()] == ["tensorrt_llm"]


@pytest.mark.loopback
def test_a_server_that_does_not_answer_is_told_before_anything_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped takes connections all the same."""
    monkeypatch.setattr(model_control, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        points = Endpoints(host="127.0.0.1", http=silent.getsockname()[1], grpc=2, metrics=3)
        served = (Served(name="a", repository=write_repository(tmp_path / "old"), source=tmp_path / "old"),)
        server = Server(name="a", pid=1, log=tmp_path / "log", endpoints=points, served=served)
        with pytest.raises(HostError) as caught:
            reload._reload(Store(tmp_path / "home"), server, None, allow_model_code=False)
    assert str(caught.value) == (
        f"a does not answer at {points.http_url}; stop it, and serve it again; its log is {tmp_path / 'log'}"
    )
