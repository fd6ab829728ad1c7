"""A target through real registries: what arrives is what was sent, or nothing that is taken for it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks.registry_servers import Answer, Images, Request, changing, serving
from tests.support import hub_server, nvidia_smi, registries
from tests.support.doubles import install_trtllm_build
from tests.support.factories import hf_folder
from tests.support.hub_server import Hub
from tests.support.registries import s3_sessions as s3_sessions
from tests.unit.registry.test_signatures import KINDS, write_pair
from tests.unit.test_runner import Recorder, plan
from trtpipe.engines.errors import ArtefactRefused, HostError, InputDataError, UsageError
from trtpipe.engines.files import LINK_FROM_BYTES
from trtpipe.pipeline.registry import oci_upload, parts, transfer
from trtpipe.pipeline.registry import s3 as s3_registry
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.registry.base import Blob, Registry, translated
from trtpipe.pipeline.registry.fetch import Counter, Fetch
from trtpipe.pipeline.registry.files import FileRegistry
from trtpipe.pipeline.registry.package import files_of, receive
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.serving.references import references
from trtpipe.pipeline.serving.targets import list_targets
from trtpipe.pipeline.store import digests
from trtpipe.pipeline.store.gc import find_garbage
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Store

TARGET = "tiny.cpu.bf16"


def build(folder: Path, home: Path) -> Store:
    store = Store(home)
    execute(plan(hf_folder(folder / "tiny"), gpu="cpu", dtype="bf16"), store, Recorder())
    return store


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of a whole target. Not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return build(folder, folder / "home").home / "artefacts"


@pytest.fixture
def made(artefacts: Path, in_folder: Path, tmp_path: Path) -> Store:
    """The store of a whole target of this machine's own."""
    shutil.copytree(artefacts, tmp_path / "home" / "artefacts", symlinks=True)
    return build(in_folder, tmp_path / "home")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with registries.s3(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture(scope="session")
def oci(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registries.oci(tmp_path_factory.mktemp("oci")) as address:
        yield address


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process talks to, as one who may do everything."""
    from huggingface_hub import close_session, constants

    close_session()
    with hub_server.serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_granted")
        yield server
        close_session()


@pytest.fixture(params=["folder", "s3", "oci", "hub"])
def registry(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Registry]:
    """Opens a registry that is empty at first."""
    name = f"at{abs(hash(request.node.name))}"
    if request.param == "s3":
        for key, value in request.getfixturevalue("s3").items():
            monkeypatch.setenv(key, value)
        url = f"s3://models/{name}"
    elif request.param == "oci":
        url = f"oci://{request.getfixturevalue('oci')}/team/{name}"
    elif request.param == "hub":
        request.getfixturevalue("hub")
        url = f"hf://team/{name}"
    else:
        (tmp_path / "shelf").mkdir()
        url = str(tmp_path / "shelf")
    return lambda: open_registry(url)


def content(run: Path) -> dict[str, bytes]:
    """Every file of a run folder's artefacts, by its place there."""
    out: dict[str, bytes] = {}
    for makes in run.iterdir():
        if makes.is_dir():
            out |= {f"{makes.name}/{file.relative_to(makes)}": file.read_bytes() for file in makes.rglob("*.*")}
    return out


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Another machine: no runs, an empty store."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Store(folder / "home")


pytestmark = [
    pytest.mark.loopback,
    pytest.mark.process,
    # huggingface_hub's own, of its HTTP client.
    pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning"),
]


def test_what_arrives_is_what_was_sent(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(Path("runs") / TARGET)
    sent = transfer.push(TARGET, registry(), made)
    assert sent.artefacts == ("tokenizer", "engine")
    assert sent.there == 0
    assert transfer.push(TARGET, registry(), made).moved == 0, "all of it is there"
    assert registry().targets() == [TARGET]

    store = elsewhere(tmp_path, monkeypatch)
    got = transfer.pull(TARGET, registry(), store)
    after = content(Path("runs") / TARGET)
    assert after == {name: data for name, data in before.items() if name.startswith(("tokenizer/", "engine/"))}
    assert (got.moved, got.there) == (sent.moved, 0)
    assert got.arrived is not None
    execute(got.arrived.spec, store, Recorder(), given=got.arrived.artefacts)
    repository = {name: data for name, data in before.items() if name.startswith("repository/")}
    assert {name: data for name, data in content(Path("runs") / TARGET).items() if name in repository} == repository
    again = transfer.pull(TARGET, registry(), store)
    assert (again.moved, again.there, again.artefacts) == (0, sent.moved, got.artefacts)
    assert not list((store.home / "incoming").iterdir())
    # Nothing of it is to be made here, though its model and checkpoint did not travel.
    assert [(one.state, one.missing) for one in list_targets(store)] == [("complete", ())]


def test_a_file_of_two_artefacts_is_counted_once(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference engine's weights are those of its checkpoint.
    sent = transfer.push(TARGET, registry(), made, ("checkpoint", "engine"))
    store = elsewhere(tmp_path, monkeypatch)
    got = transfer.pull(TARGET, registry(), store, ("checkpoint", "engine"))
    assert got.arrived is not None
    assert sum(artefact.manifest.size for artefact in got.arrived.artefacts.values()) > sent.moved
    assert (got.moved, got.there) == (sent.moved, 0)
    again = transfer.pull(TARGET, registry(), store, ("checkpoint", "engine"))
    assert (again.moved, again.there) == (0, sent.moved)


def test_a_checkpoint_alone(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.push(TARGET, registry(), made, ("checkpoint", "tokenizer"))
    sender = Path.cwd()
    store = elsewhere(tmp_path, monkeypatch)
    assert transfer.pull(TARGET, registry(), store).artefacts == ("tokenizer", "checkpoint"), "there is no engine"
    monkeypatch.chdir(sender)
    transfer.push(TARGET, registry(), made, ("engine",))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert transfer.pull(TARGET, registry(), store).artefacts == ("engine", "tokenizer"), "what serving takes"
    shutil.rmtree(Path("runs"))
    assert transfer.pull(TARGET, registry(), store, ("checkpoint",)).artefacts == ("checkpoint",)
    assert sorted(path.name for path in (Path("runs") / TARGET / "checkpoint").iterdir()) == [
        "config.json", "rank0.safetensors",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"has no scales of tiny\.cpu\.bf16; there are: engine, tokenizer, checkpoint"):
        transfer.pull(TARGET, registry(), store, ("scales",))
    with pytest.raises(UsageError, match="nothing of a target is called 'repository'"):
        transfer.choose("repository")


def test_what_broke_off_goes_on_where_it_was(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = transfer.push(TARGET, registry(), made)
    store = elsewhere(tmp_path, monkeypatch)
    weak = registry()
    asked: list[tuple[str, int]] = []
    read = type(weak).read

    def breaking(self: Any, blob: Blob, start: int = 0) -> Iterator[bytes]:
        asked.append((blob.sha256, start))
        data = b"".join(read(self, blob, start))
        yield data[:5000]
        if len(data) > 5000:
            raise HostError("the line is cut")

    monkeypatch.setattr(type(weak), "read", breaking)
    with pytest.raises(HostError, match="the line is cut"):
        transfer.pull(TARGET, weak, store)
    assert not list(store.home.glob("artefacts/*/[!.]*/manifest.json")) or not (Path("runs") / TARGET).exists()
    left = {file.name: file.stat().st_size for file in (store.home / "incoming").rglob("*") if file.is_file()}
    sizes = {blob["sha256"]: blob["size"] for blob in files_of(weak.index(TARGET)) if blob["sha256"] in left}
    (broken,) = [name for name, size in left.items() if size != sizes[name]]
    assert left[broken] == 5000
    assert len(left) > 1, "files that had arrived whole before the line was cut"
    assert [garbage.reason for garbage in find_garbage(store, references)].count("left by an interrupted pull") == 1

    def noting(self: Any, blob: Blob, start: int = 0) -> Iterator[bytes]:
        asked.append((blob.sha256, start))
        return read(self, blob, start)

    asked.clear()
    monkeypatch.setattr(type(weak), "read", noting)
    got = transfer.pull(TARGET, registry(), store)
    assert min(start for sha256, start in asked if sha256 == broken) == 5000
    assert [sha256 for sha256, _ in asked if sha256 in left] == [broken], "what was here is not asked for"
    assert (got.moved, got.there) == (sent.moved - sum(left.values()), sum(left.values()))
    assert not list((store.home / "incoming").iterdir())


def test_gc_keeps_what_has_arrived_while_a_pull_runs(
    made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf: Any = open_registry(str(tmp_path / "shelf"))
    transfer.push(TARGET, shelf, made)
    store = elsewhere(tmp_path, monkeypatch)
    (engine,) = [
        file["sha256"] for file in shelf.index(TARGET)["artefacts"]["engine"]["files"]
        if file["path"] == "rank0.safetensors"
    ]  # fmt: skip
    seen: list[list[str]] = []

    def garbage() -> list[str]:
        return [f"{one.path.parent.name}: {one.reason}" for one in find_garbage(store, references)]

    def breaking(blob: Blob, start: int = 0) -> Iterator[bytes]:
        if blob.sha256 == engine:
            seen.append(garbage())
            raise HostError("the line is cut")
        return FileRegistry.read(shelf, blob, start)

    shelf.read = breaking
    with pytest.raises(HostError, match="the line is cut"):
        transfer.pull(TARGET, shelf, store)
    assert seen == [[]]
    assert garbage() == ["tokenizer: no run refers to it", "incoming: left by an interrupted pull"]
    del shelf.read
    transfer.pull(TARGET, shelf, store)
    assert garbage() == []


def test_a_file_that_had_arrived_is_verified_and_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    weak: Any = open_registry(str(tmp_path / "shelf"))
    files: list[dict[str, Any]] = []
    for name in "abc":
        data = random.Random(name).randbytes(LINK_FROM_BYTES)
        (tmp_path / name).write_bytes(data)
        files.append({"path": f"{name}.npy", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        weak.put(Blob(files[-1]["sha256"], len(data)), tmp_path / name, lambda nbytes: None)
    record = Record(stage="convert", stage_version=1, inputs={}, settings={}, tools={})
    content = digests.combined((file["path"], file["sha256"]) for file in files)
    entry = {"record": dataclasses.asdict(record), "content": content, "files": files}
    store = Store(tmp_path / "home")

    def pulled() -> tuple[int, int]:
        fetch = Fetch(weak, Counter(3 * LINK_FROM_BYTES, lambda done, total: None))
        receive(entry, store, lambda file, out: fetch.take(store.incoming(record), file, out))
        return fetch.moved, fetch.there

    def breaking(blob: Blob, start: int = 0) -> Iterator[bytes]:
        if blob.sha256 == files[2]["sha256"]:
            raise HostError("the line is cut")
        return FileRegistry.read(weak, blob, start)

    weak.read = breaking
    with pytest.raises(HostError, match="the line is cut"):
        pulled()
    del weak.read
    kept = store.incoming(record) / files[0]["sha256"]
    kept.write_bytes(b"x" + kept.read_bytes()[1:])
    with pytest.raises(InputDataError, match=r"a\.npy from .*/shelf is damaged: its digest is another"):
        pulled()
    assert pulled() == (2 * LINK_FROM_BYTES, LINK_FROM_BYTES), "a again and c, and b was here"
    assert not store.incoming(record).exists()

    read: list[str] = []

    def watch(path: Path, size: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        read.append(path.name)
        return contextlib.nullcontext(lambda done: None)

    remembered = digests.Digests(store.home / "digests.json", watch)
    assert Store(store.home, digests=remembered).find(record) is not None
    assert read == [], "their digests are remembered, though a link to each was removed"


def test_an_engine_of_another_machine_is_refused_before_its_files(
    registry: Callable[[], Registry], in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        nvidia_smi.install(there, tmp_path / "bin", nvidia_smi.H100)
        install_trtllm_build(tmp_path / "bin")
        store = Store(tmp_path / "home")
        execute(plan(hf_folder(in_folder / "tiny"), gpu="h100", dtype="bf16"), store, Recorder())
        transfer.push("tiny.h100.bf16", registry(), store)
    store = elsewhere(tmp_path, monkeypatch)
    nvidia_smi.install(monkeypatch, tmp_path / "other", nvidia_smi.A100)
    weak = registry()
    asked: list[int] = []
    read = type(weak).read

    def noting(self: Any, blob: Blob, *rest: int) -> Iterator[bytes]:
        asked.append(blob.size)
        return read(self, blob, *rest)

    monkeypatch.setattr(type(weak), "read", noting)
    with pytest.raises(ArtefactRefused) as error:
        transfer.pull("tiny.h100.bf16", weak, store)
    assert error.value.what == "the engine of tiny.h100.bf16 does not run on this machine"
    assert "it is for h100 (SM90), and this machine has NVIDIA A100-SXM4-80GB (SM80)" in str(error.value)
    assert "nothing of its 6.4 kB was fetched; pull it where it runs, or with --any-machine" in str(error.value)
    (passport,) = [
        file["size"] for file in weak.index("tiny.h100.bf16")["artefacts"]["engine"]["files"]
        if file["path"] == "passport.json"
    ]  # fmt: skip
    assert asked == [passport], "it alone"
    assert not (Path("runs") / "tiny.h100.bf16").exists()
    transfer.pull("tiny.h100.bf16", registry(), store, any_machine=True)
    assert (Path("runs") / "tiny.h100.bf16" / "engine" / "rank0.engine").is_file()


def test_a_file_that_is_not_what_its_digest_says(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.push(TARGET, registry(), made)
    store = elsewhere(tmp_path, monkeypatch)
    weak = registry()
    read = type(weak).read

    def flipped(self: Any, blob: Blob, start: int = 0) -> Iterator[bytes]:
        data = b"".join(read(self, blob, start))
        yield bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(type(weak), "read", flipped)
    told = r"is damaged: its digest is another; pull again; if it stays so, remove the file \w{64} there"
    with pytest.raises(InputDataError, match=told):
        transfer.pull(TARGET, weak, store)
    assert not [file for file in store.home.rglob("*") if file.is_file() and file.suffix == ".safetensors"]
    assert not (Path("runs") / TARGET).exists()


def test_looking_for_a_target(made: Store, registry: Callable[[], Registry]) -> None:
    assert transfer.search(registry()) == []
    transfer.push(TARGET, registry(), made)
    (found,) = transfer.search(registry())
    assert (found.target, found.model, found.passport.gpu) == (TARGET, "tiny", "cpu")
    assert sorted(found.artefacts) == ["engine", "tokenizer"]
    assert transfer.precision(found.passport) == "bfloat16"
    assert [len(transfer.search(registry(), model=word)) for word in ("TINY", "llama")] == [1, 0]
    assert [len(transfer.search(registry(), gpu=word)) for word in ("cpu", "h100")] == [1, 0]
    assert [len(transfer.search(registry(), dtype=word)) for word in ("bf16", "bfloat16", "fp8")] == [1, 1, 0]


@pytest.mark.parametrize(
    "media",
    ["application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"],
)
def test_images_of_several_platforms_are_passed_over(made: Store, oci: str, media: str) -> None:
    """The registry answers 404 for them to those that do not accept them."""
    name = f"team/beside{len(media)}"
    index = json.dumps({"schemaVersion": 2, "mediaType": media, "manifests": []})
    for tag in ("latest", TARGET):
        put = httpx.put(f"http://{oci}/v2/{name}/manifests/{tag}", content=index, headers={"Content-Type": media})
        assert put.status_code == 201
    there = open_registry(f"oci://{oci}/{name}")
    assert there.index("latest") is None
    assert transfer.search(there) == []
    transfer.push(TARGET, there, made)
    assert [found.target for found in transfer.search(there)] == [TARGET]
    assert there.targets() == ["latest", TARGET]


@pytest.mark.parametrize("status", [401, 403])
def test_who_may_not_list_tags_pushes_and_pulls(
    made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with serving(changing(Images(), lambda r: Answer(status) if "/tags/list" in r.path else None)) as address:
        url = f"oci://{address}/team/models"
        transfer.push(TARGET, open_registry(url), made)
        transfer.push(TARGET, open_registry(url), made, ("checkpoint",))
        store = elsewhere(tmp_path, monkeypatch)
        pulled = transfer.pull(TARGET, open_registry(url), store)
        assert pulled.artefacts == ("tokenizer", "engine")
        with pytest.raises(UsageError, match=f"{url} has no target 'other'; check its name$"):
            transfer.pull("other", open_registry(url), store)
        with pytest.raises(HostError, match=rf"{url} refuses: {status} .*; run `docker login"):
            transfer.search(open_registry(url))


def test_a_target_that_is_not_there(made: Store, registry: Callable[[], Registry]) -> None:
    with pytest.raises(UsageError, match="has no target 'other'; push one with `trtpipe push`"):
        transfer.pull("other", registry(), made)
    transfer.push(TARGET, registry(), made)
    with pytest.raises(UsageError, match=rf"has no target 'tiny.cpu.bf61'; did you mean '{TARGET}'\?"):
        transfer.pull("tiny.cpu.bf61", registry(), made)


def test_a_push_hashes_what_it_sends(made: Store, tmp_path: Path) -> None:
    engine = RunFolder.of(TARGET).linked("engine") / "config.json"
    text = bytearray(engine.read_bytes())
    text[-2] ^= 1
    stamp = engine.stat().st_mtime_ns
    engine.write_bytes(text)
    os.utime(engine, ns=(stamp, stamp))
    with pytest.raises(InputDataError, match=f"{TARGET} has lost its engine: config.json has changed; run `trtp"):
        transfer.push(TARGET, open_registry(str(tmp_path / "shelf")), made)
    assert not (tmp_path / "shelf" / "targets").exists()


def test_an_upload_to_s3_goes_on_where_it_broke_off(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    part = 5 << 20
    monkeypatch.setattr(parts, "PART", part)
    monkeypatch.setattr(s3_registry, "PART", part)
    monkeypatch.setattr(parts, "AT_ONCE", 1)
    data = random.Random(7).randbytes(3 * part + 1000)
    (tmp_path / "file").write_bytes(data)
    blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
    sent: list[int] = []
    weak: Any = open_registry("s3://models/parts")
    call = weak._system.call_s3

    def breaking(method: str, **named: Any) -> Any:
        if method == "upload_part":
            if named["PartNumber"] >= 3:
                raise OSError("the line is cut")
            sent.append(named["PartNumber"])
        return call(method, **named)

    weak._system.call_s3 = breaking
    with pytest.raises(HostError, match="the line is cut"):
        weak.put(blob, tmp_path / "file", lambda nbytes: None)
    assert sent == [1, 2]
    there: Any = open_registry("s3://models/parts")
    assert not there.has(blob)
    call = there._system.call_s3

    def noting(method: str, **named: Any) -> Any:
        if method == "upload_part":
            sent.append(named["PartNumber"])
        return call(method, **named)

    there._system.call_s3 = noting
    moved: list[int] = []
    there.put(blob, tmp_path / "file", moved.append)
    assert sent == [1, 2, 3, 4], "what was there is not sent again"
    assert moved == [part] * 3 + [1000]
    assert there.has(blob)
    assert b"".join(there.read(blob)) == data
    assert b"".join(there.read(blob, 70_000)) == data[70_000:]
    assert "Uploads" not in call("list_multipart_uploads", Bucket="models")


def test_a_signal_does_not_wait_for_parts_that_s3_does_not_take(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11 << 20))
    begun, over = threading.Event(), threading.Event()

    def talk(request: Request) -> Iterator[bytes]:
        if request.method == "PUT":
            begun.set()
            over.wait(60)
        name = "ListMultipartUploadsResult" if request.method == "GET" else "InitiateMultipartUploadResult"
        yield Answer(200, {}, f"<{name}><UploadId>1</UploadId></{name}>".encode()).wire()

    script = (
        "from pathlib import Path\n"
        "from trtpipe.pipeline.cli.app import handle_signals\n"
        "from trtpipe.pipeline.registry import parts, s3\n"
        "from trtpipe.pipeline.registry.address import open_registry\n"
        "from trtpipe.pipeline.registry.base import Blob\n"
        "handle_signals()\n"
        "parts.PART = s3.PART = 5 << 20\n"
        "open_registry('s3://models/x').put(Blob('0' * 64, 11 << 20), Path('file'), lambda nbytes: None)\n"
    )
    with serving(talk) as address:
        env = {**os.environ, "AWS_ENDPOINT_URL": f"http://{address}", "AWS_ACCESS_KEY_ID": "one",
               "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert begun.wait(60)
                process.terminate()
                _, told = process.communicate(timeout=8)
            finally:
                process.kill()
                over.set()
    assert (process.returncode, told) == (143, "")


DATA = random.Random(1).randbytes(1_000_000)
BLOB = Blob(hashlib.sha256(DATA).hexdigest(), 1_000_000)


def upload(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *cuts: int) -> list[int]:
    """Put DATA to a registry of images over a line that breaks after so many bytes of the first, second, ... PATCH.
    Returns what `moved` is called with."""
    monkeypatch.setenv("TRTPIPE_HOME", str(folder / "home"))
    monkeypatch.setattr(oci_upload, "WAITS", (0.2, 0.2, 0.2))
    (folder / "file").write_bytes(DATA)
    registry: Any = open_registry(f"oci://{address}/team/sent")
    request, left = registry._client.request, list(cuts)

    def cut(content: Iterable[bytes], count: int) -> Iterator[bytes]:
        for piece in content:
            yield piece[:count]
            count -= len(piece)
            if count <= 0:
                raise httpx.ReadError("the line is cut")

    def breaking(method: str, url: str, **rest: Any) -> Any:
        if method == "PATCH" and left:
            rest["content"] = cut(rest["content"], left.pop(0))
        return request(method, url, **rest)

    registry._client.request = breaking
    moved: list[int] = []
    registry.put(BLOB, folder / "file", moved.append)
    assert sum(moved) == 1_000_000
    assert registry.has(BLOB)
    assert b"".join(registry.read(BLOB)) == DATA
    assert b"".join(registry.read(BLOB, 70_000)) == DATA[70_000:]
    assert not list((folder / "home" / "uploads").iterdir())
    return moved


def patches(asked: list[Request]) -> list[tuple[str | None, str]]:
    """(Content-Range, Content-Length) of what was sent of a file."""
    return [
        (request.headers.get("content-range"), request.headers["content-length"])
        for request in asked
        if request.method == "PATCH"
    ]


def test_an_upload_is_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GitHub's registry refuses chunks of more than 4 MiB, and Google's registry all: what has a Content-Range."""
    asked: list[Request] = []
    with serving(changing(Images(), lambda request: None), asked) as address:
        moved = upload(address, tmp_path, monkeypatch)
    assert patches(asked) == [(None, "1000000")]
    assert len(moved) > 2, "progress is told while the request lasts"
    assert min(moved) >= 0


@pytest.mark.parametrize("again", [False, True], ids=["the same push", "another push"])
def test_an_upload_of_an_image_registry_goes_on_where_it_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    asked: list[Request] = []
    with serving(changing(Images(), lambda request: None), asked) as address:
        if again:
            with pytest.raises(HostError, match="the line is cut"):
                upload(address, tmp_path, monkeypatch, 400_000, 0, 0, 0)
            asked.clear()
            upload(address, tmp_path, monkeypatch)
        else:
            upload(address, tmp_path, monkeypatch, 400_000)
    rest = ("400000-999999", "600000")
    assert patches(asked) == ([rest] if again else [(None, "1000000"), rest])


def test_an_upload_begins_again_where_the_registry_keeps_nothing(
    oci: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As registry:2, which drops what a broken request has brought."""
    upload(oci, tmp_path, monkeypatch, 700_000, 300_000)


class LastPart(Images):
    """Keeps the last request's part of a file alone."""

    def _upload(self, place: str, name: str, request: Request) -> Answer:
        if "content-range" in request.headers:
            self._uploads[name] = b""
        return super()._upload(place, name, request)


@pytest.mark.parametrize("joins", [True, False], ids=["refuses the rest", "keeps the rest alone"])
def test_an_upload_begins_again_where_the_registry_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    asked: list[Request] = []

    def refusing(request: Request) -> Answer | None:
        return Answer(416) if joins and "content-range" in request.headers else None

    with serving(changing(Images() if joins else LastPart(), refusing), asked) as address:
        upload(address, tmp_path, monkeypatch, 400_000)
    assert patches(asked) == [(None, "1000000"), ("400000-999999", "600000"), (None, "1000000")]


def test_two_pushes_of_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an upload of its own, and the first one's address is kept."""
    asked: list[Request] = []
    kept: list[list[str]] = []
    uploads = tmp_path / "home" / "uploads"

    def other(request: Request) -> Answer | None:
        if request.method == "PATCH" and request.path.endswith("/0"):
            kept.append([path.read_text() for path in uploads.iterdir()])
            there.put(BLOB, tmp_path / "file", lambda nbytes: None)
            kept.append([path.read_text() for path in uploads.iterdir()])
        return None

    with serving(changing(Images(), other), asked) as address:
        there = open_registry(f"oci://{address}/team/sent")
        upload(address, tmp_path, monkeypatch)
    assert patches(asked) == [(None, "1000000")] * 2
    assert kept == [[f"http://{address}/v2/team/sent/blobs/uploads/0"]] * 2
    assert [request.path for request in asked if request.method == "POST"] == ["/v2/team/sent/blobs/uploads/"] * 2


def test_a_file_of_another_size_is_not_there(tmp_path: Path) -> None:
    base = Images()
    base.blobs = {BLOB.sha256: DATA[:1000], "0" * 64: DATA}
    with serving(changing(base, lambda request: None)) as address:
        registry = open_registry(f"oci://{address}/team/sent")
        assert not registry.has(BLOB)
        assert registry.has(Blob("0" * 64, 1_000_000))


def test_a_name_that_cannot_be_a_tag_is_refused_before_anything_is_sent(
    oci: str, in_folder: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "home")
    execute(plan(hf_folder(in_folder / "a+b"), gpu="cpu", dtype="bf16"), store, Recorder())
    registry: Any = open_registry(f"oci://{oci}/team/plus")
    registry._ask = None
    with pytest.raises(UsageError) as caught:
        transfer.push("a+b.cpu.bf16", registry, store)
    assert str(caught.value) == (
        f"'a+b.cpu.bf16' cannot be a tag of oci://{oci}/team/plus: a tag has letters, digits, '.', '_' and '-' alone; "
        "push it to a folder, S3 or the Hugging Face Hub, or build it from a folder or a link of another name"
    )
    shelf = open_registry(str(tmp_path / "shelf"))
    assert transfer.push("a+b.cpu.bf16", shelf, store).target == "a+b.cpu.bf16"
    assert shelf.targets() == ["a+b.cpu.bf16"]


def test_a_file_that_somebody_has_removed(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputDataError, match=r"lacks the file sha256:0000000000\w\w: somebody has removed it; push"):
        b"".join(registry().read(Blob("0" * 64, 5)))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"x" * 1000, "truncated: it has 1,000 bytes instead of 5,000; push the target again"),
        (b"x" * 5001, "too long: it has 5,001 bytes instead of 5,000; push the target again"),
    ],
)
def test_a_file_of_another_size_in_a_folder(in_folder: Path, tmp_path: Path, data: bytes, line: str) -> None:
    shelf = tmp_path / "shelf"
    (shelf / "blobs").mkdir(parents=True)
    (shelf / "blobs" / ("0" * 64)).write_bytes(data)
    with pytest.raises(InputDataError) as caught:
        b"".join(open_registry(str(shelf)).read(Blob("0" * 64, 5000)))
    assert str(caught.value) == f"the file sha256:000000000000 of {shelf} is {line}"


@pytest.mark.parametrize("place", ["blobs", "targets"])
def test_a_pipe_in_a_folder_is_not_waited_for(made: Store, tmp_path: Path, place: str) -> None:
    shelf = tmp_path / "shelf"
    transfer.push(TARGET, open_registry(str(shelf)), made)
    for file in (shelf / place).iterdir():
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(InputDataError, match=r"lacks the file|is damaged: it is not a regular file"):
        transfer.pull(TARGET, open_registry(str(shelf)), Store(tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["my models", "ä", "a#b", "a%20b", "a::b", "a[b]*?"])
def test_a_folder_of_any_name(made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = set(tmp_path.iterdir())
    sent = transfer.push(TARGET, open_registry(str(tmp_path / name)), made)
    assert set(tmp_path.iterdir()) - before == {tmp_path / name}
    assert [path.name for path in (tmp_path / name / "targets").iterdir()] == [f"{TARGET}.json"]
    store = elsewhere(tmp_path, monkeypatch)
    for address in (f"../{name}", (tmp_path / name).as_uri(), str(tmp_path / name)):
        assert [found.target for found in transfer.search(open_registry(address))] == [TARGET]
        got = transfer.pull(TARGET, open_registry(address), store)
        # By each of its addresses it is one origin.
        assert {origin.source for origin in RunFolder.of(TARGET).origins().values()} == {str(tmp_path / name)}
        assert (got.moved, got.there) in ((sent.moved, 0), (0, sent.moved))
    assert got.moved == 0


def test_a_folder_by_the_url_of_this_host(tmp_path: Path) -> None:
    assert open_registry(f"file://localhost{tmp_path}/shelf").url == f"{tmp_path}/shelf"
    assert open_registry(f"file://{tmp_path}/shelf").url == f"{tmp_path}/shelf"


def test_folders_of_the_user(in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `registry` of config.toml names them, which no shell has read."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert open_registry("~/models").url == str(tmp_path / "me" / "models")
    assert open_registry("./~").url == str(in_folder / "~")


def test_what_a_killed_push_left_is_swept_by_a_later_one(made: Store, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf [1]*"
    transfer.push(TARGET, open_registry(str(shelf)), made)
    blob = max((shelf / "blobs").iterdir(), key=lambda file: file.stat().st_size)
    blob.unlink()
    old, young = (blob.with_name(f"{blob.name}.{word * 32}") for word in "ab")
    for partial, age_s in ((old, 2 * 86400), (young, 60)):
        partial.write_bytes(b"half")
        os.utime(partial, (time.time() - age_s,) * 2)
    transfer.push(TARGET, open_registry(str(shelf)), made)
    assert (blob.exists(), old.exists(), young.exists()) == (True, False, True)


def test_somebody_elses_files_beside_ours_are_left_alone(made: Store, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    transfer.push(TARGET, open_registry(str(shelf)), made)
    (shelf / "targets" / "other.json").write_text("{}")
    (shelf / "targets" / "broken.json").write_text("{")
    assert [found.target for found in transfer.search(open_registry(str(shelf)))] == [TARGET]
    with pytest.raises(InputDataError, match=r"broken at .* is damaged"):
        transfer.pull("broken", open_registry(str(shelf)), made)


def change(index: dict[str, Any], place: str, value: Any) -> None:
    *way, last = place.split(".")
    inner: Any = index
    for word in way:
        inner = inner[int(word) if word.isdigit() else word]
    if value is None:
        del inner[last]
    else:
        inner[last] = value


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("artefacts.engine.files.0.sha256", "VICTIM", "sha256: String should match pattern"),
        ("artefacts.engine.files.0.size", -1, "size: Input should be greater than or equal to 0"),
        ("artefacts.engine.files.0.size", "3", "size: Input should be a valid integer"),
        ("artefacts.engine.files.0.path", "../../out.json", "it leads out of its folder"),
        ("artefacts.engine.files.0.path", "model.py", "the engine holds model.py: only data is taken"),
        ("artefacts.engine.files.0.path", "lib/libx.so", "the engine holds lib/libx.so: only data is taken"),
        ("artefacts.engine.files.0.path", "passport.json", "it names a file of the engine twice"),
        ("artefacts.engine.content", "0" * 64, "the engine is 000000000000, the provenance says"),
        ("artefacts.engine.record.settings.build.max_batch_size", 3, "the record of the engine is"),
        ("artefacts.engine.files", None, "artefacts.engine.files: Field required"),
        ("artefacts.engine.record.stage", "../../out", "record.stage: String should match pattern"),
        ("artefacts.engine.record.stage", "convert", "the record of the engine is"),
        ("artefacts.engine.record.colour", 1, "record.colour: Extra inputs are not permitted"),
        ("model.name", "../../out", "model.name: String should match pattern"),
        ("model.name", "other", "it is of other.cpu.bf16, and says tiny.cpu.bf16"),
        ("model.source.kind", "nowhere", "it has no source of a kind that is known"),
        ("target", "other", "it is of other"),
        ("passport", None, "passport: Field required"),
        ("passport.colour", "blue", "passport.colour: Unexpected keyword argument"),
        ("passport.tp_size", "1", "passport.tp_size: Input should be a valid integer"),
        ("passport.tp_size", 2, "tp_size: its passport says 2, its settings 1"),
        ("passport.gpu", "h100", "gpu: its passport says h100, its settings cpu"),
        ("passport.sms", [90], r"sms: its passport says \(90,\), its settings None"),
        ("passport.rank_bytes", 1, "its passport is not the engine's passport.json"),
        ("provenance", None, "it holds no provenance"),
    ],
)
def test_an_index_that_is_not_to_be_believed(made: Store, tmp_path: Path, place: str, value: Any, why: str) -> None:
    """Whoever can write to a registry writes nothing here: names in an index become paths."""
    shelf, victim = tmp_path / "shelf", tmp_path / "victim"
    victim.write_text("mine")
    transfer.push(TARGET, open_registry(str(shelf)), made)
    file = shelf / "targets" / f"{TARGET}.json"
    index = json.loads(file.read_text())
    change(index, place, str(victim) if value == "VICTIM" else value)
    file.write_text(json.dumps(index))
    shutil.rmtree("runs")
    store = Store(tmp_path / "fresh")
    with pytest.raises((InputDataError, ArtefactRefused), match=why):
        transfer.pull(TARGET, open_registry(str(shelf)), store)
    assert victim.read_text() == "mine"
    assert not Path("runs").exists()
    assert not list(tmp_path.rglob("out*"))
    assert len(transfer.search(open_registry(str(shelf)))) <= 1, "it does not keep others from being found"


def test_what_is_pushed_later_comes_to_what_is_there(made: Store, tmp_path: Path) -> None:
    there = open_registry(str(tmp_path / "shelf"))
    transfer.push(TARGET, there, made)
    passport = there.index(TARGET)["passport"]
    transfer.push(TARGET, there, made, ("checkpoint",))
    index = there.index(TARGET)
    assert sorted(index["artefacts"]) == ["checkpoint", "engine", "tokenizer"]
    assert index["passport"] == passport
    with pytest.raises(UsageError, match=f"{TARGET} has no scales; of what is named it has: checkpoint"):
        transfer.push(TARGET, there, made, ("checkpoint", "scales"))
    with pytest.raises(UsageError, match=f"{TARGET} has no scales; leave out --only"):
        transfer.push(TARGET, there, made, ("scales",))
    # Of another build nothing stays.
    execute(plan(hf_folder(Path("tiny"), seed=1), gpu="cpu", dtype="bf16"), made, Recorder())
    transfer.push(TARGET, there, made, ("tokenizer", "checkpoint"))
    assert sorted(there.index(TARGET)["artefacts"]) == ["checkpoint", "tokenizer"]


def test_provenance_travels_along(made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.pipeline.registry import provenance

    shelf = str(tmp_path / "shelf")
    transfer.push(TARGET, open_registry(shelf), made)
    lines = provenance.verify(RunFolder.of(TARGET), made).lines
    store = elsewhere(tmp_path, monkeypatch)
    transfer.pull(TARGET, open_registry(shelf), store)
    found = provenance.verify(RunFolder.of(TARGET), store)
    brought = f", imported from {shelf}, not built here"
    told = [line + brought if line.startswith(("tokenizer", "engine")) else line for line in lines]
    assert found.lines == told[:4] + found.lines[4:], "also of the stages that ran elsewhere"
    assert found.elsewhere == ["model", "checkpoint", "repository"]
    (Path("runs") / TARGET / provenance.FILE).unlink()
    with pytest.raises(
        InputDataError, match=r"nothing tells where the model of .* came from, of which the tokenizer was made"
    ):
        provenance.verify(RunFolder.of(TARGET), store)
    index = json.loads((Path(shelf) / "targets" / f"{TARGET}.json").read_text())
    stages = index["provenance"]["predicate"]["runDetails"]["byproducts"]
    next(one for one in stages if one["name"] == "engine")["digest"]["sha256"] = "0" * 64
    (Path(shelf) / "targets" / f"{TARGET}.json").write_text(json.dumps(index))
    shutil.rmtree("runs")
    with pytest.raises(ArtefactRefused, match="the provenance does not hold: the engine is 000000000000, its files gi"):
        transfer.pull(TARGET, open_registry(shelf), store)


def test_a_pulled_target_is_pushed_on_with_the_provenance_that_came(
    made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (open_registry(str(tmp_path / name)) for name in ("staging", "production"))
    private, _ = write_pair(tmp_path, KINDS["ed25519"]())
    transfer.push(TARGET, first, made, sign_key=private)
    store = elsewhere(tmp_path, monkeypatch)
    transfer.pull(TARGET, first, store)
    transfer.push(TARGET, second, store)
    assert second.index(TARGET) == first.index(TARGET)
    # What is pushed without a key later keeps the signature, which is of all stages.
    monkeypatch.chdir(tmp_path / "work")
    transfer.push(TARGET, first, made, ("checkpoint",))
    assert sorted(first.index(TARGET)["artefacts"]) == ["checkpoint", "engine", "tokenizer"]
    assert first.index(TARGET)["provenance"] == second.index(TARGET)["provenance"]
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(InputDataError, match="has no checkpoint: it did not come with the target; take it from where"):
        transfer.push(TARGET, second, store, ("checkpoint",))
    # A build would make anew what came from elsewhere.
    shutil.rmtree(store.home / "imported" / "tokenizer")
    with pytest.raises(InputDataError, match=r"lost its tokenizer: .* no longer; pull or import the target again$"):
        transfer.push(TARGET, second, store)


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("s3://", UsageError, "s3:// names no place"),
        ("oci://host", UsageError, "oci://host names no repository"),
        ("oci://host/Team/models", UsageError, "oci://host/Team/models names no repository: its name is of small lett"),
        ("hf://alone", UsageError, "hf://alone names no repository"),
        ("x4://place", UsageError, "x4://place: Protocol not known: x4"),
        ("memory://x", UsageError, "memory://x is lost when this program ends; give oci://, hf://, s3:// or a folder"),
        ("s3:/bucket/x", UsageError, "'s3:/bucket/x' is not an address"),
        ("", UsageError, "'' is not an address"),
        ("reg.example/team/x", UsageError, "folder; give oci://reg.example/team/x, or ./reg.example/team/x for a fo"),
        ("localhost:5000/x", UsageError, "folder; give oci://localhost:5000/x, or "),
        ("github://h/x", HostError, "github://h/x cannot be used: .*; check its address"),
    ],
)
def test_urls_that_name_nothing(url: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        open_registry(url)


def test_a_registry_that_does_not_answer_is_named(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    port = registries.free_port()
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for url in (f"oci://127.0.0.1:{port}/team/models", "s3://models/there"):
        with pytest.raises(HostError, match=f"{url} c"):
            transfer.push(TARGET, open_registry(url), made)


@pytest.mark.parametrize("kind", ["basic", "token", "identity"])
@pytest.mark.parametrize(("password", "status"), [("open sesame", None), ("sesame", 401), (None, 401)])
def test_credentials_of_docker_login(
    made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str | None, status: int | None, kind: str
) -> None:
    with contextlib.ExitStack() as servers:
        if kind != "basic":
            known = ("ali", "open sesame", "") if kind == "token" else ("", "", "open sesame")
            issuer = servers.enter_context(registries.tokens(tmp_path, *known))
            address = servers.enter_context(registries.oci(tmp_path, issuer=issuer))
        else:
            users = "ali:$2b$04$y04SoDuCSOl.U0ndHtDdC.cOajoHGksLBsT0BJ0vve6ifdVZ/fmiy"
            address = servers.enter_context(registries.oci(tmp_path, users=users))
        word = base64.b64encode(f"ali:{password}".encode()).decode()
        entry = {"auth": word}
        if kind == "identity":  # as `az acr login` leaves it
            entry = {"auth": "MDAwMDAwMDAtMDAwMC0wMDAwLTAwMDAtMDAwMDAwMDAwMDAwOg==", "identitytoken": f"{password}"}
        auths = {} if password is None else {address: entry}
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
        url = f"oci://{address}/team/models"
        if status is None:
            transfer.push(TARGET, open_registry(url), made)
            assert [found.target for found in transfer.search(open_registry(url))] == [TARGET]
            return
        begun = time.monotonic()
        with pytest.raises(HostError, match=rf"{url} .*run `docker login {address}`"):
            open_registry(url)
        assert time.monotonic() - begun < 10, "it is not asked again and again"


def test_an_identity_token_is_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with registries.oci(tmp_path, users="ali:$2b$04$y04SoDuCSOl.U0ndHtDdC.cOajoHGksLBsT0BJ0vve6ifdVZ/fmiy") as address:
        (tmp_path / "config.json").write_text(json.dumps({"auths": {address: {"identitytoken": "eyJ.one"}}}))
        with pytest.raises(HostError) as error:
            open_registry(f"oci://{address}/team/models")
    assert str(error.value) == (
        f"oci://{address}/team/models does not let you: it asks for a password, and Docker keeps an identity token; "
        f"run `docker login {address}` with a password"
    )


def test_a_credential_helper_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the registry asks for credentials; what is public is read without them."""
    program = tmp_path / "docker-credential-locked"
    program.write_text("#!/bin/sh\necho 'the keychain is locked'; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"credsStore": "locked"}')
    why = "docker-credential-locked gives no credentials: the keychain is locked"
    with registries.oci(tmp_path, users="ali:$2b$04$y04SoDuCSOl.U0ndHtDdC.cOajoHGksLBsT0BJ0vve6ifdVZ/fmiy") as address:
        url = f"oci://{address}/team/models"
        with pytest.raises(HostError) as error:
            open_registry(url)
        assert str(error.value) == f"{url} does not let you: it asks who you are; {why}; run `docker login {address}`"
    with serving(lambda r: [Answer(200, {}, b'{"token": "public"}').wire()]) as tokens:
        images, secret = Images(), [False]

        def asking(request: Request) -> Answer | None:
            if not secret[0] and request.headers.get("authorization") == "Bearer public":
                return None
            return Answer(401, {"WWW-Authenticate": f'Bearer realm="http://{tokens}/token"'})

        with serving(changing(images, asking)) as address:
            url = f"oci://{address}/team/models"
            assert open_registry(url).targets() == []
            secret[0] = True
            with pytest.raises(HostError) as error:
                open_registry(url)
            assert str(error.value) == (
                f"{url} refuses: 401 Said; {why}; run `docker login {address}`, or check the name"
            )


def test_what_listens_is_no_registry(s3: dict[str, str]) -> None:
    url = s3["AWS_ENDPOINT_URL"].replace("http://", "oci://") + "/team/models"
    with pytest.raises(HostError, match=f"{url} is not a registry of images: .* answers 4"):
        open_registry(url)


def test_a_bucket_that_is_not_there_is_not_made_and_is_no_empty_registry(
    made: Store, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    registry = open_registry("s3://modles/x")
    for act in (
        lambda: transfer.push(TARGET, registry, made),
        lambda: transfer.pull(TARGET, registry, made),
        lambda: transfer.search(registry),
    ):
        with pytest.raises(HostError, match=r"s3://modles/x cannot be reached or written: .*bucket"):
            act()


@pytest.mark.parametrize(
    ("url", "error", "line"),
    [
        ("https://x.example/y", NotImplementedError(),
         "https://x.example/y cannot be used: fsspec's driver of https:// does not do all of this; name a registry "
         "that can be written"),
        ("/nas/x", OSError(30, "Read-only file system", "/nas/x/blobs"),
         "/nas/x cannot be reached or written: Read-only file system; check its permissions, or name another folder"),
        ("s3://b/x", ConnectionError("cannot connect to it"),
         "s3://b/x cannot be reached or written: cannot connect to it; check its address and the network"),
        ("/nas/x", PermissionError(13, "Permission denied"),
         "/nas/x does not let you: Permission denied; check its permissions"),
    ],
)  # fmt: skip
def test_what_a_registry_cannot_do_is_told(url: str, error: Exception, line: str) -> None:
    with pytest.raises(HostError) as caught, translated(url):
        raise error
    assert str(caught.value) == line


def test_a_full_disk_of_a_folder_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    shelf = str(tmp_path / "shelf")
    with pytest.raises(HostError) as caught, translated(shelf):
        raise OSError(errno.ENOSPC, "No space left on device", f"{shelf}/blobs")
    assert str(caught.value) == (
        f"the disk of {shelf} is full: No space left on device; 4.1 kB are free; "
        "free some space there, or name another folder"
    )


def test_a_push_to_the_hub_is_one_commit_of_a_private_repository(made: Store, hub: Hub) -> None:
    transfer.push(TARGET, open_registry("hf://team/models"), made)
    repository = hub.repositories["team/models"]
    assert repository.private
    before, after = repository.commits.values()
    assert before == {}
    assert {name.partition("/")[0] for name in after} == {"blobs", "targets"}
