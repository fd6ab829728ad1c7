"""What no run folder and no server refers to goes; what one refers to, or somebody works in, stays."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.factories import hf_folder
from tests.unit.cli.conftest import remember
from tests.unit.test_runner import NAMES, REUSED, Recorder, build, plan
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import StageResult, execute, satisfy
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.references import elsewhere, forget_deleted, references
from trtpipe.pipeline.serving.servers import MAX_PID, Served, Server, recorded
from trtpipe.pipeline.serving.targets import remove_targets
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import Stage, stages_of
from trtpipe.pipeline.store import gc
from trtpipe.pipeline.store import store as store_module
from trtpipe.pipeline.store.manifest import Origin, Record
from trtpipe.pipeline.store.store import Artefact, Store, machine


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def model(in_folder: Path) -> Path:
    return hf_folder(in_folder / "tiny")


def found(store: Store) -> list[tuple[str, str]]:
    """(stage folder, why) of the garbage."""
    return [(item.path.parent.name, item.reason) for item in gc.find_garbage(store, references)]


def artefacts(store: Store) -> dict[str, int]:
    return {name: len(list((store.home / "artefacts" / name).iterdir())) for name in NAMES}


def test_an_empty_store_has_no_garbage(store: Store) -> None:
    assert gc.find_garbage(store, references) == []
    assert not store.home.exists()


def test_what_a_run_refers_to_stays(store: Store, model: Path) -> None:
    build(plan(model), store)
    assert found(store) == []
    build(plan(model, "build.max_batch_size=8"), store)
    assert found(store) == [("build", "no run refers to it"), ("package", "no run refers to it")]
    gc.remove(gc.find_garbage(store, references), store, references)
    assert artefacts(store) == dict.fromkeys(NAMES, 1)
    assert (RunFolder.of("tiny.cpu.fp32").linked("repository") / "ensemble").is_dir()
    assert found(store) == []


def test_artefacts_that_two_runs_share_stay_as_long_as_one_does(store: Store, model: Path) -> None:
    build(plan(model), store)
    build(plan(model, dtype="fp16"), store)
    assert artefacts(store) == {"download": 1, "tokenizer": 1, "convert": 2, "build": 2, "package": 2}
    shutil.rmtree(RunFolder.of("tiny.cpu.fp32").path)
    gone = "no run refers to it"
    assert found(store) == [("build", gone), ("convert", gone), ("package", gone)]
    gc.remove(gc.find_garbage(store, references), store, references)
    assert artefacts(store) == dict.fromkeys(NAMES, 1)
    shutil.rmtree("runs")
    assert len(gc.find_garbage(store, references)) == 5
    gc.remove(gc.find_garbage(store, references), store, references)
    assert artefacts(store) == dict.fromkeys(NAMES, 0)


def test_looking_changes_nothing(store: Store, model: Path) -> None:
    build(plan(model), store)
    shutil.rmtree("runs")
    before = sorted(store.home.rglob("*"))
    assert len(gc.find_garbage(store, references)) == 5
    assert sorted(store.home.rglob("*")) == before


def test_the_size_of_garbage_is_its_bytes(store: Store) -> None:
    damaged = store.home / "damaged" / "convert-x"
    (damaged / "files").mkdir(parents=True)
    (damaged / "files" / "a").write_bytes(b"12345")
    (damaged / "b").write_bytes(b"678")
    (damaged / "link").symlink_to("b")
    (item,) = gc.find_garbage(store, references)
    assert (item.path, item.reason, item.size) == (damaged, "damaged", 8)


def test_what_another_gc_deletes_while_this_one_looks_has_no_size(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = store.home / "damaged" / "convert-x"
    (damaged / "files").mkdir(parents=True)
    (damaged / "files" / "a").write_bytes(b"12345")
    (damaged / "b").write_bytes(b"678")
    look = Path.lstat

    def late(path: Path) -> os.stat_result:
        if path == damaged / "b":
            shutil.rmtree(damaged)
        return look(path)

    monkeypatch.setattr(Path, "lstat", late)
    (item,) = gc.find_garbage(store, references)
    assert (item.path, item.size) == (damaged, 0)


def test_leftovers_go_unless_somebody_works_in_them(store: Store, model: Path) -> None:
    build(plan(model), store, until="download")
    (folder,) = RunFolder.of("tiny.cpu.fp32").folders(store)
    record = RunFolder.of("tiny.cpu.fp32").last("download")
    assert record is not None
    left = folder.with_name(f".{folder.name}.abcdefgh")
    left.mkdir()
    with store.locked(record):
        assert gc.find_garbage(Store(store.home), references) == []
    (item,) = gc.find_garbage(store, references)
    assert (item.path, item.reason) == (left, "left by an interrupted run")


def test_an_artefact_without_a_readable_manifest_goes(store: Store) -> None:
    (store.home / "artefacts" / "convert" / "0123").mkdir(parents=True)
    assert found(store) == [("convert", "it has no readable manifest")]


def test_garbage_that_is_gone_already_is_no_failure(store: Store, model: Path) -> None:
    build(plan(model), store, until="convert")
    shutil.rmtree("runs")
    garbage = gc.find_garbage(store, references)
    shutil.rmtree(garbage[0].path)
    gc.remove(garbage, store, references)
    assert gc.find_garbage(store, references) == []


def test_what_a_build_has_come_to_use_since_stays(store: Store, model: Path) -> None:
    build(plan(model), store)
    shutil.rmtree("runs")
    garbage = gc.find_garbage(store, references)
    assert build(plan(model), store, until="download") == {"download": REUSED}
    assert [one.path.parent.name for one in gc.remove(garbage, store, references)] == [
        "build", "convert", "package", "tokenizer",
    ]  # fmt: skip
    assert artefacts(store) == {**dict.fromkeys(NAMES, 0), "download": 1}
    RunFolder.of("tiny.cpu.fp32").linked("model")


def test_a_build_makes_anew_what_goes_between_its_look_and_its_reference(store: Store, model: Path) -> None:
    build(plan(model), store)
    shutil.rmtree("runs")
    recorder, looked = Recorder(), list[str]()

    def perform(stage: Stage, spec: BuildSpec, inputs: dict[str, Artefact], last: Record | None) -> StageResult:
        result = satisfy(stage, spec, inputs, last, store=store, reporter=recorder)
        looked.append(stage.name)
        if looked == ["download", "tokenizer"]:
            gc.remove(gc.find_garbage(store, references), store, references)
        return result

    results = execute(plan(model), store, recorder, perform=perform)
    assert looked == ["download", "tokenizer", *NAMES[1:]]
    assert [one.stage for one in results if one.reused] == ["download"]
    assert (artefacts(store), found(store)) == (dict.fromkeys(NAMES, 1), [])


def test_what_a_killed_gc_leaves_of_an_artefact_does_not_pass_for_whole(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(plan(model), store, until="download")
    run, stage = RunFolder.of("tiny.cpu.fp32"), stages_of(plan(model))[0]
    artefact = run.find("download", store)
    assert artefact is not None
    (run.path / "run.json").unlink()

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    garbage = gc.find_garbage(store, references)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        gc.remove(garbage, store, references)
    assert artefact.path.is_dir()
    assert (store.find(artefact.manifest.record), run.update(stage, artefact, store)) == (None, False)


def test_what_a_renamed_run_folder_refers_to_stays(store: Store, model: Path, tmp_path: Path) -> None:
    build(plan(model), store, until="download")
    for moved in (Path("runs/other"), Path("runs/third")):
        (last,) = Path("runs").iterdir()
        last.rename(moved)
        assert gc.find_garbage(store, references) == []
        forget_deleted(store)
    build(plan(model, dtype="fp16"), store, until="download")  # another of the first name
    Path("runs/tiny.cpu.fp16").rename("runs/tiny.cpu.fp32")
    assert gc.find_garbage(store, references) == []
    shutil.rmtree("runs")
    assert {one.path.parent.name for one in gc.find_garbage(store, references)} == {"download"}
    forget_deleted(store)
    assert list((store.home / "roots").iterdir()) == []


def test_what_somebody_works_in_stays(store: Store, model: Path) -> None:
    build(plan(model), store, until="download")
    record = RunFolder.of("tiny.cpu.fp32").last("download")
    assert record is not None
    shutil.rmtree("runs")
    store.incoming(record).mkdir(parents=True)
    garbage = gc.find_garbage(store, references)
    assert [one.path.parent.name for one in garbage] == ["download", "incoming"]
    with store.locked(record):
        assert gc.remove(garbage, Store(store.home), references) == []
    assert gc.remove(garbage, store, references) == garbage
    assert gc.remove(garbage, store, references) == []


def test_what_is_imported_stays_while_an_import_runs_which_waits_for_a_deletion(store: Store) -> None:
    folder = store.home / "imported" / "convert" / "0123.4567"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    seen = list[bool]()

    def imports() -> None:
        with Store(store.home).importing("x"):
            seen.append((folder / "manifest.json").exists())  # without it nobody takes the artefact for whole

    thread = threading.Thread(target=imports)

    def nothing_is_referred_to(store: Store) -> set[Path]:
        thread.start()
        thread.join(0.3)
        assert (store.imports(), seen) == (True, [])
        return set()

    garbage = gc.find_garbage(store, references)
    with store.importing("y"):
        assert gc.remove(garbage, store, references) == []
    assert gc.remove(garbage, store, nothing_is_referred_to) == garbage
    thread.join()
    assert seen == [False]


def test_a_run_folder_comes_to_refer_to_nothing_while_gc_deletes(store: Store, model: Path) -> None:
    build(plan(model), store, until="download")
    run, stage = RunFolder.of("tiny.cpu.fp32"), stages_of(plan(model))[0]
    artefact = run.find("download", store)
    assert artefact is not None
    (run.path / "run.json").unlink()
    answers = list[bool]()
    thread = threading.Thread(target=lambda: answers.append(run.update(stage, artefact, store)))
    with store.referring():
        thread.start()
        thread.join(0.3)
        assert (answers, run.stages()) == ([], [])
        store.digests.remove_tree(artefact.path.parent)
    thread.join()
    assert (answers, run.stages()) == ([False], [])


def test_a_wait_is_noted_once_it_takes_long(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SLOW_S", 0.2)
    noted = list[str]()
    waiting = Store(store.home, note=noted.append)
    for holds, waits in (
        (store.importing("x"), lambda: waiting.of(Origin(source="a", content="b")).importing("x")),
        (store.referring(), waiting.referring),
    ):

        def wait(waits: Callable[[], contextlib.AbstractContextManager[None]] = waits) -> None:
            with waits():
                pass

        thread = threading.Thread(target=wait)
        with holds:
            thread.start()
            thread.join(0.1)
            before = len(noted)
            thread.join(0.5)
        thread.join()
        assert len(noted) == before + 1
    assert noted == [
        "waiting for another pull or import of this target",
        "waiting for another command, which changes or deletes what runs refer to",
    ]


def a_root(store: Store) -> Path:
    (root,) = (store.home / "roots").iterdir()
    return root


def the_record_of_a_run(store: Store) -> Path:
    return RunFolder.of("tiny.cpu.fp32").path / "run.json"


def the_record_of_a_server(store: Store) -> Path:
    (store.home / "servers").mkdir(exist_ok=True)
    return store.home / "servers" / "x.json"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"download": {"stage": 1}}', "7", '{"run": "a\\u0000b"}'])
@pytest.mark.parametrize("place", [a_root, the_record_of_a_run, the_record_of_a_server])
def test_nothing_goes_while_what_refers_to_it_cannot_be_read(
    store: Store, model: Path, place: Callable[[Store], Path], content: str
) -> None:
    build(plan(model), store, until="download")
    place(store).write_text(content)
    with pytest.raises(HostError, match="cannot be read, so nothing is dropped"):
        gc.find_garbage(store, references)


def test_a_root_and_a_record_that_are_removed_meanwhile_do_not_stop_it(store: Store, model: Path) -> None:
    build(plan(model), store)
    for place in (a_root(store).with_name("0123.json"), the_record_of_a_server(store)):
        place.symlink_to("gone")
    assert found(store) == []


def test_a_run_folder_that_may_not_be_looked_into_stops_it(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(plan(model), store, until="download")
    looked = Path.stat

    def refused(path: Path, **options: bool) -> os.stat_result:
        if path.name == "tiny.cpu.fp32":
            raise PermissionError(13, "Permission denied", str(path))
        return looked(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(HostError, match=r"cpu\.fp32 cannot be read, so nothing is dropped: Permission denied; make"):
        gc.find_garbage(store, references)


def test_what_a_running_server_serves_stays(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(plan(model), store)
    repository = RunFolder.of("tiny.cpu.fp32").linked("repository")
    endpoints = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    server = Server(
        name="x",
        pid=os.getpid(),
        served=(Served(name="x", repository=repository),),
        log=Path("x.log"),
        endpoints=endpoints,
    )
    monkeypatch.setattr("trtpipe.pipeline.serving.references.running", lambda store: [server])
    shutil.rmtree("runs")
    assert [stage for stage, _ in found(store)] == ["build", "convert", "download", "tokenizer"]


def test_roots_of_other_folders_count(
    store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(plan(model), store)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert found(store) == []
    roots = [json.loads(path.read_text())["run"] for path in (store.home / "roots").iterdir()]
    assert roots == [str(tmp_path / "work" / "runs" / "tiny.cpu.fp32")]


@pytest.fixture
def on_another_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on this is another machine, which has the store and no run folder."""

    def move() -> None:
        for module in ("run_folder", "serving.references", "serving.servers"):
            monkeypatch.setattr(f"trtpipe.pipeline.{module}.machine", lambda: "b")
        Path("runs").rename("runs of a")

    return move


