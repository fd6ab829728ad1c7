"""Download from a folder: the artefact is one checked Hugging Face folder with only what is needed in it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder
from tests.unit.stages.conftest import LINKED, WANTED, names, refusal, run
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.folder import UnknownModel
from trtpipe.engines.model_source import FolderSource
from trtpipe.pipeline.stages.download import DOWNLOAD
from trtpipe.pipeline.store.digests import Digests


def test_a_folder(folder: Path, out: Path) -> None:
    for name in ("README.md", "pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_text("not for us")
    assert run(FolderSource(path=str(folder)), out) == {"source": f"folder {folder}"}
    assert names(out) == WANTED
    for name in WANTED:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
        # Large files are hard links, small ones copies, which nobody can change from outside.
        large = (out / name).stat().st_size >= LINKED
        assert (name == "model.safetensors") == large == (out / name).samefile(folder / name)


def test_a_folder_with_shards(tmp_path: Path, out: Path) -> None:
    given = hf_folder(tmp_path / "given", shards=2)
    (given / "model.safetensors").write_bytes(b"a stray file beside the shards")
    run(FolderSource(path=str(given)), out)
    assert names(out) == sorted(
        {*WANTED, "model.safetensors.index.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))}
        - {"model.safetensors"}
    )


def test_links_are_followed(folder: Path, out: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    run(FolderSource(path=str(folder)), out)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "model.safetensors").samefile(blobs / "model.safetensors")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS])  # the latter of a file system in user space
def test_another_file_system_gets_copies(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def across(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", across)
    run(FolderSource(path=str(folder)), out)
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
