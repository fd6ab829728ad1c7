"""Download from a folder: the artefact is one checked Hugging Face folder with only what is needed in it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder
from tests.unit.stages.conftest import LINKED, WANTED, job, names, refusal, run
from tests.unit.test_runner import Recorder, plan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import DiskFull, copy, place
from trtpipe.engines.hf.folder import UnknownModel
from trtpipe.engines.model_source import FolderSource
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.stages import download
from trtpipe.pipeline.stages.download import DOWNLOAD
from trtpipe.pipeline.stages.draft import DRAFT
from trtpipe.pipeline.stages.tokenizer import TOKENIZER
from trtpipe.pipeline.store.digests import Digests
from trtpipe.pipeline.store.store import Store


def test_a_folder(folder: Path, out: Path) -> None:
    for name in ("README.md", "pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_text("not for us")
    assert run(FolderSource(path=str(folder)), out) == {"source": f"folder {folder}"}
    assert names(out) == WANTED
    for name in WANTED:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
        # All are copies, also large ones, which nobody can change from outside.
        assert ((out / name).stat().st_size >= LINKED) == (name == "model.safetensors")
        assert not (out / name).samefile(folder / name)


def test_what_is_written_into_a_folder_later_changes_no_artefact(folder: Path, out: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    told: list[tuple[int, int]] = []
    run(FolderSource(path=str(folder)), out, progress=lambda done, total: told.append((done, total)))
    total = sum((folder / name).stat().st_size for name in WANTED)
    assert told[-1] == (total, total)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    assert (folder / "model.safetensors").read_bytes() != before
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_that_changes_while_it_is_copied_is_refused(
    in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before the copy of that file, or after it."""
    folder, store = hf_folder(in_folder / "given"), Store(tmp_path / "home")

    def changing(source: Path, target: Path, progress: Any) -> None:
        copy(source, target, progress)
        if source.name == "generation_config.json":
            data = (folder / name).read_bytes()
            # The last byte is one of a weight, or the bracket that closes the JSON.
            (folder / name).write_bytes(data[:-1] + (b" }" if name == "config.json" else bytes([data[-1] ^ 1])))

    monkeypatch.setattr(download, "copy", changing)
    with pytest.raises(InputDataError) as error:
        execute(plan(folder), store, Recorder(), until="download")
    assert str(error.value) == (
        "the input 'folder' of download changed while it was read: the result may be of old and new files; "
        "run again once nothing writes into it"
    )
    assert list(store.artefacts()) == []
    monkeypatch.undo()
    monkeypatch.chdir(in_folder)
    [result] = execute(plan(folder), store, Recorder(), until="download")
    assert (result.artefact.path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("fault", ["tokenizer", "tensor"])
def test_a_fault_that_a_later_stage_finds_too_is_told_before_the_copy(
    in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = hf_folder(in_folder / "given")
    if fault == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
        line = f"{folder}/tokenizer.json is not a tokenizer: "
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
        line = f"tensor 'model.layers.2.input_layernorm.weight' is missing from {folder}; "
    monkeypatch.setattr(download, "copy", lambda source, target, progress: pytest.fail("it is copied"))
    with pytest.raises(InputDataError) as error:
        execute(plan(folder), Store(tmp_path / "home"), Recorder())
    assert str(error.value).startswith(line)


def test_a_draft_model_is_a_copy_too(folder: Path, out: Path) -> None:
    DRAFT.run(job(folder, out))
    assert names(out) == WANTED
    assert not (out / "model.safetensors").samefile(folder / "model.safetensors")


@pytest.mark.parametrize(("clones", "refused"), [(False, True), (True, False)])
def test_the_disk_for_a_copy_is_looked_at_first(
    in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clones: bool, refused: bool
) -> None:
    """A file system that lets files share blocks needs none."""
    folder, usage = hf_folder(in_folder / "given"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(download, "takes_clones", lambda file, home: clones)
    wanted = plan(folder)
    told = r"the build of given needs about [\d.]+ kB of disk and .* has 1\.0 kB free: [\d.]+ kB are for the model's"
    with pytest.raises(DiskFull, match=told) if refused else nullcontext():
        execute(wanted, Store(tmp_path / "home"), Recorder(), until="download")


def test_a_template_for_tools_comes_too(folder: Path, out: Path, tmp_path: Path) -> None:
    """As transformers 5 saves it, in a folder of its own."""
    source = FolderSource(path=str(folder))
    without = DOWNLOAD.sources(source, Digests(tmp_path / "digests.json"))
    template = "additional_chat_templates/tool_use.jinja"
    (folder / template).parent.mkdir()
    (folder / template).write_text("{{ tools }}")
    assert DOWNLOAD.sources(source, Digests(tmp_path / "digests.json")) != without
    run(source, out)
    (tmp_path / "tokenizer").mkdir()
    TOKENIZER.run(job(None, tmp_path / "tokenizer", model=out))
    assert [(one / template).read_text() for one in (out, tmp_path / "tokenizer")] == ["{{ tools }}"] * 2


@pytest.mark.parametrize(
    ("ends", "written"),
    [(2, {"eos_token_id": [1, 2]}), ([0, 1], {"eos_token_id": [1, 0]}), (1, {"eos_token_id": [1]}), ("</s>", None)],
)
def test_the_tokenizer_has_the_end_tokens_that_config_json_alone_states(
    folder: Path, out: Path, ends: Any, written: dict[str, Any] | None
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    # The file's own are the model's.
    TOKENIZER.run(job(None, out, model=folder))
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 1}
    (folder / "generation_config.json").unlink()
    (out / "generation_config.json").unlink()
    TOKENIZER.run(job(None, out, model=folder))
    made = out / "generation_config.json"
    assert (json.loads(made.read_text()) if made.is_file() else None) == written


def test_a_folder_with_shards(tmp_path: Path, out: Path) -> None:
    given = hf_folder(tmp_path / "given", shards=2)
    run(FolderSource(path=str(given)), out)
    assert names(out) == sorted(
        {*WANTED, "model.safetensors.index.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))}
        - {"model.safetensors"}
    )


def test_an_index_that_was_left_behind_is_no_part_of_the_model(folder: Path, out: Path) -> None:
    gone = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(gone))
    run(FolderSource(path=str(folder)), out)
    assert names(out) == WANTED


def test_links_are_followed(folder: Path, out: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    run(FolderSource(path=str(folder)), out)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "model.safetensors").read_bytes() == (blobs / "model.safetensors").read_bytes()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS])  # the latter of a file system in user space
def test_another_file_system_gets_copies(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def across(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", across)
    place(folder / "model.safetensors", out / "model.safetensors")
    assert not (out / "model.safetensors").samefile(folder / "model.safetensors")
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_pickles_are_refused(folder: Path, out: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    line = refusal(FolderSource(path=str(folder)), out, InputDataError, 3)
    assert f"{folder} holds only pickle weights (pytorch_model.bin)" in line
    assert names(out) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is not a Hugging Face model folder: it has no config.json"),
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": ["BertModel"]}'),
            "describes a BertModel: trtpipe reads no model of this architecture",
        ),
    ],
)
def test_not_a_llama(folder: Path, out: Path, change: Any, line: str) -> None:
    change(folder)
    assert line in refusal(FolderSource(path=str(folder)), out, UnknownModel, 3)
    assert names(out) == []


def test_no_tokenizer(tmp_path: Path, out: Path) -> None:
    given = hf_folder(tmp_path / "given", tokenizer=False)
    assert f"{given} has no tokenizer.json" in refusal(FolderSource(path=str(given)), out, InputDataError, 3)
    assert names(out) == []


def test_a_folder_is_known_by_its_content(folder: Path, tmp_path: Path) -> None:
    def key(path: Path) -> dict[str, str]:
        return DOWNLOAD.sources(FolderSource(path=str(path)), Digests(tmp_path / "digests.json"))

    elsewhere = hf_folder(tmp_path / "elsewhere")
    (elsewhere / "README.md").write_text("not for us")
    first = key(folder)
    assert first == key(elsewhere)
    (elsewhere / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert key(elsewhere) != first
    assert (
        DOWNLOAD.hashed(FolderSource(path="a")) == DOWNLOAD.hashed(FolderSource(path="b")) == {"format": "huggingface"}
    )


def test_a_folder_that_is_no_model_is_named_before_it_is_hashed(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        DOWNLOAD.sources(FolderSource(path=str(tmp_path)), Digests(tmp_path / "digests.json"))