def test_what_a_run_of_another_machine_refers_to_stays(
    store: Store, model: Path, on_another_machine: Callable[[], None]
) -> None:
    build(plan(model, "build.max_batch_size=8"), store)
    build(plan(model), store)
    on_another_machine()
    assert found(store) == [("build", "no run refers to it"), ("package", "no run refers to it")]
    (other,) = elsewhere(store)
    assert (other.name, other.machine) == (str(Path("runs/tiny.cpu.fp32").absolute()), machine())
    assert (other.file, len(other.artefacts)) == (a_root(store), 5)
    forget_deleted(store)
    assert elsewhere(store) == [other]
    # A folder of its own at the same path.
    build(plan(model, dtype="fp16"), store)
    Path("runs/tiny.cpu.fp16").rename("runs/tiny.cpu.fp32")
    assert [stage for stage, _ in found(store)] == ["build", "package"]
    assert elsewhere(store) == [other]


def test_a_run_folder_that_two_machines_see_counts_as_it_is(
    store: Store, model: Path, on_another_machine: Callable[[], None]
) -> None:
    build(plan(model), store)
    on_another_machine()
    Path("runs of a").rename("runs")
    assert (found(store), elsewhere(store)) == ([], [])
    build(plan(model, "build.max_batch_size=8"), store)
    assert [stage for stage, _ in found(store)] == ["build", "package"]
    assert json.loads(a_root(store).read_text())["machine"] == "b"


