"""Download from a GGUF file, which a process of its own reads into safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import CONFIG, gguf_bytes, hf_folder
from tests.unit.stages.conftest import WANTED, names, refusal, run
from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.engines.extras import install_command
from trtpipe.engines.hf import gguf_worker as gguf_import
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.model_source import FolderSource, GgufSource, HubSource
from trtpipe.pipeline.stages import download
from trtpipe.pipeline.stages.download import DOWNLOAD


def test_a_gguf_file(tmp_path: Path, out: Path, worker: list[dict[str, Any]]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes())
    told: list[str] = []
    assert run(GgufSource(path=str(path)), out, told.append) == {"source": f"GGUF file {path}"}
    assert told == ["reading model.gguf into safetensors"]
    assert worker == [{"gguf": str(path), "out": str(out), "bytes": gguf_bytes()}]
    assert names(out) == WANTED


@pytest.mark.parametrize("content", [b"", b"GGU", b"ggml....", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_gguf_file(tmp_path: Path, out: Path, worker: list[dict[str, Any]], content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert refusal(GgufSource(path=str(path)), out, InputDataError, 3) == (
        f"{path} is not a GGUF file: it begins with {content[:4]!r}; download it again"
    )
    assert worker == []


def test_a_gguf_file_that_is_not_there(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "model.gguf"
    line = refusal(GgufSource(path=str(path)), out, InputDataError, 3)
    assert line == f"GGUF file {path} cannot be read: No such file or directory"


def test_what_the_reader_made_is_checked(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes())
    monkeypatch.setattr(download, "run_worker", lambda *args, **kwargs: hf_folder(out, tokenizer=False))
    assert "has no tokenizer.json" in refusal(GgufSource(path=str(tmp_path / "model.gguf")), out, InputDataError, 3)


def test_the_readers_versions_are_part_of_the_key() -> None:
    assert sorted(DOWNLOAD.tools(GgufSource(path="x.gguf"))) == ["gguf", "torch", "transformers"]
    assert DOWNLOAD.tools(FolderSource(path="x")) == DOWNLOAD.tools(HubSource(repo_id="a/b")) == {}


def test_the_bytes_that_the_reader_has_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    import numpy as np

    source = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    for name, count in (("a", 4), ("b", 12)):
        writer.add_tensor(name, np.arange(count, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    monkeypatch.setattr(gguf, "dequantize", gguf.dequantize)  # restored afterwards
    told: list[tuple[int, int]] = []
    gguf_import._report_reading(source, lambda done, total: told.append((done, total)))
    values = [gguf.dequantize(one.data, one.tensor_type).tolist() for one in gguf.GGUFReader(str(source)).tensors]
    assert values == [list(range(4)), list(range(12))]
    assert told == [(0, 64), (16, 64), (64, 64)]


def test_a_host_without_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "GGUF_READERS", ("a-package-nobody-has",))
    with pytest.raises(HostError) as error:
        DOWNLOAD.tools(GgufSource(path="x.gguf"))
    assert error.value.exit_code == 4
    assert error.value.remedy == f"run `{install_command('gguf')}`"


def test_rotary_settings_are_written_in_both_spellings(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    # As transformers 5 saves it.
    config = {**CONFIG, "rope_parameters": {"rope_theta": 5e5, **linear}, "dtype": "bfloat16"}
    del config["rope_theta"], config["torch_dtype"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    before = read_model_config(tmp_path)
    gguf_import._write_both_rope_spellings(path)
    written = json.loads(path.read_text())
    assert (written["rope_theta"], written["rope_scaling"], written["torch_dtype"]) == (5e5, linear, "bfloat16")
    assert read_model_config(tmp_path) == before


@pytest.mark.parametrize(("pre", "restored"), [("smollm", True), ("llama-bpe", False), (None, False)])
def test_smollms_digits_are_restored(tmp_path: Path, pre: str | None, restored: bool) -> None:
    import gguf
    from tokenizers import Tokenizer

    folder = hf_folder(tmp_path / "made")
    source = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    gguf_import._restore_pre_tokenizer(source, folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 123")]
    assert pieces == (["a", "Ġ", "1", "2", "3"] if restored else ["a", "Ġ123"])
    assert tokenizer.decode(tokenizer.encode("a 123").ids) == "a 123"
