"""A target that travels: packed where its checkpoint was made, verified file by file, and finished elsewhere."""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder
from tests.unit.test_runner import Recorder, plan
from trtpipe.engines.errors import ArtefactRefused, HostError, InputDataError, TrtpipeError, UsageError
from trtpipe.pipeline.execution.hardware import GpuAbsent
from trtpipe.pipeline.registry import export, transfer
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.registry.package import describe
from trtpipe.pipeline.registry.provenance import verify
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.serving.repositories import find_repository
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.store.gc import find_garbage
from trtpipe.pipeline.store.store import Store

Edit = Callable[[dict[str, bytes]], object]


@pytest.fixture
def made(in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[BuildSpec, Store]:
    """A target for a GPU that this machine lacks, as far as it can be built here."""
    monkeypatch.setenv("PATH", "")
    model = hf_folder(in_folder / "tiny")
    made = plan(model, gpu="h100", dtype="bf16")
    store = Store(tmp_path / "home")
    with pytest.raises(GpuAbsent):
        execute(made, store, Recorder())
    return made, store


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def rewritten(path: Path, edit: Edit) -> Path:
    """The export with other content."""
    content = members(path)
    edit(content)
    out = path.with_name("edited.tar")
    with tarfile.open(out, "w") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out


def test_a_store_that_cannot_be_written_is_not_said_of_the_file(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    path = export.pack("tiny.h100.bf16", made[1], tmp_path / "tiny.tar")
    (tmp_path / "elsewhere").touch()
    with pytest.raises(OSError, match="elsewhere"):  # which the command explains, as for all commands
        export.unpack(path, Store(tmp_path / "elsewhere"))


def test_a_folder_takes_the_file_and_must_be_there(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    spec, store = made
    assert export.pack(spec.target, store, tmp_path) == tmp_path / f"{spec.target}.tar"
    assert (tmp_path / f"{spec.target}.tar").is_file()
    with pytest.raises(UsageError, match=f"there is no folder {tmp_path / 'nowhere'}"):
        export.pack(spec.target, store, tmp_path / "nowhere" / "x.tar")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is not a regular file"):
        export.pack(spec.target, store, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_what_a_killed_export_left_is_removed_by_the_next(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    spec, store = made
    folder = tmp_path / "[out]"
    folder.mkdir()
    left, other = folder / ".e.tar.77.partial", folder / ".f.tar.77.partial"
    for file in (left, other, running := folder / ".e.tar.78.partial"):
        file.touch()
    with running.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        export.pack(spec.target, store, folder / "e.tar")
    assert sorted(folder.iterdir()) == [running, other, folder / "e.tar"]


def test_a_full_disk_is_that_of_the_export(
    made: tuple[BuildSpec, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(HostError, match=f"^the disk of {tmp_path} is full: .*or name another folder$"):
        export.pack(made[0].target, made[1], tmp_path / "x.tar")
    assert not list(tmp_path.glob("*x.tar*"))


def test_a_name_that_an_index_refuses_is_not_exported(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    """As of targets that were built before such names were refused."""
    spec, store = made
    told = Path("runs", spec.target, "plan.json")
    recorded = json.loads(told.read_text())
    recorded["model"]["name"] = "a b"
    told.write_text(json.dumps(recorded))
    with pytest.raises(UsageError, match=r"'a b\.h100\.bf16' cannot be the name of what is carried elsewhere"):
        export.pack(spec.target, store, tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()


def test_an_export_holds_index_tokenizer_and_checkpoint(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    path = export.pack("tiny.h100.bf16", made[1], tmp_path / "out.tar")
    content = members(path)
    assert list(content) == [
        "trtpipe.json", "tokenizer/generation_config.json", "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json", "checkpoint/config.json", "checkpoint/rank0.safetensors",
    ]  # fmt: skip
    index = json.loads(content["trtpipe.json"])
    assert (index["format"], index["target"]) == (1, "tiny.h100.bf16")
    draft = index["passport"]
    facts = ("runtime", "gpu", "sm", "sms", "toolchain", "tp_size", "dtype", "made", "accuracy")
    assert [draft[name] for name in facts] == ["tensorrt_llm", "h100", 90, [90], "1.2.1", 1, "bfloat16", {}, None]
    assert draft["rank_bytes"] == len(content["checkpoint/rank0.safetensors"])
    assert str(tmp_path) not in content["trtpipe.json"].decode().replace(index["model"]["source"]["path"], "")
    # The same target packs to the same bytes.
    assert export.pack("tiny.h100.bf16", made[1], tmp_path / "again.tar").read_bytes() == path.read_bytes()


def test_it_is_finished_where_neither_model_nor_store_is(
    made: tuple[BuildSpec, Store], in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, store = made
    path = export.pack(first.target, store, tmp_path / "out.tar")
    checkpoint = RunFolder.of(first.target).linked("checkpoint")
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    shutil.rmtree(in_folder / "tiny")
    shutil.rmtree(in_folder / "runs")
    shutil.rmtree(store.home)

    elsewhere = Store(tmp_path / "elsewhere")
    garbage: list[object] = []
    arrived = export.unpack(path, elsewhere, lambda *done: garbage.extend(find_garbage(elsewhere, lambda store: set())))
    assert garbage == [], "gc keeps what has arrived while an import runs"
    # But for where each value comes from.
    assert replace(arrived.spec, values=()) == replace(first, values=())
    assert {file.name: file.read_bytes() for file in arrived.artefacts["checkpoint"].path.iterdir()} == before
    run = RunFolder.of(first.target)
    assert run.linked("checkpoint") == arrived.artefacts["checkpoint"].path
    assert export.imported(first.target, elsewhere) == arrived
    # A second time nothing is written.
    stamps = {file: file.stat().st_mtime_ns for file in elsewhere.home.rglob("*") if file.is_file()}
    assert export.unpack(path, elsewhere).artefacts == arrived.artefacts
    assert {file: file.stat().st_mtime_ns for file in elsewhere.home.rglob("*") if file.is_file()} == stamps
    # A build would make anew what came from elsewhere.
    elsewhere.home.rename(tmp_path / "moved")
    with pytest.raises(InputDataError, match=r"; move the store back, or pull or import the target again$"):
        run.linked("checkpoint")
    (tmp_path / "moved").rename(elsewhere.home)

    recorder = Recorder()
    with pytest.raises(GpuAbsent):
        execute(arrived.spec, elsewhere, recorder, given=arrived.artefacts)
    assert [name for name, _ in recorder.started] == ["build"], "nothing before it needs the model"
    shutil.rmtree(elsewhere.home / "imported" / "convert")
    with pytest.raises(InputDataError, match=r"cannot be used: it is no longer in .*; pull or import the target ag"):
        export.imported(first.target, elsewhere)


def flip(name: str) -> Edit:
    def edit(content: dict[str, bytes]) -> None:
        content[name] = content[name][:-1] + bytes([content[name][-1] ^ 1])

    return edit


def index(**changes: Any) -> Edit:
    def edit(content: dict[str, bytes]) -> None:
        content["trtpipe.json"] = json.dumps(json.loads(content["trtpipe.json"]) | changes).encode()

    return edit


def outside(content: dict[str, bytes]) -> None:
    raw = json.loads(content["trtpipe.json"])
    raw["artefacts"]["checkpoint"]["files"][0]["path"] = "../../config.json"
    content["trtpipe.json"] = json.dumps(raw).encode()


def other_record(content: dict[str, bytes]) -> None:
    raw = json.loads(content["trtpipe.json"])
    raw["artefacts"]["checkpoint"]["content"] = "0" * 64
    content["trtpipe.json"] = json.dumps(raw).encode()


def other_settings(content: dict[str, bytes]) -> None:
    raw = json.loads(content["trtpipe.json"])
    raw["artefacts"]["checkpoint"]["record"]["settings"]["dtype"] = "float16"
    content["trtpipe.json"] = json.dumps(raw).encode()


DAMAGE: list[tuple[Edit, type[TrtpipeError], str]] = [
    (flip("checkpoint/rank0.safetensors"), InputDataError, "checkpoint/rank0.safetensors is damaged: its digest is"),
    (flip("tokenizer/tokenizer.json"), InputDataError, "tokenizer/tokenizer.json is damaged"),
    (lambda content: content.pop("checkpoint/config.json"), InputDataError, "lacks checkpoint/config.json"),
    (lambda content: content.pop("trtpipe.json"), InputDataError, "is not an export of trtpipe"),
    (lambda content: content.update({"trtpipe.json": b"{"}), InputDataError, "trtpipe.json is damaged"),
    (index(format=2), ArtefactRefused, "is of format 2, this trtpipe reads 1; export it again"),
    (outside, InputDataError, "holds the file name ../../config.json: it leads out of its folder"),
    (other_record, InputDataError, "the checkpoint is not what its digest says; copy it again"),
    (other_settings, ArtefactRefused, "other settings than its plan's: settings: dtype float16 -> bfloat16; build the"),
]


def test_an_import_keeps_no_engine_of_other_settings(in_folder: Path, tmp_path: Path) -> None:
    model, store = hf_folder(in_folder / "tiny"), Store(tmp_path / "home")
    execute(plan(model, "build.max_batch_size=4"), store, Recorder())
    path = export.pack("tiny.cpu.fp32", store, tmp_path / "four.tar")
    execute(plan(model, "build.max_batch_size=2"), store, Recorder())
    bundle = export.unpack(path, store)
    run = RunFolder.of("tiny.cpu.fp32")
    assert bundle.spec.build.max_batch_size == run.spec().build.max_batch_size == 4
    assert (run.find("build", store), run.find("package", store)) == (None, None)
    assert not (run.path / "engine").exists()
    assert not (run.path / "repository").exists()
    assert verify(run, store).elsewhere == ["engine", "repository"]
    with pytest.raises(InputDataError, match="has no engine"):
        describe("tiny.cpu.fp32", store, ["engine"])


@pytest.mark.parametrize(("edit", "kind", "message"), DAMAGE)
def test_damage_is_named_and_nothing_of_it_is_kept(
    made: tuple[BuildSpec, Store], tmp_path: Path, edit: Edit, kind: type[TrtpipeError], message: str
) -> None:
    path = rewritten(export.pack(made[0].target, made[1], tmp_path / "out.tar"), edit)
    elsewhere = Store(tmp_path / "elsewhere")
    with pytest.raises(kind, match=message) as error:
        export.unpack(path, elsewhere)
    assert error.value.what.startswith(str(path))
    if "digest" not in message or "damaged" in message:
        assert not list(elsewhere.home.glob("artefacts/convert/*"))


def test_a_copy_cut_short(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    path = export.pack(made[0].target, made[1], tmp_path / "out.tar")
    whole = path.read_bytes()
    for size in (0, 100, 600, len(whole) // 2):
        path.write_bytes(whole[:size])
        # Also where nothing of it is needed, since all is there.
        for store in (Store(tmp_path / "elsewhere"), made[1]):
            with pytest.raises(InputDataError, match="copy it again"):
                export.unpack(path, store)


def test_a_member_of_a_negative_size(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    path = export.pack(made[0].target, made[1], tmp_path / "out.tar")
    with tarfile.open(path) as tar:
        at = tar.getmembers()[1].offset
    data = bytearray(path.read_bytes())
    data[at + 124 : at + 136] = (-(1 << 40)).to_bytes(12, "big", signed=True)
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    path.write_bytes(data)
    with pytest.raises(InputDataError, match=r"out\.tar is not a whole export: .*; copy it again$"):
        export.unpack(path, Store(tmp_path / "elsewhere"))


def gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes()))


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def linked_index(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("trtpipe.json")
        link.type, link.linkname = tarfile.LNKTYPE, "nowhere"
        tar.addfile(link)


@pytest.mark.parametrize("spoil", [gzipped, endless, linked_index])
def test_a_file_that_is_no_plain_tar_of_files_is_refused(
    made: tuple[BuildSpec, Store], tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path = export.pack(made[0].target, made[1], tmp_path / "out.tar")
    spoil(path)
    with pytest.raises(InputDataError, match=r"is not an? (whole )?export"):
        export.unpack(path, Store(tmp_path / "elsewhere"))


@pytest.mark.parametrize("content", ["{}", '{"settings": {"gpu": 7}, "model": "x"}'])
def test_a_damaged_plan_is_told(made: tuple[BuildSpec, Store], tmp_path: Path, content: str) -> None:
    target = made[0].target
    (RunFolder.of(target).path / "plan.json").write_text(content)
    with pytest.raises(InputDataError, match=r"plan runs/.*/plan\.json is damaged"):
        export.pack(target, made[1], tmp_path / "out.tar")


def test_an_unknown_target_is_not_exported(made: tuple[BuildSpec, Store], tmp_path: Path) -> None:
    _, store = made
    with pytest.raises(UsageError, match=r"there is no target 'other' in \./runs"):
        export.pack("other", store, tmp_path / "out.tar")
    with pytest.raises(UsageError, match=r"'tiny\.h100\.bf16' is neither an export nor an imported target"):
        export.imported("tiny.h100.bf16", store)
    with pytest.raises(InputDataError, match="cannot be read: No such file"):
        export.unpack(tmp_path / "none.tar", store)
    shutil.rmtree(store.home / "artefacts" / "convert")
    with pytest.raises(
        InputDataError, match=r"has lost its checkpoint: .* has it no longer; run `trtpipe build --recipe"
    ):
        export.pack("tiny.h100.bf16", store, tmp_path / "out.tar")
    assert not list(tmp_path.glob("*.tar*"))


def test_an_imported_checkpoint_is_to_be_built_before_its_engine_is_pushed(
    made: tuple[BuildSpec, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = made
    packed = export.pack(spec.target, store, tmp_path / "t.tar")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = Store(tmp_path / "there")
    export.unpack(packed, there)
    told = f"has no engine: its build stage has not run to its end; run `trtpipe build --from {spec.target}`"
    with pytest.raises(InputDataError, match=told):
        transfer.push(spec.target, open_registry(str(tmp_path / "shelf")), there)
    with pytest.raises(InputDataError, match=f"has not run; run `trtpipe build --from {spec.target}`"):
        find_repository(None)