def test_a_copy_of_a_run_folder_at_the_same_path_is_a_run_folder_of_its_own(
    store: Store, model: Path, on_another_machine: Callable[[], None]
) -> None:
    build(plan(model), store)
    first = a_root(store)
    before = first.read_bytes()
    on_another_machine()
    shutil.copytree("runs of a", "runs", symlinks=True)
    # The machine of the other folder may have built it anew since.
    assert (found(store), [one.file for one in elsewhere(store)]) == ([], [first])
    build(plan(model, "build.max_batch_size=8"), store)
    assert (found(store), first.read_bytes()) == ([], before)
    assert (len(list((store.home / "roots").iterdir())), [one.file for one in elsewhere(store)]) == (2, [first])
    assert remove_targets(["tiny.cpu.fp32"], store) == ["tiny.cpu.fp32"]
    assert a_root(store) == first
    assert found(store) == [("build", "no run refers to it"), ("package", "no run refers to it")]


def test_a_copy_that_is_removed_leaves_the_root_of_the_other_folder(
    store: Store, model: Path, on_another_machine: Callable[[], None]
) -> None:
    build(plan(model), store)
    on_another_machine()
    shutil.copytree("runs of a", "runs", symlinks=True)
    remove_targets(["tiny.cpu.fp32"], store)
    assert (a_root(store).is_file(), found(store)) == (True, [])


