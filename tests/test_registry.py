"""A target through real registries: what arrives is what was sent, or nothing that is taken for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ArtefactRefused, HostError, InputDataError, UsageError
from engines.nvidia import Gpu
from pipeline import host
from pipeline.gc import find_garbage
from pipeline.registry import fetch, ship
from pipeline.registry.base import Blob, Registry, open_registry
from pipeline.runner import RunFolder, execute
from pipeline.store import Store
from tests import hub_server, registries
from tests.factories import hf_folder
from tests.hub_server import Hub
from tests.test_runner import Recorder, plan

TARGET = "tiny.cpu.bf16"


@pytest.fixture
def made(in_folder: Path, tmp_path: Path) -> Store:
    """The store of a whole target of this machine's own."""
    store = Store(tmp_path / "home")
    execute(plan(hf_folder(in_folder / "tiny"), gpu="cpu", dtype="bf16"), store, Recorder())
    return store


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
        url = str(tmp_path / "shelf")
    return lambda: open_registry(url)


def content(run: Path) -> dict[str, bytes]:
    """Every file of a run folder's artefacts, by its place there."""
    out = {}
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
    sent = ship.push(TARGET, registry(), made, ship.USUAL)
    assert sent.artefacts == ("tokenizer", "engine", "repository")
    assert sent.there == 0
    assert ship.push(TARGET, registry(), made, ship.USUAL).moved == 0, "all of it is there"
    assert registry().targets() == [TARGET]

    store = elsewhere(tmp_path, monkeypatch)
    got = ship.pull(TARGET, registry(), store)
    after = content(Path("runs") / TARGET)
    assert after == {name: data for name, data in before.items() if not name.startswith(("model/", "checkpoint/"))}
    # The repository holds the engine's files and the tokenizer's: they travel once.
    assert got.there > 0
    assert got.moved == sent.moved
    again = ship.pull(TARGET, registry(), store)
    assert (again.moved, again.artefacts) == (0, got.artefacts)
    assert not list((store.home / "incoming").iterdir())


