"""The hub, through the real client against a server of our own: pinned, only what we need, and one line on failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from tqdm import TMonitor

from tests.support.factories import hf_folder
from tests.support.hub_server import Hub, serving
from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError, UsageError
from trtpipe.engines.hf.folder import INDEX_NAME, locate_tensors
from trtpipe.pipeline.sources import hub

pytestmark = pytest.mark.loopback

REPO = "acme/tiny-llama"
WANTED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def use(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the client, which reads its environment on import, to `server` and to an empty cache."""
    huggingface_hub.close_session()  # one that an earlier test has left is of another hub
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache / "agents.json"), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Seconds between attempts.
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    hub.resolve_commit.cache_clear()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        use(running, tmp_path / "hf", monkeypatch)
        yield running
        huggingface_hub.close_session()
    hub.resolve_commit.cache_clear()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A repository as people publish them: more in it than we need."""
    folder = hf_folder(tmp_path / "made")
    wanted = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    assert sorted(wanted) == WANTED
    others = [
        "README.md",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "consolidated.safetensors",
    ]
    return {**wanted, **dict.fromkeys(others, b"not for us")}


def ignore(done: int, total: int) -> None:
    pass


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.resolve_commit.cache_clear()


def refused(error: pytest.ExceptionInfo[TrtpipeError], exit_code: int) -> str:
    assert error.value.exit_code == exit_code
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_branch_is_pinned_to_its_commit(server: Hub, files: dict[str, bytes]) -> None:
    first = server.add(REPO, files)
    other = server.add(REPO, {**files, "README.md": b"new"}, branch="v2")
    assert hub.resolve_commit(REPO, "main") == first
    assert hub.resolve_commit(REPO, "v2") == other
    assert server.fetched() == []


def test_a_commit_needs_no_hub(server: Hub) -> None:
    assert hub.resolve_commit(REPO, "0123456789" * 4) == "0123456789" * 4
    assert server.asked == []


def test_a_branch_that_moves_meanwhile_does_not_move_for_us(server: Hub, files: dict[str, bytes]) -> None:
    first = server.add(REPO, files)
    assert hub.resolve_commit(REPO, "main") == first
    moved = server.add(REPO, {**files, "README.md": b"new"})
    assert moved != first
    assert hub.resolve_commit(REPO, "main") == first


def test_only_what_we_need_is_downloaded_whole(server: Hub, files: dict[str, bytes]) -> None:
    commit = server.add(REPO, files)
    folder = hub.download(REPO, commit, ignore)
    assert folder.name == commit
    assert sorted(path.name for path in folder.iterdir()) == WANTED == server.fetched()
    assert all((folder / name).read_bytes() == files[name] for name in WANTED)


def test_shards_are_all_taken(server: Hub, tmp_path: Path) -> None:
    made = hf_folder(tmp_path / "sharded", shards=3)
    commit = server.add(REPO, {path.name: path.read_bytes() for path in made.iterdir()})
    folder = hub.download(REPO, commit, ignore)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in made.iterdir())


def test_shards_of_other_names_are_taken_too(server: Hub, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in hf_folder(tmp_path / "sharded", shards=3).iterdir()}
    # Two of the three; the others keep their names.
    for number in (1, 2):
        name = f"model-{number:05d}-of-00003.safetensors"
        content[f"pytorch_{name}"] = content.pop(name)
        content[INDEX_NAME] = content[INDEX_NAME].replace(name.encode(), f"pytorch_{name}".encode())
    others = {"consolidated.safetensors": b"not for us", "mtp/model-extra.safetensors": b"neither"}
    commit = server.add(REPO, {**content, **others})
    assert sorted(hub.file_sizes(REPO, commit)) == sorted(content)
    folder = hub.download(REPO, commit, ignore)
    assert sorted(path.name for path in folder.iterdir()) == sorted(content)
    assert len(locate_tensors(folder)) == 21


@pytest.mark.parametrize("usual", [True, False])
def test_shards_beside_a_single_file_are_left_out(
    server: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, usual: bool
) -> None:
    """Transformers reads the file."""
    shards = {path.name: path.read_bytes() for path in hf_folder(tmp_path / "sharded", shards=2, seed=1).iterdir()}
    single = {name: files[name] for name in WANTED}
    if not usual:
        shards = {name.replace("model-0", "part-0"): data for name, data in shards.items()}
        shards[INDEX_NAME] = shards[INDEX_NAME].replace(b"model-0", b"part-0")
    assert len({**single, **shards}) == len(WANTED) + 3
    commit = server.add(REPO, {**shards, **single})
    assert sorted(hub.file_sizes(REPO, commit)) == WANTED
    folder = hub.download(REPO, commit, ignore)
    assert sorted(set(server.fetched())) == sorted([*WANTED, INDEX_NAME])
    assert {tensor.path.name for tensor in locate_tensors(folder).values()} == {"model.safetensors"}
    offline(monkeypatch)
    assert hub.download(REPO, commit, ignore) == folder


def test_an_index_that_has_the_single_file_among_its_shards(server: Hub, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in hf_folder(tmp_path / "sharded", shards=2).iterdir()}
    name = "model-00001-of-00002.safetensors"
    content["model.safetensors"] = content.pop(name)
    content[INDEX_NAME] = content[INDEX_NAME].replace(name.encode(), b"model.safetensors")
    commit = server.add(REPO, content)
    assert sorted(hub.file_sizes(REPO, commit)) == sorted(content)
    assert len(locate_tensors(hub.download(REPO, commit, ignore))) == 21


def test_files_that_are_listed_without_a_size_are_taken_too(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = huggingface_hub.HfApi.model_info

    def model_info(*args: Any, **kwargs: Any) -> Any:
        found = asked(*args, **kwargs)
        for file in found.siblings or []:
            file.size = file.size if file.rfilename == "model.safetensors" else None
        return found

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    commit = server.add(REPO, files)
    assert hub.file_sizes(REPO, commit) == {"model.safetensors": len(files["model.safetensors"])}
    assert sorted(path.name for path in hub.download(REPO, commit, ignore).iterdir()) == WANTED


def test_a_second_download_transfers_nothing(server: Hub, files: dict[str, bytes]) -> None:
    commit = server.add(REPO, files)
    folder = hub.download(REPO, commit, ignore)
    server.asked.clear()
    assert hub.download(REPO, commit, ignore) == folder
    assert server.fetched() == []


def test_the_remedy_for_a_damaged_file_of_the_cache_heals_it(server: Hub, files: dict[str, bytes]) -> None:
    commit = server.add(REPO, files)
    weights = hub.download(REPO, commit, ignore) / "model.safetensors"
    blob = weights.resolve()
    assert (weights.is_symlink(), blob.parent.name) == (True, "blobs")
    blob.write_bytes(b"damaged")
    with pytest.raises(HostError) as error:
        hub.download(REPO, commit, ignore)
    assert refused(error, 4) == (
        f"model.safetensors of {REPO} has another size than the hub says: 7 bytes have come, "
        f"of {len(files['model.safetensors']):,}; remove {blob} and try again"
    )
    blob.unlink()
    hub.download(REPO, commit, ignore)
    assert weights.read_bytes() == files["model.safetensors"]


def test_a_damaged_file_of_a_data_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob, link = tmp_path / "blob", tmp_path / "train.parquet"
    blob.write_bytes(b"damaged")
    link.symlink_to(blob)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_paths_info", lambda *_, **__: [SimpleNamespace(size=1000)])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(link))
    with pytest.raises(HostError) as error:
        hub.download_data("acme/text", "0" * 40, "train.parquet")
    assert refused(error, 4) == (
        "train.parquet of acme/text has another size than the hub says: 7 bytes have come, of 1,000; "
        f"remove {blob} and try again"
    )


def test_progress_ends_with_every_byte(server: Hub, files: dict[str, bytes]) -> None:
    seen: list[tuple[int, int]] = []
    hub.download(REPO, server.add(REPO, files), lambda done, total: seen.append((done, total)))
    total = sum(len(files[name]) for name in WANTED)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_download_starts_no_thread_of_tqdms(server: Hub, files: dict[str, bytes]) -> None:
    """One that is started while a bar is collected waits for it for ever, and it for the thread."""
    before = threading.enumerate()
    commit = server.add(REPO, files)
    assert hub.resolve_commit(REPO, "main") == commit
    hub.download(REPO, commit, lambda done, total: None)
    assert not [thread for thread in threading.enumerate() if isinstance(thread, TMonitor) and thread not in before]


def test_a_connection_cut_in_the_middle_of_a_file_is_resumed_there(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    server.cuts["model.safetensors"] = [20_500, 10_000]
    folder = hub.download(REPO, server.add(REPO, files), ignore)
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    ranges = [entry.headers.get("range") for entry in server.asked
              if entry.method == "GET" and entry.path.endswith("/model.safetensors")]  # fmt: skip
    # Whole chunks of 1000 bytes count as received.
    assert ranges == [None, "bytes=20000-", "bytes=30000-"]


def test_a_connection_that_always_breaks(server: Hub, files: dict[str, bytes]) -> None:
    commit = server.add(REPO, files)
    server.cuts["model.safetensors"] = [0] * 6
    with pytest.raises(HostError) as error:
        hub.download(REPO, commit, ignore)
    line = refused(error, 4)
    assert f"the hub did not deliver {REPO}@{commit}: peer closed connection" in line
    assert line.endswith("check the connection and HF_ENDPOINT; a second try keeps the files that are whole")
    # The second try: what is whole stays.
    server.asked.clear()
    folder = hub.download(REPO, commit, ignore)
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert "model.safetensors" in server.fetched()
    assert len(server.fetched()) < len(WANTED) + 1


def test_pickles_are_refused_before_anything_is_transferred(server: Hub, files: dict[str, bytes]) -> None:
    commit = server.add(REPO, {name: data for name, data in files.items() if not name.endswith(".safetensors")})
    with pytest.raises(InputDataError) as error:
        hub.download(REPO, commit, ignore)
    assert refused(error, 3) == (
        f"{REPO} has only pickle weights (pytorch_model.bin): a pickle can run code when it is loaded; "
        "choose a revision or repository with safetensors"
    )
    assert server.fetched() == server.fetched("HEAD") == []


def test_a_repository_without_weights(server: Hub) -> None:
    commit = server.add(REPO, {"README.md": b"", "model.gguf": b"GGUF"})
    with pytest.raises(InputDataError, match=f"{REPO} has no weights: no file matches"):
        hub.download(REPO, commit, ignore)


def test_a_gated_repository_without_a_token(server: Hub, files: dict[str, bytes]) -> None:
    # Its description is public, as on the hub; its files are not.
    commit = server.add(REPO, files, gated=True)
    assert hub.resolve_commit(REPO, "main") == commit
    with pytest.raises(HostError) as error:
        hub.download(REPO, commit, ignore)
    assert refused(error, 4) == (
        f"{REPO} is gated: its licence must be accepted and a token sent; "
        "accept it on the model's page, then set HF_TOKEN or run `hf auth login`"
    )


def test_a_gated_repository_whose_licence_was_not_accepted(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    commit = server.add(REPO, files, gated=True)
    with pytest.raises(HostError, match=f"{REPO} is gated"):
        hub.download(REPO, commit, ignore)
    assert {entry.headers.get("authorization") for entry in server.asked} == {"Bearer hf_stranger"}


@pytest.mark.parametrize("kind", ["gated", "private"])
def test_hf_token_is_sent(server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    option: dict[str, Any] = {kind: True}
    commit = server.add(REPO, files, **option)
    assert hub.resolve_commit(REPO, "main") == commit
    assert len(list(hub.download(REPO, commit, ignore).iterdir())) == len(WANTED)
    assert {entry.headers.get("authorization") for entry in server.asked} == {"Bearer hf_granted"}


def test_a_missing_repository(server: Hub) -> None:
    with pytest.raises(UsageError) as error:
        hub.resolve_commit("acme/none", "main")
    assert refused(error, 2) == (
        "the hub has no model repository acme/none; check the spelling; if it is private, set HF_TOKEN"
    )


def test_a_missing_repository_for_someone_with_a_token(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    with pytest.raises(UsageError) as error:
        hub.resolve_commit("acme/none", "main")
    assert refused(error, 2) == "the hub has no model repository acme/none; check the spelling"


def test_a_missing_revision(server: Hub, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    with pytest.raises(UsageError) as error:
        hub.resolve_commit(REPO, "v9")
    assert refused(error, 2) == f"{REPO} has no revision v9; pass a branch, tag or commit"


def test_a_missing_commit(server: Hub, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    with pytest.raises(UsageError, match=f"{REPO} has no revision {'0' * 40}"):
        hub.download(REPO, "0" * 40, ignore)


@pytest.mark.parametrize("repo_id", ["acme/a/b", "acme/tiny llama", "acme/--", "acme/.git"])
def test_what_is_no_repository_id(server: Hub, repo_id: str) -> None:
    with pytest.raises(UsageError) as error:
        hub.resolve_commit(repo_id, "main")
    assert refused(error, 2).startswith(f"'{repo_id}' is not a repository id: ")
    assert server.asked == []


def test_a_hub_in_trouble(server: Hub, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    server.failing = 501
    with pytest.raises(HostError) as error:
        hub.resolve_commit(REPO, "main")
    assert f"the hub did not deliver {REPO}@main: Server error '501 Not Implemented'" in refused(error, 4)


def test_a_token_the_hub_does_not_take(server: Hub, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    server.failing = 403
    with pytest.raises(HostError) as error:
        hub.resolve_commit(REPO, "main")
    assert refused(error, 4).endswith("; check HF_TOKEN")


def test_a_hub_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as closed:
        pass
    use(closed, tmp_path / "hf", monkeypatch)
    with pytest.raises(HostError) as error:
        hub.resolve_commit(REPO, "main")
    huggingface_hub.close_session()
    assert f"the hub did not deliver {REPO}@main: [Errno 111] Connection refused" in refused(error, 4)


def test_a_hub_that_fails_is_no_reason_to_take_an_older_commit(server: Hub, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    hub.download(REPO, hub.resolve_commit(REPO, "main"), ignore)
    hub.resolve_commit.cache_clear()
    server.failing = 501
    with pytest.raises(HostError, match="the hub did not deliver"):
        hub.resolve_commit(REPO, "main")


def test_offline_with_a_cache(server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    commit = server.add(REPO, files)
    folder = hub.download(REPO, hub.resolve_commit(REPO, "main"), ignore)
    server.add(REPO, {**files, "README.md": b"new"})
    server.asked.clear()
    offline(monkeypatch)
    # The branch, too, is what it was when it was last asked for.
    assert hub.resolve_commit(REPO, "main") == commit
    assert hub.download(REPO, commit, ignore) == folder
    assert server.asked == []


def test_offline_without_a_cache(server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    commit = server.add(REPO, files)
    offline(monkeypatch)
    for revision in ("main", commit):
        with pytest.raises(HostError) as error:
            hub.download(REPO, hub.resolve_commit(REPO, revision), ignore)
        assert refused(error, 4) == (
            f"{REPO}@{revision} is not in the local Hugging Face cache and the hub cannot be asked: "
            "HF_HUB_OFFLINE is set; download it while online, or pass a local folder as --model"
        )
    assert server.asked == []


def test_offline_with_half_a_cache(server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    commit = server.add(REPO, files)
    folder = hub.download(REPO, hub.resolve_commit(REPO, "main"), ignore)
    (folder / "model.safetensors").unlink()
    offline(monkeypatch)
    assert hub.resolve_commit(REPO, "main") == commit
    with pytest.raises(HostError, match="is not in the local Hugging Face cache"):
        hub.download(REPO, commit, ignore)


def environment(server: Hub, home: Path) -> dict[str, str]:
    """Of a process that talks to `server`."""
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        env.pop(name, None)
    return env


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "status", "answer"),
    [
        pytest.param(signal.SIGTERM, 143, b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\nfew", id="stalled"),
        pytest.param(
            signal.SIGINT, 130, b"HTTP/1.1 429 Busy\r\nRetry-After: 60\r\nContent-Length: 0\r\n\r\n", id="busy"
        ),
    ],
)
def test_a_signal_does_not_wait_for_files_that_are_under_way(
    server: Hub, files: dict[str, bytes], tmp_path: Path, number: int, status: int, answer: bytes
) -> None:
    commit = server.add(REPO, files)
    begun, over = threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        yield answer
        begun.set()
        over.wait(60)

    server.changed = lambda asked, *_: (
        pieces() if asked.method == "GET" and asked.path.endswith("/model.safetensors") else None
    )
    script = (
        "import sys\n"
        "from trtpipe.pipeline.cli.app import handle_signals\n"
        "from trtpipe.pipeline.sources import hub\n"
        "handle_signals()\n"
        "try:\n"
        f"    hub.download({REPO!r}, {commit!r}, lambda done, total: None)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    env = environment(server, tmp_path / "hf")
    snapshot = tmp_path / "hf" / "hub" / "models--acme--tiny-llama" / "snapshots" / commit
    with subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert begun.wait(60)
            deadline = time.monotonic() + 60
            while len(list(snapshot.glob("*"))) < len(WANTED) - 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(number)
            _, told = process.communicate(timeout=8)
        finally:
            process.kill()
            over.set()
    assert (process.returncode, told) == (status, "")
    server.changed = None
    server.asked.clear()
    hub.download(REPO, commit, ignore)
    assert server.fetched() == ["model.safetensors"], "files that are whole are kept"


@pytest.mark.process
def test_the_clients_own_variables_work_as_everywhere(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    commit = server.add(REPO, files, private=True)
    script = (
        "from trtpipe.pipeline.sources import hub\n"
        f"commit = hub.resolve_commit({REPO!r}, 'main')\n"
        f"print(hub.download({REPO!r}, commit, lambda done, total: None))\n"
    )
    env = {**environment(server, tmp_path / "home"), "HF_TOKEN": "hf_granted"}

    def run(**more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**env, **more},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""  # no progress bar of another's
        return done.stdout.strip()

    folder = Path(run())
    assert folder == tmp_path / "home" / "hub" / "models--acme--tiny-llama" / "snapshots" / commit
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    server.asked.clear()
    assert run(HF_HUB_OFFLINE="1") == str(folder)
    assert server.asked == []


def test_the_remedy_for_a_data_set_names_text_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as closed:
        pass
    use(closed, tmp_path / "hf", monkeypatch)
    with pytest.raises(HostError) as error:
        hub.download_data("abisee/cnn_dailymail", "0" * 40, "train.parquet")
    huggingface_hub.close_session()
    words = refused(error, 4)
    assert words.startswith("the data set abisee/cnn_dailymail cannot be had: ")
    assert words.endswith("or the shipped text, --set calibration.data=demo --set calibration.samples=128")