def test_a_target_that_a_container_built_at_another_path_is_removed_with_its_root(
    store: Store, model: Path, tmp_path: Path
) -> None:
    build(plan(model), store)
    root, there = a_root(store), tmp_path / "data" / "runs" / "tiny.cpu.fp32"
    raw = {**json.loads(root.read_text()), "machine": "gpu-7 (container)", "run": str(there)}
    root.with_name("0123.json").write_text(json.dumps(raw))
    root.unlink()
    (one,) = elsewhere(store)
    assert (one.name, len(one.artefacts)) == (str(there), 5)
    remove_targets(["tiny.cpu.fp32"], store)
    assert (list((store.home / "roots").iterdir()), len(found(store))) == ([], 5)


def test_runs_of_other_machines_that_were_not_built_for_long_are_forgotten_when_asked(
    store: Store, model: Path, on_another_machine: Callable[[], None]
) -> None:
    build(plan(model), store)
    month_ago = time.time() - 30 * 86400
    os.utime(a_root(store), (month_ago, month_ago))
    assert references(store, others_after=29) == references(store), "it is of this machine"
    build(plan(model), store)
    on_another_machine()
    assert len(references(store, others_after=1)) == 5
    os.utime(a_root(store), (month_ago, month_ago))
    assert (len(elsewhere(store)), len(elsewhere(store, 31)), elsewhere(store, 29)) == (1, 1, [])
    assert (len(references(store)), len(references(store, 31)), references(store, 29)) == (5, 5, set())
    forget_deleted(store)
    forget_deleted(store, 31)
    assert a_root(store).is_file()
    forget_deleted(store, 29)
    assert list((store.home / "roots").iterdir()) == []