def test_a_checkpoint_alone(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship.push(TARGET, registry(), made, ("checkpoint", "tokenizer", "engine"))
    store = elsewhere(tmp_path, monkeypatch)
    assert ship.pull(TARGET, registry(), store, ("checkpoint",)).artefacts == ("checkpoint",)
    assert sorted(path.name for path in (Path("runs") / TARGET / "checkpoint").iterdir()) == [
        "config.json", "rank0.safetensors",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"has no repository of tiny\.cpu\.bf16; there are: tokenizer, che"):
        ship.pull(TARGET, registry(), store, ("repository",))


def test_what_broke_off_goes_on_where_it_was(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship.push(TARGET, registry(), made, ship.USUAL)
    store = elsewhere(tmp_path, monkeypatch)
    monkeypatch.setattr(fetch, "CHUNK", 1000)
    weak = registry()
    asked: list[tuple[str, int]] = []
    read = type(weak).read

    def breaking(self: Any, blob: Blob, start: int, stop: int) -> bytes:
        asked.append((blob.sha256, start))
        if blob.size > 5000 and start >= 5000:
            raise HostError("the line is cut")
        return read(self, blob, start, stop)

    monkeypatch.setattr(type(weak), "read", breaking)
    with pytest.raises(HostError, match="the line is cut"):
        ship.pull(TARGET, weak, store)
    assert not list(store.home.glob("artefacts/*/[!.]*/manifest.json")) or not (Path("runs") / TARGET).exists()
    (left,) = [file for file in (store.home / "incoming").rglob("*") if file.is_file()]
    assert left.stat().st_size == 5000
    assert [garbage.reason for garbage in find_garbage(store)].count("left by an interrupted pull") == 1

    asked.clear()
    monkeypatch.setattr(type(weak), "read", read)
    monkeypatch.setattr(
        type(weak), "read", lambda self, blob, *rest: (asked.append((blob.sha256, rest[0])), read(self, blob, *rest))[1]
    )
    ship.pull(TARGET, registry(), store)
    assert min(start for sha256, start in asked if sha256 == left.name) == 5000


def test_an_engine_of_another_machine_is_refused_before_its_files(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship.push(TARGET, registry(), made, ship.USUAL)
    passport = {"runtime": "tensorrt_llm", "gpu": "h100", "sm": 90, "sms": [90], "toolchain": "1.2.1"}
    there = registry()
    index = there.index(TARGET)
    index["passport"] |= passport
    there.publish(TARGET, index, [Blob(file["sha256"], file["size"]) for file in ship.files_of(index)])
    store = elsewhere(tmp_path, monkeypatch)
    card = Gpu(index=0, name="NVIDIA A100-SXM4-80GB", sm=80, driver="580.1", total_mib=81920, used_mib=0)
    monkeypatch.setattr(host, "visible_gpus", lambda: (card,))
    weak = registry()
    monkeypatch.setattr(type(weak), "read", lambda *rest: pytest.fail("its files were asked for"))
    with pytest.raises(ArtefactRefused) as error:
        ship.pull(TARGET, weak, store)
    assert error.value.what == f"the engine of {TARGET} does not run on this machine"
    assert "it is for h100 (SM90), and this machine has NVIDIA A100-SXM4-80GB (SM80)" in str(error.value)
    assert "nothing of its 0.0 GB was fetched; pull it where it runs, or with --any-machine" in str(error.value)
    assert not (Path("runs") / TARGET).exists()


def test_a_file_that_is_not_what_its_digest_says(
    made: Store, registry: Callable[[], Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship.push(TARGET, registry(), made, ship.USUAL)
    store = elsewhere(tmp_path, monkeypatch)
    weak = registry()
    read = type(weak).read

    def flipped(self: Any, blob: Blob, start: int, stop: int) -> bytes:
        data = read(self, blob, start, stop)
        return bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(type(weak), "read", flipped)
    with pytest.raises(InputDataError, match="is damaged: its digest is another; pull again"):
        ship.pull(TARGET, weak, store)
    assert not [file for file in store.home.rglob("*") if file.is_file() and file.suffix == ".safetensors"]
    assert not (Path("runs") / TARGET).exists()


def test_looking_for_a_target(made: Store, registry: Callable[[], Registry]) -> None:
    assert ship.search(registry()) == []
    ship.push(TARGET, registry(), made, ship.USUAL)
    (found,) = ship.search(registry())
    assert (found.target, found.model, found.passport.gpu) == (TARGET, "tiny", "cpu")
    assert found.artefacts == ("tokenizer", "engine", "repository")
    assert ship.precision(found.passport) == "bfloat16"
    assert [len(ship.search(registry(), model=word)) for word in ("TINY", "llama")] == [1, 0]
    assert [len(ship.search(registry(), gpu=word)) for word in ("cpu", "h100")] == [1, 0]
    assert [len(ship.search(registry(), dtype=word)) for word in ("bf", "fp8")] == [1, 0]


def test_a_target_that_is_not_there(made: Store, registry: Callable[[], Registry]) -> None:
    with pytest.raises(UsageError, match="has no target 'other'; push one with `trtpipe push`"):
        ship.pull("other", registry(), made)
    ship.push(TARGET, registry(), made, ship.USUAL)
    with pytest.raises(UsageError, match=rf"has no target 'tiny.cpu.bf61'; did you mean '{TARGET}'\?"):
        ship.pull("tiny.cpu.bf61", registry(), made)


def test_a_push_hashes_what_it_sends(made: Store, tmp_path: Path) -> None:
    engine = RunFolder.of(TARGET).linked("engine") / "config.json"
    text = bytearray(engine.read_bytes())
    text[-2] ^= 1
    stamp = engine.stat().st_mtime_ns
    engine.write_bytes(text)
    import os

    os.utime(engine, ns=(stamp, stamp))
    with pytest.raises(InputDataError, match=f"{TARGET} has no engine"):
        ship.push(TARGET, open_registry(str(tmp_path / "shelf")), made, ship.USUAL)
    assert not (tmp_path / "shelf" / "targets").exists()


def test_somebody_elses_files_beside_ours_are_left_alone(made: Store, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    ship.push(TARGET, open_registry(str(shelf)), made, ship.USUAL)
    (shelf / "targets" / "other.json").write_text("{}")
    (shelf / "targets" / "broken.json").write_text("{")
    assert [found.target for found in ship.search(open_registry(str(shelf)))] == [TARGET]
    with pytest.raises(InputDataError, match=r"broken at .* is damaged"):
        ship.pull("broken", open_registry(str(shelf)), made)


def test_provenance_travels_along(made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import provenance

    shelf = str(tmp_path / "shelf")
    ship.push(TARGET, open_registry(shelf), made, ship.USUAL)
    lines = provenance.verify(RunFolder.of(TARGET), made)
    store = elsewhere(tmp_path, monkeypatch)
    ship.pull(TARGET, open_registry(shelf), store)
    assert provenance.verify(RunFolder.of(TARGET), store) == lines, "also of the stages that ran elsewhere"
    index = json.loads((Path(shelf) / "targets" / f"{TARGET}.json").read_text())
    stages = index["provenance"]["predicate"]["runDetails"]["byproducts"]
    next(one for one in stages if one["name"] == "engine")["digest"]["sha256"] = "0" * 64
    (Path(shelf) / "targets" / f"{TARGET}.json").write_text(json.dumps(index))
    shutil.rmtree("runs")
    with pytest.raises(ArtefactRefused, match="the provenance does not hold: the engine is 000000000000, its files gi"):
        ship.pull(TARGET, open_registry(shelf), store)


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("s3://", UsageError, "s3:// names no place"),
        ("oci://host", UsageError, "oci://host names no repository"),
        ("hf://alone", UsageError, "hf://alone names no repository"),
        ("x4://place", UsageError, "x4://place: Protocol not known: x4"),
    ],
)
def test_urls_that_name_nothing(url: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        open_registry(url)


def test_nobody_at_the_far_end(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    port = registries.free_port()
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for url in (f"oci://127.0.0.1:{port}/team/models", "s3://models/there"):
        with pytest.raises(HostError, match=f"{url} c"):
            ship.push(TARGET, open_registry(url), made, ship.USUAL)


def test_a_push_to_the_hub_is_one_commit_of_a_private_repository(made: Store, hub: Hub) -> None:
    ship.push(TARGET, open_registry("hf://team/models"), made, ship.USUAL)
    repository = hub.repositories["team/models"]
    assert repository.private
    before, after = repository.commits.values()
    assert before == {}
    assert {name.partition("/")[0] for name in after} == {"blobs", "targets"}