def test_where_a_run_was_deleted_its_root_goes(store: Store, model: Path) -> None:
    build(plan(model), store)
    forget_deleted(store)
    assert a_root(store).is_file()
    shutil.rmtree("runs")
    forget_deleted(store)
    assert list((store.home / "roots").iterdir()) == []


def test_a_root_of_an_earlier_version_is_of_this_machine(store: Store, model: Path) -> None:
    build(plan(model), store)
    run = RunFolder.of("tiny.cpu.fp32")
    a_root(store).rename(store.home / "roots" / f"{run.key}.json")
    a_root(store).write_text(json.dumps({"run": str(run.path.absolute())}))
    (run.path / ".id").unlink()
    assert (found(store), elsewhere(store)) == ([], [])
    assert run.started(store)
    shutil.rmtree("runs")
    assert len(found(store)) == 5
    forget_deleted(store)
    assert a_root(store).is_file(), "it may be of another machine"


def test_a_server_of_another_machine_is_left_alone(
    store: Store, model: Path, on_another_machine: Callable[[], None]
) -> None:
    build(plan(model), store)
    repository = RunFolder.of("tiny.cpu.fp32").linked("repository")
    remember(store, "x", pid=MAX_PID - 1, repository=repository)
    record = the_record_of_a_server(store)
    before = record.read_bytes()
    on_another_machine()
    a_root(store).unlink()
    assert (recorded(store), record.read_bytes()) == ([], before)
    assert [stage for stage, _ in found(store)] == ["build", "convert", "download", "tokenizer"]
    (other,) = elsewhere(store)
    assert (other.name, other.machine, other.file) == ("x", machine(), record)
    # A container has the store at another path.
    text = json.dumps({**json.loads(before), "served": [
        {"name": "x", "repository": str(Path("/cache", repository.relative_to(store.home)))}
    ]})  # fmt: skip
    record.write_text(text)
    assert [stage for stage, _ in found(store)] == ["build", "convert", "download", "tokenizer"]
